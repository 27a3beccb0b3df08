# mypy: ignore-errors
"""Sums over the first axis of up to three matrices of partial sums."""

from __future__ import annotations

from slimbayes.accelerate.gpu.programs.language import jit, tl


@jit
def _total(parts, out, count, width, block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    j = block * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.range(0, count, ROWS):
        rows = first + i
        inside = (rows < count)[:, None] & (j < width)[None, :]
        sums += tl.load(parts + rows[:, None].to(tl.int64) * width + j[None, :], mask=inside, other=0.0)
    tl.store(out + j, tl.sum(sums, 0), mask=j < width)


@jit(do_not_specialize=["count_a", "count_b", "count_c"])
def totals(
    a, out_a, count_a, width_a, b, out_b, count_b, width_b, c, out_c, count_c, width_c,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[j] = Σ_i parts[i, j]; one program to COLUMNS columns of one of the three."""
    pid = tl.program_id(0)
    blocks_a = tl.cdiv(width_a, COLUMNS)
    blocks_b = tl.cdiv(width_b, COLUMNS)
    if pid < blocks_a:
        _total(a, out_a, count_a, width_a, pid, ROWS, COLUMNS)
    elif pid < blocks_a + blocks_b:
        _total(b, out_b, count_b, width_b, pid - blocks_a, ROWS, COLUMNS)
    else:
        _total(c, out_c, count_c, width_c, pid - blocks_a - blocks_b, ROWS, COLUMNS)
