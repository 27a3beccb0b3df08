"""What the operations around BatchNorm share: tiles, pieces of rows, and the programs for their statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from slimbayes.accelerate.gpu.launch import RECORDER, available, ceil_div, launch, power_of_two

LAST = torch.channels_last
SWEEP: dict[str, int] = {"STAGES": 3}  # how the sweeps that only read are pipelined
WIDE: dict[str, int] = {"STAGES": 3, "num_warps": 4}  # of sweeps over many tensors, with many sums
_WIDE_TILE = 1024  # few elements to a thread: they have many of them at once
_TILE, _WIDTH = 4096, 64  # elements of one tile, and channels of it
_ROWS, _COLUMNS = 256, 8  # tile of the programs over [R, C]: few channels each, to have many programs
_PROGRAMS = 128  # of a sweep that only reads: one to a multiprocessor is enough, small sums are cheaper whole
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def fits(y: Tensor) -> bool:
    """Whether the kernels take these activations."""
    found = available(y.device) or RECORDER.calls is not None
    return found and y.dtype in _TYPES and y.numel() > 0 and y.shape[1:].numel() < 2**31


def dense(f: Tensor | None, stand_in: Tensor) -> Tensor:
    """A factor as the kernels read it, or a tensor of its type where there is none: a program is compiled by types."""
    return stand_in if f is None else f.contiguous()


def tile(channels: int) -> tuple[int, int]:
    """Positions and channels of a tile: the same for all but narrow layers, so that few programs are compiled."""
    width = min(_WIDTH, power_of_two(channels))
    return _TILE // width, width


def wide_tile(channels: int) -> tuple[int, int]:
    """``tile`` of a sweep over many tensors."""
    width = tile(channels)[1]
    return _WIDE_TILE // width, width


def pieces(y: Tensor) -> int:
    """Into how many pieces a row is cut: enough programs for the whole GPU, each with a tile of positions or more."""
    rows, channels = y.shape[:2]
    positions = y.shape[2] * y.shape[3]
    least, width = tile(channels)
    count = 1
    while (
        rows * count * ceil_div(channels, width) < _PROGRAMS
        and positions % (2 * count) == 0
        and positions >= 2 * count * least
    ):
        count *= 2
    return count


def moments(y: Tensor, r: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and variance of r∘y over rows and positions, and the pieces' own means and squared deviations of y."""
    from slimbayes.accelerate.gpu.programs import norm as programs

    rows, channels = y.shape[:2]
    split = pieces(y)
    positions = y.numel() // (rows * split * channels)
    row_mean = torch.empty(rows * split, channels, dtype=torch.float32, device=y.device)
    row_m2 = torch.empty_like(row_mean)
    bp, bc = tile(channels)
    launch(
        programs.moments, rows * split * ceil_div(channels, bc), y,
        y, row_mean, row_m2, positions, channels, BP=bp, BC=bc, **SWEEP,
    )  # fmt: skip
    mean, var = statistics(y, row_mean, row_m2, r, positions, split)
    return mean, var, row_mean, row_m2


def statistics(
    y: Tensor, row_mean: Tensor, row_m2: Tensor, r: Tensor | None, positions: int, split: int
) -> tuple[Tensor, Tensor]:
    """Mean and variance of r∘y over all rows from those of the pieces."""
    from slimbayes.accelerate.gpu.programs import norm as programs

    count, channels = row_mean.shape
    mean, var = torch.empty_like(row_mean[0]), torch.empty_like(row_mean[0])
    launch(
        programs.statistics, ceil_div(channels, _COLUMNS), row_mean,
        row_mean, row_m2, dense(r, y), mean, var, count, positions, channels, split, int(r is not None),
        BR=_ROWS, BC=_COLUMNS,
    )  # fmt: skip
    return mean, var


def gradient_sums(
    g: Tensor, y: Tensor, r: Tensor | None, weight: Tensor, bias: Tensor,
    mean: Tensor, var: Tensor, row_mean: Tensor, eps: float, relu: bool,
) -> Tensor:  # fmt: skip
    """Σ g′ and Σ g′(y − mean of the piece) for every piece of a row, [2, R·S, C]."""
    from slimbayes.accelerate.gpu.programs import norm as programs

    count, channels = row_mean.shape
    split = count // y.shape[0]
    sums = torch.empty(2, count, channels, dtype=torch.float32, device=y.device)
    bp, bc = tile(channels)
    launch(
        programs.gradient_sums, count * ceil_div(channels, bc), y,
        g, y, dense(r, y), row_mean, mean, var, weight, bias, sums, y.numel() // (count * channels),
        channels, eps, count * channels, split, int(r is not None), int(relu), BP=bp, BC=bc, **SWEEP,
    )  # fmt: skip
    return sums


def small_gradients(
    sums: Tensor, y: Tensor, r: Tensor | None, weight: Tensor, bias: Tensor, s: Tensor | None,
    mean: Tensor, var: Tensor, row_mean: Tensor, row_m2: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of (r, weight, bias, s) from the sums over positions; an absent factor's is empty."""
    from slimbayes.accelerate.gpu.programs import norm as programs

    count, channels = row_mean.shape
    split = count // y.shape[0]
    gw, gb = torch.empty_like(mean), torch.empty_like(mean)

    gr, gs = room(r, y, row_mean), room(s, y, row_mean)
    launch(
        programs.gradients, ceil_div(channels, _COLUMNS), y,
        sums, row_mean, row_m2, dense(r, y), dense(s, y), mean, var, weight, bias, gr, gs, gw, gb,
        count, y.numel() // (count * channels), channels, eps, count * channels, split,
        int(r is not None), int(s is not None), BR=_ROWS, BC=_COLUMNS,
    )  # fmt: skip
    return whole_rows(gr, r, split), gw, gb, whole_rows(gs, s, split)


def room(factor: Tensor | None, y: Tensor, row_mean: Tensor) -> Tensor:
    """Where a kernel writes the gradient of a factor, row by row whatever the factor's own strides; see whole_rows."""
    if factor is None:
        return y.new_empty(0)
    if row_mean.shape[0] > y.shape[0]:
        return torch.empty_like(row_mean)
    return torch.empty(factor.shape, dtype=factor.dtype, device=factor.device)


def whole_rows(grad: Tensor, factor: Tensor | None, split: int) -> Tensor:
    """The gradient of a factor [R, C] from those of its rows' pieces, [R·S, C]."""
    if factor is None or split == 1:
        return grad
    total: Tensor = grad.unflatten(0, (-1, split)).sum(1).to(factor.dtype)
    return total


def piece_moments(y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations of every piece of a row, in plain torch."""
    cut = y.flatten(2).unflatten(2, (pieces(y), -1)).transpose(1, 2).flatten(0, 1)  # [R·S, C, P / S]
    var, mean = torch.var_mean(cut, 2, correction=0)
    return mean, var * cut.shape[2]


def fake_statistics(y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stand-ins for mean, variance and the moments of the pieces of rows."""
    wide = torch.promote_types(y.dtype, torch.float32)
    rows = y.new_empty((pieces(y) * y.shape[0], y.shape[1]), dtype=wide)
    channels = y.new_empty(y.shape[1], dtype=wide)
    return channels, torch.empty_like(channels), rows, torch.empty_like(rows)


def scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    """x∘f in at least float32, in plain torch."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide if factor is None else wide * factor[:, :, None, None]


def like(factor: Tensor | None, y: Tensor) -> Tensor:
    """A stand-in for the gradient of a factor."""
    return y.new_empty(0) if factor is None else factor.new_empty(factor.shape)
