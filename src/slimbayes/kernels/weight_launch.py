"""Starting the kernels of programs/ktied.py and weights.py: tiles, buffers for partial sums, memory layouts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slimbayes.kernels.launch import INTERPRETED, ceil_div, launch, power_of_two

_BLOCK, _BLOCK_WARPS = 512, 4  # the same for flat weights
_FAST = not INTERPRETED


class Tile(NamedTuple):
    """How a k-tied weight is cut: a program takes ``steps`` rows of four blocks of ``columns``, by one warp.

    Four columns to a lane give 16-byte loads. More rows mean fewer partial sums, and fewer programs.
    """

    columns: int = 128
    steps: int = 32
    unroll: int = 1
    registers: int | None = None
    programs: int = (
        2048  # fewer rows to a program, rather than fewer programs; 132 multiprocessors run 12 to 32 each
    )


# By the number of ranks and the pass: V and, backward, its gradient's sums are held in registers.
FORWARD = {1: Tile(), 2: Tile(), 3: Tile(64), 4: Tile(64)}
BACKWARD = {1: Tile(), 2: Tile(32, 64), 3: Tile(64), 4: Tile(64)}


def _grid(tile: Tile, m: int, n: int) -> tuple[dict[str, int], int, int]:
    """The kernel's sizes, the number of blocks of rows and that of columns."""
    # The noise's order depends on n alone, so that both passes, and any tile, make the same.
    gap = min(128, max(32, power_of_two(ceil_div(n, 4))))
    columns = min(tile.columns, gap)
    across = ceil_div(n, 4 * gap) * (gap // columns)
    steps = tile.steps
    while steps > 4 and ceil_div(m, steps) * across < tile.programs:
        steps //= 2
    sizes = {"BN": columns, "GAP": gap, "STEPS": steps, "UNROLL": tile.unroll, "num_warps": 1}
    if tile.registers is not None:
        sizes["maxnreg"] = tile.registers
    return {**sizes, "WHOLE": n % (4 * gap) == 0, "FAST": _FAST}, ceil_div(m, steps), across


def ktied(
    mean: Tensor,
    log_u: Tensor,
    log_v: Tensor,
    seed: Tensor,
    stream: int,
    center: float,
    dtype: torch.dtype,
    noise_only: bool,
) -> tuple[Tensor, Tensor]:
    """The sample [m, n] and its three sums."""
    from slimbayes.kernels.programs import ktied as programs

    mean, log_u, log_v = mean.contiguous(), log_u.contiguous(), log_v.contiguous()
    m, n = mean.shape
    rank = log_u.shape[1]
    sizes, down, across = _grid(FORWARD[rank], m, n)
    out = torch.empty_like(mean, dtype=dtype)
    partial = torch.empty(down * across, 3, dtype=torch.float32, device=mean.device)
    launch(
        programs.ktied_sample, down * across, mean,
        mean, log_u, log_v, out, partial, seed, m, n, stream, center, K=rank, ADD=not noise_only, **sizes,
    )  # fmt: skip
    return out, partial.sum(0)


def ktied_backward(
    grad: Tensor,
    d_sums: Tensor | None,
    mean: Tensor,
    log_u: Tensor,
    log_v: Tensor,
    seed: Tensor,
    stream: int,
    center: float,
    noise_only: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """gM, dlog u and dlog v; the partial sums of the last two are m·n·k/512 and m·n·k/32 numbers."""
    from slimbayes.kernels.programs import ktied as programs

    grad, mean, log_u, log_v = grad.contiguous(), mean.contiguous(), log_u.contiguous(), log_v.contiguous()
    m, n = mean.shape
    rank = log_u.shape[1]
    sizes, down, across = _grid(BACKWARD[rank], m, n)
    d_mean = torch.empty_like(mean)
    part_u = torch.empty(across, m, rank, dtype=torch.float32, device=mean.device)
    part_v = torch.empty(down, n, rank, dtype=torch.float32, device=mean.device)
    sums = d_mean if d_sums is None else d_sums.contiguous()
    launch(
        programs.ktied_grad, down * across, mean,
        grad, mean, log_u, log_v, d_mean, part_u, part_v, sums, seed, m, n, stream, center,
        K=rank, ADD=not noise_only, STATS=d_sums is not None, **sizes,
    )  # fmt: skip
    return d_mean, _total(part_u).to(log_u.dtype), _total(part_v).to(log_v.dtype)


def _total(parts: Tensor) -> Tensor:
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)


def field(
    mean: Tensor,
    rho: Tensor,
    seed: Tensor,
    stream: int,
    center: float,
    maximum: float | None,
    dtype: torch.dtype,
    noise_only: bool,
) -> tuple[Tensor, Tensor]:
    """The sample in the layout of M, and its three sums."""
    from slimbayes.kernels.programs import weights as programs

    out = torch.empty_like(mean, dtype=dtype)
    mean, rho = _like(mean, out), _like(rho, out)
    size = mean.numel()
    count, quarter = _blocks(size)
    partial = torch.empty(count, 3, dtype=torch.float32, device=mean.device)
    launch(
        programs.field_sample, count, mean,
        mean, rho, out, partial, seed, size, quarter, stream, center, maximum or 0.0,
        CAP=maximum is not None, ADD=not noise_only, BLOCK=_BLOCK, FAST=_FAST, num_warps=_BLOCK_WARPS,
    )  # fmt: skip
    return out, partial.sum(0)


def field_backward(
    grad: Tensor,
    d_sums: Tensor | None,
    mean: Tensor,
    rho: Tensor,
    seed: Tensor,
    stream: int,
    center: float,
    maximum: float | None,
    noise_only: bool,
) -> tuple[Tensor, Tensor]:
    """gM and gρ, each in the layout of its tensor."""
    from slimbayes.kernels.programs import weights as programs

    d_mean, d_rho = torch.empty_like(mean), torch.empty_like(rho)
    to = torch.empty_like(mean, dtype=rho.dtype) if d_rho.stride() != d_mean.stride() else d_rho
    grad, mean, rho = _like(grad, d_mean), _like(mean, d_mean), _like(rho, d_mean)
    size = mean.numel()
    count, quarter = _blocks(size)
    sums = d_mean if d_sums is None else d_sums.contiguous()
    launch(
        programs.field_grad, count, mean,
        grad, mean, rho, d_mean, to, sums, seed, size, quarter, stream, center, maximum or 0.0,
        CAP=maximum is not None, ADD=not noise_only, STATS=d_sums is not None, BLOCK=_BLOCK, FAST=_FAST,
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
