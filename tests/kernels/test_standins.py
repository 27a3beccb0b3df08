"""What is around the kernels of rows, where there is no GPU: kernels in torch stand in for those in Triton."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from helpers_kernels import DEVICE
from kernels import test_between as between_tests
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import slimbayes as sb
from slimbayes import fast_paths
from slimbayes.accelerate import row_factors as apply_rows
from slimbayes.accelerate.gpu import factor_convolution, launch, rows

pytestmark = pytest.mark.skipif(rows.available(DEVICE), reason="the kernels themselves run here")


class Kernel:
    """A function of a kernel's arguments, started as Triton starts one."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        return self.function


def seen(tensor, last, P, C):
    """A tensor of rows as the kernels see its memory, positions and channels in this order: [R, P, C]."""
    count = tensor.numel() // (P * C)
    return tensor.as_strided((count, P, C), (P * C, C, 1) if last else (P * C, 1, P))


def lines(f, by_row, by_column, repeats, count, C):
    return f.as_strided((count // repeats, C), (by_row, by_column)).repeat_interleave(repeats, 0)[:, None]


def scale(last):
    def run(x, f, y, *numbers, **blocks):
        P, C, by_row, by_column, repeats = numbers if last else numbers[1:]
        values = seen(x, last, P, C)
        factor = lines(f, by_row, by_column, repeats, len(values), C)
        seen(y, last, P, C).copy_(values.float() * factor.float())

    return Kernel(run)


def gradients(last):
    def run(g, x, f, gx, gf, *numbers, WRITE, BP, **blocks):
        P, C, by_row, by_column, repeats, pairs, splits, steps = numbers if last else numbers[1:]
        slopes, values = (seen(tensor, last, P, C).float() for tensor in (g, x))
        factor = lines(f, by_row, by_column, repeats, len(values), C).float()
        assert gf.numel() == splits * pairs
        parts = (slopes * values).split(steps * BP, 1)
        gf.view(splits, -1, C).copy_(torch.stack([part.sum(1) for part in parts]))
        if WRITE:
            seen(gx, last, P, C).copy_(slopes * factor)

    return Kernel(run)


@pytest.fixture(autouse=True)
def standing_in(monkeypatch):
    programs = SimpleNamespace(
        scale_last=scale(True),
        scale_first=scale(False),
        grad_last=gradients(True),
        grad_first=gradients(False),
    )
    monkeypatch.setattr(rows, "_programs", lambda: programs)
    monkeypatch.setattr(launch, "_direct", False)
    for module in (rows, factor_convolution):
        monkeypatch.setattr(module, "available", lambda device: True)
    monkeypatch.setattr(apply_rows, "on_gpu", lambda x: True)
    monkeypatch.setattr(apply_rows, "cuda_kernel", lambda: rows.scale_rows)
    kept = (rows._forward, rows._backward)
    for function in kept:
        function.cache_clear()
    with fast_paths(native=False):
        yield
    for function in kept:
        function.cache_clear()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", between_tests.CONVOLUTIONS)
def test_a_convolution_between_factors(name, channels_last):
    between_tests.test_twin(name, channels_last)


def test_second_derivatives():
    between_tests.test_second_derivatives_through_an_input_that_is_not_dense()


@pytest.mark.parametrize("fused", [True, False])
def test_strides(fused):
    between_tests.test_what_is_saved_may_come_back_with_other_strides(fused)


def test_a_convolution_goes_back_in_the_layout_it_came_in():
    """cuDNN has other algorithms, of other rounding, for other layouts of what was saved."""
    layouts = []

    class Layouts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.convolution_backward.default:
                layouts.append([x.is_contiguous(memory_format=torch.channels_last) for x in args[:2]])
            return func(*args, **(kwargs or {}))

    op = between_tests.layer()
    x, s, r = between_tests.tensors(op, channels_last=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.contiguous(), lambda saved: saved):
        y = factor_convolution.convolved(op, x, s, r)
    with Layouts():
        y.square().sum().backward()
    assert layouts == [[True, True]]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant):
    between_tests.test_checkpointed(reentrant)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("size", [(2, 3, 5), (1, 4, 40, 60), (8, 3, 2, 2), (2, 130, 3, 3)])
@pytest.mark.parametrize("repeats", [1, 2])
def test_factors_on_rows(size, channels_last, repeats):
    """Small rows and large ones, whose sums are split, and factors that several rows share."""
    torch.manual_seed(0)
    size = (size[0] * repeats, *size[1:])
    x = torch.randn(size)
    if channels_last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    x.requires_grad_()
    f = torch.randn(size[0] // repeats, size[1], requires_grad=True)
    g = torch.randn_like(x)
    found = torch.autograd.grad(rows.scale_rows(x, f), (x, f), g)
    exact = torch.autograd.grad(x * rows.broadcast(f, x), (x, f), g)
    between_tests.same(found, exact, rtol=1e-4, atol=1e-4)
    (only,) = torch.autograd.grad(rows.scale_rows(x, f.detach()), x, g)
    between_tests.same([only], exact[:1])


@pytest.mark.parametrize(
    "method",
    [sb.Rank1.paper(components=2), sb.Rank1.paper(components=2, random="input"), sb.BatchEnsemble(2)],
    ids=["rank1", "random input", "ensemble"],
)
@pytest.mark.parametrize("noise", ["example", "shared"])
def test_a_network(method, noise):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same"), nn.ReLU(), nn.Conv2d(4, 5, 3, bias=False), nn.Flatten()
    )
    model, x = sb.bayesianize(net, method), torch.randn(3, 3, 6, 6)

    def grads(paths):
        with paths:
            value = sb.draw(model, x, noise=noise, seed=4).square().mean()
            return torch.autograd.grad(value, list(model.parameters()), allow_unused=True)

    found, exact = grads(contextlib.nullcontext()), grads(fast_paths(rows=False, folded=False))
    for one, other in zip(found, exact, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
