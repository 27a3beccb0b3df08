"""Factors on rows: y[r, c, ...] = x[r, c, ...] · f[r, c], with a backward pass that reads g and x once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate.gpu.launch import Prepared, available, ceil_div, power_of_two

_TILE_BYTES = 8192  # one tile of one tensor: a few of them in flight hide the memory's latency
_ENOUGH, _FILL = (
    1024,
    4096,
)  # programs that keep a GPU of some 130 multiprocessors busy; those that split work makes
_SHORTEST = 3  # tiles of positions to a program whose sums are partial
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def scale_rows(x: Tensor, f: Tensor) -> Tensor:
    """y = x∘f for x [R, C, *spatial] and f [R, C], or [G, C] for G equal parts of the rows; y is laid out as x.

    Backward in one sweep: gx = g∘f and gf[r, c] = Σ_spatial g∘x, accumulated in float32, without atomics.

    >>> scale_rows(torch.ones(2, 3, 4), torch.arange(6.0).view(2, 3))[1, 2]
    tensor([5., 5., 5., 5.])
    """
    if torch.compiler.is_compiling() or not fits(x, f):
        return x * broadcast(f, x)
    scaled: Tensor = _ScaleRows.apply(*dense(x), f)  # type: ignore[no-untyped-call]
    return scaled


def fits(x: Tensor, f: Tensor) -> bool:
    """Whether the kernels can scale x [R, C, *spatial] by f [..., C], one line for each of equal parts of the rows."""
    shape, kind = x.shape, f.shape
    if len(shape) < 3 or x.dtype not in TYPES or f.dtype not in TYPES or kind[-1] != shape[1]:
        return False
    size, lines = x.numel(), f.numel() // (shape[1] or 1)
    if not (0 < size < 2**31 * shape[0] and lines > 0 and shape[0] % lines == 0):
        return False
    return available(x.device) and (len(kind) == 2 or f.is_contiguous())


def broadcast(f: Tensor, x: Tensor) -> Tensor:
    """f [..., C] in x's type and in a shape that broadcasts against x [R, C, *spatial]."""
    rows, channels = x.shape[:2]
    f = f.reshape(-1, channels)
    if f.shape[0] != rows:
        f = f[:, None].expand(-1, rows // f.shape[0], -1)
    return f.reshape(rows, channels, *[1] * (x.dim() - 2)).to(x.dtype)


def factor_gradient(g: Tensor, x: Tensor, f: Tensor) -> Tensor:
    """Σ g∘x over positions and over the rows that share a line of f [..., C], in operations with gradients."""
    # Without flatten and unflatten, which a vectorised Jacobian cannot take.
    sums = (g * x).sum(tuple(range(2, x.dim())))  # [R, C]
    rows, channels = x.shape[:2]
    lines = f.numel() // channels
    if lines != rows:
        sums = sums.reshape(lines, rows // lines, channels).sum(1)
    return sums.reshape(f.shape).to(f.dtype)


class _ScaleRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, last: bool, f: Tensor) -> Tensor:
        ctx.last = last
        ctx.save_for_backward(x, f)
        ctx.set_materialize_grads(False)
        return scale(x, f, last)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> tuple[Tensor | None, None, Tensor | None]:
        if g is None:
            return None, None, None
        x, f = ctx.saved_tensors
        if torch.is_grad_enabled() or batched(g):
            return g * broadcast(f, x), None, factor_gradient(g, x, f)
        g, x = like(g, ctx.last), like(x, ctx.last)  # who kept x need not have kept its strides
        write, _, reduce = ctx.needs_input_grad
        if not reduce:
            return scale(g, f, ctx.last), None, None
        gx, gf = gradients(g, x, f, ctx.last, torch.empty_like(x) if write else None)
        return gx, None, gf


_BATCHED = torch._C._dispatch_key_parse("Batched")


def batched(g: Tensor) -> bool:
    """Whether a gradient has an axis that only vmap sees: that of a vectorised Jacobian. Kernels would not see it."""
    return bool(torch._C._dispatch_keys(g).has(_BATCHED))


def _is_last(x: Tensor) -> bool:
    if x.dim() == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).is_contiguous()


def dense(x: Tensor) -> tuple[Tensor, bool]:
    """x in one of the two layouts, and whether its channels are last in memory."""
    if x.is_contiguous():
        return x, False
    return (x, True) if _is_last(x) else (x.contiguous(), False)


def like(g: Tensor, last: bool) -> Tensor:
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


def _lines(f: torch.Size, strides: tuple[int, ...], rows: int) -> tuple[int, int, int]:
    """The strides between lines and between columns of a factor [G, C] or dense [..., C], and the rows of a line."""
    by_row, by_column = strides if len(f) == 2 else (f[-1], 1)
    return by_row, by_column, rows // f[:-1].numel()


@lru_cache(maxsize=4096)
def _forward(
    shape: torch.Size, f: torch.Size, strides: tuple[int, ...], last: bool, *types: torch.dtype
) -> Prepared:
    """The kernel of x∘f for these shapes and types."""
    rows, channels = shape[:2]
    positions, blocks, count = _plan(rows, channels, shape.numel(), types[0].itemsize, last)
    numbers = (positions, channels, *_lines(f, strides, rows))
    if last:
        return Prepared(_programs().scale_last, count, numbers, blocks)
    return Prepared(_programs().scale_first, count, (rows * channels, *numbers), blocks)


@lru_cache(maxsize=4096)
def _backward(
    shape: torch.Size, f: torch.Size, strides: tuple[int, ...], last: bool, write: bool, *types: torch.dtype
) -> tuple[Prepared, tuple[int, ...] | None]:
    """The kernel of both gradients, and the shape of the sums that it leaves: (splits, lines, rows of one, C), or None.

    None: of the factor's own shape, for there is nothing to add.
    """
    rows, channels = shape[:2]
    size, itemsize = shape.numel(), types[0].itemsize
    positions, blocks, _ = _plan(rows, channels, size, itemsize, last)
    count, splits, steps = _backward_plan(rows, channels, size, itemsize, last)
    by_row, by_column, repeats = _lines(f, strides, rows)
    pairs = rows * channels
    numbers = (positions, channels, by_row, by_column, repeats, pairs, splits, steps)
    programs, meta = _programs(), {**blocks, "WRITE": write}
    if last:
        made = Prepared(programs.grad_last, count, numbers, meta)
    else:
        made = Prepared(programs.grad_first, count, (pairs, *numbers), meta)
    whole = splits == 1 and repeats == 1
    return made, None if whole else (splits, rows // repeats, repeats, channels)


def scale(x: Tensor, f: Tensor, last: bool) -> Tensor:
    """x∘f by the kernel, for x in the layout that ``dense`` gives and a factor that ``fits``."""
    y = torch.empty_like(x)
    _forward(x.shape, f.shape, f.stride(), last, x.dtype, f.dtype)(x, f, y)
    return y


def gradients(g: Tensor, x: Tensor, f: Tensor, last: bool, gx: Tensor | None) -> tuple[Tensor | None, Tensor]:
    """(g∘f, Σ g∘x) for g in x's layout; the first is written into ``gx``, which may be g itself, or not made."""
    write = gx is not None
    run, sums = _backward(x.shape, f.shape, f.stride(), last, write, x.dtype, f.dtype)
    if sums is None:
        gf = torch.empty(f.shape, dtype=f.dtype, device=f.device)
    else:
        gf = torch.empty(sums, dtype=torch.float32, device=f.device)
    run(g, x, f, x if gx is None else gx, gf)
    return gx, gf if sums is None else gf.sum((0, 2)).view(f.shape).to(f.dtype)


@lru_cache(maxsize=1)
def _programs() -> Any:
    """The kernels, imported at their first use: Triton takes a second."""
    from slimbayes.accelerate.gpu.programs import rows as programs

    return programs
