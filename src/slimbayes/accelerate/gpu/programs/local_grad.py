# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton adds tuples, and has no stars in them)
"""Gradients of local noise; laid out as local.py has it."""

from __future__ import annotations

from slimbayes.accelerate.gpu.programs.ktied_parts import four, line, place, put
from slimbayes.accelerate.gpu.programs.language import jit, tl
from slimbayes.accelerate.gpu.programs.local import (
    columns,
    dot,
    gather,
    in_lanes,
    local_normals,
    numbers,
    row_sums,
    vector,
    zeros,
)


@jit
def _inverse_root(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        return 1.0 / tl.sqrt(tl.where(x < 1.1754943508222875e-38, 1.1754943508222875e-38, x))


@jit(do_not_specialize=["R", "steps"])
def thin_grad(
    x, a, d_thin, dx, part_a, R, n, steps,
    P: tl.constexpr, DX: tl.constexpr, BN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dx = 2x∘(dT Aᵀ) of its rows and BN columns, and their part of dA = (x∘x)ᵀ dT, into [blocks, P, n]."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(n, BN)
    row = (pid // blocks) * steps
    j = (pid % blocks) * BN + tl.arange(0, BN)
    inside = j < n
    a_columns = columns(a, j, inside, P)
    zero = tl.zeros((BN,), tl.float32)
    sums = zeros(zero, P)
    last = tl.minimum(row + steps, R) - 1
    following = line(x + row * n, j, inside, WHOLE)
    following_t = numbers(d_thin, row, P)
    for step in tl.range(0, last + 1 - row):
        i = row + step
        value = following.to(tl.float32)
        t = following_t
        following = line(x + tl.minimum(i + 1, last) * n, j, inside, WHOLE)
        following_t = numbers(d_thin, tl.minimum(i + 1, last), P)
        sums = gather(sums, value * value, t, P)
        if DX:
            put(dx + i * n, j, 2.0 * value * dot(zero, t, a_columns, P), inside, WHOLE)
    part_a += (pid // blocks).to(tl.int64) * n * P
    for p in tl.static_range(0, P):
        tl.store(part_a + p * n + j, sums[p], mask=inside)


@jit
def _twice(columns, Q: tl.constexpr):
    found = (2.0 * columns[0],)
    for q in tl.static_range(1, Q):
        found = found + (2.0 * columns[q],)
    return found


@jit
def _before(g, z, u, a, zero, Q: tl.constexpr, RELU: tl.constexpr):
    """The gradient of z = relu(y + …): what comes with z itself, and 2z∘(dT Aᵀ) from the next product's T (a is 2A)."""
    total = g.to(tl.float32)
    if Q > 0:
        total += z * dot(zero, u, a, Q)
    if RELU:
        total = tl.where(z <= 0.0, 0.0, total)
    return total


@jit
def _slope(g, noise, first, t, b, P: tl.constexpr, FAST: tl.constexpr):
    """2h = g∘ε/√variance; a clamped variance has no slope."""
    variance = dot(first, t, b, P)
    slope = g * noise * _inverse_root(variance, FAST)
    return tl.where(variance <= 1.1754943508222875e-38, 0.0, slope)


@jit
def _store_sums(
    to, j, sums, rest, shift, m, inside, P: tl.constexpr, EXTRA: tl.constexpr, BIAS: tl.constexpr
):
    """The halves of the sums of 2h, and the sum of g."""
    for p in tl.static_range(0, P):
        tl.store(to + p * m + j, 0.5 * sums[p], mask=inside)
    if EXTRA:
        tl.store(to + P * m + j, 0.5 * rest, mask=inside)
    if BIAS:
        tl.store(to + (P + 1 if EXTRA else P) * m + j, shift, mask=inside)


@jit
def _store_a(to, j, sums, m, inside, Q: tl.constexpr):
    for q in tl.static_range(0, Q):
        tl.store(to + q * m + j, sums[q], mask=inside)


@jit(do_not_specialize=["R", "stream", "steps"])
def noisy_grad(
    grads, d_next, out, t, b, extra, next_a, dy, part_t, part_b, part_a, seed, R, m, stream, steps,
    P: tl.constexpr, Q: tl.constexpr, EXTRA: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
    BN: tl.constexpr, GAP: tl.constexpr, UNROLL: tl.constexpr, WHOLE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """dy, and the parts of dT = h B [blocks, R, P], of dB = hᵀT, Σ h and Σ dy [blocks, P + …, m], of dA [blocks, Q, m].

    h = dy∘ε/(2√variance). Without a ReLU and a next product dy is the gradient that came, and is not stored.
    """
    row, counter, first = place(m, steps, BN, GAP)
    lane = tl.arange(0, BN)
    ja = first + lane
    jb = ja + GAP
    jc = ja + 2 * GAP
    jd = ja + 3 * GAP
    in_a, in_b, in_c, in_d = ja < m, jb < m, jc < m, jd < m
    ba = columns(b, ja, in_a, P)
    bb = columns(b, jb, in_b, P)
    bc = columns(b, jc, in_c, P)
    bd = columns(b, jd, in_d, P)
    xa = vector(extra, ja, in_a, EXTRA)
    xb = vector(extra, jb, in_b, EXTRA)
    xc = vector(extra, jc, in_c, EXTRA)
    xd = vector(extra, jd, in_d, EXTRA)
    spot = in_lanes(counter + lane, ba[0])
    key = tl.load(seed)
    zero = tl.zeros((BN,), tl.float32)
    ra, rb, rc, rd = zero, zero, zero, zero
    ya, yb, yc, yd = zero, zero, zero, zero
    sa = zeros(zero, P)
    sb, sc, sd = sa, sa, sa
    na, nb, nc, nd = ba, bb, bc, bd
    wa = sa
    if Q > 0:
        na = columns(next_a, ja, in_a, Q)
        nb = columns(next_a, jb, in_b, Q)
        nc = columns(next_a, jc, in_c, Q)
        nd = columns(next_a, jd, in_d, Q)
        na, nb, nc, nd = _twice(na, Q), _twice(nb, Q), _twice(nc, Q), _twice(nd, Q)
        wa = zeros(zero, Q)
    wb, wc, wd = wa, wa, wa
    part_t += (counter // BN).to(tl.int64) * R * P
    last = tl.minimum(row + steps, R) - 1
    at = row * m
    next_ga, next_gb, next_gc, next_gd = four(grads + at, ja, jb, jc, jd, in_a, in_b, in_c, in_d, WHOLE)
    next_za, next_zb, next_zc, next_zd = next_ga, next_gb, next_gc, next_gd
    if RELU or Q > 0:
        next_za, next_zb, next_zc, next_zd = four(out + at, ja, jb, jc, jd, in_a, in_b, in_c, in_d, WHOLE)
    next_t = numbers(t, row, P)
    next_u = next_t
    if Q > 0:
        next_u = numbers(d_next, row, Q)
    for step in tl.range(0, last + 1 - row, loop_unroll_factor=UNROLL):
        i = row + step
        row_t = next_t
        row_u = next_u
        ga, gb, gc, gd = next_ga, next_gb, next_gc, next_gd
        za, zb, zc, zd = next_za, next_zb, next_zc, next_zd
        following = tl.minimum(i + 1, last)
        at = following * m
        next_ga, next_gb, next_gc, next_gd = four(grads + at, ja, jb, jc, jd, in_a, in_b, in_c, in_d, WHOLE)
        if RELU or Q > 0:
            next_za, next_zb, next_zc, next_zd = four(out + at, ja, jb, jc, jd, in_a, in_b, in_c, in_d, WHOLE)
        next_t = numbers(t, following, P)
        if Q > 0:
            next_u = numbers(d_next, following, Q)
        za, zb, zc, zd = za.to(tl.float32), zb.to(tl.float32), zc.to(tl.float32), zd.to(tl.float32)
        ga = _before(ga, za, row_u, na, zero, Q, RELU)
        gb = _before(gb, zb, row_u, nb, zero, Q, RELU)
        gc = _before(gc, zc, row_u, nc, zero, Q, RELU)
        gd = _before(gd, zd, row_u, nd, zero, Q, RELU)
        if RELU or Q > 0:
            target = dy + i * m
            put(target, ja, ga, in_a, WHOLE)
            put(target, jb, gb, in_b, WHOLE)
            put(target, jc, gc, in_c, WHOLE)
            put(target, jd, gd, in_d, WHOLE)
        if Q > 0:
            wa = gather(wa, za * za, row_u, Q)
            wb = gather(wb, zb * zb, row_u, Q)
            wc = gather(wc, zc * zc, row_u, Q)
            wd = gather(wd, zd * zd, row_u, Q)
        if BIAS:
            ya += ga
            yb += gb
            yc += gc
            yd += gd
        ea, eb, ec, ed = local_normals(key, spot, i, stream, FAST)
        ha = _slope(ga, ea, xa, row_t, ba, P, FAST)
        hb = _slope(gb, eb, xb, row_t, bb, P, FAST)
        hc = _slope(gc, ec, xc, row_t, bc, P, FAST)
        hd = _slope(gd, ed, xd, row_t, bd, P, FAST)
        sa = gather(sa, ha, row_t, P)
        sb = gather(sb, hb, row_t, P)
        sc = gather(sc, hc, row_t, P)
        sd = gather(sd, hd, row_t, P)
        if EXTRA:
            ra += ha
            rb += hb
            rc += hc
            rd += hd
        row_sums(part_t + i * P, ha, hb, hc, hd, ba, bb, bc, bd, 0.5, P)
    lines: tl.constexpr = P + (1 if EXTRA else 0) + (1 if BIAS else 0)
    part_b += (row // steps).to(tl.int64) * m * lines
    _store_sums(part_b, ja, sa, ra, ya, m, in_a, P, EXTRA, BIAS)
    _store_sums(part_b, jb, sb, rb, yb, m, in_b, P, EXTRA, BIAS)
    _store_sums(part_b, jc, sc, rc, yc, m, in_c, P, EXTRA, BIAS)
    _store_sums(part_b, jd, sd, rd, yd, m, in_d, P, EXTRA, BIAS)
    if Q > 0:
        part_a += (row // steps).to(tl.int64) * m * Q
        _store_a(part_a, ja, wa, m, in_a, Q)
        _store_a(part_a, jb, wb, m, in_b, Q)
        _store_a(part_a, jc, wc, m, in_c, Q)
        _store_a(part_a, jd, wd, m, in_d, Q)
