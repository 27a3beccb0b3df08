"""relu(BatchNorm(r∘y))∘s as one operation: the factors on both sides cost no sweep over the activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimbayes.kernels.launch import available, ceil_div, launch, power_of_two

_TILE, _WIDTH = 4096, 64  # elements of one tile, and channels of it
_SWEEP: dict[str, int] = {"STAGES": 3}  # how the sweeps that only read are pipelined
_ROWS, _COLUMNS = 256, 8  # tile of the programs over [R, C]: few channels each, to have many programs
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_LAST = torch.channels_last


def norm_rows(
    y: Tensor,
    r: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    s: Tensor | None,
    momentum: float,
    eps: float,
    relu: bool,
) -> Tensor:
    """u = relu((r∘y − μ)/√(σ² + eps)·weight + bias)∘s, μ and σ² over all rows and positions: training mode.

    y is [R, C, H, W]; r and s are [R, C] or absent. The running statistics move as in torch's BatchNorm.
    With P₁ = Σ g′ and P₂ = Σ g′y over the positions of a row (g′ the gradient behind the ReLU), which the
    backward pass of BatchNorm needs anyway, the factors' gradients are

        ds = γ/σ·(r P₂ − μ P₁) + β P₁,    dr = γ/σ·(s P₂ − (dβ Σy + dγ Σx̂y)/n),    x̂ = (r∘y − μ)/σ.

    >>> y, r = torch.randn(4, 3, 2, 2), torch.ones(4, 3)
    >>> u = norm_rows(y, r, None, None, torch.ones(3), torch.zeros(3), None, 0.1, 1e-5, False)
    >>> bool(u.mean((0, 2, 3)).abs().max() < 1e-6)
    True
    """
    u, mean, var, _, _ = torch.ops.slimbayes.norm_rows(y, r, weight, bias, s, eps, relu)
    with torch.no_grad():
        count = y.numel() // y.shape[1]
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((var * (count / max(count - 1, 1))).to(running_var.dtype), momentum)
    return u  # type: ignore[no-any-return]


@torch.library.custom_op("slimbayes::norm_rows", mutates_args=())
def _norm_rows(
    y: Tensor, r: Tensor | None, weight: Tensor, bias: Tensor, s: Tensor | None, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(u, mean, variance, mean of each row [R, C], its sum of squared deviations [R, C])."""
    rows, channels = y.shape[:2]
    positions = y.numel() // (rows * channels)
    if not _fits(y):
        return _plain(y, r, weight, bias, s, eps, relu)
    from slimbayes.kernels.programs import norm as programs

    y = y.contiguous(memory_format=_LAST)
    row_mean = torch.empty(rows, channels, dtype=torch.float32, device=y.device)
    row_m2 = torch.empty_like(row_mean)
    mean = torch.empty(channels, dtype=torch.float32, device=y.device)
    var = torch.empty_like(mean)
    u = torch.empty_like(y)
    bp, bc = _tile(channels)
    has_r, has_s = int(r is not None), int(s is not None)
    r_, s_ = _dense(r, row_mean), _dense(s, row_mean)
    launch(
        programs.moments, rows * ceil_div(channels, bc), y,
        y, row_mean, row_m2, positions, channels, BP=bp, BC=bc, **_SWEEP,
    )  # fmt: skip
    launch(
        programs.statistics, ceil_div(channels, _COLUMNS), y,
        row_mean, row_m2, r_, mean, var, rows, positions, channels, has_r, BR=_ROWS, BC=_COLUMNS,
    )  # fmt: skip
    launch(
        programs.normalize, rows * ceil_div(positions, bp) * ceil_div(channels, bc), y,
        y, r_, s_, mean, var, weight, bias, u, positions, channels, eps, has_r, has_s, int(relu),
        BP=bp, BC=bc,
    )  # fmt: skip
    return u, mean, var, row_mean, row_m2


@_norm_rows.register_fake
def _(
    y: Tensor, r: Tensor | None, weight: Tensor, bias: Tensor, s: Tensor | None, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(y.dtype, torch.float32)
    rows = y.new_empty(y.shape[:2], dtype=wide)
    channels = y.new_empty(y.shape[1], dtype=wide)
    u = torch.empty_like(y, memory_format=_LAST)
    return u, channels, torch.empty_like(channels), rows, torch.empty_like(rows)


@torch.library.custom_op("slimbayes::norm_rows_backward", mutates_args=())
def _norm_rows_backward(
    g: Tensor, y: Tensor, r: Tensor | None, weight: Tensor, bias: Tensor, s: Tensor | None,
    mean: Tensor, var: Tensor, row_mean: Tensor, row_m2: Tensor, eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of (y, r, weight, bias, s); an absent factor's is empty."""
    rows, channels = y.shape[:2]
    positions = y.numel() // (rows * channels)
    if not _fits(y):
        return _plain_backward(g, y, r, weight, bias, s, mean, var, eps, relu)
    from slimbayes.kernels.programs import norm as programs

    y, g = y.contiguous(memory_format=_LAST), g.contiguous(memory_format=_LAST)
    sums = torch.empty(2, rows, channels, dtype=torch.float32, device=y.device)
    gy = torch.empty_like(y)
    gw, gb = torch.empty_like(mean), torch.empty_like(mean)
    has_r, has_s = int(r is not None), int(s is not None)
    gr = y.new_empty(0) if r is None else torch.empty_like(r)
    gs = y.new_empty(0) if s is None else torch.empty_like(s)
    r_, s_ = _dense(r, row_mean), _dense(s, row_mean)
    bp, bc = _tile(channels)
    launch(
        programs.gradient_sums, rows * ceil_div(channels, bc), y,
        g, y, r_, row_mean, mean, var, weight, bias, sums, positions, channels, eps, rows * channels,
        has_r, int(relu), BP=bp, BC=bc, **_SWEEP,
    )  # fmt: skip
    launch(
        programs.gradients, ceil_div(channels, _COLUMNS), y,
        sums, row_mean, row_m2, r_, s_, mean, var, weight, bias, gr, gs, gw, gb,
        rows, positions, channels, eps, rows * channels, has_r, has_s, BR=_ROWS, BC=_COLUMNS,
    )  # fmt: skip
    launch(
        programs.gradient, rows * ceil_div(positions, bp) * ceil_div(channels, bc), y,
        g, y, r_, s_, mean, var, weight, bias, gw, gb, gy, rows, positions, channels, eps,
        has_r, has_s, int(relu), BP=bp, BC=bc,
    )  # fmt: skip
    return gy, gr, gw, gb, gs


@_norm_rows_backward.register_fake
def _(
    g: Tensor, y: Tensor, r: Tensor | None, weight: Tensor, bias: Tensor, s: Tensor | None,
    mean: Tensor, var: Tensor, row_mean: Tensor, row_m2: Tensor, eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gr = y.new_empty(0) if r is None else r.new_empty(r.shape)
    gs = y.new_empty(0) if s is None else s.new_empty(s.shape)
    return torch.empty_like(y, memory_format=_LAST), gr, torch.empty_like(mean), torch.empty_like(mean), gs


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    y, r, weight, bias, s, eps, relu = inputs
    ctx.save_for_backward(y, r, weight, bias, s, *output[1:])
    ctx.eps, ctx.relu = eps, relu
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, g: Tensor, *_: Any) -> tuple[Any, ...]:
    y, r, weight, bias, s, *statistics = ctx.saved_tensors
    gy, gr, gw, gb, gs = torch.ops.slimbayes.norm_rows_backward(
        g, y, r, weight, bias, s, *statistics, ctx.eps, ctx.relu
    )
    return (
        gy, None if r is None else gr, gw.to(weight.dtype), gb.to(bias.dtype), None if s is None else gs,
        None, None,
    )  # fmt: skip


_norm_rows.register_autograd(_backward, setup_context=_setup)


def _fits(y: Tensor) -> bool:
    return available(y.device) and y.dtype in _TYPES and y[0].numel() < 2**31


def _dense(f: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if f is None else f.contiguous()


def _tile(channels: int) -> tuple[int, int]:
    """Positions and channels of a tile: the same for all but narrow layers, so that few programs are compiled."""
    width = min(_WIDTH, power_of_two(channels))
    return _TILE // width, width


def _expression(
    y: Tensor, r: Tensor | None, weight: Tensor, bias: Tensor, s: Tensor | None, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(u, mean, variance) in plain torch: the kernels' twin."""
    x = y.to(torch.promote_types(y.dtype, torch.float32))
    if r is not None:
        x = x * r[:, :, None, None]
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    scale = weight * torch.rsqrt(var + eps)
    z = (x - mean[:, None, None]) * scale[:, None, None] + bias[:, None, None]
    if relu:
        z = z.relu()
    if s is not None:
        z = z * s[:, :, None, None]
    return z.to(y.dtype), mean, var


def _plain(
    y: Tensor, r: Tensor | None, weight: Tensor, bias: Tensor, s: Tensor | None, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    u, mean, var = _expression(y, r, weight, bias, s, eps, relu)
    wide = y.to(mean.dtype)
    row_var, row_mean = torch.var_mean(wide, (2, 3), correction=0)
    return u.contiguous(memory_format=_LAST), mean, var, row_mean, row_var * (y.shape[2] * y.shape[3])


def _plain_backward(
    g: Tensor, y: Tensor, r: Tensor | None, weight: Tensor, bias: Tensor, s: Tensor | None,
    mean: Tensor, var: Tensor, eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    wide = mean.dtype
    x, grad = y.to(wide), g.to(wide)
    before = 1.0 if r is None else r.to(wide)[:, :, None, None]
    behind = 1.0 if s is None else s.to(wide)[:, :, None, None]
    inverse = torch.rsqrt(var + eps)[:, None, None]
    normal = (x * before - mean[:, None, None]) * inverse
    z = normal * weight[:, None, None] + bias[:, None, None]
    if relu:
        grad = grad * (z > 0)
    gs = y.new_empty(0) if s is None else (grad * z).sum((2, 3)).to(s.dtype)
    grad = grad * behind
    gb, gw = grad.sum((0, 2, 3)), (grad * normal).sum((0, 2, 3))
    count = y.numel() // y.shape[1]
    gx = (
        (grad - gb[:, None, None] / count - normal * gw[:, None, None] / count)
        * inverse
        * weight[:, None, None]
    )
    gr = y.new_empty(0) if r is None else (gx * x).sum((2, 3)).to(r.dtype)
    return (gx * before).to(y.dtype).contiguous(memory_format=_LAST), gr, gw, gb, gs
