"""Shared factors folded into the weight of a convolution, one convolution per draw."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slimbayes.core.rules.base import Inputs, Operation, per_draw


def is_convolution(op: Operation) -> bool:
    """Whether an operation is a convolution, transposed or not."""
    return hasattr(op, "kernel_size") and hasattr(op, "transposed") and op.output_axis == 1


def output_ratio(op: Any) -> float:
    """Positions of the output for each of the input."""
    ratio = float(math.prod(op.stride))
    return ratio if op.transposed else 1.0 / ratio


def outer_product(op: Any, r: Tensor | None, s: Tensor | None) -> Tensor:
    """r_d s_dᵀ in the shape of a convolution's weight, [D, first, second, 1, ...].

    The weight's second axis counts the channels of one group, so that its side has one part per group.
    """
    first, second = (s, r) if op.transposed else (r, s)
    rest = (1,) * len(op.kernel_size)
    product: Tensor | None = None
    if first is not None:
        product = first.reshape(*first.shape, 1, *rest)
    if second is not None:
        blocks = second.reshape(second.shape[0], op.groups, 1, -1)  # [D, groups, 1, second]
        blocks = blocks.expand(-1, -1, op.weight.shape[0] // op.groups, -1).flatten(1, 2)
        blocks = blocks.reshape(*blocks.shape, *rest)
        product = blocks if product is None else product * blocks
    assert product is not None
    return product


def convolve(op: Operation, inputs: Inputs, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One convolution per draw; splitting and joining rows keeps channels_last both ways."""
    draws = weight.shape[0]
    if draws == 1:
        return per_draw(op, inputs, weight, bias)
    x, *rest = inputs
    parts = x.split(x.shape[0] // draws)
    biases = [None] * draws if bias is None else bias.unbind(0)
    return torch.cat(
        [op.compute((part, *rest), w, b) for part, w, b in zip(parts, weight.unbind(0), biases, strict=True)]
    )
