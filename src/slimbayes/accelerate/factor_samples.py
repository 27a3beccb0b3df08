"""All factors of a network at once on the CPU: their samples, and their KL, as one autograd function each.

A step of a small network is mostly calls. Here the factors' locations and scales are put side by side, so that
one call serves all layers; the numbers are those that layer by layer would give for the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.accelerate import cpu
from slimbayes.accelerate.cpu import rows as kernels
from slimbayes.accelerate.factor_noise import inside
from slimbayes.accelerate.row_factors import plain_backward
from slimbayes.core.noise import fresh_noise
from slimbayes.core.posteriors import EPSILON

KINDS = {"normal": "normal", "lognormal": "normal", "cauchy": "cauchy", "halfcauchy": "cauchy"}


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All elements one after the other.

    >>> joined([torch.zeros(2, 3), torch.ones(2, 1)]).tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    """
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def sample_all(
    locs: Sequence[Tensor],
    rhos: Sequence[Tensor],
    samples: int,
    examples: int,
    family: str,
    clip: float | None = None,
) -> Sequence[Tensor]:
    """f = loc + σ∘ε of every factor [K, C], σ = softplus(ρ) + 1e-7, within ±clip: [K, samples, examples, C] each.

    Log-normal: exp(loc + σ∘ε); half-Cauchy: loc + σ∘|ε|. The noise of all comes from one call.

    >>> loc, rho = torch.ones(2, 3), torch.full((2, 3), -20.0)
    >>> [f.shape for f in sample_all([loc, loc], [rho, rho], 1, 4, "normal")]
    [torch.Size([2, 1, 4, 3]), torch.Size([2, 1, 4, 3])]
    """
    log = family == "lognormal"
    bound = None if log else clip
    values: Sequence[Tensor] = _Samples.apply(samples, examples, family, bound, *locs, *rhos)  # type: ignore[no-untyped-call]
    if log:
        values = [value.exp() if clip is None else value.exp().clamp(-clip, clip) for value in values]
    return values


class _Samples(torch.autograd.Function):
    """Of locations and raw scales [K, C_i], i = 1..n, the samples [K, S, E, C_i]."""

    @staticmethod
    def forward(
        ctx: Any, samples: int, examples: int, family: str, clip: float | None, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        count = len(parameters) // 2
        locs, rhos = parameters[:count], parameters[count:]
        shapes = [(loc.shape[0], samples, examples, loc.shape[1]) for loc in locs]
        sizes = [math.prod(shape) for shape in shapes]
        noise = fresh_noise(KINDS[family], (sum(sizes),), locs[0].dtype, locs[0].device)
        if family == "halfcauchy":
            noise.abs_()
        loc, scale = joined(locs), F.softplus(joined(rhos)).add_(EPSILON)
        if samples * examples == 1:
            value = torch.addcmul(loc, scale, noise)
            values = value.split(sizes)
        else:
            value = torch.empty_like(noise) if any(ctx.needs_input_grad) else noise  # over what nobody needs
            values = value.split(sizes)
            scales = scale.split([rho.numel() for rho in rhos])
            for mean, sigma, own, out in zip(locs, scales, noise.split(sizes), values, strict=True):
                shape = (mean.shape[0], samples * examples, mean.shape[1])
                wide = sigma.view(mean.shape).unsqueeze(1)
                torch.addcmul(mean.unsqueeze(1), wide, own.view(shape), out=out.view(shape))
        kept = None
        if clip is not None and not (family == "normal" and inside(loc, scale, clip)):
            kept = value.abs() <= clip
            value.clamp_(-clip, clip)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(noise, kept, *rhos)
        ctx.sizes = sizes
        return tuple([own.view(shape) for own, shape in zip(values, shapes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        noise, kept, *rhos = ctx.saved_tensors
        sizes, count, needs = ctx.sizes, len(rhos), ctx.needs_input_grad[4:]
        # One sample to a factor: all gradients side by side, where each of them is there and wanted.
        if (
            noise.numel() == sum([rho.numel() for rho in rhos])
            and all(needs)
            and all([g is not None for g in grads])
        ):
            whole = joined(grads)  # type: ignore[arg-type]
            if kept is not None:
                whole = whole * kept
            slopes = (whole * noise * torch.sigmoid(joined(rhos))).split(sizes)
            parts = [*whole.split(sizes), *slopes]
            return (None, None, None, None, *[p.view(r.shape) for p, r in zip(parts, rhos * 2, strict=True)])
        result: list[Tensor | None] = [None] * (2 * count)
        start = 0
        for i, (grad, rho, size) in enumerate(zip(grads, rhos, sizes, strict=True)):
            if grad is not None and (needs[i] or needs[count + i]):
                own, shape = slice(start, start + size), (rho.shape[0], -1, rho.shape[1])
                flat = grad.reshape(shape)  # [K, S·E, C]
                if kept is not None:
                    flat = flat * kept[own].view(shape)
                if needs[i]:
                    result[i] = flat.sum(1)
                if needs[count + i]:
                    result[count + i] = (flat * noise[own].view(shape)).sum(1) * torch.sigmoid(rho)
            start += size
        return (None, None, None, None, *result)


def normal_kl(locs: Sequence[Tensor], rhos: Sequence[Tensor], prior_loc: float, prior_scale: float) -> Tensor:
    """Σ log(σ_p/σ) + (σ² + (μ − μ_p)²)/(2σ_p²) − ½ over all elements, σ = softplus(ρ) + 1e-7; log-normal too.

    >>> rho = torch.full((2, 3), math.log(math.expm1(1.0)))
    >>> round(float(normal_kl([torch.ones(2, 3)], [rho], 0.0, 1.0)), 4)
    3.0
    """
    by_kernel = cpu.library() is not None and all([_plain(one) for one in (*locs, *rhos)])
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
        if plain_backward(grad):
            shift, raw = joined(parameters[:count]) - prior_loc, joined(parameters[count:])
            sigma = F.softplus(raw) + EPSILON
        else:
            shift, raw, sigma = ctx.flat
        precision = prior_scale**-2
        slope = (sigma * precision - sigma.reciprocal()) * torch.sigmoid(raw) * grad
        sizes = [p.numel() for p in parameters[:count]]
        parts = [*(shift * (grad * precision)).split(sizes), *slope.split(sizes)]
        return (None, None, *[part.view(p.shape) for part, p in zip(parts, parameters, strict=True)])


def _plain(tensor: Tensor) -> bool:
    dense = tensor.dtype == torch.float32 and tensor.is_cpu and tensor.is_contiguous()
    return dense and type(tensor) in (Tensor, nn.Parameter) and torch._C._get_tracing_state() is None


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
        if not plain_backward(grad):
            return (None, None, *kernels.normal_kl_gradients(locs, rhos, prior_loc, precision, float(grad)))
        scales = [F.softplus(rho) + EPSILON for rho in rhos]
        slopes = [
            (scale * precision - scale.reciprocal()) * torch.sigmoid(rho) * grad
            for scale, rho in zip(scales, rhos, strict=True)
        ]
        return (None, None, *[(loc - prior_loc) * (grad * precision) for loc in locs], *slopes)
