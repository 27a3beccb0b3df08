"""Factors on rows: y[r, c, ...] = x[r, c, ...] · f[r, c], with a backward pass that reads g and x once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from slimbayes.kernels.launch import available, ceil_div, launch, power_of_two

_TILE_BYTES = 8192  # one tile of one tensor: a few of them in flight hide the memory's latency
_ENOUGH, _FILL = (
    1024,
    4096,
)  # programs that keep a GPU of some 130 multiprocessors busy; those that split work makes
_SHORTEST = 3  # tiles of positions to a program whose sums are partial
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def scale_rows(x: Tensor, f: Tensor) -> Tensor:
    """y = x∘f for x [R, C, *spatial] and f [R, C]; y has x's type and memory layout.

    Backward in one sweep: gx = g∘f and gf[r, c] = Σ_spatial g∘x, accumulated in float32, without atomics.

    >>> scale_rows(torch.ones(2, 3, 4), torch.arange(6.0).view(2, 3))[1, 2]
    tensor([5., 5., 5., 5.])
    """
    if torch.compiler.is_compiling() or not _fits(x, f):
        return x * f.reshape(f.shape + (1,) * (x.dim() - 2)).to(x.dtype)
    scaled: Tensor = _ScaleRows.apply(*_dense(x), f)  # type: ignore[no-untyped-call]
    return scaled


def _fits(x: Tensor, f: Tensor) -> bool:
    return (
        available(x.device)
        and x.dim() > 2
        and x.dtype in _TYPES
        and f.dtype in _TYPES
        and x.shape[:2] == f.shape
        and 0 < x.numel() < 2**31 * x.shape[0]
    )


class _ScaleRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, last: bool, f: Tensor) -> Tensor:
        ctx.last = last
        ctx.save_for_backward(x, f)
        ctx.set_materialize_grads(False)
        return _scale(x, f, last)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None, Tensor | None]:
        if g is None:
            return None, None, None
        x, f = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: these gradients will be differentiated themselves
            factor = f.reshape(f.shape + (1,) * (x.dim() - 2)).to(x.dtype)
            return g * factor, None, (g * x).flatten(2).sum(2).to(f.dtype)
        g = _like(g, ctx.last)
        write, _, reduce = ctx.needs_input_grad
        if not reduce:
            return _scale(g, f, ctx.last), None, None
        gx, gf = _gradients(g, x, f, ctx.last, write)
        return gx, None, gf


def _is_last(x: Tensor) -> bool:
    if x.dim() == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).is_contiguous()


def _dense(x: Tensor) -> tuple[Tensor, bool]:
    """x in one of the two layouts, and whether its channels are last in memory."""
    if x.is_contiguous():
        return x, False
    return (x, True) if _is_last(x) else (x.contiguous(), False)


def _like(g: Tensor, last: bool) -> Tensor:
    """The gradient in the layout of x."""
    if not last:
        return g if g.is_contiguous() else g.contiguous()
    if _is_last(g):
        return g
    return g.movedim(1, -1).contiguous().movedim(-1, 1)


def _last_blocks(positions: int, channels: int, tile: int) -> tuple[int, int]:
    """Tile (positions, channels): wide in channels, but with few idle lanes."""
    width = min(128, power_of_two(channels))
    while width > 32 and ceil_div(channels, width) * width > 1.25 * channels:
        width //= 2
    return min(power_of_two(positions), tile // width), width


def _first_blocks(positions: int, tile: int) -> tuple[int, int]:
    """Tile (row-channel pairs, positions), with few idle lanes in the last tile of positions."""
    width = min(1024, power_of_two(positions))
    while width > 128 and ceil_div(positions, width) * width > 1.15 * positions:
        width //= 2
    return max(1, tile // width), width


@lru_cache(maxsize=1024)
def _plan(rows: int, channels: int, size: int, itemsize: int, last: bool) -> tuple[int, dict[str, int], int]:
    """The number of positions, the tile as the kernels' constants, and the number of programs forward."""
    positions = size // (rows * channels)
    tile = _TILE_BYTES // itemsize
    if last:
        bp, bc = _last_blocks(positions, channels, tile)
        return positions, {"BP": bp, "BC": bc}, rows * ceil_div(positions, bp) * ceil_div(channels, bc)
    br, bp = _first_blocks(positions, tile)
    return positions, {"BR": br, "BP": bp}, ceil_div(rows * channels, br) * ceil_div(positions, bp)


@lru_cache(maxsize=1024)
def _backward_plan(rows: int, channels: int, size: int, itemsize: int, last: bool) -> tuple[int, int, int]:
    """The number of programs backward, into how many parts they split the positions, and the tiles of a part."""
    positions, blocks, _ = _plan(rows, channels, size, itemsize, last)
    groups = rows * ceil_div(channels, blocks["BC"]) if last else ceil_div(rows * channels, blocks["BR"])
    tiles = ceil_div(positions, blocks["BP"])
    # Few rows: the positions are split over programs, whose partial sums are added afterwards by another kernel.
    # It is short, but starting it takes time too, so the programs must be far too few, and each part long enough.
    parts = 1 if groups >= _ENOUGH else max(1, min(ceil_div(_FILL, groups), tiles // _SHORTEST))
    steps = ceil_div(tiles, parts)
    parts = ceil_div(tiles, steps)
    return groups * parts, parts, steps


def _scale(x: Tensor, f: Tensor, last: bool) -> Tensor:
    y = torch.empty_like(x)
    rows, channels = f.shape
    positions, blocks, count = _plan(rows, channels, x.numel(), x.itemsize, last)
    by_row, by_column = f.stride()
    programs = _programs()
    if last:
        launch(programs.scale_last, count, x, x, f, y, positions, channels, by_row, by_column, **blocks)
    else:
        launch(
            programs.scale_first, count, x,
            x, f, y, rows * channels, positions, channels, by_row, by_column, **blocks,
        )  # fmt: skip
    return y


def _gradients(g: Tensor, x: Tensor, f: Tensor, last: bool, write: bool) -> tuple[Tensor | None, Tensor]:
    rows, channels = f.shape
    size, itemsize = x.numel(), x.itemsize
    positions, blocks, _ = _plan(rows, channels, size, itemsize, last)
    count, splits, steps = _backward_plan(rows, channels, size, itemsize, last)
    by_row, by_column = f.stride()
    gx = torch.empty_like(x) if write else None
    if splits == 1:
        gf = torch.empty((rows, channels), dtype=f.dtype, device=f.device)
    else:
        gf = torch.empty((splits, rows, channels), dtype=torch.float32, device=f.device)
    target = x if gx is None else gx
    pairs = rows * channels
    programs = _programs()
    if last:
        launch(
            programs.grad_last, count, x,
            g, x, f, target, gf, positions, channels, by_row, by_column, pairs, splits, steps, **blocks, WRITE=write,
        )  # fmt: skip
    else:
        launch(
            programs.grad_first, count, x,
            g, x, f, target, gf, pairs, positions, channels, by_row, by_column, pairs, splits, steps, **blocks,
            WRITE=write,
        )  # fmt: skip
    return gx, gf if splits == 1 else gf.sum(0).to(f.dtype)


@lru_cache(maxsize=1)
def _programs() -> Any:
    """The kernels, imported at their first use: Triton takes a second."""
    from slimbayes.kernels.programs import rows as programs

    return programs
