"""What one weight matrix does in a call of a layer that has several: y = r ∘ (W (s ∘ x)) + b."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slimbayes.core.context import Frame


@dataclass
class Flips:
    """Flipout's second product, o ∘ (Δ (i ∘ x)): one Δ [draws, out, in], signs i and o for every row."""

    delta: Tensor
    inner: Tensor
    outer: Tensor


@dataclass
class Local:
    """Noise on every output by itself, y + ε ∘ √(Q x²), where ``squares`` are the factors of Q = σ² [out, in]."""

    squares: tuple[Tensor, ...]  # the first is applied first; the last has the rows of the kernel
    noise: Callable[[Tensor], Tensor]  # ε for an output [R, ..., out]

    def stddev(self, x: Tensor) -> Tensor:
        """Of the outputs for x [..., in]; where it is zero its square root has no finite slope."""
        variance = x.square()
        for matrix in self.squares:
            variance = F.linear(variance, matrix)
        return variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()


@dataclass
class Mapped:
    """The tensors of one kernel. Weight and bias have a leading axis of groups of rows: 1, or what divides the draws.

    ``inner`` [R, in], ``outer`` and ``shift`` [R, out] differ from row to row; ``before`` changes the kernel's
    whole input [R, ..., in], where that is not the layer's own state. ``local`` is for layers without a state.
    ``whole`` is all that a rule does with rows [R, ..., in], where nothing else is known of it; it takes the operation
    to do it with as a second argument, where that is not the kernel.
    """

    weight: Tensor
    bias: Tensor | None
    inner: Tensor | None = None
    outer: Tensor | None = None
    shift: Tensor | None = None
    flips: Flips | None = None
    local: Local | None = None
    before: Callable[[Tensor], Tensor] | None = None
    whole: Callable[..., Tensor] | None = None

    @property
    def by_group(self) -> bool:
        """Whether all rows of a group meet the same weight and bias."""
        by_row = (self.inner, self.outer, self.shift, self.flips, self.local, self.whole)
        return all([own is None for own in by_row])

    @property
    def groups(self) -> int:
        """Groups of rows that differ."""
        return max(self.weight.shape[0], 1 if self.bias is None else self.bias.shape[0])

    def product(self, x: Tensor) -> Tensor:
        """r ∘ (W (s ∘ x)) for x [..., R, in]."""
        if self.whole is not None:
            return self.whole(x.movedim(-2, 0)).movedim(0, -2)
        y = grouped_product(x if self.inner is None else x * self.inner, self.weight)
        if self.outer is not None:
            y = y * self.outer
        if self.flips is not None:
            y = torch.addcmul(y, grouped_product(x * self.flips.inner, self.flips.delta), self.flips.outer)
        return y

    def offset(self, rows: int) -> Tensor | None:
        """What is added to the product, [R or 1, out]; None if nothing is."""
        bias = None if self.bias is None else expand_groups(self.bias, rows)
        if self.shift is None or bias is None:
            return bias if self.shift is None else self.shift
        return self.shift + bias

    def __call__(self, x: Tensor) -> Tensor:
        """The kernel's output for x [..., R, in]."""
        if self.by_group and self.groups == 1:
            return F.linear(x, self.weight.squeeze(0), None if self.bias is None else self.bias.squeeze(0))
        y, offset = self.product(x), self.offset(x.shape[-2])
        return y if offset is None else y + offset


def grouped_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., R, in] in groups of rows times weight [G, out, in]."""
    groups = weight.shape[0]
    if groups == 1:
        return F.linear(x, weight.squeeze(0))
    split = x.unflatten(-2, (groups, -1))  # [..., G, R/G, in]
    return torch.matmul(split, weight.transpose(1, 2)).flatten(-3, -2)


def expand_groups(value: Tensor, count: int) -> Tensor:
    """[G, ...] to [count, ...], every group repeated in its place; one group is left as it is."""
    groups = value.shape[0]
    if groups in (1, count):
        return value
    return value.unsqueeze(1).expand(groups, count // groups, *value.shape[1:]).flatten(0, 1)


def by_draw(factor: Tensor) -> Tensor:
    """A factor [K, S, 1, C] that all examples share as groups of rows, [K·S, C]."""
    return factor.flatten(0, 2)


def by_row(factor: Tensor, frame: Frame) -> Tensor:
    """A factor [K or 1, S or 1, B or 1, C] for every row, [R, C]."""
    rows = (frame.components, frame.samples, frame.batch, frame.extra)
    return factor.unsqueeze(3).expand(*rows, factor.shape[-1]).flatten(0, 3)
