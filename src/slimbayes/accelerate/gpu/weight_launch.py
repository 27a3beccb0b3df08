"""Starting the kernels of programs/ktied.py, ktied_grad.py and weights.py: tiles, partial sums, memory layouts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slimbayes.accelerate.gpu.launch import INTERPRETED, ceil_div, launch, power_of_two
from slimbayes.accelerate.gpu.totals import totals
from slimbayes.accelerate.gpu.waves import rows_per_program

_BLOCK, _BLOCK_WARPS = 512, 4  # the same for flat weights
_FAST = not INTERPRETED


class Tile(NamedTuple):
    """How a k-tied weight is cut: a program, one warp, takes rows of four blocks of ``columns``.

    Four columns to a lane give 16-byte loads. ``fit`` programs run on a multiprocessor at once, as their registers
    allow: 2048 to a lane, up to 32 programs.
    """

    columns: int
    fit: int
    unroll: int = 1
    registers: int | None = None


# By the number of ranks and the pass: V and, backward, its gradient's sums are held in registers.
FORWARD = {1: Tile(128, 20), 2: Tile(64, 28), 3: Tile(64, 28), 4: Tile(64, 24)}
BACKWARD = {1: Tile(64, 28), 2: Tile(64, 20), 3: Tile(32, 28), 4: Tile(32, 24)}
# Without the noise.
FORWARD_MEAN = {1: Tile(128, 28), 2: Tile(64, 32), 3: Tile(64, 32), 4: Tile(64, 28)}
BACKWARD_MEAN = {1: Tile(64, 32), 2: Tile(64, 28), 3: Tile(32, 32), 4: Tile(32, 24)}


class _Grid(NamedTuple):
    """The kernel's constants, its rows to a program, the number of blocks of rows and that of columns."""

    sizes: dict[str, int]
    steps: int
    down: int
    across: int


def _grid(tile: Tile, mean: Tensor) -> _Grid:
    m, n = mean.shape
    # The noise's order depends on n alone, so that both passes, and any tile, make the same.
    gap = min(128, max(32, power_of_two(ceil_div(n, 4))))
    columns = min(tile.columns, gap)
    across = ceil_div(n, 4 * gap) * (gap // columns)
    steps = rows_per_program(m, across, tile.fit, mean.device)
    sizes = {"BN": columns, "GAP": gap, "UNROLL": tile.unroll, "num_warps": 1}
    if tile.registers is not None:
        sizes["maxnreg"] = tile.registers
    return _Grid({**sizes, "WHOLE": n % (4 * gap) == 0, "FAST": _FAST}, steps, ceil_div(m, steps), across)


def ktied(
    mean: Tensor,
    log_u: Tensor,
    log_v: Tensor,
    seed: Tensor,
    stream: int,
    center: float,
    dtype: torch.dtype,
    form: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sample or the mean, the noise (each [m, n], or empty), and the three sums."""
    from slimbayes.accelerate.gpu.programs import ktied as programs

    mean, log_u, log_v = mean.contiguous(), log_u.contiguous(), log_v.contiguous()
    m, n = mean.shape
    rank = log_u.shape[1]
    grid = _grid((FORWARD_MEAN if form == "mean" else FORWARD)[rank], mean)
    programs_needed = grid.down * grid.across
    out, noise = _outputs(mean, dtype, form)
    partial = torch.empty(programs_needed, 3, dtype=torch.float32, device=mean.device)
    launch(
        programs.ktied_sample, programs_needed, mean,
        mean, log_u, log_v, out, noise, partial, seed, m, n, stream, center, grid.steps,
        K=rank, FORM=form, **grid.sizes,
    )  # fmt: skip
    return out, noise, partial.sum(0)


def ktied_backward(
    grad: Tensor,
    noise_grad: Tensor | None,
    d_sums: Tensor | None,
    mean: Tensor,
    log_u: Tensor,
    log_v: Tensor,
    seed: Tensor,
    stream: int,
    center: float,
    form: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """gM, dlog u and dlog v."""
    from slimbayes.accelerate.gpu.programs import ktied_grad as programs

    mean, log_u, log_v = mean.contiguous(), log_u.contiguous(), log_v.contiguous()
    grad = grad.contiguous()
    noise_grad = grad if noise_grad is None else noise_grad.contiguous()
    m, n = mean.shape
    rank = log_u.shape[1]
    sizes, steps, down, across = _grid((BACKWARD_MEAN if form == "mean" else BACKWARD)[rank], mean)
    d_mean = torch.empty_like(mean)
    part_u = torch.empty(across, m, rank, dtype=torch.float32, device=mean.device)
    part_v = torch.empty(down, n, rank, dtype=torch.float32, device=mean.device)
    sums = d_mean if d_sums is None else d_sums.contiguous()
    launch(
        programs.ktied_grad, down * across, mean,
        grad, noise_grad, mean, log_u, log_v, d_mean, part_u, part_v, sums, seed, m, n, stream, center, steps,
        K=rank, FORM=form, STATS=d_sums is not None, **sizes,
    )  # fmt: skip
    d_u, d_v = totals(part_u, part_v)
    return d_mean, d_u.to(log_u.dtype), d_v.to(log_v.dtype)


def _outputs(mean: Tensor, dtype: torch.dtype, form: str) -> tuple[Tensor, Tensor]:
    """Room for what a form makes; what it does not make is empty."""
    made = [torch.empty_like(mean, dtype=dtype) for _ in range(2 if form == "both" else 1)]
    none = mean.new_empty(0, dtype=dtype)
    return (made[0], made[1]) if form == "both" else (none, made[0]) if form == "noise" else (made[0], none)


def field(
    mean: Tensor,
    rho: Tensor,
    seed: Tensor,
    stream: int,
    center: float,
    maximum: float | None,
    dtype: torch.dtype,
    form: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sample or the mean and the noise, in the layout of M, and the three sums."""
    from slimbayes.accelerate.gpu.programs import weights as programs

    out, noise = _outputs(mean, dtype, form)
    like = noise if form == "noise" else out
    mean, rho = _like(mean, like), _like(rho, like)
    size = mean.numel()
    count, quarter = _blocks(size)
    partial = torch.empty(count, 3, dtype=torch.float32, device=mean.device)
    launch(
        programs.field_sample, count, mean,
        mean, rho, out, noise, partial, seed, size, quarter, stream, center, maximum or 0.0,
        CAP=maximum is not None, FORM=form, BLOCK=_BLOCK, FAST=_FAST, num_warps=_BLOCK_WARPS,
    )  # fmt: skip
    return out, noise, partial.sum(0)


def field_backward(
    grad: Tensor,
    noise_grad: Tensor | None,
    d_sums: Tensor | None,
    mean: Tensor,
    rho: Tensor,
    seed: Tensor,
    stream: int,
    center: float,
    maximum: float | None,
    form: str,
) -> tuple[Tensor, Tensor]:
    """gM and gρ, each in the layout of its tensor."""
    from slimbayes.accelerate.gpu.programs import weights as programs

    d_mean, d_rho = torch.empty_like(mean), torch.empty_like(rho)
    to = torch.empty_like(mean, dtype=rho.dtype) if d_rho.stride() != d_mean.stride() else d_rho
    grad, mean, rho = _like(grad, d_mean), _like(mean, d_mean), _like(rho, d_mean)
    noise_grad = grad if noise_grad is None else _like(noise_grad, d_mean)
    size = mean.numel()
    count, quarter = _blocks(size)
    sums = d_mean if d_sums is None else d_sums.contiguous()
    launch(
        programs.field_grad, count, mean,
        grad, noise_grad, mean, rho, d_mean, to, sums, seed, size, quarter, stream, center, maximum or 0.0,
        CAP=maximum is not None, FORM=form, STATS=d_sums is not None, BLOCK=_BLOCK, FAST=_FAST,
        num_warps=_BLOCK_WARPS,
    )  # fmt: skip
    return d_mean, d_rho if to is d_rho else d_rho.copy_(to)


def _blocks(size: int) -> tuple[int, int]:
    """The number of programs, and a quarter of the weight as a whole number of blocks (aligned loads)."""
    count = ceil_div(size, 4 * _BLOCK)
    return count, count * _BLOCK


def _like(tensor: Tensor, out: Tensor) -> Tensor:
    """The tensor with its numbers in the order of ``out``'s memory."""
    if tensor.stride() == out.stride():
        return tensor
    return torch.empty_like(out, dtype=tensor.dtype).copy_(tensor)
