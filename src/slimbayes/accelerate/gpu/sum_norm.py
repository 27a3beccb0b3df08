"""relu(BatchNorm(r∘y + q∘x))∘s with the sum itself, as one operation: the residual sum of pre-activation blocks.

What the factors' gradients need is summed in the sweep that makes the gradient of the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate.gpu.launch import ceil_div, launch
from slimbayes.accelerate.gpu.norm import expression, follow, plain_backward
from slimbayes.accelerate.gpu.norm_launch import (
    LAST,
    WIDE,
    dense,
    fake_statistics,
    fits,
    gradient_sums,
    like,
    piece_moments,
    pieces,
    room,
    scaled,
    small_gradients,
    statistics,
    tile,
    whole_rows,
    wide_tile,
)
from slimbayes.core.custom_operation import operation


def sum_norm_rows(
    y: Tensor,
    r: Tensor,
    x: Tensor,
    q: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    s: Tensor | None,
    momentum: float,
    eps: float,
    relu: bool,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """(v, u): v = r∘y + q∘x, u = relu((v − μ)/√(σ² + eps)·weight + bias)∘s, training mode.

    y and x are [R, C, H, W]; r, q and s are [R, C], the last two or absent. Only with ``keep`` is v differentiable.

    >>> y, r = torch.randn(4, 3, 2, 2), torch.ones(4, 3)
    >>> one, zero = torch.ones(3), torch.zeros(3)
    >>> v, u = sum_norm_rows(y, r, y, None, None, None, one, zero, None, 0.1, 1e-5, False, True)
    >>> bool(torch.allclose(v, 2 * y)) and bool(u.mean((0, 2, 3)).abs().max() < 1e-6)
    True
    """
    v, u, mean, var, _, _ = torch.ops.slimbayes.sum_norm_rows(y, r, x, q, weight, bias, s, eps, relu, keep)
    follow(running_mean, running_var, mean, var, y, momentum)
    return v, u


def run(
    y: Tensor, r: Tensor, x: Tensor, q: Tensor | None, weight: Tensor, bias: Tensor, s: Tensor | None,
    eps: float, relu: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(v, u, mean, variance, mean of each piece of a row of v, its sum of squared deviations)."""
    if not fits(y):
        v = scaled(y, r)
        v = (v + scaled(x, q)).to(y.dtype).contiguous(memory_format=LAST)
        u, mean, var = expression(v, None, weight, bias, s, eps, relu)
        return v, u.contiguous(memory_format=LAST), mean, var, *piece_moments(v.to(mean.dtype))
    from slimbayes.accelerate.gpu.programs import norm, residual

    rows, channels = y.shape[:2]
    y, x = y.contiguous(memory_format=LAST), x.contiguous(memory_format=LAST)
    v, u, split = torch.empty_like(y), torch.empty_like(y), pieces(y)
    positions = y.numel() // (rows * channels)
    row_mean = torch.empty(rows * split, channels, dtype=torch.float32, device=y.device)
    row_m2 = torch.empty_like(row_mean)
    (bp, bc), wp = tile(channels), wide_tile(channels)[0]
    launch(
        residual.sum_moments, rows * split * ceil_div(channels, bc), y,
        y, dense(r, y), x, dense(q, y), v, row_mean, row_m2, positions // split, channels, split,
        int(q is not None), BP=wp, BC=bc, **WIDE,
    )  # fmt: skip
    mean, var = statistics(v, row_mean, row_m2, None, positions // split, split)
    launch(
        norm.normalize, rows * ceil_div(positions, bp) * ceil_div(channels, bc), y,
        v, v, dense(s, v), mean, var, weight, bias, u, positions, channels, eps,
        0, int(s is not None), int(relu), BP=bp, BC=bc,
    )  # fmt: skip
    return v, u, mean, var, row_mean, row_m2


@operation(
    "sum_norm_rows",
    "(Tensor y, Tensor r, Tensor x, Tensor? q, Tensor weight, Tensor bias, Tensor? s, float eps, bool relu, "
    "bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _sum_norm_rows(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return run(*inputs)


@_sum_norm_rows.register_fake
def _(y: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(y, memory_format=LAST),
        torch.empty_like(y, memory_format=LAST),
        *fake_statistics(y),
    )


def run_backward(
    gu: Tensor, gv: Tensor | None, y: Tensor, r: Tensor, x: Tensor, q: Tensor | None, weight: Tensor,
    bias: Tensor, s: Tensor | None, v: Tensor, mean: Tensor, var: Tensor, row_mean: Tensor, row_m2: Tensor,
    eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of (y, r, x, q, weight, bias, s); an absent factor's is empty."""
    if not fits(y):
        g, _, gw, gb, gs = plain_backward(gu, v, None, weight, bias, s, mean, var, eps, relu)
        g = g.to(mean.dtype) if gv is None else g.to(mean.dtype) + gv
        gr = (g * y).sum((2, 3)).to(r.dtype)
        gq = y.new_empty(0) if q is None else (g * x).sum((2, 3)).to(q.dtype)
        gy, gx = (scaled(g, f).to(y.dtype).clone(memory_format=LAST) for f in (r, q))
        return gy, gr, gx, gq, gw, gb, gs
    from slimbayes.accelerate.gpu.programs import residual

    y, x, gu = (each.contiguous(memory_format=LAST) for each in (y, x, gu))
    sums = gradient_sums(gu, v, None, weight, bias, mean, var, row_mean, eps, relu)
    _, gw, gb, gs = small_gradients(sums, v, None, weight, bias, s, mean, var, row_mean, row_m2, eps)
    gy, gx = torch.empty_like(y), torch.empty_like(y)
    (rows, channels), count = y.shape[:2], row_mean.shape[0]
    split = count // rows
    gr, gq = room(r, y, row_mean), room(q, y, row_mean)
    other = gu if gv is None else gv.contiguous(memory_format=LAST)
    wp, bc = wide_tile(channels)
    launch(
        residual.sum_gradient, count * ceil_div(channels, bc), y,
        gu, other, y, dense(r, y), x, dense(q, y), v, dense(s, y), mean, var, weight, bias,
        gw, gb, gy, gx, gr, gq, rows, y.numel() // (count * channels), channels, split, eps,
        int(gv is not None), int(q is not None), int(s is not None), int(relu), BP=wp, BC=bc, **WIDE,
    )  # fmt: skip
    return gy, whole_rows(gr, r, split), gx, whole_rows(gq, q, split), gw, gb, gs


@operation(
    "sum_norm_rows_backward",
    "(Tensor gu, Tensor? gv, Tensor y, Tensor r, Tensor x, Tensor? q, Tensor weight, Tensor bias, Tensor? s, "
    "Tensor v, Tensor mean, Tensor var, Tensor row_mean, Tensor row_m2, float eps, bool relu) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _sum_norm_rows_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return run_backward(*inputs)


@_sum_norm_rows_backward.register_fake
def _(
    gu: Tensor, gv: Tensor | None, y: Tensor, r: Tensor, x: Tensor, q: Tensor | None, weight: Tensor,
    bias: Tensor, s: Tensor | None, v: Tensor, mean: Tensor, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gy, gx = torch.empty_like(y, memory_format=LAST), torch.empty_like(y, memory_format=LAST)
    return gy, like(r, y), gx, like(q, y), torch.empty_like(mean), torch.empty_like(mean), like(s, y)


def _setup_sum_first(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    y, r, x, q, weight, bias, s, ctx.eps, ctx.relu, ctx.keep = inputs
    # Without q the gradients need no x: kept only where it is read.
    ctx.save_for_backward(y, r, x if q is not None else y, q, weight, bias, s, output[0], *output[2:])
    ctx.mark_non_differentiable(*output[2:])


def _backward_sum_first(ctx: Any, gv: Tensor, gu: Tensor, *_: Any) -> tuple[Any, ...]:
    y, r, x, q, weight, bias, s, *made = ctx.saved_tensors
    gy, gr, gx, gq, gw, gb, gs = torch.ops.slimbayes.sum_norm_rows_backward(
        gu, gv if ctx.keep else None, y, r, x, q, weight, bias, s, *made, ctx.eps, ctx.relu
    )
    return (
        gy, gr, gx, None if q is None else gq, gw.to(weight.dtype), gb.to(bias.dtype), None if s is None else gs,
        None, None, None,
    )  # fmt: skip


_sum_norm_rows.register_autograd(_backward_sum_first, setup_context=_setup_sum_first)
