"""Bulk factors: kernel and plain twins against the formula with the noise read back from them."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_kernels import DEVICE, needs_kernels

from slimbayes import fast_paths
from slimbayes.accelerate.gpu import factors
from slimbayes.core.posteriors import positive

FAMILIES = ["normal", "cauchy", "lognormal", "halfcauchy", "delta"]
KERNEL = [pytest.param(True, marks=needs_kernels, id="kernel"), pytest.param(False, id="plain")]
SEED = torch.tensor([1234567890123], device=DEVICE)


def parameters(components, widths, dtype=torch.float32):
    torch.manual_seed(1)
    like = {"dtype": dtype, "device": DEVICE}
    locs = [torch.randn(components, width, **like).requires_grad_() for width in widths]
    rhos = [torch.randn(components, width, **like).sub(1.0).requires_grad_() for width in widths]
    return locs, rhos


def read_noise(locs, rhos, seed, samples, examples, family):
    """The noise itself: loc = 0 and σ = 1 (|ε| for a half-Cauchy)."""
    rho = math.log(math.expm1(1.0 - 1e-7))
    zeros = [torch.zeros_like(loc) for loc in locs]
    ones = [torch.full_like(loc, rho) for loc in locs]
    family = "normal" if family == "lognormal" else family
    return factors.sample_factors(zeros, ones, seed, samples, examples, family)


def formula(locs, rhos, noise, family, clip):
    out = []
    for loc, rho, e in zip(locs, rhos, noise, strict=True):
        value = loc[:, None, None] + positive(rho)[:, None, None] * e
        value = value.exp() if family == "lognormal" else value
        out.append(value if clip is None else value.clamp(-clip, clip))
    return out


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("clip", [None, 1.5])
@pytest.mark.parametrize("size", [(1, (5,), 1, 1), (2, (7, 64, 3), 1, 6), (3, (33, 100), 2, 35)], ids=str)
def test_twin(kernel, family, clip, size):
    components, widths, samples, examples = size
    locs, rhos = parameters(components, widths)
    with fast_paths(triton=kernel):
        out = factors.sample_factors(locs, rhos, SEED, samples, examples, family, clip)
        noise = read_noise(locs, rhos, SEED, samples, examples, family)
        expected = formula(locs, rhos, noise, family, clip)
        weights = [torch.randn_like(value) for value in expected]
        pick = [value * weight for value, weight in zip(out, weights, strict=True)]
        grads = torch.autograd.grad(sum(one.sum() for one in pick), locs + rhos)
    for value, target in zip(out, expected, strict=True):
        assert value.shape == (components, samples, examples, target.shape[-1]) and value.is_contiguous()
        torch.testing.assert_close(value, target, rtol=2e-5, atol=2e-6)
    pick = [value * weight for value, weight in zip(expected, weights, strict=True)]
    exact = torch.autograd.grad(sum(one.sum() for one in pick), locs + rhos)
    for grad, target in zip(grads, exact, strict=True):
        assert grad.is_contiguous()
        torch.testing.assert_close(grad, target, rtol=1e-4, atol=1e-4 * float(target.abs().max()))


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("family", ["normal", "cauchy"])
def test_moments(kernel, family):
    locs, rhos = parameters(2, (40, 24))
    with fast_paths(triton=kernel):
        noise = torch.cat(
            [e.flatten(0, 2) for e in read_noise(locs, rhos, SEED, 4, 200, family)], 1
        ).double()  # fmt: skip
    count = noise.numel()
    if family == "normal":
        assert abs(float(noise.mean())) < 5 / math.sqrt(count)
        assert abs(float(noise.var()) - 1.0) < 5 * math.sqrt(2 / count)
        assert abs(float((noise**4).mean()) - 3.0) < 5 * math.sqrt(96 / count)
        cdf = torch.special.ndtr(noise)
    else:
        cdf = 0.5 + torch.atan(noise) / math.pi
    histogram = torch.histc(cdf.cpu(), 32, 0.0, 1.0)
    chi2 = float(((histogram - count / 32) ** 2 / (count / 32)).sum())
    assert chi2 < 75.0  # 31 degrees of freedom: p = 2e-5
    # Rows and columns are uncorrelated, so are the quarters that share a counter.
    centred = cdf - 0.5
    for shift in (1, 200, 400, 600):
        product = (centred[:-shift] * centred[shift:]).mean() * 12
        assert abs(float(product)) < 5 / math.sqrt(count)
    assert abs(float((centred[:, 1:] * centred[:, :-1]).mean() * 12)) < 5 / math.sqrt(count)


@pytest.mark.parametrize("kernel", KERNEL)
def test_seed_and_types(kernel):
    locs, rhos = parameters(2, (5, 9))
    with fast_paths(triton=kernel):
        first = factors.sample_factors(locs, rhos, SEED, 1, 8)
        again = factors.sample_factors(locs, rhos, SEED, 1, 8)
        other = factors.sample_factors(locs, rhos, SEED + 1, 1, 8)
        small = factors.sample_factors(locs, rhos, SEED, 1, 8, dtype=torch.bfloat16)
        (small[0].float().sum() + 0.0 * small[1].float().sum()).backward()
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])
    assert small[0].dtype == torch.bfloat16
    torch.testing.assert_close(small[1].float(), first[1], rtol=1e-2, atol=1e-2)
    assert torch.equal(locs[0].grad, torch.full_like(locs[0], 8.0)) and not locs[1].grad.any()


@pytest.mark.parametrize("kernel", KERNEL)
def test_an_unused_factor_gets_zeros(kernel):
    locs, rhos = parameters(2, (5, 9))
    with fast_paths(triton=kernel):
        factors.sample_factors(locs, rhos, SEED, 1, 8)[0].sum().backward()
    assert float(locs[0].grad.sum()) == 80.0 and not rhos[1].grad.any()


def test_double_precision_stays_plain():
    locs, rhos = parameters(1, (4,), torch.float64)
    (out,) = factors.sample_factors(locs, rhos, SEED, 1, 3)
    (noise,) = read_noise(locs, rhos, SEED, 1, 3, "normal")
    (expected,) = formula(locs, rhos, [noise], "normal", None)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    g = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, locs + rhos, g), torch.autograd.grad(expected, locs + rhos, g), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_an_unknown_family():
    locs, rhos = parameters(1, (4,))
    with pytest.raises(ValueError, match="laplace"):
        factors.sample_factors(locs, rhos, SEED, 1, 1, "laplace")


@pytest.mark.parametrize("kernel", KERNEL)
def test_compiled(kernel):
    locs, rhos = parameters(2, (5, 9))

    def loss(seed):
        first, second = factors.sample_factors(locs, rhos, seed, 1, 4, clip=2.0)
        return (first.square().sum() + second.sin().sum()) * 2.0

    with fast_paths(triton=kernel):
        expected = torch.autograd.grad(loss(SEED), locs + rhos)
        torch._dynamo.reset()
        value = torch.compile(loss, fullgraph=True, backend="aot_eager")(SEED)
        for grad, target in zip(torch.autograd.grad(value, locs + rhos), expected, strict=True):
            torch.testing.assert_close(grad, target)
