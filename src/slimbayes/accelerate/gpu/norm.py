"""relu(BatchNorm(r∘y))∘s as one operation: the factors on both sides cost no sweep over the activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate.gpu.launch import ceil_div, launch
from slimbayes.accelerate.gpu.norm_launch import (
    LAST,
    dense,
    fake_statistics,
    fits,
    gradient_sums,
    like,
    moments,
    piece_moments,
    small_gradients,
    tile,
)
from slimbayes.core.custom_operation import operation


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
    follow(running_mean, running_var, mean, var, y, momentum)
    return u  # type: ignore[no-any-return]


def follow(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    var: Tensor,
    image: Tensor,
    momentum: float,
) -> None:
    """Move the running statistics towards those of an image [R, C, ...], as torch's BatchNorm does."""
    count = values_per_channel(image)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((var * (count / max(count - 1, 1))).to(running_var.dtype), momentum)


def follow_all(
    running: list[Tensor], values: list[Tensor], images: list[Tensor | None], momenta: list[float]
) -> None:
    """Move many running statistics at once: two kernels in place of two for every norm.

    Towards the value, or where there is an image of n values per channel towards value·n/(n − 1): a variance.

    >>> mean, var = torch.zeros(3), torch.zeros(3)
    >>> follow_all([mean, var], [torch.ones(3)] * 2, [None, torch.zeros(2, 3, 1, 1)], [0.1, 0.1])
    >>> mean, var
    (tensor([0.1000, 0.1000, 0.1000]), tensor([0.2000, 0.2000, 0.2000]))
    """
    counts = [0 if image is None else values_per_channel(image) for image in images]
    torch.ops.slimbayes.follow([each.detach() for each in running], values, counts, momenta)


def values_per_channel(image: Tensor) -> int:
    """n of [R, C, ...]; a symbol while the compiler does not know it."""
    return image.numel() // image.shape[1]


@torch.library.custom_op(
    "slimbayes::follow",
    mutates_args=("running",),
    schema="(Tensor(a!)[] running, Tensor[] values, SymInt[] counts, float[] momenta) -> ()",
)
def _follow(running: list[Tensor], values: list[Tensor], counts: list[int], momenta: list[float]) -> None:
    targets = torch._foreach_mul(values, [n / max(n - 1, 1) if n else 1.0 for n in counts])
    for momentum in dict.fromkeys(momenta):
        chosen = [at for at, own in enumerate(momenta) if own == momentum]
        torch._foreach_lerp_([running[at] for at in chosen], [targets[at] for at in chosen], momentum)


@_follow.register_fake
def _(running: list[Tensor], values: list[Tensor], counts: list[int], momenta: list[float]) -> None:
    return None


def run(
    y: Tensor, r: Tensor | None, weight: Tensor, bias: Tensor, s: Tensor | None, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(u, mean, variance, mean of each piece of a row [R·S, C], its sum of squared deviations [R·S, C])."""
    if not fits(y):
        return _plain(y, r, weight, bias, s, eps, relu)
    from slimbayes.accelerate.gpu.programs import norm as programs

    rows, channels = y.shape[:2]
    positions = y.numel() // (rows * channels)
    y = y.contiguous(memory_format=LAST)
    mean, var, row_mean, row_m2 = moments(y, r)
    u = torch.empty_like(y)
    bp, bc = tile(channels)
    has_r, has_s = int(r is not None), int(s is not None)
    r_, s_ = dense(r, y), dense(s, y)
    launch(
        programs.normalize, rows * ceil_div(positions, bp) * ceil_div(channels, bc), y,
        y, r_, s_, mean, var, weight, bias, u, positions, channels, eps, has_r, has_s, int(relu),
        BP=bp, BC=bc,
    )  # fmt: skip
    return u, mean, var, row_mean, row_m2


@operation(
    "norm_rows",
    "(Tensor y, Tensor? r, Tensor weight, Tensor bias, Tensor? s, float eps, bool relu) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _norm_rows(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return run(*inputs)


@_norm_rows.register_fake
def _(y: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(y, memory_format=LAST), *fake_statistics(y)


def run_backward(
    g: Tensor, y: Tensor, r: Tensor | None, weight: Tensor, bias: Tensor, s: Tensor | None,
    mean: Tensor, var: Tensor, row_mean: Tensor, row_m2: Tensor, eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of (y, r, weight, bias, s); an absent factor's is empty."""
    if not fits(y):
        return plain_backward(g, y, r, weight, bias, s, mean, var, eps, relu)
    from slimbayes.accelerate.gpu.programs import norm as programs

    rows, channels = y.shape[:2]
    positions = y.numel() // (rows * channels)
    y, g = y.contiguous(memory_format=LAST), g.contiguous(memory_format=LAST)
    sums = gradient_sums(g, y, r, weight, bias, mean, var, row_mean, eps, relu)
    gr, gw, gb, gs = small_gradients(sums, y, r, weight, bias, s, mean, var, row_mean, row_m2, eps)
    gy = torch.empty_like(y)
    has_r, has_s = int(r is not None), int(s is not None)
    r_, s_ = dense(r, y), dense(s, y)
    bp, bc = tile(channels)
    launch(
        programs.gradient, rows * ceil_div(positions, bp) * ceil_div(channels, bc), y,
        g, y, r_, s_, mean, var, weight, bias, gw, gb, gy, rows, positions, channels, eps,
        has_r, has_s, int(relu), BP=bp, BC=bc,
    )  # fmt: skip
    return gy, gr, gw, gb, gs


@operation(
    "norm_rows_backward",
    "(Tensor g, Tensor y, Tensor? r, Tensor weight, Tensor bias, Tensor? s, Tensor mean, Tensor var, "
    "Tensor row_mean, Tensor row_m2, float eps, bool relu) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _norm_rows_backward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return run_backward(*inputs)


@_norm_rows_backward.register_fake
def _(
    g: Tensor, y: Tensor, r: Tensor | None, weight: Tensor, bias: Tensor, s: Tensor | None,
    mean: Tensor, var: Tensor, row_mean: Tensor, row_m2: Tensor, eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    gy = torch.empty_like(y, memory_format=LAST)
    return gy, like(r, y), torch.empty_like(mean), torch.empty_like(mean), like(s, y)


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


def expression(
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
    u, mean, var = expression(y, r, weight, bias, s, eps, relu)
    wide = y.to(mean.dtype)
    row_mean, row_m2 = piece_moments(wide)
    return u.contiguous(memory_format=LAST), mean, var, row_mean, row_m2


def plain_backward(
    g: Tensor, y: Tensor, r: Tensor | None, weight: Tensor, bias: Tensor, s: Tensor | None,
    mean: Tensor, var: Tensor, eps: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of (y, r, weight, bias, s) in plain torch."""
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
    return (gx * before).to(y.dtype).contiguous(memory_format=LAST), gr, gw, gb, gs
