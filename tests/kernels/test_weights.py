"""Weight samples: kernel and plain twins against the formula with the noise read back from them."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_kernels import DEVICE, needs_kernels
from torch.nn import functional as F

from slimbayes import fast_paths
from slimbayes.accelerate.gpu import weight_launch
from slimbayes.accelerate.gpu.weight_launch import Tile
from slimbayes.accelerate.gpu.weight_operations import FORMS
from slimbayes.accelerate.gpu.weights import ktied_weight, meanfield_weight

KERNEL = [pytest.param(True, marks=needs_kernels, id="kernel"), pytest.param(False, id="plain")]
SEED = torch.tensor([-987654321987654321], device=DEVICE)
SHAPES = [(1, 1), (10, 7), (64, 128), (33, 150), (5, 6, 3, 3)]
UNIT = math.log(math.expm1(1.0 - 1e-7))
TIGHT = {"rtol": 3e-5, "atol": 3e-6}


def last(x):
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def ktied_parameters(shape, k, dtype=torch.float32):
    torch.manual_seed(0)
    like = {"dtype": dtype, "device": DEVICE}
    n = math.prod(shape[1:])
    mean = torch.randn(shape, **like).requires_grad_()
    return [
        mean, torch.randn(shape[0], k, **like).sub(1).requires_grad_(), torch.randn(n, k, **like).requires_grad_()
    ]  # fmt: skip


def ktied_noise(mean, stream=0):
    n = math.prod(mean.shape[1:])
    u, v = mean.new_zeros(mean.shape[0], 1), mean.new_zeros(n, 1)
    return ktied_weight(mean.detach(), u, v, SEED, stream=stream, form="noise")[1]


def forms(mean, noise, form):
    """What a form makes; nothing is what the operations make of it."""
    nothing = mean.new_empty(0)
    made = {"sample": (mean + noise, nothing), "noise": (nothing, noise), "mean": (mean, nothing)}
    return made.get(form, (mean, noise))


def ktied_formula(mean, log_u, log_v, noise, center, form="sample"):
    sigma = log_u.exp() @ log_v.exp().t()
    w = sigma.view(mean.shape) * noise
    sums = torch.stack([(mean - center).square().sum(), sigma.square().sum(), sigma.log().sum()])
    return *forms(mean, w, form), sums


def field_formula(mean, rho, noise, center, maximum=None, form="sample"):
    sigma = F.softplus(rho) + 1e-7
    sigma = sigma if maximum is None else sigma.clamp(max=maximum)
    sums = torch.stack([(mean - center).square().sum(), sigma.square().sum(), sigma.log().sum()])
    return *forms(mean, sigma * noise, form), sums


def agree(found, expected, parameters, **tolerance):
    for value, target in zip(found, expected, strict=True):
        torch.testing.assert_close(value, target, **tolerance)
    found = [value for value in found if value.numel()]
    expected = [value for value in expected if value.numel()]
    weights = [torch.randn_like(value) for value in expected]
    grads = torch.autograd.grad(found, parameters, weights)
    exact = torch.autograd.grad(expected, parameters, weights)
    for grad, target in zip(grads, exact, strict=True):
        scale = 1.0 + float(target.abs().max())
        torch.testing.assert_close(grad, target, rtol=tolerance["rtol"], atol=tolerance["atol"] * scale)


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_ktied(kernel, shape, k, form):
    parameters = ktied_parameters(shape, k)
    with fast_paths(triton=kernel):
        found = ktied_weight(*parameters, SEED, center=0.3, stream=5, form=form)
        noise = ktied_noise(parameters[0], stream=5)
        expected = ktied_formula(*parameters, noise, 0.3, form)
        agree(found, expected, parameters, **TIGHT)


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_meanfield(kernel, shape, form):
    torch.manual_seed(0)
    parameters = [torch.randn(shape, device=DEVICE, requires_grad=True) for _ in range(2)]
    with fast_paths(triton=kernel):
        found = meanfield_weight(*parameters, SEED, center=0.3, form=form)
        unit = torch.full(shape, UNIT, device=DEVICE)
        noise = meanfield_weight(parameters[0].detach(), unit, SEED, form="noise")[1]
        expected = field_formula(*parameters, noise, 0.3, None, form)
        agree(found, expected, parameters, **TIGHT)


@pytest.mark.parametrize("kernel", KERNEL)
def test_the_cap(kernel):
    """σ stays at its cap, and only gradients that would lower it pass."""
    mean = torch.zeros(64, 5, device=DEVICE)
    rho = torch.full((64, 5), 1.0, device=DEVICE, requires_grad=True)
    with fast_paths(triton=kernel):
        w, _, sums = meanfield_weight(mean, rho, SEED, maximum=0.5)
        noise = meanfield_weight(mean, torch.full_like(mean, UNIT), SEED)[0]
        torch.testing.assert_close(w, 0.5 * noise, **TIGHT)
        assert float(sums.detach()[1]) == pytest.approx(0.25 * 320, rel=1e-5)
        (grad,) = torch.autograd.grad(w.sum(), rho)
        torch.testing.assert_close(grad, noise.clamp_min(0.0) * torch.sigmoid(rho.detach()), **TIGHT)


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types(kernel, dtype):
    """16-bit samples are the rounded float32 ones; a 16-bit gradient gives float32 gradients."""
    parameters = ktied_parameters((20, 30), 2)
    rho = torch.randn(20, 30, device=DEVICE, requires_grad=True)
    with fast_paths(triton=kernel):
        for make, inputs in ((ktied_weight, parameters), (meanfield_weight, [parameters[0], rho])):
            wide, small = make(*inputs, SEED)[0], make(*inputs, SEED, dtype=dtype)[0]
            assert small.dtype == dtype
            torch.testing.assert_close(small, wide.to(dtype))
            g = torch.randn_like(small)
            ours = torch.autograd.grad(small, inputs, g)
            for grad, target in zip(ours, torch.autograd.grad(wide, inputs, g.float()), strict=True):
                assert grad.dtype == torch.float32
                torch.testing.assert_close(grad, target)


@pytest.mark.parametrize("kernel", KERNEL)
def test_channels_last(kernel):
    shape = (6, 5, 3, 3)
    contiguous = ktied_parameters(shape, 2)
    mean = last(contiguous[0].detach()).requires_grad_()
    rho = torch.randn(shape, device=DEVICE, requires_grad=True)
    with fast_paths(triton=kernel):
        w, _, sums = ktied_weight(mean, *contiguous[1:], SEED)
        assert w.shape == shape and w.is_contiguous(memory_format=torch.channels_last)
        noise = ktied_noise(mean)
        agree(
            (w, _, sums),
            ktied_formula(mean, *contiguous[1:], noise, 0.0),
            [mean, *contiguous[1:]],
            **TIGHT,
        )
        for other in (rho, last(rho.detach()).requires_grad_()):
            found = meanfield_weight(mean, other, SEED)
            assert found[0].stride() == mean.stride()
            noise = meanfield_weight(mean.detach(), torch.full_like(mean, UNIT), SEED, form="noise")[1]
            agree(found, field_formula(mean, other, noise, 0.0), [mean, other], **TIGHT)


@pytest.mark.parametrize("kernel", KERNEL)
def test_moments_seeds_and_streams(kernel):
    mean = torch.zeros(120, 200, device=DEVICE)
    unit = torch.full_like(mean, UNIT)
    with fast_paths(triton=kernel):
        samples = [
            ktied_noise(mean),
            ktied_noise(mean, stream=1),
            meanfield_weight(mean, unit, SEED)[0],
            meanfield_weight(mean, unit, SEED, stream=1)[0],
            meanfield_weight(mean, unit, SEED + 1)[0],
        ]
        assert torch.equal(samples[0], ktied_noise(mean))
        assert torch.equal(samples[2], meanfield_weight(mean, unit, SEED)[0])
    count = mean.numel()
    # A plain twin has one stream for both posteriors; the kernels have one each.
    table = torch.stack([sample.flatten() for sample in samples]).double()
    assert (table.mean(1).abs() < 5 / math.sqrt(count)).all()
    assert ((table.var(1) - 1).abs() < 5 * math.sqrt(2 / count)).all()
    assert (((table**4).mean(1) - 3).abs() < 5 * math.sqrt(96 / count)).all()
    table = table if kernel else table[[0, 1, 4]]
    assert (torch.corrcoef(table).fill_diagonal_(0.0).abs() < 5 / math.sqrt(count)).all()
    for sample in samples[:3]:
        for shift in (1, count // 4, 200, 512 * 12):
            flat = sample.flatten().double()
            assert abs(float((flat[:-shift] * flat[shift:]).mean())) < 6 / math.sqrt(count - shift)


@pytest.mark.parametrize("kernel", KERNEL)
def test_parts_of_the_gradient(kernel):
    """Only the sample, or only the sums: the other's gradient is zero."""
    parameters = ktied_parameters((12, 20), 2)
    rho = torch.randn(12, 20, device=DEVICE, requires_grad=True)
    with fast_paths(triton=kernel):
        noise = ktied_noise(parameters[0])
        expected = ktied_formula(*parameters, noise, 0.0)
        found = ktied_weight(*parameters, SEED)
        for i in (0, 2):
            ours = torch.autograd.grad(found[i].sum(), parameters, retain_graph=True)
            exact = torch.autograd.grad(
                expected[i].sum(), parameters, retain_graph=True, materialize_grads=True
            )  # fmt: skip
            for grad, target in zip(ours, exact, strict=True):
                torch.testing.assert_close(grad, target, rtol=1e-4, atol=1e-4)
        sums = meanfield_weight(parameters[0], rho, SEED)[2]
        (grad,) = torch.autograd.grad(sums[2], rho)
        torch.testing.assert_close(grad, torch.sigmoid(rho) / (F.softplus(rho) + 1e-7), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", ["ktied", "meanfield"])
def test_double_precision(make):
    mean, log_u, log_v = ktied_parameters((6, 9), 2, torch.float64)
    rho = torch.randn(6, 9, dtype=torch.float64, device=DEVICE, requires_grad=True)
    if make == "ktied":
        found = ktied_weight(mean, log_u, log_v, SEED)
        agree(
            found,
            ktied_formula(mean, log_u, log_v, ktied_noise(mean), 0.0),
            [mean, log_u, log_v],
            rtol=1e-10,
            atol=1e-10,
        )
    else:
        found = meanfield_weight(mean, rho, SEED)
        one = torch.tensor(UNIT, dtype=torch.float64, device=DEVICE)
        one = torch.log(torch.expm1(torch.ones_like(one) - 1e-7))
        noise = meanfield_weight(mean.detach(), one.expand(6, 9).clone(), SEED, form="noise")[1]
        agree(found, field_formula(mean, rho, noise, 0.0), [mean, rho], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_compiled(kernel, layout):
    mean, log_u, log_v = ktied_parameters((6, 5, 3, 3), 2)
    if layout == "channels_last":
        mean = last(mean.detach()).requires_grad_()
    rho = torch.randn_like(mean).requires_grad_()
    parameters = [mean, log_u, log_v, rho]

    def loss(seed):
        first, _, sums = ktied_weight(mean, log_u, log_v, seed, dtype=torch.bfloat16)
        second, _, more = meanfield_weight(mean, rho, seed, maximum=0.9)
        return (first.float() * second).sum() + sums.sum() + more.sum()

    with fast_paths(triton=kernel):
        expected = loss(SEED)
        exact = torch.autograd.grad(expected, parameters)
        torch._dynamo.reset()
        value = torch.compile(loss, fullgraph=True, backend="aot_eager")(SEED)
        torch.testing.assert_close(value, expected)
        for grad, target in zip(torch.autograd.grad(value, parameters), exact, strict=True):
            torch.testing.assert_close(grad, target, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("k", [4, 5])
def test_many_ranks(kernel, k):
    """Four ranks have registers of their own; more take the plain way, and its noise."""
    parameters = ktied_parameters((9, 140), k)
    with fast_paths(triton=kernel):
        found = ktied_weight(*parameters, SEED)
        with fast_paths(triton=kernel and k <= 4):
            noise = ktied_noise(parameters[0])
        agree(found, ktied_formula(*parameters, noise, 0.0), parameters, **TIGHT)


@needs_kernels
@pytest.mark.parametrize("tile", [Tile(32, 8), Tile(64, 1, 2), Tile(128, 32)], ids=str)
def test_tiles_change_nothing_but_the_sums_order(tile, monkeypatch):
    """The passes may have different tiles: the noise is that of the place in the weight."""
    parameters = ktied_parameters((21, 530), 2)
    expected = ktied_weight(*parameters, SEED)
    weights = [torch.randn_like(value) for value in expected]
    exact = torch.autograd.grad(expected, parameters, weights)
    monkeypatch.setitem(weight_launch.FORWARD, 2, tile)
    monkeypatch.setitem(weight_launch.BACKWARD, 2, tile)
    found = ktied_weight(*parameters, SEED)
    assert torch.equal(found[0], expected[0])
    for grad, target in zip(torch.autograd.grad(found, parameters, weights), exact, strict=True):
        torch.testing.assert_close(grad, target, rtol=1e-4, atol=1e-5 * float(target.abs().max()))
