"""Factors on rows: r ∘ y + b and x ∘ s, with a backward pass of few sweeps and few temporaries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from slimbayes.accelerate import switches
from slimbayes.core.context import Frame
from slimbayes.core.paths import FastPath
from slimbayes.core.rules.base import combined

WIDTH = 512  # floats of a factor repeated side by side, so that inner loops over few channels are long


class RowFactors(FastPath):
    """Scaling in one sweep, and its gradients in few."""

    def on(self) -> bool:
        """By ``rows``."""
        return switches.paths.rows

    def scaled(self, x: Tensor, factor: Tensor, axis: int, frame: Frame, private: bool) -> Tensor | None:
        """x ∘ f."""
        return scaled(x, factor, axis, frame, private)


def scaled(x: Tensor, factor: Tensor, axis: int, frame: Frame, private: bool = False) -> Tensor:
    """x ∘ f for rows x [R, ...] and a factor [K, S, B or 1, C] along the channel ``axis`` of x.

    ``private`` promises that the result goes into one linear operation and nowhere else: its gradient is
    then fresh memory that only this function sees, and the input's gradient g ∘ f is written over it.
    """
    if not eager():
        if axis == 1:
            return row_product(x, row_vectors(factor.to(x.dtype), frame, x.shape[0]))
        return x * per_row(factor.to(x.dtype), x, axis, frame)
    if on_gpu(x) and switches.paths.triton and axis == 1 and 3 <= x.dim() <= 5:
        kernel = cuda_kernel()
        if kernel is not None:
            lines = lined(factor, frame) and factor.is_contiguous()
            result: Tensor = kernel(x, factor if lines else row_vectors(factor, frame, x.shape[0]))
            return result
    factor = factor.to(x.dtype)
    layout = Layout.of(x, axis)
    if layout is None:
        return x * per_row(factor, x, axis, frame)
    groups = row_vectors(factor, frame, 0 if layout.last else x.shape[0])
    return _Scaled.apply(x, groups, layout, private)  # type: ignore[no-any-return, no-untyped-call]


def row_product(x: Tensor, factor: Tensor) -> Tensor:
    """x ∘ f for x [R, C, ...] and f [R, C]: a function of its own, so that ``compiling`` finds it in a graph."""
    return x * factor.reshape(factor.shape + (1,) * (x.dim() - 2))


def affine(y: Tensor, factor: Tensor | None, bias: Tensor | None, axis: int, frame: Frame) -> Tensor:
    """r ∘ y + b for rows y [R, ...] that nobody else holds, a factor [K, S, B or 1, C] and a bias [K, C]."""
    if factor is None:
        return y if bias is None else combined(y, bias[:, None, None], axis, frame, torch.add)
    if bias is None and (torch.is_grad_enabled() or not eager()):
        return scaled(y, factor, axis, frame)
    factor = factor.to(y.dtype)
    shift = None if bias is None else bias.to(y.dtype)[:, None, None]  # [K, 1, 1, C]
    layout = Layout.of(y, axis) if eager() else None
    if layout is None or (y.is_cuda and switches.paths.triton and torch.is_grad_enabled()):
        if layout is not None:  # the kernel scales; the bias comes after it
            y = scaled(y, factor, axis, frame)
            return y if shift is None else y + per_row(shift, y, axis, frame)
        rows = per_row(factor, y, axis, frame)
        return y * rows if shift is None else torch.addcmul(per_row(shift, y, axis, frame), y, rows)
    groups = row_vectors(factor, frame, 0 if layout.last else y.shape[0])  # [G, C]
    if torch.is_grad_enabled():
        assert bias is not None
        return _Affine.apply(y, groups, bias.to(y.dtype), layout)  # type: ignore[no-any-return, no-untyped-call]
    if bias is None:
        flat, wide = layout.match(y, groups)
        flat.mul_(wide)
    else:
        _shift(y, groups, bias.to(y.dtype), layout, y)
    return y


def _shift(y: Tensor, factor: Tensor, bias: Tensor, layout: Layout, out: Tensor) -> None:
    """Write y ∘ f + b into ``out``, for a factor [G, C] and a bias [K, C] of K equal parts of the rows."""
    flat = layout.view(y, factor.shape[0])
    if layout.last and flat.shape[1] == 1:  # one position to a factor: the bias is broadcast, not repeated
        parts = (len(bias), -1, bias.shape[1])
        torch.addcmul(
            bias.unsqueeze(1), flat.view(parts), factor.reshape(parts), out=layout.view(out, len(bias))
        )
        return
    shift = bias[:, None].expand(-1, factor.shape[0] // bias.shape[0], -1).flatten(0, 1)  # [G, C]
    flat, wide = layout.match(y, factor)
    torch.addcmul(layout.match(y, shift)[1], flat, wide, out=layout.match(out, factor)[0])


def on_gpu(x: Tensor) -> bool:
    """Whether the rows are where the GPU kernels run."""
    return x.is_cuda


def lined(factor: Tensor, frame: Frame) -> bool:
    """Whether a factor [K, S or 1, B or 1, C] has one line for each of equal, consecutive parts of the rows."""
    components, samples, examples = factor.shape[:3]
    if components != frame.components:
        return False
    if examples == 1:
        return samples == 1 or samples == frame.samples
    return examples == frame.batch and samples == frame.samples


def cuda_kernel() -> Any:
    """The GPU kernel of ``scaled``, or None where it cannot be had."""
    try:
        from slimbayes.accelerate.gpu.rows import scale_rows
    except ImportError:
        return None
    return scale_rows


def eager() -> bool:
    """True where an autograd function may run: no compiler, no transform of functions, no dual numbers."""
    if torch.compiler.is_compiling():
        return False
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


_BATCHED = torch._C._dispatch_key_parse("Batched")


def plain_backward(grad: Tensor) -> bool:
    """Whether a backward pass must use plain operations: it is differentiated itself, or runs on batched tensors."""
    if torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return True
    return bool(torch._C._dispatch_keys(grad).has(_BATCHED))  # a vectorised Jacobian


def row_vectors(factor: Tensor, frame: Frame, rows: int) -> Tensor:
    """A factor [K, S, B or 1, C] as [groups, C], rows outermost; as [rows, C] when ``rows`` is not 0.

    A gradient of [rows, C] is summed over the positions of a row first and over the batch afterwards.
    """
    channels = factor.shape[-1]
    groups = factor.expand(frame.components, frame.samples, -1, channels).flatten(0, 2)  # [G, C]
    if rows in (0, groups.shape[0]):
        return groups
    return groups[:, None].expand(-1, rows // groups.shape[0], -1).flatten(0, 1)  # [R, C]


def per_row(factor: Tensor, x: Tensor, axis: int, frame: Frame) -> Tensor:
    """A factor [K, S, B or 1, C] as [R, ..., C, ...], to be broadcast against x [R, ...]."""
    shape = [1] * (x.dim() - 1)
    shape[axis if axis < 0 else axis - 1] = factor.shape[-1]
    return row_vectors(factor, frame, x.shape[0]).reshape(x.shape[0], *shape)


class Layout:
    """Where the channels of dense rows lie in memory: behind all positions (``last``) or before them."""

    def __init__(self, axis: int, last: bool) -> None:
        self.axis = axis
        self.last = last

    @staticmethod
    def of(x: Tensor, axis: int) -> Layout | None:
        """The layout of x [R, ..., C, ...], or None for one with gaps or in another order."""
        axis = axis % x.dim()
        if x.movedim(axis, -1).is_contiguous():
            return Layout(axis, True)
        return Layout(axis, False) if axis == 1 and x.is_contiguous() else None

    def dense(self, x: Tensor) -> Tensor:
        """x itself if it lies in this layout, else a copy that does."""
        moved = x.movedim(self.axis, -1) if self.last else x
        if moved.is_contiguous():
            return x
        return moved.contiguous().movedim(-1, self.axis) if self.last else moved.contiguous()

    def view(self, x: Tensor, groups: int) -> Tensor:
        """x [R, ...] as [G, positions, C] (last) or [R, C, positions]."""
        if self.last:
            return x.movedim(self.axis, -1).view(groups, -1, x.shape[self.axis])
        return x.view(x.shape[0], x.shape[1], -1)

    def match(self, x: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        """x and the factor [G, C] in shapes that broadcast, inner loops as long as they can be."""
        flat = self.view(x, factor.shape[0])
        if not self.last:
            return flat, factor.unsqueeze(2)
        repeats = _repeats(flat)
        if repeats == 1:
            return flat, factor.unsqueeze(1)
        wide = factor.repeat(1, repeats).unsqueeze(1)  # [G, 1, repeats·C]
        return flat.view(flat.shape[0], -1, wide.shape[2]), wide

    def sum(self, x: Tensor, groups: int) -> Tensor:
        """Σ over positions: [G, C]."""
        return self.view(x, groups).sum(1 if self.last else 2)


def _repeats(flat: Tensor) -> int:
    """How many positions of [G, positions, C] to take as one: a power of two that divides them."""
    repeats = 1
    while flat.shape[2] * repeats * 2 <= WIDTH and flat.shape[1] % (repeats * 2) == 0:
        repeats *= 2
    return repeats


def _save(ctx: Any, x: Tensor, factor: Tensor, layout: Layout) -> None:
    """Keep what the gradients need, and no more: x for the factor's, the factor for x's."""
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, factor if ctx.needs_input_grad[0] else None)
    ctx.layout, ctx.groups = layout, factor.shape[0]


def _gradients(ctx: Any, grad: Tensor, private: bool) -> tuple[Tensor | None, Tensor | None]:
    """(g ∘ f, Σ g ∘ x) with at most one new tensor of x's size, none when g may be written over."""
    layout, groups, needs = ctx.layout, ctx.groups, ctx.needs_input_grad
    x, factor = ctx.saved_tensors
    grad_x = grad_f = spare = None
    if needs[1]:
        spare = torch.mul(grad, x, out=grad) if private and not needs[0] else grad * x
        one = spare.numel() == groups * spare.shape[layout.axis]  # one position per factor: nothing to sum
        grad_f = layout.view(spare, groups).reshape(groups, -1) if one else layout.sum(spare, groups)
        spare = None if one else spare
    if needs[0]:
        grad_x = grad if private else (torch.empty_like(grad) if spare is None else spare)
        flat, wide = layout.match(grad, factor)
        torch.mul(flat, wide, out=layout.match(grad_x, factor)[0])
    return grad_x, grad_f


def _plain_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The same in operations that can be differentiated again."""
    layout, groups = ctx.layout, ctx.groups
    x, factor = ctx.saved_tensors
    grad_x = grad_f = None
    if factor is not None:
        grad_x = layout.view(grad, groups) * factor.unsqueeze(1 if layout.last else 2)
        if layout.last:
            grad_x = grad_x.view(grad.movedim(layout.axis, -1).shape).movedim(-1, layout.axis)
        else:
            grad_x = grad_x.view(grad.shape)
    if x is not None:
        grad_f = layout.sum(grad * x, groups)
    return grad_x, grad_f


class _Scaled(torch.autograd.Function):
    """x ∘ f for dense rows and a factor [G, C]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor, layout: Layout, private: bool) -> Tensor:
        _save(ctx, x, factor, layout)
        ctx.private = private
        out = torch.empty_like(x)  # keeps the order of the axes in memory
        flat, wide = layout.match(x, factor)
        torch.mul(flat, wide, out=layout.match(out, factor)[0])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dense = ctx.layout.dense(grad)
        if plain_backward(grad):
            return (*_plain_gradients(ctx, dense), None, None)
        return (*_gradients(ctx, dense, ctx.private or dense is not grad), None, None)


class _Affine(torch.autograd.Function):
    """y ∘ f + b for dense rows, a factor [G, C] and a bias [K, C] of K equal parts of the rows."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, factor: Tensor, bias: Tensor, layout: Layout) -> Tensor:
        _save(ctx, y, factor, layout)
        ctx.components = bias.shape[0]
        out = torch.empty_like(y)
        _shift(y, factor, bias, layout, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layout, components = ctx.layout, ctx.components
        dense = layout.dense(grad)
        grad_b = None
        if ctx.needs_input_grad[2]:
            if layout.last:
                grad_b = layout.sum(dense, components)
            else:
                grad_b = dense.view(components, -1, *layout.view(dense, 0).shape[1:]).sum((1, 3))
        if plain_backward(grad):
            return (*_plain_gradients(ctx, dense), grad_b, None)
        return (*_gradients(ctx, dense, dense is not grad), grad_b, None)
