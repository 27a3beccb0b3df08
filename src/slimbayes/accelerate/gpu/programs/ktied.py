# mypy: ignore-errors
"""Weight samples of k-tied Normals with the sums their KL needs, and their gradients.

A program is one warp. It goes down its rows, ``steps`` of them and one at a time, with the columns in its lanes: V,
and backward the sums over rows, stay in registers; U is a number to a rank and a row; a sum over columns crosses
lanes, never warps. The noise lives in registers too, four numbers to a counter for four blocks of columns (on its 7
rounds see weights.py). The next row is on its way while this one is worked on: there are too few warps to wait with.

FORM says what is made: "sample" M + σ∘ε, "noise" σ∘ε, "mean" M, or "both" of the last two.
"""

from __future__ import annotations

from slimbayes.accelerate.gpu.programs.ktied_parts import (
    add_square,
    at_lanes,
    columns_v,
    dot,
    exponentials,
    four,
    or_one,
    place,
    put,
    row_logs,
)
from slimbayes.accelerate.gpu.programs.language import jit, tl
from slimbayes.accelerate.gpu.programs.rownoise import log2, row_noise


@jit
def _put_sample(out, noise, at, j, m, value, inside, FORM: tl.constexpr, WHOLE: tl.constexpr):
    if FORM == "sample":
        put(out + at, j, m + value, inside, WHOLE)
    if FORM == "mean" or FORM == "both":
        put(out + at, j, m, inside, WHOLE)
    if FORM == "noise" or FORM == "both":
        put(noise + at, j, value, inside, WHOLE)


@jit(do_not_specialize=["m", "stream", "steps"])
def ktied_sample(
    mean, log_u, log_v, out, noise, partial, seed, m, n, stream, center, steps,
    K: tl.constexpr, FORM: tl.constexpr, BN: tl.constexpr, GAP: tl.constexpr,
    UNROLL: tl.constexpr, WHOLE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """M, (U Vᵀ)∘ε or their sum on its rows of four blocks of BN columns; the sums go to ``partial``.

    A row at a time, and its columns in the lanes: V stays in registers, U is a number to a rank.
    """
    row, counter, first = place(n, steps, BN, GAP)
    lane = tl.arange(0, BN)
    ja = first + lane
    jb = ja + GAP
    jc = ja + 2 * GAP
    jd = ja + 3 * GAP
    in_a, in_b, in_c, in_d = ja < n, jb < n, jc < n, jd < n
    a0, a1, a2, a3 = columns_v(log_v, ja, n, K)
    b0, b1, b2, b3 = columns_v(log_v, jb, n, K)
    c0, c1, c2, c3 = columns_v(log_v, jc, n, K)
    d0, d1, d2, d3 = columns_v(log_v, jd, n, K)
    spot = at_lanes(counter + lane, a0)
    key = tl.load(seed)
    squares = tl.zeros((BN,), tl.float32)
    spread = tl.zeros((BN,), tl.float32)
    logs = tl.zeros((BN,), tl.float32)
    last = tl.minimum(row + steps, m) - 1
    next_a, next_b, next_c, next_d = four(mean + row * n, ja, jb, jc, jd, in_a, in_b, in_c, in_d, WHOLE)
    l0, l1, l2, l3 = row_logs(log_u, row, K)
    for step in tl.range(0, last + 1 - row, loop_unroll_factor=UNROLL):
        i = row + step
        ma, mb = next_a.to(tl.float32), next_b.to(tl.float32)
        mc, md = next_c.to(tl.float32), next_d.to(tl.float32)
        u0, u1, u2, u3 = exponentials(l0, l1, l2, l3, K)
        following = tl.minimum(i + 1, last)
        next_a, next_b, next_c, next_d = four(
            mean + following * n, ja, jb, jc, jd, in_a, in_b, in_c, in_d, WHOLE
        )
        l0, l1, l2, l3 = row_logs(log_u, following, K)
        sa = dot(u0, u1, u2, u3, a0, a1, a2, a3, K)
        sb = dot(u0, u1, u2, u3, b0, b1, b2, b3, K)
        sc = dot(u0, u1, u2, u3, c0, c1, c2, c3, K)
        sd = dot(u0, u1, u2, u3, d0, d1, d2, d3, K)
        ea, eb, ec, ed = sa, sb, sc, sd
        if FORM != "mean":
            ea, eb, ec, ed = row_noise(key, spot, i, stream, FAST)
        at = i * n
        _put_sample(out, noise, at, ja, ma, sa * ea, in_a, FORM, WHOLE)
        _put_sample(out, noise, at, jb, mb, sb * eb, in_b, FORM, WHOLE)
        _put_sample(out, noise, at, jc, mc, sc * ec, in_c, FORM, WHOLE)
        _put_sample(out, noise, at, jd, md, sd * ed, in_d, FORM, WHOLE)
        squares = add_square(squares, ma, center, in_a, WHOLE)
        squares = add_square(squares, mb, center, in_b, WHOLE)
        squares = add_square(squares, mc, center, in_c, WHOLE)
        squares = add_square(squares, md, center, in_d, WHOLE)
        spread = add_square(spread, sa, 0.0, in_a, WHOLE)
        spread = add_square(spread, sb, 0.0, in_b, WHOLE)
        spread = add_square(spread, sc, 0.0, in_c, WHOLE)
        spread = add_square(spread, sd, 0.0, in_d, WHOLE)
        # Lifted by 2⁸⁰, the product of two scales is a float down to σ = 1e-31: two logarithms for four of them.
        ab = (or_one(sa, in_a, WHOLE) * 1.2089258196146292e24) * or_one(sb, in_b, WHOLE)
        cd = (or_one(sc, in_c, WHOLE) * 1.2089258196146292e24) * or_one(sd, in_d, WHOLE)
        logs += (log2(ab, FAST) - 80.0) + (log2(cd, FAST) - 80.0)
    to = partial + 3 * tl.program_id(0)
    tl.store(to, tl.sum(squares))
    tl.store(to + 1, tl.sum(spread))
    tl.store(to + 2, tl.sum(logs) * 0.6931471805599453)
