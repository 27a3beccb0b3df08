"""A product between factors as one operation, and the factors of all layers at once: against plain operations."""

import itertools
import math

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.accelerate import factor_folding, factor_product, factor_samples
from slimbayes.accelerate.gpu.factors_kl import factors_kl
from slimbayes.core.context import Frame
from slimbayes.core.conversion import converted_layers, factor_groups, find_record


@pytest.fixture(autouse=True)
def plain_kernels():
    """These are the torch operations; tests/native has the kernels in C that are their twins."""
    with sb.fast_paths(native=False):
        yield


F64 = torch.float64
NEAR = {"rtol": 1e-10, "atol": 1e-12}


def layer_and_tensors(transposed=False, positions=(), examples=1, samples=2):
    torch.manual_seed(0)
    op = nn.Linear(5, 3, dtype=F64)
    layer = sb.bayesianize(op, sb.Rank1(components=2))
    if transposed:  # the weight of Hugging Face's Conv1D
        layer.weight = nn.Parameter(layer.weight.detach().t().contiguous())
        layer.matrix_sides = lambda u, v: (u, v)
    x = torch.randn(2 * samples * 4, *positions, 5, dtype=F64, requires_grad=True)
    s = torch.randn(2, samples, examples, 5, dtype=F64, requires_grad=True)
    r = torch.randn(2, samples, examples, 3, dtype=F64, requires_grad=True)
    bias = torch.randn(2, 3, dtype=F64, requires_grad=True)
    return layer, x, s, r, bias, Frame(2, samples, 4, 1, "example", None)


def plain(layer, x, s, r, bias, frame, transposed):
    def wide(f):
        f = f.expand(2, frame.samples, 4, -1).flatten(0, 2)
        return f.view(len(x), *(1,) * (x.dim() - 2), -1)

    h = (x if s is None else x * wide(s)) @ (layer.weight if transposed else layer.weight.t())
    h = h if r is None else h * wide(r)
    return h if bias is None else h + wide(bias[:, None, None])


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("examples", [1, 4])
@pytest.mark.parametrize("positions", [(), (3,)])
def test_a_product_and_its_gradients(positions, examples, transposed, large, monkeypatch):
    if large:
        monkeypatch.setattr(factor_product, "LARGE", 1)
    for has_s, has_r, has_bias, needs_x in itertools.product((True, False), repeat=4):
        layer, x, s, r, bias, frame = layer_and_tensors(transposed, positions, examples)
        x.requires_grad_(needs_x)
        given = (s if has_s else None, r if has_r else None, bias if has_bias else None)
        leaves = [t for t in (x, layer.weight, *given) if t is not None and t.requires_grad]
        results = []
        for ours in (True, False):
            if ours:
                y = factor_product.factored(layer, x, *given, frame, by_draw=examples == 1)
            else:
                y = plain(layer, x, *given, frame, transposed)
            results.append([y, *torch.autograd.grad(y.sin().sum(), leaves)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, **NEAR)
        with torch.no_grad():
            torch.testing.assert_close(
                factor_product.factored(layer, x, *given, frame), results[1][0], **NEAR
            )


@pytest.mark.parametrize("examples", [1, 4])
def test_a_product_has_second_derivatives(examples):
    layer, x, s, r, bias, frame = layer_and_tensors(examples=examples, samples=1)

    def run(x, weight, s, r, bias):
        s, r = (factor_product.grouped(f, frame) for f in (s, r))
        return factor_product._Product.apply(x, weight, s, r, bias, True, False)

    leaves = (x, layer.weight, s, r, bias)
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_gradients_that_nobody_wants_are_not_made():
    layer, x, s, r, bias, frame = layer_and_tensors()
    for t in (x, s, bias):
        t.requires_grad_(False)
    layer.weight.requires_grad_(False)
    factor_product.factored(layer, x, s, r, bias, frame).sum().backward()
    assert r.grad is not None and x.grad is None and layer.weight.grad is None


@pytest.mark.parametrize("family", ["normal", "cauchy", "lognormal", "halfcauchy"])
@pytest.mark.parametrize("clip", [None, 10.0, 0.8])
@pytest.mark.parametrize(("samples", "examples"), [(1, 1), (2, 1), (2, 3)])
def test_samples_of_all_factors(samples, examples, clip, family, monkeypatch):
    """loc + σε for the noise of one call, cut in the order of the factors; and its gradients."""
    torch.manual_seed(0)
    widths = (3, 5)
    locs = [torch.randn(2, w, dtype=F64, requires_grad=True) for w in widths]
    rhos = [(torch.randn(2, w, dtype=F64) - 2).requires_grad_() for w in widths]
    kind = "cauchy" if "cauchy" in family else "normal"
    noise = torch.randn(sum(2 * samples * examples * w for w in widths), dtype=F64)

    def made(asked, size, dtype, device):
        assert asked == kind and math.prod(size) == len(noise)
        return noise.clone()

    monkeypatch.setattr(factor_samples, "fresh_noise", made)
    ours = factor_samples.sample_all(locs, rhos, samples, examples, family, clip)
    wanted, start = [], 0
    for loc, rho in zip(locs, rhos, strict=True):
        shape = (2, samples, examples, loc.shape[1])
        e = noise[start : start + math.prod(shape)].view(shape)
        start += math.prod(shape)
        e = e.abs() if family == "halfcauchy" else e
        value = loc[:, None, None] + (nn.functional.softplus(rho) + 1e-7)[:, None, None] * e
        value = value.exp() if family == "lognormal" else value
        wanted.append(value if clip is None else value.clamp(-clip, clip))
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, **NEAR)
    for used in ((0, 1), (1,)):  # all factors, and a network that leaves one out
        gradients = [
            torch.autograd.grad(
                sum(values[i].sin().sum() for i in used), [*locs, *rhos], retain_graph=True, allow_unused=True
            )
            for values in (ours, wanted)
        ]
        for a, b in zip(*gradients, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, **NEAR)


def test_samples_of_all_factors_have_second_derivatives(monkeypatch):
    noise = torch.randn(2 * 3 * (2 + 4), dtype=F64)
    monkeypatch.setattr(factor_samples, "fresh_noise", lambda *_: noise.clone())
    leaves = [torch.randn(2, w, dtype=F64, requires_grad=True) for w in (2, 4, 2, 4)]
    run = lambda *p: tuple(factor_samples.sample_all(p[:2], p[2:], 1, 3, "normal"))  # noqa: E731
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_the_kl_of_normal_factors_at_once():
    torch.manual_seed(0)
    leaves = [torch.randn(2, w, dtype=F64, requires_grad=True) for w in (2, 4, 2, 4)]
    ours = factor_samples.normal_kl(leaves[:2], leaves[2:], 1.0, 0.1)
    wanted = factors_kl(leaves[:2], leaves[2:], "normal", 1.0, 0.1)
    torch.testing.assert_close(ours, wanted, **NEAR)
    for a, b in zip(*(torch.autograd.grad(kl, leaves) for kl in (ours, wanted)), strict=True):
        torch.testing.assert_close(a, b, **NEAR)
    run = lambda *p: factor_samples.normal_kl(p[:2], p[2:], 1.0, 0.1)  # noqa: E731
    assert torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("noise", ["example", "shared"])
def test_factors_drawn_before_the_network_have_the_layers_own_moments(noise):
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), sb.Rank1(components=2))
    x = torch.randn(3, 3)
    draws = []
    for fast in (True, False):
        with sb.fast_paths(factors=fast), torch.no_grad():
            torch.manual_seed(3)
            draws.append(sb.draw(model, x, samples=4000, noise=noise).unflatten(0, (2, 4000)))
    a, b = draws
    error = (a.var(1) / 4000 + b.var(1) / 4000).sqrt()
    assert float(((a.mean(1) - b.mean(1)) / error).abs().max()) < 5
    assert float((a.var(1) / b.var(1)).log().abs().max()) < 0.2
    same = []
    for _ in range(2):
        torch.manual_seed(3)
        same.append(sb.draw(model, x, samples=3, noise=noise))
    assert torch.equal(*same)


def test_layers_are_looked_up_again_when_the_model_has_changed():
    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), sb.Rank1())
    assert [name for name, _ in converted_layers(model)] == ["0", "2"]
    assert converted_layers(model)[0][1] is model[0]
    assert [len(group.factors) for group in factor_groups(model)] == [4]
    assert factor_groups(model) is factor_groups(model)
    model.double()
    assert factor_groups(model)[0].factors[0].loc.dtype == F64
    model[0].bayes.clip = 3.0
    assert sorted(len(group.factors) for group in factor_groups(model)) == [2, 2]
    model[2] = nn.Linear(4, 2)
    assert [name for name, _ in converted_layers(model)] == ["0"]
    assert [len(group.factors) for group in factor_groups(model)] == [2]


def test_what_is_known_of_the_layers_does_not_outlive_them():
    import copy
    import gc
    import pickle
    import weakref

    gc.collect()
    gc.disable()
    try:
        layer = sb.bayesianize(nn.Linear(3, 2), sb.Rank1())
        sb.draw(layer, torch.randn(4, 3)).sum().backward()
        sb.kl(layer)  # torch 2.6 samples nothing ahead of a draw
        assert find_record(layer).survey is not None
        assert find_record(copy.deepcopy(layer)).survey is None
        assert find_record(pickle.loads(pickle.dumps(layer))).survey is None
        gone = weakref.ref(layer)
        del layer
        assert gone() is None  # by its count alone: no cycle
    finally:
        gc.enable()


def test_the_choice_decides_which_gradients_come_by_draw(monkeypatch):
    layer = sb.bayesianize(nn.Linear(6, 4), sb.Rank1(components=2))
    for inner in (True, False):
        monkeypatch.setattr(
            factor_folding, "choose", lambda *_, inner=inner: factor_folding.Choice(inner, False)
        )
        node = sb.draw(layer, torch.randn(5, 6), noise="shared").grad_fn
        while type(node).__name__ != "_ProductBackward":
            node = next(parent for parent, _ in node.next_functions if parent is not None)
        assert node.by_draw == inner
