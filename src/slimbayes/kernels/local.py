"""Local noise of a k-tied matrix product as one operation: y + √(x² A Bᵀ + extra)∘ε, with ε made in registers.

Neither the noise nor the variance is ever stored: the backward pass makes both again, from the seed and from
T = (x∘x) A, which is [rows, p].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimbayes.kernels import plain
from slimbayes.kernels.launch import INTERPRETED, available, ceil_div, launch, power_of_two

_LARGEST = 2**31 - 2**24  # offsets inside a matrix are 32-bit
_RANKS = 10  # columns of A and B, each of which has its own registers
# The Triton of older versions cannot carry tuples through a loop.
_TUPLES = INTERPRETED or torch.torch_version.TorchVersion(torch.__version__) >= "2.8"


class Tile(NamedTuple):
    """A program, one warp, takes ``steps`` rows of ``columns`` (those of the noise: of four blocks of them).

    Fewer rows where there would be fewer than ``programs`` of them.
    """

    columns: int
    steps: int = 32
    programs: int = 2048


# By what they hold in registers for up to 3, 6 and 10 columns of A or B.
THIN = (Tile(512), Tile(256), Tile(128))
THIN_GRAD = (Tile(256), Tile(128), Tile(128))
NOISY = (Tile(64), Tile(64), Tile(32))
NOISY_GRAD = (Tile(64), Tile(32), Tile(32))


def thin_local(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, extra: Tensor | None, seed: Tensor, stream: int = 0
) -> Tensor:
    """y + √max(x² A Bᵀ + extra, tiny)∘ε in the type of y, differentiable in all but the seed.

    ``y`` is [R, m], ``x`` [R, n], ``a`` [n, p], ``b`` [m, p], ``extra`` [m] or None; ``seed`` holds one int64 on
    the device, and streams of one seed are independent. With T = (x∘x) A and h = g∘ε/(2√variance), 0 where the
    variance is clamped:

        dT = h B,    dx = 2x∘(dT Aᵀ),    dA = (x∘x)ᵀ dT,    dB = hᵀ T,    dextra = Σ_rows h.

    >>> y, x, a = torch.ones(2, 3), torch.zeros(2, 4), torch.ones(4, 1)
    >>> thin_local(y, x, a, torch.ones(3, 1), None, torch.tensor([5]))
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    kernel = _runs(y, x, a, b, extra)
    if torch.compiler.is_compiling():
        return torch.ops.slimbayes.thin_local(y, x, a, b, extra, seed, stream, kernel)[0]  # type: ignore[no-any-return]
    out: Tensor = _ThinLocal.apply(y, x, a, b, extra, seed, stream, kernel)[0]  # type: ignore[no-untyped-call]
    return out


def _runs(y: Tensor, x: Tensor, a: Tensor, b: Tensor, extra: Tensor | None) -> bool:
    tensors = (y, x, a, b) if extra is None else (y, x, a, b, extra)
    return (
        _TUPLES
        and available(y.device)
        and 0 < a.shape[1] <= _RANKS
        and all(0 < tensor.numel() < _LARGEST and tensor.dtype != torch.float64 for tensor in tensors)
    )


def _forward(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, extra: Tensor | None, seed: Tensor, stream: int, kernel: bool
) -> tuple[Tensor, Tensor]:
    """The noisy rows, and T in float32 (float64 if y is)."""
    if kernel:
        return _forward_kernel(y, x, a, b, extra, seed, stream)
    wide = _wide(y)
    thin = x.to(wide).square() @ a.to(wide)
    stddev = _variance(thin, b, extra).clamp_min_(torch.finfo(wide).tiny).sqrt_()
    noise = plain.draw("normal", tuple(y.shape), seed, stream, wide)
    return noise.mul_(stddev).add_(y).to(y.dtype), thin


def _backward(
    grad: Tensor, x: Tensor, a: Tensor, b: Tensor, extra: Tensor | None, seed: Tensor, thin: Tensor,
    stream: int, kernel: bool, wants_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx (empty if not wanted), dAᵀ [p, n], and dBᵀ with dextra as its last row, [p (+ 1), m]."""
    if kernel:
        return _backward_kernel(grad, x, a, b, extra, seed, thin, stream, wants_x)
    wide = thin.dtype
    variance = _variance(thin, b, extra)
    h = plain.draw("normal", tuple(grad.shape), seed, stream, wide).mul_(grad).mul_(0.5)
    h = torch.where(variance > torch.finfo(wide).tiny, h * variance.rsqrt(), 0.0)
    d_thin = h @ b.to(wide)
    values = x.to(wide)
    dx = (d_thin @ a.to(wide).t()).mul_(values).mul_(2.0).to(x.dtype) if wants_x else x.new_empty(0)
    sums = thin.t() @ h
    if extra is not None:
        sums = torch.cat([sums, h.sum(0, keepdim=True)])
    return dx, d_thin.t() @ values.square(), sums


def _wide(y: Tensor) -> torch.dtype:
    return torch.promote_types(y.dtype, torch.float32)


def _variance(thin: Tensor, b: Tensor, extra: Tensor | None) -> Tensor:
    product = thin @ b.to(thin.dtype).t()
    return product if extra is None else product.add_(extra)


def _forward_kernel(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, extra: Tensor | None, seed: Tensor, stream: int
) -> tuple[Tensor, Tensor]:
    from slimbayes.kernels.programs import local as programs

    y, x, a, b = y.contiguous(), x.contiguous(), a.contiguous(), b.contiguous()
    (rows, m), (n, p) = y.shape, a.shape
    sizes, down, across = _flat_grid(_tile(THIN, p), rows, n)
    part = torch.empty(across, rows, p, dtype=torch.float32, device=y.device)
    launch(programs.thin, down * across, x, x, a, part, rows, n, P=p, **sizes)
    thin = _total(part)
    out = torch.empty_like(y)
    sizes, down, across = _noise_grid(_tile(NOISY, p), rows, m)
    launch(
        programs.noisy, down * across, y,
        y, thin, b, _or(extra, b), out, seed, rows, m, stream, P=p, EXTRA=extra is not None, **sizes,
    )  # fmt: skip
    return out, thin


def _backward_kernel(
    grad: Tensor, x: Tensor, a: Tensor, b: Tensor, extra: Tensor | None, seed: Tensor, thin: Tensor,
    stream: int, wants_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from slimbayes.kernels.programs import local as programs

    grad, x, a, b = grad.contiguous(), x.contiguous(), a.contiguous(), b.contiguous()
    (rows, m), (n, p) = grad.shape, a.shape
    like: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    sizes, down, across = _noise_grid(_tile(NOISY_GRAD, p), rows, m)
    part_t = torch.empty(across, rows, p, **like)
    part_b = torch.empty(down, p + int(extra is not None), m, **like)
    launch(
        programs.noisy_grad, down * across, x,
        grad, thin, b, _or(extra, b), part_t, part_b, seed, rows, m, stream,
        P=p, EXTRA=extra is not None, **sizes,
    )  # fmt: skip
    sizes, down, across = _flat_grid(_tile(THIN_GRAD, p), rows, n)
    dx = torch.empty_like(x) if wants_x else x.new_empty(0)
    part_a = torch.empty(down, p, n, **like)
    launch(
        programs.thin_grad, down * across, x,
        x, a, _total(part_t), dx if wants_x else x, part_a, rows, n, P=p, DX=wants_x, **sizes,
    )  # fmt: skip
    return dx, _total(part_a), _total(part_b)


def _tile(tiles: tuple[Tile, ...], p: int) -> Tile:
    return tiles[0 if p <= 3 else 1 if p <= 6 else 2]


def _steps(tile: Tile, rows: int, across: int) -> int:
    steps = tile.steps
    while steps > 4 and ceil_div(rows, steps) * across < tile.programs:
        steps //= 2
    return steps


def _flat_grid(tile: Tile, rows: int, n: int) -> tuple[dict[str, int], int, int]:
    """The kernel's sizes, the number of blocks of rows and that of columns."""
    columns = min(tile.columns, max(32, power_of_two(n)))
    across = ceil_div(n, columns)
    steps = _steps(tile, rows, across)
    sizes = {"BN": columns, "STEPS": steps, "WHOLE": n % columns == 0, "num_warps": 1}
    return sizes, ceil_div(rows, steps), across


def _noise_grid(tile: Tile, rows: int, m: int) -> tuple[dict[str, int], int, int]:
    # The noise's order depends on m alone, so that both passes, and any tile, make the same.
    gap = min(128, max(32, power_of_two(ceil_div(m, 4))))
    columns = min(tile.columns, gap)
    across = ceil_div(m, 4 * gap) * (gap // columns)
    steps = _steps(tile, rows, across)
    sizes = {"BN": columns, "GAP": gap, "STEPS": steps, "num_warps": 1}
    return {**sizes, "WHOLE": m % (4 * gap) == 0, "FAST": not INTERPRETED}, ceil_div(rows, steps), across


def _total(parts: Tensor) -> Tensor:
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)


def _or(extra: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if extra is None else extra.contiguous()


_op = torch.library.custom_op(
    "slimbayes::thin_local",
    _forward,
    mutates_args=(),
    schema="(Tensor y, Tensor x, Tensor a, Tensor b, Tensor? extra, Tensor seed, int stream, bool kernel)"
    " -> (Tensor, Tensor)",
)
_op_backward = torch.library.custom_op(
    "slimbayes::thin_local_backward",
    _backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor a, Tensor b, Tensor? extra, Tensor seed, Tensor thin, int stream,"
    " bool kernel, bool wants_x) -> (Tensor, Tensor, Tensor)",
)


@_op.register_fake
def _(y: Tensor, x: Tensor, a: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(y.shape[0], a.shape[1], dtype=_wide(y))


@_op_backward.register_fake
def _(
    grad: Tensor, x: Tensor, a: Tensor, b: Tensor, extra: Tensor | None, seed: Tensor, thin: Tensor,
    stream: int, kernel: bool, wants_x: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (n, p), m = a.shape, b.shape[0]
    dx = x.new_empty(x.shape if wants_x else (0,))
    return dx, thin.new_empty(p, n), thin.new_empty(p + int(extra is not None), m)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, x, a, b, extra, seed, stream, kernel = inputs
    ctx.save_for_backward(x, a, b, extra, seed, output[1])
    ctx.settings = (stream, kernel)
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad: Tensor, run: Any) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    if not any(needs[1:5]):
        return grad, *(None for _ in range(7))
    x, a, b, extra, *rest = ctx.saved_tensors
    dx, da, sums = run(grad, x, a, b, extra, *rest, *ctx.settings, needs[1])
    p = a.shape[1]
    return (
        grad,
        dx if needs[1] else None,
        da.t().to(a.dtype),
        sums[:p].t().to(b.dtype),
        None if extra is None else sums[p].to(extra.dtype),
        None, None, None,
    )  # fmt: skip


def _op_gradients(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradients(ctx, grad, torch.ops.slimbayes.thin_local_backward)


_op.register_autograd(_op_gradients, setup_context=_setup)


class _ThinLocal(torch.autograd.Function):
    """The same pair without the operator's dispatch, which costs as much as a small layer."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _forward(*inputs)
        _setup(ctx, inputs, output)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, grad, _backward)
