# mypy: ignore-errors
"""Plain noise: four runs of BLOCK numbers to a program, from all four words of each counter."""

from __future__ import annotations

from slimbayes.accelerate.gpu.programs.language import jit, tl
from slimbayes.accelerate.gpu.programs.random import four


@jit
def _store(out, at, size, value, KIND: tl.constexpr):
    kind_of_float: tl.constexpr = out.dtype.element_ty
    if KIND == "uniform":
        # Cut, not rounded, for rounding would close the interval at 1.
        if kind_of_float == tl.bfloat16:
            value = (value.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
        if kind_of_float == tl.float16:
            value = (value.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
    if KIND == "cauchy" and kind_of_float == tl.float16:
        value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
    tl.store(out + at, value.to(kind_of_float), mask=at < size)


@jit(do_not_specialize=["stream"])
def fill(
    out, seed, size, quarter, stream, KIND: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """Standard noise at i, i + quarter, i + 2·quarter and i + 3·quarter."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = (at & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = four(tl.load(seed), low, (at >> 32).to(tl.uint32), stream, 4, KIND, 10, FAST)
    _store(out, at, size, a, KIND)
    _store(out, at + quarter, size, b, KIND)
    _store(out, at + 2 * quarter, size, c, KIND)
    _store(out, at + 3 * quarter, size, d, KIND)


@jit
def fill_words(out, seed, size, quarter, BLOCK: tl.constexpr):
    """Random words, under a tag of their own."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = (at & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(tl.load(seed), low, (at >> 32).to(tl.uint32), 0, 5, 10)
    tl.store(out + at, a.to(tl.int32, bitcast=True), mask=at < size)
    tl.store(out + at + quarter, b.to(tl.int32, bitcast=True), mask=at + quarter < size)
    tl.store(out + at + 2 * quarter, c.to(tl.int32, bitcast=True), mask=at + 2 * quarter < size)
    tl.store(out + at + 3 * quarter, d.to(tl.int32, bitcast=True), mask=at + 3 * quarter < size)
