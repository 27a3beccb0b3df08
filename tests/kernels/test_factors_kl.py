"""The bulk KL of factors against the closed forms of kl.py, values and gradients."""

from __future__ import annotations

import pytest
import torch

from slimbayes.accelerate.gpu.factors_kl import factors_kl
from slimbayes.core import distributions as d
from slimbayes.core.kl import total_kl
from slimbayes.core.posteriors import positive

TYPES = {"normal": d.Normal, "lognormal": d.LogNormal, "cauchy": d.Cauchy, "halfcauchy": d.HalfCauchy}


def parameters(dtype):
    torch.manual_seed(0)
    locs = [torch.randn(3, width, dtype=dtype).requires_grad_() for width in (4, 7)]
    rhos = [torch.randn(3, width, dtype=dtype).sub(2.0).requires_grad_() for width in (4, 7)]
    return locs, rhos


@pytest.mark.parametrize("family", list(TYPES))
@pytest.mark.parametrize("compiled", [False, True])
def test_twin(family, compiled):
    locs, rhos = parameters(torch.float64)
    make, loc, scale = TYPES[family], 0.3, 0.7

    def bulk():
        return factors_kl(locs, rhos, family, loc, scale) * 1.5

    expected = 0.0
    for mean, rho in zip(locs, rhos, strict=True):
        prior = torch.full_like(mean, loc) if family != "halfcauchy" else mean.detach()
        p = make(prior, torch.full_like(mean, scale))
        expected = expected + 1.5 * total_kl(make(mean, positive(rho)), p)
    value = torch.compile(bulk, fullgraph=True, backend="aot_eager")() if compiled else bulk()
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad(value, locs + rhos, materialize_grads=True)
    exact = torch.autograd.grad(expected, locs + rhos, allow_unused=True)
    for grad, target in zip(grads, exact, strict=True):
        target = torch.zeros_like(grad) if target is None else target
        torch.testing.assert_close(grad, target, rtol=1e-10, atol=1e-10)


def test_sixteen_bits_are_summed_in_float32():
    locs, rhos = parameters(torch.bfloat16)
    value = factors_kl(locs, rhos, "normal", 0.0, 1.0)
    assert value.dtype == torch.float32
    value.backward()
    assert locs[0].grad.dtype == torch.bfloat16


def test_an_unknown_family():
    with pytest.raises(ValueError, match="delta"):
        factors_kl([torch.ones(1)], [torch.ones(1)], "delta", 0.0, 1.0)
