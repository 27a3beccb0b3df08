# mypy: ignore-errors
"""Weight samples of k-tied Normals with the sums their KL needs, and their gradients.

A program is one warp. It goes down its rows, one at a time, with the columns in its lanes: V, and backward the
sums over rows, stay in registers; U is a number to a rank and a row; a sum over columns crosses lanes, never
warps. The noise lives in registers too, four numbers to a counter for four blocks of columns (on its 7 rounds
see weights.py).
"""

from __future__ import annotations

from slimbayes.kernels.programs.language import jit, tl
from slimbayes.kernels.programs.rownoise import inverse, log2, row_noise


@jit
def _u(log_u, i, K: tl.constexpr):
    """u of row i, up to four ranks; those over K repeat the first and are never used."""
    first = log_u + i * K
    u0 = tl.exp(tl.load(first).to(tl.float32))
    u1 = u0
    u2 = u0
    u3 = u0
    if K > 1:
        u1 = tl.exp(tl.load(first + 1).to(tl.float32))
    if K > 2:
        u2 = tl.exp(tl.load(first + 2).to(tl.float32))
    if K > 3:
        u3 = tl.exp(tl.load(first + 3).to(tl.float32))
    return u0, u1, u2, u3


@jit
def _v(log_v, j, n, K: tl.constexpr):
    """v of a block of columns, as _u; 1 outside the weight."""
    first = log_v + j * K
    keep = j < n
    v0 = tl.exp(tl.load(first, mask=keep, other=0.0).to(tl.float32))
    v1 = v0
    v2 = v0
    v3 = v0
    if K > 1:
        v1 = tl.exp(tl.load(first + 1, mask=keep, other=0.0).to(tl.float32))
    if K > 2:
        v2 = tl.exp(tl.load(first + 2, mask=keep, other=0.0).to(tl.float32))
    if K > 3:
        v3 = tl.exp(tl.load(first + 3, mask=keep, other=0.0).to(tl.float32))
    return v0, v1, v2, v3


@jit
def _dot(u0, u1, u2, u3, v0, v1, v2, v3, K: tl.constexpr):
    """Σ_a u_a v_a."""
    total = u0 * v0
    if K > 1:
        total += u1 * v1
    if K > 2:
        total += u2 * v2
    if K > 3:
        total += u3 * v3
    return total


@jit
def _gather(t0, t1, t2, t3, g, w0, w1, w2, w3, K: tl.constexpr):
    """t_a + g·w_a for every rank."""
    t0 += g * w0
    if K > 1:
        t1 += g * w1
    if K > 2:
        t2 += g * w2
    if K > 3:
        t3 += g * w3
    return t0, t1, t2, t3


@jit
def _line(pointer, j, inside, WHOLE: tl.constexpr):
    value = tl.load(pointer + j) if WHOLE else tl.load(pointer + j, mask=inside, other=0.0)
    return value.to(tl.float32)


@jit
def _put(pointer, j, value, inside, WHOLE: tl.constexpr):
    value = value.to(pointer.dtype.element_ty)
    if WHOLE:
        tl.store(pointer + j, value)
    else:
        tl.store(pointer + j, value, mask=inside)


@jit
def _squares(total, m, center, inside, WHOLE: tl.constexpr):
    shift = m - center
    if not WHOLE:
        shift = tl.where(inside, shift, 0.0)
    return total + shift * shift


@jit
def _or_one(sigma, inside, WHOLE: tl.constexpr):
    return sigma if WHOLE else tl.where(inside, sigma, 1.0)


@jit
def _place(n, BN: tl.constexpr, GAP: tl.constexpr, STEPS: tl.constexpr):
    """This program's first row, its place in the counter's order, and its first column.

    A run of 4·GAP columns has one counter for the columns c, c + GAP, c + 2·GAP and c + 3·GAP.
    """
    pid = tl.program_id(0)
    blocks = tl.cdiv(n, 4 * GAP) * (GAP // BN)
    block = pid % blocks
    column = (block // (GAP // BN)) * (4 * GAP) + (block % (GAP // BN)) * BN
    return (pid // blocks) * STEPS, block * BN, column


@jit
def _spot(counter, v):
    """The counter, unchanged, for no v is negative.

    It now has a loaded block's place in the threads, and so has the noise: else every row of it would move from
    the compiler's own choice to that of the loads through shared memory.
    """
    return tl.where(v < 0.0, 0, counter)


@jit(do_not_specialize=["m", "stream"])
def ktied_sample(
    mean, log_u, log_v, out, partial, seed, m, n, stream, center,
    K: tl.constexpr, ADD: tl.constexpr, BN: tl.constexpr, GAP: tl.constexpr, STEPS: tl.constexpr,
    UNROLL: tl.constexpr, WHOLE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """W = M + (U Vᵀ)∘ε on STEPS rows of four blocks of BN columns; the sums go to ``partial``.

    A row at a time, and its columns in the lanes: V stays in registers, U is a number to a rank.
    """
    row, counter, first = _place(n, BN, GAP, STEPS)
    lane = tl.arange(0, BN)
    ja = first + lane
    jb = ja + GAP
    jc = ja + 2 * GAP
    jd = ja + 3 * GAP
    in_a, in_b, in_c, in_d = ja < n, jb < n, jc < n, jd < n
    a0, a1, a2, a3 = _v(log_v, ja, n, K)
    b0, b1, b2, b3 = _v(log_v, jb, n, K)
    c0, c1, c2, c3 = _v(log_v, jc, n, K)
    d0, d1, d2, d3 = _v(log_v, jd, n, K)
    spot = _spot(counter + lane, a0)
    key = tl.load(seed)
    squares = tl.zeros((BN,), tl.float32)
    spread = tl.zeros((BN,), tl.float32)
    logs = tl.zeros((BN,), tl.float32)
    for step in tl.range(0, tl.minimum(STEPS, m - row), loop_unroll_factor=UNROLL):
        i = row + step
        source = mean + i * n
        ma = _line(source, ja, in_a, WHOLE)
        mb = _line(source, jb, in_b, WHOLE)
        mc = _line(source, jc, in_c, WHOLE)
        md = _line(source, jd, in_d, WHOLE)
        u0, u1, u2, u3 = _u(log_u, i, K)
        ea, eb, ec, ed = row_noise(key, spot, i, stream, FAST)
        sa = _dot(u0, u1, u2, u3, a0, a1, a2, a3, K)
        sb = _dot(u0, u1, u2, u3, b0, b1, b2, b3, K)
        sc = _dot(u0, u1, u2, u3, c0, c1, c2, c3, K)
        sd = _dot(u0, u1, u2, u3, d0, d1, d2, d3, K)
        target = out + i * n
        _put(target, ja, ma + sa * ea if ADD else sa * ea, in_a, WHOLE)
        _put(target, jb, mb + sb * eb if ADD else sb * eb, in_b, WHOLE)
        _put(target, jc, mc + sc * ec if ADD else sc * ec, in_c, WHOLE)
        _put(target, jd, md + sd * ed if ADD else sd * ed, in_d, WHOLE)
        squares = _squares(squares, ma, center, in_a, WHOLE)
        squares = _squares(squares, mb, center, in_b, WHOLE)
        squares = _squares(squares, mc, center, in_c, WHOLE)
        squares = _squares(squares, md, center, in_d, WHOLE)
        spread = _squares(spread, sa, 0.0, in_a, WHOLE)
        spread = _squares(spread, sb, 0.0, in_b, WHOLE)
        spread = _squares(spread, sc, 0.0, in_c, WHOLE)
        spread = _squares(spread, sd, 0.0, in_d, WHOLE)
        # Lifted by 2⁸⁰, the product of two scales is a float down to σ = 1e-31: two logarithms for four of them.
        ab = (_or_one(sa, in_a, WHOLE) * 1.2089258196146292e24) * _or_one(sb, in_b, WHOLE)
        cd = (_or_one(sc, in_c, WHOLE) * 1.2089258196146292e24) * _or_one(sd, in_d, WHOLE)
        logs += (log2(ab, FAST) - 80.0) + (log2(cd, FAST) - 80.0)
    to = partial + 3 * tl.program_id(0)
    tl.store(to, tl.sum(squares))
    tl.store(to + 1, tl.sum(spread))
    tl.store(to + 2, tl.sum(logs) * 0.6931471805599453)


@jit
def _mean_grad(g, m, twice, center, ADD: tl.constexpr, STATS: tl.constexpr):
    """gM = gW + 2·g₀·(M − center)."""
    total = g if ADD else tl.zeros(g.shape, tl.float32)
    if STATS:
        total += twice * (m - center)
    return total


@jit
def _slope(
    g, noise, spread, logs, sigma, inside, STATS: tl.constexpr, WHOLE: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """G = gW∘ε + 2·g₁·σ + g₂/σ."""
    slope = g * noise
    if STATS:
        rest = spread * sigma + logs * inverse(sigma, FAST)
        slope += rest if WHOLE else tl.where(inside, rest, 0.0)
    return slope


@jit
def _store_v(to, j, t0, t1, t2, t3, v0, v1, v2, v3, inside, K: tl.constexpr):
    to += j * K
    tl.store(to, t0 * v0, mask=inside)
    if K > 1:
        tl.store(to + 1, t1 * v1, mask=inside)
    if K > 2:
        tl.store(to + 2, t2 * v2, mask=inside)
    if K > 3:
        tl.store(to + 3, t3 * v3, mask=inside)


@jit(do_not_specialize=["m", "stream"])
def ktied_grad(
    grads, mean, log_u, log_v, d_mean, part_u, part_v, d_stats, seed, m, n, stream, center,
    K: tl.constexpr, ADD: tl.constexpr, STATS: tl.constexpr, BN: tl.constexpr, GAP: tl.constexpr,
    STEPS: tl.constexpr, UNROLL: tl.constexpr, WHOLE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """gM of STEPS rows, and their parts of dlog u = u∘(G v) and dlog v = v∘(Gᵀu), G = gW∘ε + 2·g₁·σ + g₂/σ.

    Gᵀu gathers in registers over the rows; G v is one sum over the lanes to a row and a rank.
    """
    row, counter, first = _place(n, BN, GAP, STEPS)
    lane = tl.arange(0, BN)
    ja = first + lane
    jb = ja + GAP
    jc = ja + 2 * GAP
    jd = ja + 3 * GAP
    in_a, in_b, in_c, in_d = ja < n, jb < n, jc < n, jd < n
    a0, a1, a2, a3 = _v(log_v, ja, n, K)
    b0, b1, b2, b3 = _v(log_v, jb, n, K)
    c0, c1, c2, c3 = _v(log_v, jc, n, K)
    d0, d1, d2, d3 = _v(log_v, jd, n, K)
    spot = _spot(counter + lane, a0)
    key = tl.load(seed)
    twice = 2.0 * tl.load(d_stats) if STATS else 0.0
    spread = 2.0 * tl.load(d_stats + 1) if STATS else 0.0
    logs = tl.load(d_stats + 2) if STATS else 0.0
    zero = tl.zeros((BN,), tl.float32)
    ta0, ta1, ta2, ta3 = zero, zero, zero, zero
    tb0, tb1, tb2, tb3 = zero, zero, zero, zero
    tc0, tc1, tc2, tc3 = zero, zero, zero, zero
    td0, td1, td2, td3 = zero, zero, zero, zero
    part_u += (counter // BN).to(tl.int64) * m * K
    for step in tl.range(0, tl.minimum(STEPS, m - row), loop_unroll_factor=UNROLL):
        i = row + step
        source = grads + i * n
        ga = _line(source, ja, in_a, WHOLE)
        gb = _line(source, jb, in_b, WHOLE)
        gc = _line(source, jc, in_c, WHOLE)
        gd = _line(source, jd, in_d, WHOLE)
        ma, mb, mc, md = zero, zero, zero, zero
        if STATS:
            other = mean + i * n
            ma = _line(other, ja, in_a, WHOLE)
            mb = _line(other, jb, in_b, WHOLE)
            mc = _line(other, jc, in_c, WHOLE)
            md = _line(other, jd, in_d, WHOLE)
        u0, u1, u2, u3 = _u(log_u, i, K)
        ea, eb, ec, ed = row_noise(key, spot, i, stream, FAST)
        target = d_mean + i * n
        _put(target, ja, _mean_grad(ga, ma, twice, center, ADD, STATS), in_a, WHOLE)
        _put(target, jb, _mean_grad(gb, mb, twice, center, ADD, STATS), in_b, WHOLE)
        _put(target, jc, _mean_grad(gc, mc, twice, center, ADD, STATS), in_c, WHOLE)
        _put(target, jd, _mean_grad(gd, md, twice, center, ADD, STATS), in_d, WHOLE)
        sa = _dot(u0, u1, u2, u3, a0, a1, a2, a3, K)
        sb = _dot(u0, u1, u2, u3, b0, b1, b2, b3, K)
        sc = _dot(u0, u1, u2, u3, c0, c1, c2, c3, K)
        sd = _dot(u0, u1, u2, u3, d0, d1, d2, d3, K)
        ga = _slope(ga, ea, spread, logs, sa, in_a, STATS, WHOLE, FAST)
        gb = _slope(gb, eb, spread, logs, sb, in_b, STATS, WHOLE, FAST)
        gc = _slope(gc, ec, spread, logs, sc, in_c, STATS, WHOLE, FAST)
        gd = _slope(gd, ed, spread, logs, sd, in_d, STATS, WHOLE, FAST)
        ta0, ta1, ta2, ta3 = _gather(ta0, ta1, ta2, ta3, ga, u0, u1, u2, u3, K)
        tb0, tb1, tb2, tb3 = _gather(tb0, tb1, tb2, tb3, gb, u0, u1, u2, u3, K)
        tc0, tc1, tc2, tc3 = _gather(tc0, tc1, tc2, tc3, gc, u0, u1, u2, u3, K)
        td0, td1, td2, td3 = _gather(td0, td1, td2, td3, gd, u0, u1, u2, u3, K)
        to = part_u + i * K
        tl.store(to, u0 * tl.sum(_dot(ga, gb, gc, gd, a0, b0, c0, d0, 4)))
        if K > 1:
            tl.store(to + 1, u1 * tl.sum(_dot(ga, gb, gc, gd, a1, b1, c1, d1, 4)))
        if K > 2:
            tl.store(to + 2, u2 * tl.sum(_dot(ga, gb, gc, gd, a2, b2, c2, d2, 4)))
        if K > 3:
            tl.store(to + 3, u3 * tl.sum(_dot(ga, gb, gc, gd, a3, b3, c3, d3, 4)))
    part_v += (row // STEPS).to(tl.int64) * n * K
    _store_v(part_v, ja, ta0, ta1, ta2, ta3, a0, a1, a2, a3, in_a, K)
    _store_v(part_v, jb, tb0, tb1, tb2, tb3, b0, b1, b2, b3, in_b, K)
    _store_v(part_v, jc, tc0, tc1, tc2, tc3, c0, c1, c2, c3, in_c, K)
    _store_v(part_v, jd, td0, td1, td2, td3, d0, d1, d2, d3, in_d, K)
