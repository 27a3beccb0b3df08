# mypy: ignore-errors
"""All rank-1 factors of a network: samples, and the gradients of their parameters.

Columns are the channels of all layers side by side. A column belongs to a layer that starts at column ``start``
and has ``width`` channels; its block of the flat parameters is [K, width] at K·start, that of the flat output
[K, n, width] at K·n·start. The noise of row r of
component k is word r // quarter of the counter (column, k·quarter + r % quarter).
"""

from __future__ import annotations

from slimbayes.accelerate.gpu.programs.language import jit, tl
from slimbayes.accelerate.gpu.programs.random import four, sigmoid, softplus


@jit
def _value(loc, sigma, noise, FAMILY: tl.constexpr):
    """The sample before clipping, and its derivative with respect to loc; that to σ is this times noise."""
    if FAMILY == "lognormal":
        value = tl.exp(loc + sigma * noise)
        slope = value
    else:
        value = loc + sigma * noise
        slope = tl.full(noise.shape, 1.0, tl.float32)
    return value, slope


@jit
def _noise(key, column, row, stream, KIND: tl.constexpr, FAST: tl.constexpr):
    """Four values of noise for every counter; zeros for points."""
    if KIND == "none":
        zero = tl.zeros((row + column).shape, dtype=tl.float32)
        return zero, zero, zero, zero
    else:
        return four(key, column, row, stream, 1, KIND, 10, FAST)


@jit
def _store_sample(at, loc, sigma, noise, mask, clip, FAMILY: tl.constexpr, CLIP: tl.constexpr):
    if FAMILY == "halfcauchy":
        noise = tl.abs(noise)
    value, _ = _value(loc, sigma, noise, FAMILY)
    if CLIP:
        value = tl.where(
            value > clip, clip, tl.where(value < -clip, -clip, value)
        )  # keeps what is not a number
    tl.store(at, value.to(at.dtype.element_ty), mask=mask)


@jit
def _slopes(at, loc, sigma, noise, mask, clip, FAMILY: tl.constexpr, CLIP: tl.constexpr):
    if FAMILY == "halfcauchy":
        noise = tl.abs(noise)
    grad = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    value, slope = _value(loc, sigma, noise, FAMILY)
    if CLIP:
        mask = mask & (tl.abs(value) <= clip)
    # A masked slope may be infinite: it must not meet a gradient of zero.
    d_loc = tl.where(mask, grad * slope, 0.0)
    d_sigma = tl.where(mask, grad * (slope * noise), 0.0)
    return d_loc, d_sigma


@jit(do_not_specialize=["components", "n", "quarter", "stream"])
def sample(
    out, loc, rho, starts, widths, seed, columns, components, n, quarter, stream, clip,
    KIND: tl.constexpr, FAMILY: tl.constexpr, CLIP: tl.constexpr, BQ: tl.constexpr, BC: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Four rows of BQ each, for BC columns of one component."""
    pid = tl.program_id(0)
    c_blocks = tl.cdiv(columns, BC)
    q_blocks = tl.cdiv(quarter, BQ)
    column = (pid % c_blocks) * BC + tl.arange(0, BC)
    q = ((pid // c_blocks) % q_blocks) * BQ + tl.arange(0, BQ)
    k = (pid // c_blocks) // q_blocks
    keep = column < columns
    start = tl.load(starts + column, mask=keep, other=0)
    width = tl.load(widths + column, mask=keep, other=0)
    parameter = start * components + k * width + (column - start)
    center = tl.load(loc + parameter, mask=keep, other=0.0).to(tl.float32)[None, :]
    raw = tl.load(rho + parameter, mask=keep, other=0.0).to(tl.float32)
    sigma = (softplus(raw) + 1e-7)[None, :]
    begin = out + (start.to(tl.int64) * components + k.to(tl.int64) * width) * n + (column - start)
    key = tl.load(seed)
    a, b, c, d = _noise(key, column[None, :], (k * quarter + q)[:, None], stream, KIND, FAST)
    inside = (q < quarter)[:, None] & keep[None, :]
    at = begin[None, :] + q[:, None] * width[None, :]
    step = quarter * width[None, :]
    row = q[:, None]
    _store_sample(at, center, sigma, a, inside & (row < n), clip, FAMILY, CLIP)
    _store_sample(at + step, center, sigma, b, inside & (row + quarter < n), clip, FAMILY, CLIP)
    _store_sample(at + 2 * step, center, sigma, c, inside & (row + 2 * quarter < n), clip, FAMILY, CLIP)
    _store_sample(at + 3 * step, center, sigma, d, inside & (row + 3 * quarter < n), clip, FAMILY, CLIP)


@jit(do_not_specialize=["components", "n", "quarter", "stream"])
def grad(
    grads, loc, rho, d_loc, d_rho, starts, widths, seed, columns, components, n, quarter, stream, clip,
    KIND: tl.constexpr, FAMILY: tl.constexpr, CLIP: tl.constexpr, BQ: tl.constexpr, BC: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """dloc and dρ of BC columns of one component: sums over all its rows, in float32."""
    pid = tl.program_id(0)
    c_blocks = tl.cdiv(columns, BC)
    column = (pid % c_blocks) * BC + tl.arange(0, BC)
    k = pid // c_blocks
    keep = column < columns
    start = tl.load(starts + column, mask=keep, other=0)
    width = tl.load(widths + column, mask=keep, other=0)
    parameter = start * components + k * width + (column - start)
    center = tl.load(loc + parameter, mask=keep, other=0.0).to(tl.float32)[None, :]
    raw = tl.load(rho + parameter, mask=keep, other=0.0).to(tl.float32)
    sigma = (softplus(raw) + 1e-7)[None, :]
    begin = grads + (start.to(tl.int64) * components + k.to(tl.int64) * width) * n + (column - start)
    key = tl.load(seed)
    total_loc = tl.zeros((BQ, BC), dtype=tl.float32)
    total_sigma = tl.zeros((BQ, BC), dtype=tl.float32)
    step = quarter * width[None, :]
    for first in range(0, quarter, BQ):
        q = first + tl.arange(0, BQ)
        a, b, c, d = _noise(key, column[None, :], (k * quarter + q)[:, None], stream, KIND, FAST)
        inside = (q < quarter)[:, None] & keep[None, :]
        at = begin[None, :] + q[:, None] * width[None, :]
        row = q[:, None]
        la, sa = _slopes(at, center, sigma, a, inside & (row < n), clip, FAMILY, CLIP)
        lb, sb = _slopes(at + step, center, sigma, b, inside & (row + quarter < n), clip, FAMILY, CLIP)
        lc, sc = _slopes(
            at + 2 * step, center, sigma, c, inside & (row + 2 * quarter < n), clip, FAMILY, CLIP
        )
        ld, sd = _slopes(
            at + 3 * step, center, sigma, d, inside & (row + 3 * quarter < n), clip, FAMILY, CLIP
        )
        total_loc += (la + lb) + (lc + ld)
        total_sigma += (sa + sb) + (sc + sd)
    tl.store(d_loc + parameter, tl.sum(total_loc, axis=0).to(d_loc.dtype.element_ty), mask=keep)
    slope = tl.sum(total_sigma, axis=0) * sigmoid(raw)
    tl.store(d_rho + parameter, slope.to(d_rho.dtype.element_ty), mask=keep)
