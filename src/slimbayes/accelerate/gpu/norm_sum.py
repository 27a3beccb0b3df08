"""z = relu(BatchNorm(r∘y) + x) with z∘s and z∘t, as one operation: the residual sum of post-activation blocks.

What the factors' gradients need is summed in the sweep that adds up the gradients of z.
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
    like,
    moments,
    piece_moments,
    room,
    scaled,
    small_gradients,
    tile,
    whole_rows,
    wide_tile,
)
from slimbayes.core.custom_operation import operation


def norm_sum_rows(
    y: Tensor,
    r: Tensor | None,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    s: Tensor | None,
    t: Tensor | None,
    momentum: float,
    eps: float,
    relu: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(z, z∘s, z∘t): z = relu((r∘y − μ)/√(σ² + eps)·weight + bias + x), training mode.

    y and x are [R, C, H, W]; r, s and t are [R, C] or absent, and the products of absent ones are empty. Only with
    ``keep`` is z itself differentiable.

    >>> y, one, zero = torch.randn(4, 3, 2, 2), torch.ones(3), torch.zeros(3)
    >>> f = torch.full((4, 3), 2.0)
    >>> z, u, _ = norm_sum_rows(y, None, y, None, None, one, zero, f, None, 0.1, 1e-5, True, True)
    >>> bool((z >= 0).all()) and bool(torch.allclose(u, 2 * z))
    True
    """
    z, u, w, mean, var, _, _ = torch.ops.slimbayes.norm_sum_rows(y, r, x, weight, bias, s, t, eps, relu, keep)
    follow(running_mean, running_var, mean, var, y, momentum)
    return z, u, w


def run(
    y: Tensor, r: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor, s: Tensor | None, t: Tensor | None,
    eps: float, relu: bool, keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(z, z∘s, z∘t, mean, variance, mean of each piece of a row of y, its sum of squared deviations)."""
    if not fits(y):
        wide = torch.promote_types(y.dtype, torch.float32)
        normed, mean, var = expression(y.to(wide), r, weight, bias, None, eps, False)
        z = normed + x
        z = (z.relu() if relu else z).to(y.dtype).contiguous(memory_format=LAST)
        u, w = (
            y.new_empty(0) if f is None else scaled(z, f).to(y.dtype).contiguous(memory_format=LAST)
            for f in (s, t)
        )
        return z, u, w, mean, var, *piece_moments(y.to(mean.dtype))
    from slimbayes.accelerate.gpu.programs import residual

    y, x = y.contiguous(memory_format=LAST), x.contiguous(memory_format=LAST)
    mean, var, row_mean, row_m2 = moments(y, r)
    rows, channels = y.shape[:2]
    positions = y.numel() // (rows * channels)
    z = torch.empty_like(y)
    u, w = (y.new_empty(0) if f is None else torch.empty_like(y) for f in (s, t))
    bp, bc = tile(channels)
    bp //= 2  # of four tensors at once
    launch(
        residual.normalize_sum, rows * ceil_div(positions, bp) * ceil_div(channels, bc), y,
        y, dense(r, y), x, dense(s, y), dense(t, y), mean, var, weight, bias, z, u, w,
        positions, channels, eps, int(r is not None), int(s is not None), int(t is not None), int(relu),
        BP=bp, BC=bc,
    )  # fmt: skip
    return z, u, w, mean, var, row_mean, row_m2


@operation(
    "norm_sum_rows",
    "(Tensor y, Tensor? r, Tensor x, Tensor weight, Tensor bias, Tensor? s, Tensor? t, float eps, bool relu, "
    "bool keep) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _norm_sum_rows(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return run(*inputs)


@_norm_sum_rows.register_fake
def _(
    y: Tensor, r: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor, s: Tensor | None, t: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    z, u, w = (
        torch.empty_like(y, memory_format=LAST) if wanted else y.new_empty(0)
        for wanted in (True, s is not None, t is not None)
    )
    return z, u, w, *fake_statistics(y)


def run_backward(
    gz: Tensor | None, gu: Tensor | None, gw: Tensor | None, y: Tensor, r: Tensor | None, weight: Tensor,
    bias: Tensor, s: Tensor | None, t: Tensor | None, z: Tensor, mean: Tensor, var: Tensor, row_mean: Tensor,
    row_m2: Tensor, eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of (y, r, x, weight, bias, s, t); an absent factor's is empty."""
    pairs = ((gu, s), (gw, t))
    if not fits(y):
        value = z.to(mean.dtype)
        total = torch.zeros_like(value) if gz is None else gz.to(mean.dtype)
        for grad, factor in pairs:
            if grad is not None:
                total = total + scaled(grad, factor)
        gs, gt = (
            y.new_empty(0) if grad is None or f is None else (grad * value).sum((2, 3)).to(f.dtype)
            for grad, f in pairs
        )
        g = (total * (value > 0) if relu else total).to(y.dtype).contiguous(memory_format=LAST)
        g = g.clone() if g is gz else g  # a result may not share memory with an argument
        gy, gr, d_weight, d_bias, _ = plain_backward(g, y, r, weight, bias, None, mean, var, eps, False)
        return gy, gr, g, d_weight, d_bias, gs, gt
    from slimbayes.accelerate.gpu.programs import norm, residual

    y = y.contiguous(memory_format=LAST)
    given = [y if grad is None else grad.contiguous(memory_format=LAST) for grad in (gz, gu, gw)]
    (rows, channels), count = y.shape[:2], row_mean.shape[0]
    split = count // rows
    (bp, bc), wp = tile(channels), wide_tile(channels)[0]
    g, sums = torch.empty_like(y), torch.empty(2, count, channels, dtype=torch.float32, device=y.device)
    gs, gt = room(s, y, row_mean), room(t, y, row_mean)
    launch(
        residual.summed_gradients, count * ceil_div(channels, bc), y,
        *given, z, y, dense(s, y), dense(t, y), row_mean, g, gs, gt, sums,
        y.numel() // (count * channels), channels, count * channels, split, int(gz is not None),
        int(s is not None), int(t is not None), int(relu), BP=wp, BC=bc, **WIDE,
    )  # fmt: skip
    gr, d_weight, d_bias, _ = small_gradients(
        sums, y, r, weight, bias, None, mean, var, row_mean, row_m2, eps
    )
    gy, positions = torch.empty_like(y), y.numel() // (rows * channels)
    launch(
        norm.gradient, rows * ceil_div(positions, bp) * ceil_div(channels, bc), y,
        g, y, dense(r, y), y, mean, var, weight, bias, d_weight, d_bias, gy, rows, positions,
        channels, eps, int(r is not None), 0, 0, BP=bp, BC=bc,
    )  # fmt: skip
    return gy, gr, g, d_weight, d_bias, whole_rows(gs, s, split), whole_rows(gt, t, split)


@operation(
    "norm_sum_rows_backward",
    "(Tensor? gz, Tensor? gu, Tensor? gw, Tensor y, Tensor? r, Tensor weight, Tensor bias, Tensor? s, "
    "Tensor? t, Tensor z, Tensor mean, Tensor var, Tensor row_mean, Tensor row_m2, float eps, bool relu) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _norm_sum_rows_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return run_backward(*inputs)


@_norm_sum_rows_backward.register_fake
def _(
    gz: Tensor | None, gu: Tensor | None, gw: Tensor | None, y: Tensor, r: Tensor | None, weight: Tensor,
    bias: Tensor, s: Tensor | None, t: Tensor | None, z: Tensor, mean: Tensor, *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gy, gx = torch.empty_like(y, memory_format=LAST), torch.empty_like(y, memory_format=LAST)
    small = torch.empty_like(mean)
    return gy, like(r, y), gx, small, torch.empty_like(small), like(s, y), like(t, y)


def _setup_norm_first(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    y, r, _, weight, bias, s, t, ctx.eps, ctx.relu, ctx.keep = inputs
    ctx.save_for_backward(y, r, weight, bias, s, t, output[0], *output[3:])
    ctx.mark_non_differentiable(*output[3:])


def _backward_norm_first(
    ctx: Any, gz: Tensor | None, gu: Tensor | None, gw: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    y, r, weight, bias, s, t, *made = ctx.saved_tensors
    gz = gz if ctx.keep else None
    gu, gw = None if s is None else gu, None if t is None else gw
    gy, gr, gx, d_weight, d_bias, gs, gt = torch.ops.slimbayes.norm_sum_rows_backward(
        gz, gu, gw, y, r, weight, bias, s, t, *made, ctx.eps, ctx.relu
    )
    return (
        gy, None if r is None else gr, gx, d_weight.to(weight.dtype), d_bias.to(bias.dtype),
        None if s is None else gs, None if t is None else gt, None, None, None,
    )  # fmt: skip


_norm_sum_rows.register_autograd(_backward_norm_first, setup_context=_setup_norm_first)
