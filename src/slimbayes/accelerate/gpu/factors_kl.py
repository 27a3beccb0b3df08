"""The KL of all rank-1 factors of a network against one prior, as one operation with an analytic gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slimbayes.accelerate.gpu.joint_parameters import join
from slimbayes.core.custom_operation import operation


def factors_kl(
    locs: Sequence[Tensor], rhos: Sequence[Tensor], family: str, prior_loc: float, prior_scale: float
) -> Tensor:
    """Σ KL(q‖p) over all elements of all layers, q and p of one family, σ = softplus(ρ) + 1e-7.

    Normal, log-normal: log(σ_p/σ) + (σ² + (μ − μ_p)²)/(2σ_p²) − ½. Cauchy:
    log(((γ + γ_p)² + (m − m_p)²)/(4 γ γ_p)); half-Cauchy: log((γ + γ_p)²/(4 γ γ_p)).

    >>> rho = torch.full((2, 3), math.log(math.expm1(1.0)))
    >>> round(float(factors_kl([torch.ones(2, 3)], [rho], "normal", 0.0, 1.0)), 4)
    3.0
    """
    if family not in ("normal", "lognormal", "cauchy", "halfcauchy"):
        raise ValueError(
            f"no closed KL for factors of the family {family!r}; there are normal, lognormal, cauchy, halfcauchy"
        )
    return flat_kl(join(locs), join(rhos), family, prior_loc, prior_scale)


def flat_kl(loc: Tensor, rho: Tensor, family: str, prior_loc: float, prior_scale: float) -> Tensor:
    """``factors_kl`` of parameters that ``join`` has put together."""
    if (
        torch.compiler.is_compiling()
    ):  # one operation; in eager code autograd's own are few, and differentiable again
        total: Tensor = torch.ops.slimbayes.factors_kl(loc, rho, family, prior_loc, prior_scale)
        return total
    return _formula(loc, rho, family, prior_loc, prior_scale)


def _wide(flat: Tensor) -> Tensor:
    """Float32 at least: the sum has many terms."""
    return flat if flat.dtype.itemsize >= 4 else flat.float()


def _formula(loc: Tensor, rho: Tensor, family: str, prior_loc: float, prior_scale: float) -> Tensor:
    sigma = F.softplus(_wide(rho)) + 1e-7
    count = sigma.numel()
    logs = sigma.log().sum()
    if family == "halfcauchy":
        return 2.0 * (sigma + prior_scale).log().sum() - logs - count * math.log(4.0 * prior_scale)
    shift = _wide(loc) - prior_loc
    if family == "cauchy":
        both = torch.hypot(sigma + prior_scale, shift)  # its square may be too large
        return 2.0 * both.log().sum() - logs - count * math.log(4.0 * prior_scale)
    squares = torch.dot(sigma, sigma) + torch.dot(shift, shift)
    return squares * (0.5 / prior_scale**2) - logs + count * (math.log(prior_scale) - 0.5)


@operation("factors_kl", "(Tensor loc, Tensor rho, str family, float prior_loc, float prior_scale) -> Tensor")
def _kl(
    loc: Tensor, rho: Tensor, family: str, prior_loc: float, prior_scale: float
) -> Tensor:  # fmt: skip
    return _formula(loc, rho, family, prior_loc, prior_scale)


@_kl.register_fake
def _(
    loc: Tensor, rho: Tensor, family: str, prior_loc: float, prior_scale: float
) -> Tensor:  # fmt: skip
    return rho.new_empty((), dtype=rho.dtype if rho.dtype.itemsize >= 4 else torch.float32)


@operation(
    "factors_kl_backward",
    "(Tensor grad, Tensor loc, Tensor rho, str family, float prior_loc, float prior_scale)"
    " -> (Tensor, Tensor)",
)
def _kl_backward(
    grad: Tensor, loc: Tensor, rho: Tensor, family: str, prior_loc: float, prior_scale: float
) -> tuple[Tensor, Tensor]:
    raw = _wide(rho)
    sigma = F.softplus(raw) + 1e-7
    slope = torch.sigmoid(raw) * grad
    if family == "halfcauchy":
        d_sigma = 2.0 / (sigma + prior_scale) - sigma.reciprocal()
        d_loc = torch.zeros_like(raw)
    elif family == "cauchy":
        shift = _wide(loc) - prior_loc
        wide = sigma + prior_scale
        both = torch.hypot(wide, shift)
        d_sigma = 2.0 * wide / both / both - sigma.reciprocal()
        d_loc = (2.0 * shift / both / both) * grad
    else:
        d_sigma = torch.add(sigma.reciprocal().neg_(), sigma, alpha=prior_scale**-2)
        d_loc = (_wide(loc) - prior_loc) * (grad * prior_scale**-2)
    return d_loc.to(loc.dtype), (d_sigma * slope).to(rho.dtype)


@_kl_backward.register_fake
def _(grad: Tensor, loc: Tensor, rho: Tensor, *prior: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(loc), torch.empty_like(rho)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    loc, rho, *ctx.prior = inputs
    ctx.save_for_backward(loc, rho)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    d_loc, d_rho = torch.ops.slimbayes.factors_kl_backward(grad, *ctx.saved_tensors, *ctx.prior)
    return d_loc, d_rho, None, None, None


_kl.register_autograd(_backward, setup_context=_setup)
