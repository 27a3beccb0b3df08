"""A convolution between factors, y = r ∘ conv(x ∘ s, W), as one node for autograd on the GPU.

With h = conv(x ∘ s, W), g the gradient of y and g' = g ∘ r: dr = Σ g ∘ h; the convolution's own backward pass makes
dW and d of g', and ds = Σ d ∘ x, dx = d ∘ s, written over d. Small layers take the host longer than the GPU, and every
node, view and call counts there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.accelerate import row_factors, switches
from slimbayes.accelerate.gpu.launch import available
from slimbayes.accelerate.gpu.rows import (
    TYPES,
    batched,
    broadcast,
    dense,
    factor_gradient,
    fits,
    gradients,
    like,
    scale,
)
from slimbayes.accelerate.situation import by_pointers
from slimbayes.core.context import Frame
from slimbayes.core.rules.base import Operation

Settings = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool, tuple[int, ...], int]
_PLAIN = {nn.Conv1d._conv_forward, nn.Conv2d._conv_forward, nn.Conv3d._conv_forward}
_KNOWN = (Tensor, nn.Parameter)


def usable(op: Operation, x: Tensor, s: Tensor | None, r: Tensor | None, frame: Frame) -> bool:
    """Whether the layer is a convolution of rows x on the GPU in one type, in training and in eager code."""
    if torch.compiler.is_compiling() or not available(x.device) or not switches.paths.rows:
        return False
    kind, held, weight = type(op), op.__dict__, op.weight
    if (
        getattr(kind, "_conv_forward", None) not in _PLAIN
        or type(x) is not Tensor
        or type(weight) not in _KNOWN
    ):
        return False
    if type(held["padding"]) is not tuple or held["padding_mode"] != "zeros" or x.dim() != weight.dim():
        return False
    if x.dtype != _computed_in(x.device.type, weight) or not (torch.is_grad_enabled() and frame.tiled):
        return False
    if s is not None and not (fits(x, s) and row_factors.lined(s, frame)):
        return False
    if r is not None:
        # Kernels count the numbers of one row in 32 bits; padding makes rows of the output somewhat longer.
        small = 0 < 4 * x.numel() * weight.shape[0] < 2**31 * x.shape[0] * x.shape[1]
        whole = r.dtype in TYPES and r.shape[-1] == weight.shape[0] and r.is_contiguous()
        if not (small and whole and row_factors.lined(r, frame)):
            return False
    return (s is not None or r is not None) and by_pointers()


def _computed_in(device: str, weight: Tensor) -> torch.dtype | None:
    """The type that a convolution with this weight computes in."""
    if weight.dtype not in TYPES:
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def convolved(op: Any, x: Tensor, s: Tensor | None, r: Tensor | None) -> Tensor:
    """r ∘ conv(x ∘ s, W) for rows x [R, C, ...] and factors [K, S or 1, B or 1, C], where ``usable``."""
    held = op.__dict__
    padding = held["padding"]
    x, _ = dense(x)  # where autograd sees it: a second derivative goes through x as it is saved
    settings = (held["stride"], padding, held["dilation"], False, (0,) * len(padding), held["groups"])
    y: Tensor = _Between.apply(x, s, op.weight, r, settings)  # type: ignore[no-untyped-call]
    return y


class _Between(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, s: Tensor | None, weight: Tensor, r: Tensor | None, settings: Settings
    ) -> Tensor:
        taps = None if weight.dtype == x.dtype else weight.to(x.dtype)
        x, first = dense(x)
        inner = x if s is None else scale(x, s, first)
        y = torch.convolution(inner, weight if taps is None else taps, None, *settings)
        outer, last = y, False
        if r is not None:
            y, last = dense(y)
            outer = scale(y, r, last)
        _, _, need_w, need_r, _ = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.layouts = settings, (first, last)
        ctx.save_for_backward(
            x, s, inner if need_w and s is not None else None, weight, taps, y if need_r else None, r
        )
        return outer

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, ...]:
        if g is None:
            return None, None, None, None, None
        if torch.is_grad_enabled() or batched(g):
            return (*_plain_gradients(ctx, g), None)
        x, s, inner, weight, taps, y, r = ctx.saved_tensors
        need_x, need_s, need_w, need_r, _ = ctx.needs_input_grad
        first, last = ctx.layouts
        # Whoever kept them since (save_on_cpu) need not have kept their strides.
        x = like(x, first)
        inner = x if inner is None else like(inner, first)
        gx = gs = gw = gr = None
        through = need_x or need_s
        if r is not None:
            g = like(g, last)
            if not need_r:
                g = scale(g, r, last)
            else:
                y = like(y, last)
                g, gr = gradients(g, y, r, last, torch.empty_like(y) if through or need_w else None)
        if through or need_w:
            gx, gw, _ = torch.ops.aten.convolution_backward.default(
                g, inner, weight if taps is None else taps, None, *ctx.settings, (through, need_w, False),
            )  # fmt: skip
        if s is not None and gx is not None:
            gx = like(gx, first)
            if need_s:
                gx, gs = gradients(gx, x, s, first, gx if need_x else None)
            else:
                gx = scale(gx, s, first)
        if gw is not None and taps is not None:
            gw = gw.to(weight.dtype)
        return gx, gs, gw, gr, None


def _plain_gradients(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    """The same in operations that can be differentiated again, all from the inputs."""
    x, s, _, weight, _, _, r = ctx.saved_tensors
    need_x, need_s, need_w, need_r, _ = ctx.needs_input_grad
    taps = weight.to(x.dtype)
    inner = x if s is None else x * broadcast(s, x)
    gr = None
    if r is not None:
        if need_r:
            gr = factor_gradient(g, torch.convolution(inner, taps, None, *ctx.settings), r)
        g = g * broadcast(r, g)
    gx, gw, _ = torch.ops.aten.convolution_backward.default(
        g, inner, taps, None, *ctx.settings, (need_x or need_s, need_w, False)
    )
    gs = None
    if s is not None and gx is not None:
        gs = factor_gradient(gx, x, s) if need_s else None
        gx = gx * broadcast(s, x) if need_x else None
    return gx, gs, None if gw is None else gw.to(weight.dtype), gr
