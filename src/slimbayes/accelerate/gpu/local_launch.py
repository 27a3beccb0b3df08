"""Starting the kernels of programs/local.py and local_grad.py: tiles and buffers for partial sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimbayes.accelerate.gpu.launch import INTERPRETED, ceil_div, launch, power_of_two
from slimbayes.accelerate.gpu.totals import totals
from slimbayes.accelerate.gpu.waves import rows_per_program


class Tile(NamedTuple):
    """A program, one warp, takes rows of ``columns`` (those of the noise: of four blocks of them).

    ``fit`` programs run on a multiprocessor at once, as their registers allow: 2048 to a lane, up to 32 programs.
    """

    columns: int
    fit: int
    unroll: int = 1
    registers: int | None = None


# By what they hold in registers for up to 3, 6, 12 and more columns of A or B; the noise's also for a next A.
THIN = (Tile(512, 24), Tile(256, 24), Tile(128, 32), Tile(128, 32))
THIN_GRAD = (Tile(256, 28), Tile(128, 28), Tile(128, 16), Tile(128, 16))
NOISY = (Tile(64, 16, 2), Tile(64, 16, 2), Tile(32, 20), Tile(32, 12))
NOISY_GRAD = (Tile(64, 12, 2), Tile(64, 8), Tile(32, 8), Tile(32, 8))


def thin(x: Tensor, a: Tensor) -> Tensor:
    """T = (x∘x) A, [R, p]."""
    from slimbayes.accelerate.gpu.programs import local as programs

    x, a = x.contiguous(), a.contiguous()
    (rows, n), p = x.shape, a.shape[1]
    sizes, steps, down, across = _flat_grid(_tile(THIN, p), x)
    part = torch.empty(across, rows, p, dtype=torch.float32, device=x.device)
    launch(programs.thin, down * across, x, x, a, part, rows, n, steps, P=p, **sizes)
    return totals(part)[0]


def thin_backward(d_thin: Tensor, x: Tensor, a: Tensor, wants_x: bool) -> tuple[Tensor, Tensor]:
    """dx (empty if not wanted) and dAᵀ [p, n]."""
    from slimbayes.accelerate.gpu.programs import local_grad as programs

    x, a = x.contiguous(), a.contiguous()
    (rows, n), p = x.shape, a.shape[1]
    sizes, steps, down, across = _flat_grid(_tile(THIN_GRAD, p), x)
    dx = torch.empty_like(x) if wants_x else x.new_empty(0)
    part = torch.empty(down, p, n, dtype=torch.float32, device=x.device)
    launch(
        programs.thin_grad, down * across, x,
        x, a, d_thin.contiguous(), dx if wants_x else x, part, rows, n, steps, P=p, DX=wants_x, **sizes,
    )  # fmt: skip
    return dx, totals(part)[0]


def noisy(
    y: Tensor, t: Tensor, b: Tensor, extra: Tensor | None, bias: Tensor | None, next_a: Tensor | None,
    seed: Tensor, stream: int, relu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The noisy rows, and the next T (empty without a next A)."""
    from slimbayes.accelerate.gpu.programs import local as programs

    y, t, b = y.contiguous(), t.contiguous(), b.contiguous()
    (rows, m), p = y.shape, b.shape[1]
    q = 0 if next_a is None else next_a.shape[1]
    out = torch.empty_like(y)
    sizes, steps, down, across = _noise_grid(_tile(NOISY, p + q), y)
    part = torch.empty((across if q else 0), rows, q, dtype=torch.float32, device=y.device)
    launch(
        programs.noisy, down * across, y,
        y, t, b, _or(extra, b), _or(bias, b), _or(next_a, b), out, part if q else t, seed, rows, m, stream,
        steps,
        P=p, Q=q, EXTRA=extra is not None, BIAS=bias is not None, RELU=relu, **sizes,
    )  # fmt: skip
    return out, totals(part)[0] if q else part[0:0].flatten()


def noisy_backward(
    grad: Tensor, d_next: Tensor | None, out: Tensor | None, t: Tensor, b: Tensor, extra: Tensor | None,
    bias: bool, next_a: Tensor | None, seed: Tensor, stream: int, relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dy (empty where it is the gradient itself), dT, dBᵀ with Σ h and Σ dy as its last rows, dAᵀ of the next."""
    from slimbayes.accelerate.gpu.programs import local_grad as programs

    grad, t, b = grad.contiguous(), t.contiguous(), b.contiguous()
    (rows, m), p = grad.shape, b.shape[1]
    q = 0 if next_a is None else next_a.shape[1]
    like: dict[str, Any] = {"dtype": torch.float32, "device": grad.device}
    sizes, steps, down, across = _noise_grid(_tile(NOISY_GRAD, p + q), grad)
    changes = relu or q > 0
    dy = torch.empty_like(grad) if changes else grad.new_empty(0)
    part_t = torch.empty(across, rows, p, **like)
    part_b = torch.empty(down, p + int(extra is not None) + int(bias), m, **like)
    parts = [part_t, part_b]
    if q:
        parts.append(torch.empty(down, q, m, **like))
    launch(
        programs.noisy_grad, down * across, grad,
        grad, _or(d_next, t), _or(out, grad), t, b, _or(extra, b), _or(next_a, b), dy if changes else grad,
        part_t, part_b, parts[-1], seed, rows, m, stream, steps,
        P=p, Q=q, EXTRA=extra is not None, BIAS=bias, RELU=relu, **sizes,
    )  # fmt: skip
    d_t, sums, *d_a = totals(*parts)
    return dy, d_t, sums, d_a[0] if q else d_t.new_empty(0)


def _tile(tiles: tuple[Tile, ...], p: int) -> Tile:
    return tiles[0 if p <= 3 else 1 if p <= 6 else 2 if p <= 12 else 3]


_Grid = tuple[dict[str, int], int, int, int]  # constants, rows to a program, blocks of rows and of columns


def _flat_grid(tile: Tile, x: Tensor) -> _Grid:
    rows, n = x.shape
    columns = min(tile.columns, max(32, power_of_two(n)))
    across = ceil_div(n, columns)
    steps = rows_per_program(rows, across, tile.fit, x.device)
    sizes = {"BN": columns, "WHOLE": n % columns == 0, "num_warps": 1}
    return sizes, steps, ceil_div(rows, steps), across


def _noise_grid(tile: Tile, y: Tensor) -> _Grid:
    rows, m = y.shape
    # The noise's order depends on m alone, so that both passes, and any tile, make the same.
    gap = min(128, max(32, power_of_two(ceil_div(m, 4))))
    columns = min(tile.columns, gap)
    across = ceil_div(m, 4 * gap) * (gap // columns)
    steps = rows_per_program(rows, across, tile.fit, y.device)
    sizes = {"BN": columns, "GAP": gap, "UNROLL": tile.unroll, "num_warps": 1}
    sizes |= {"WHOLE": m % (4 * gap) == 0, "FAST": not INTERPRETED}
    if tile.registers is not None:
        sizes["maxnreg"] = tile.registers
    return sizes, steps, ceil_div(rows, steps), across


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if tensor is None else tensor.contiguous()
