"""Samples of one rank-1 factor in one sweep, f = loc + σ ∘ ε, clipped only where something can be clipped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate.row_factors import eager
from slimbayes.core import distributions as d
from slimbayes.core.context import Frame
from slimbayes.core.rules.base import sample

FARTHEST = 40.0  # deviations that no normal generator reaches: float64 ends near 8.6, P(|ε| > 40) < 1e-349


def sample_factor(spread: d.Spread, frame: Frame, source: str, clip: float | None) -> Tensor:
    """Samples [K, S, B or 1, C] of a factor's spread, within ±clip."""
    per_example = frame.noise == "example"
    if spread.noise is None or not eager() or not isinstance(spread, (d.Normal, d.Cauchy)):
        plain = sample(spread, frame, source, per_example, True)
        return plain if clip is None else plain.clamp(-clip, clip)
    loc, scale = spread.loc, spread.scale  # [K, C]
    shape = (loc.shape[-1],)
    noise = frame.noise_like(spread.noise, source, shape, loc.dtype, loc.device, per_example)
    value: Tensor = _Shifted.apply(loc, scale, noise)  # type: ignore[no-untyped-call]
    if clip is None or (isinstance(spread, d.Normal) and inside(loc, scale, clip)):
        return value
    return value.clamp(-clip, clip)


def inside(loc: Tensor, scale: Tensor, clip: float) -> bool:
    """Whether no normal sample can leave ±clip; False on a GPU, where asking would wait for it.

    >>> inside(torch.ones(2), torch.full((2,), 0.03), 10.0), inside(torch.ones(2), torch.ones(2), 10.0)
    (True, False)
    """
    if loc.device.type != "cpu":
        return False
    if loc.numel() == 0:
        return True
    return float(loc.detach().abs().max() + FARTHEST * scale.detach().max()) < clip


class _Shifted(torch.autograd.Function):
    """loc + σ ∘ ε for loc and σ [K, C] and noise [K, S, E, C], which is not differentiated."""

    @staticmethod
    def forward(ctx: Any, loc: Tensor, scale: Tensor, noise: Tensor) -> Tensor:
        ctx.save_for_backward(noise if ctx.needs_input_grad[1] else None)
        return torch.addcmul(loc[:, None, None], scale[:, None, None], noise)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (noise,) = ctx.saved_tensors
        flat = grad.flatten(1, 2)  # [K, S·E, C]
        grad_loc = flat.sum(1) if ctx.needs_input_grad[0] else None
        grad_scale = None if noise is None else (flat * noise.flatten(1, 2)).sum(1)
        return grad_loc, grad_scale, None
