"""The KL of all normal factors of a network as one autograd function: a step of a small network is mostly calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slimbayes.accelerate import cpu
from slimbayes.accelerate.cpu import rows as kernels
from slimbayes.accelerate.situation import by_pointers, dense_float, further
from slimbayes.core.posteriors import EPSILON


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All elements one after the other.

    >>> joined([torch.zeros(2, 3), torch.ones(2, 1)]).tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    """
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def normal_kl(locs: Sequence[Tensor], rhos: Sequence[Tensor], prior_loc: float, prior_scale: float) -> Tensor:
    """Σ log(σ_p/σ) + (σ² + (μ − μ_p)²)/(2σ_p²) − ½ over all elements, σ = softplus(ρ) + 1e-7; log-normal too.

    >>> rho = torch.full((2, 3), math.log(math.expm1(1.0)))
    >>> round(float(normal_kl([torch.ones(2, 3)], [rho], 0.0, 1.0)), 4)
    3.0
    """
    by_kernel = cpu.library() is not None and by_pointers() and dense_float(*locs, *rhos)
    by_kernel = by_kernel and all([one.is_contiguous() for one in (*locs, *rhos)])
    total: Tensor = (_KernelKL if by_kernel else _NormalKL).apply(prior_loc, prior_scale, *locs, *rhos)  # type: ignore[no-untyped-call]
    return total


class _NormalKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prior_loc: float, prior_scale: float, *parameters: Tensor) -> Tensor:
        count = len(parameters) // 2
        shift = joined(parameters[:count]).sub_(prior_loc)
        raw = joined(parameters[count:])
        sigma = F.softplus(raw).add_(EPSILON)
        ctx.save_for_backward(*parameters)
        ctx.prior = prior_loc, prior_scale
        ctx.flat = shift, raw, sigma  # no inputs and no outputs: nothing else holds them
        squares = torch.dot(sigma, sigma).add_(torch.dot(shift, shift)).mul_(0.5 / prior_scale**2)
        return squares.sub_(sigma.log().sum()).add_(sigma.numel() * (math.log(prior_scale) - 0.5))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        prior_loc, prior_scale = ctx.prior
        parameters = ctx.saved_tensors  # read first: it tells of parameters changed since
        count = len(parameters) // 2
        if further(grad):
            shift, raw = joined(parameters[:count]) - prior_loc, joined(parameters[count:])
            sigma = F.softplus(raw) + EPSILON
        else:
            shift, raw, sigma = ctx.flat
        precision = prior_scale**-2
        slope = (sigma * precision - sigma.reciprocal()) * torch.sigmoid(raw) * grad
        sizes = [p.numel() for p in parameters[:count]]
        parts = [*(shift * (grad * precision)).split(sizes), *slope.split(sizes)]
        return (None, None, *[part.view(p.shape) for part, p in zip(parts, parameters, strict=True)])


class _KernelKL(torch.autograd.Function):
    """The same by one call of a CPU kernel each way."""

    @staticmethod
    def forward(ctx: Any, prior_loc: float, prior_scale: float, *parameters: Tensor) -> Tensor:
        count = len(parameters) // 2
        ctx.save_for_backward(*parameters)
        ctx.prior = prior_loc, prior_scale
        total = kernels.normal_kl(parameters[:count], parameters[count:], prior_loc, prior_scale**-2)
        numbers = sum([p.numel() for p in parameters[:count]])
        return torch.tensor(total + numbers * (math.log(prior_scale) - 0.5), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        prior_loc, prior_scale = ctx.prior
        parameters = ctx.saved_tensors
        count = len(parameters) // 2
        locs, rhos = parameters[:count], parameters[count:]
        precision = prior_scale**-2
        if not further(grad):
            return (None, None, *kernels.normal_kl_gradients(locs, rhos, prior_loc, precision, float(grad)))
        scales = [F.softplus(rho) + EPSILON for rho in rhos]
        slopes = [
            (scale * precision - scale.reciprocal()) * torch.sigmoid(rho) * grad
            for scale, rho in zip(scales, rhos, strict=True)
        ]
        return (None, None, *[(loc - prior_loc) * (grad * precision) for loc in locs], *slopes)
