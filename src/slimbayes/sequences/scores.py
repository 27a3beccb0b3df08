"""Softmax attention as torch's own layer computes it, and its masks, on rows [R, H, T, d]."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def attend_by_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    drop: Callable[[Tensor], Tensor] | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ/√d + mask) v, and its weights [R, H, L, S] after ``drop``: where torch's fused kernels cannot."""
    scores = torch.matmul(q * math.sqrt(1.0 / q.shape[-1]), k.transpose(-2, -1))
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    weights = F.softmax(scores if mask is None else scores + mask, -1)
    if drop is not None:
        weights = drop(weights)
    return torch.matmul(weights, v), weights


def additive(mask: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """A mask to be added to the scores; of a boolean one, True forbids.

    >>> additive(torch.tensor([True, False]), "attn_mask", torch.float32)
    tensor([-inf, 0.])
    """
    if mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be boolean or floating point, got {mask.dtype}")
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)


def join_masks(attention: Tensor | None, padding: Tensor | None, more: int) -> Tensor | None:
    """Masks [R or 1, H or 1, L, S] and [R, 1, 1, S] as one, with ``more`` keys that everybody sees."""
    both = [F.pad(mask, (0, more)) if more else mask for mask in (attention, padding) if mask is not None]
    return None if not both else both[0] if len(both) == 1 else both[0] + both[1]
