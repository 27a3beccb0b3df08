"""What the passes over a traced graph leave alone, and that they keep what they replace."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers_graphs import C, compiled, factor, image
from torch import nn
from torch.nn import functional as F

from slimbayes.accelerate.compile import norm_fusion
from slimbayes.accelerate.gpu import factors, patches, warm_up
from slimbayes.accelerate.gpu.norm_sum import norm_sum_rows
from slimbayes.accelerate.row_factors import row_product

INPUTS = {"y": image(0), "r": factor(1), "x": image(2), "s": factor(3), "t": factor(4)}


def outcome(function, norm: nn.Module, names: str) -> list[torch.Tensor | None]:
    """Results, gradients, buffers, and the inputs as the function left them."""
    leaves = {name: INPUTS[name].clone(memory_format=torch.preserve_format) for name in names}
    grads = {name: value.requires_grad_() for name, value in leaves.items() if name != "x"}
    results = function(*leaves.values())
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward(results, [torch.sin(result.detach()) for result in results])
    return [
        *results, *(leaf.grad for leaf in grads.values()), *leaves.values(), norm.weight.grad, *norm.buffers(),
    ]  # fmt: skip


def check(make, names: str, expected: list[int]) -> None:
    """The compiled function does what the plain one does, with so many norms fused."""
    norm = nn.BatchNorm2d(C).double()
    other = copy.deepcopy(norm)
    wanted = outcome(make(norm), norm, names)
    counts: list[int] = []
    found = outcome(compiled(make(other), counts), other, names)
    assert counts == expected
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def without_gradient(norm):
    def function(y, r):
        with torch.no_grad():
            z = row_product(y, r)
        return F.relu(norm(z)) + y

    return function


def normed_without_gradient(norm):
    def function(y, r):
        with torch.no_grad():
            z = norm(row_product(y, r))
        return F.relu(z) * r[:, :, None, None]

    return function


def autocast_between(norm):
    def function(y, r):
        z = row_product(y, r)
        with torch.autocast("cpu", torch.bfloat16):
            z = norm(z)
        return F.relu(z)

    return function


def written_between(norm):
    def function(y, r):
        v = norm(row_product(y, r))
        w = y.detach().clone()
        w[0] = 3.0  # what it writes to is not looked for
        return F.relu(v) + w

    return function


def factor_written(norm):
    def function(y, r, s):
        v = F.relu(norm(y))
        with torch.no_grad():
            s.mul_(2.0)
        return row_product(v, s.detach())

    return function


def sum_into_an_input(norm):
    def function(y, r, x):
        x += norm(row_product(y, r))
        return F.relu(x)

    return function


def sum_of_one(norm):
    def function(y, r):
        product = row_product(y, r)
        return norm(product + product)

    return function


def used_twice(norm):
    def function(y, r, x, s):
        a, b = norm(row_product(y, r)), norm(row_product(x, s))
        u = F.relu(b)
        return u + 1, F.relu(a) * 2

    return function


def statistics_read(norm):
    def function(y, r):
        z = norm(row_product(y, r))
        mean = norm.running_mean.clone()
        return F.relu(z) + mean[:, None, None]

    return function


def foreign_between(norm):
    def function(y, r):
        z = row_product(y, r)
        w = torch.utils.checkpoint.checkpoint(torch.sin, y, use_reentrant=False)
        return F.relu(norm(z)) + w

    return function


LEFT_ALONE = [
    (without_gradient, "yr"),
    (normed_without_gradient, "yr"),
    (autocast_between, "yr"),
    (written_between, "yr"),
    (sum_of_one, "yr"),
    (used_twice, "yrxs"),
    (statistics_read, "yr"),
    (foreign_between, "yr"),
]


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("make, names", LEFT_ALONE, ids=lambda value: getattr(value, "__name__", ""))
def test_left_alone(make, names: str) -> None:
    check(make, names, [0])


def test_a_factor_that_is_written_keeps_its_values() -> None:
    norm = nn.BatchNorm2d(C).double()
    values = []
    for fuse in (True, False):
        counts: list[int] = []
        function = factor_written(norm)
        y, r, s = image(0), factor(1), factor(3)
        values.append((compiled(function, counts) if fuse else function)(y, r, s).detach())
        assert counts in ([0], [])
    torch.testing.assert_close(values[0], values[1], rtol=1e-9, atol=1e-9)


def test_a_sum_into_an_input_is_left_in_place() -> None:
    """The norm in front of it is fused, the sum is not."""
    check(sum_into_an_input, "yrx", [1])


def in_place_block(norm):
    def function(y, r, x, s, t):
        z = norm(row_product(y, r))
        z += x
        z = F.relu(z, inplace=True)
        first = torch.tanh(row_product(z, s))
        other = F.relu(F.batch_norm(first, None, None, training=True), inplace=True)
        return other + row_product(z, t), z

    return function


def sum_in_front(norm):
    def function(y, r, x, s, t):
        v = row_product(y, r) + row_product(x, t)
        return row_product(F.relu(norm(v)), s), v

    return function


def sum_overwritten(norm):
    def function(y, r, x, s, t):
        v = row_product(y, r) + x
        v.relu_()
        return row_product(norm(v), s), t * 2

    return function


def result_overwritten(norm):
    def function(y, r, x, s, t):
        z = norm(row_product(y, r)) + x
        z.mul_(2.0)
        return row_product(z, s), row_product(z, t)

    return function


@pytest.mark.parametrize("make", [sum_overwritten, result_overwritten])
def test_what_is_overwritten_before_it_is_read(make) -> None:
    norm = nn.BatchNorm2d(C).double()
    inputs = [INPUTS[name] for name in "yrxst"]
    with torch.no_grad():
        expected = make(norm)(*inputs)
        found = compiled(make(norm), [])(*inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("activation", [nn.SiLU, nn.LeakyReLU, nn.Hardswish, nn.ELU])
def test_an_activation_in_place_behind_the_sum(activation) -> None:
    """The norm is fused without the sum, which the activation writes over."""
    act = activation(inplace=True)

    def block(norm):
        def function(y, r, x, s, t):
            z = norm(row_product(y, r))
            z += x
            z = act(z)
            return row_product(z, s), z, t * 2

        return function

    check(block, "yrxst", [1])


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_inside_transforms_nothing_is_fused(transform: str) -> None:
    norm = nn.BatchNorm2d(C, track_running_stats=False).double()
    inner = lambda y, r: F.relu(norm(row_product(y, r))).square().sum()  # noqa: E731
    y, r = image(0), factor(1)
    if transform == "grad":
        function, inputs = torch.func.grad(inner), (y, r)
    else:
        function, inputs = torch.vmap(inner), (torch.stack([y, 2 * y]), torch.stack([r, r]))
    counts: list[int] = []
    found = compiled(lambda *given: function(*given), counts)(*inputs)
    torch.testing.assert_close(found, function(*inputs), rtol=1e-9, atol=1e-9)
    assert counts == [0]


@pytest.mark.parametrize("make", [in_place_block, sum_in_front])
def test_fused_with_the_same_results(make) -> None:
    check(make, "yrxst", [1])


@pytest.mark.parametrize("warm", [False, True])
def test_the_number_of_rows_stays_a_symbol(warm: bool) -> None:
    norm, other = (nn.BatchNorm2d(C).double() for _ in range(2))
    counts: list[int] = []

    def fuse(graph: torch.fx.Graph, devices: tuple[str, ...]) -> int:
        found = norm_fusion.fuse_norms(graph, devices)
        if warm:
            warm_up.kernel_calls(graph)
        return found

    run = compiled(lambda y, r, x: F.relu(norm(row_product(y, r)) + x).sum(), counts, fuse)
    for rows in (6, 8, 10, 7):
        y, r, x = image(rows, rows), factor(rows, rows), image(rows + 1, rows)
        expected = F.relu(other(row_product(y, r)) + x).sum()
        torch.testing.assert_close(run(y, r, x), expected)
        torch.testing.assert_close(norm.running_var, other.running_var)
    assert counts == [1, 1]  # once for six rows, once for any number


def test_unknown_sizes_do_not_stop_the_warming() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(norm_fusion.NORM_ROWS, (x, None, x, x, None, 1e-5, True))
    graph.output(made)
    assert warm_up.kernel_calls(graph) == []  # nothing is known of x


def test_a_result_never_shares_memory_with_a_gradient() -> None:
    y, x = image(0).requires_grad_(), image(1).requires_grad_()
    one = torch.ones(C, dtype=torch.float64)
    z, _, _ = norm_sum_rows(y, factor(2), x, None, None, one, one, None, None, 0.1, 1e-5, False, True)
    grad = torch.ones_like(z)
    z.backward(grad)
    torch.testing.assert_close(x.grad, grad)
    assert x.grad.data_ptr() != grad.data_ptr()


def test_tables_that_graphs_read_are_kept() -> None:
    assert factors._tables.cache_info().maxsize is None
    assert patches._table.cache_info().maxsize is None
