# mypy: ignore-errors
"""Gradients of k-tied weight samples; laid out as ktied.py has it."""

from __future__ import annotations

from slimbayes.accelerate.gpu.programs.ktied_parts import (
    at_lanes,
    columns_v,
    dot,
    exponentials,
    four,
    gather,
    place,
    put,
    row_logs,
)
from slimbayes.accelerate.gpu.programs.language import jit, tl
from slimbayes.accelerate.gpu.programs.rownoise import inverse, row_noise


@jit
def _mean_grad(g, m, twice, center, FORM: tl.constexpr, STATS: tl.constexpr):
    """gM = gW + 2·g₀·(M − center)."""
    total = g.to(tl.float32)
    if FORM == "noise":
        total = tl.zeros(g.shape, tl.float32)
    if STATS:
        total += twice * (m.to(tl.float32) - center)
    return total


@jit
def _slope(
    g, noise, spread, logs, sigma, inside,
    FORM: tl.constexpr, STATS: tl.constexpr, WHOLE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """G = gW∘ε + 2·g₁·σ + g₂/σ."""
    slope = tl.zeros(sigma.shape, tl.float32)
    if FORM != "mean":
        slope = g.to(tl.float32) * noise
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


@jit(do_not_specialize=["m", "stream", "steps"])
def ktied_grad(
    grads, noise_grads, mean, log_u, log_v, d_mean, part_u, part_v, d_stats, seed, m, n, stream, center, steps,
    K: tl.constexpr, FORM: tl.constexpr, STATS: tl.constexpr, BN: tl.constexpr, GAP: tl.constexpr,
    UNROLL: tl.constexpr, WHOLE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """gM of its rows, and their parts of dlog u = u∘(G v) and dlog v = v∘(Gᵀu), G = gW∘ε + 2·g₁·σ + g₂/σ.

    Gᵀu gathers in registers over the rows; G v is one sum over the lanes to a row and a rank.
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
    twice = 2.0 * tl.load(d_stats) if STATS else 0.0
    spread = 2.0 * tl.load(d_stats + 1) if STATS else 0.0
    logs = tl.load(d_stats + 2) if STATS else 0.0
    zero = tl.zeros((BN,), tl.float32)
    ta0, ta1, ta2, ta3 = zero, zero, zero, zero
    tb0, tb1, tb2, tb3 = zero, zero, zero, zero
    tc0, tc1, tc2, tc3 = zero, zero, zero, zero
    td0, td1, td2, td3 = zero, zero, zero, zero
    part_u += (counter // BN).to(tl.int64) * m * K
    last = tl.minimum(row + steps, m) - 1
    at = row * n
    next_ga, next_gb, next_gc, next_gd = four(grads + at, ja, jb, jc, jd, in_a, in_b, in_c, in_d, WHOLE)
    next_ha, next_hb, next_hc, next_hd = next_ga, next_gb, next_gc, next_gd
    if FORM == "both":
        next_ha, next_hb, next_hc, next_hd = four(
            noise_grads + at, ja, jb, jc, jd, in_a, in_b, in_c, in_d, WHOLE
        )
    next_ma, next_mb, next_mc, next_md = zero, zero, zero, zero
    if STATS:
        next_ma, next_mb, next_mc, next_md = four(mean + at, ja, jb, jc, jd, in_a, in_b, in_c, in_d, WHOLE)
    l0, l1, l2, l3 = row_logs(log_u, row, K)
    for step in tl.range(0, last + 1 - row, loop_unroll_factor=UNROLL):
        i = row + step
        ga, gb, gc, gd = next_ga, next_gb, next_gc, next_gd
        ha, hb, hc, hd = next_ha, next_hb, next_hc, next_hd
        ma, mb, mc, md = next_ma, next_mb, next_mc, next_md
        u0, u1, u2, u3 = exponentials(l0, l1, l2, l3, K)
        following = tl.minimum(i + 1, last)
        at = following * n
        next_ga, next_gb, next_gc, next_gd = four(grads + at, ja, jb, jc, jd, in_a, in_b, in_c, in_d, WHOLE)
        next_ha, next_hb, next_hc, next_hd = next_ga, next_gb, next_gc, next_gd
        if FORM == "both":
            next_ha, next_hb, next_hc, next_hd = four(
                noise_grads + at, ja, jb, jc, jd, in_a, in_b, in_c, in_d, WHOLE
            )
        if STATS:
            next_ma, next_mb, next_mc, next_md = four(
                mean + at, ja, jb, jc, jd, in_a, in_b, in_c, in_d, WHOLE
            )
        l0, l1, l2, l3 = row_logs(log_u, following, K)
        target = d_mean + i * n
        put(target, ja, _mean_grad(ga, ma, twice, center, FORM, STATS), in_a, WHOLE)
        put(target, jb, _mean_grad(gb, mb, twice, center, FORM, STATS), in_b, WHOLE)
        put(target, jc, _mean_grad(gc, mc, twice, center, FORM, STATS), in_c, WHOLE)
        put(target, jd, _mean_grad(gd, md, twice, center, FORM, STATS), in_d, WHOLE)
        sa = dot(u0, u1, u2, u3, a0, a1, a2, a3, K)
        sb = dot(u0, u1, u2, u3, b0, b1, b2, b3, K)
        sc = dot(u0, u1, u2, u3, c0, c1, c2, c3, K)
        sd = dot(u0, u1, u2, u3, d0, d1, d2, d3, K)
        ea, eb, ec, ed = sa, sb, sc, sd
        if FORM != "mean":
            ea, eb, ec, ed = row_noise(key, spot, i, stream, FAST)
        ka = _slope(ha, ea, spread, logs, sa, in_a, FORM, STATS, WHOLE, FAST)
        kb = _slope(hb, eb, spread, logs, sb, in_b, FORM, STATS, WHOLE, FAST)
        kc = _slope(hc, ec, spread, logs, sc, in_c, FORM, STATS, WHOLE, FAST)
        kd = _slope(hd, ed, spread, logs, sd, in_d, FORM, STATS, WHOLE, FAST)
        ta0, ta1, ta2, ta3 = gather(ta0, ta1, ta2, ta3, ka, u0, u1, u2, u3, K)
        tb0, tb1, tb2, tb3 = gather(tb0, tb1, tb2, tb3, kb, u0, u1, u2, u3, K)
        tc0, tc1, tc2, tc3 = gather(tc0, tc1, tc2, tc3, kc, u0, u1, u2, u3, K)
        td0, td1, td2, td3 = gather(td0, td1, td2, td3, kd, u0, u1, u2, u3, K)
        to = part_u + i * K
        tl.store(to, u0 * tl.sum(dot(ka, kb, kc, kd, a0, b0, c0, d0, 4)))
        if K > 1:
            tl.store(to + 1, u1 * tl.sum(dot(ka, kb, kc, kd, a1, b1, c1, d1, 4)))
        if K > 2:
            tl.store(to + 2, u2 * tl.sum(dot(ka, kb, kc, kd, a2, b2, c2, d2, 4)))
        if K > 3:
            tl.store(to + 3, u3 * tl.sum(dot(ka, kb, kc, kd, a3, b3, c3, d3, 4)))
    part_v += (row // steps).to(tl.int64) * n * K
    _store_v(part_v, ja, ta0, ta1, ta2, ta3, a0, a1, a2, a3, in_a, K)
    _store_v(part_v, jb, tb0, tb1, tb2, tb3, b0, b1, b2, b3, in_b, K)
    _store_v(part_v, jc, tc0, tc1, tc2, tc3, c0, c1, c2, c3, in_c, K)
    _store_v(part_v, jd, td0, td1, td2, td3, d0, d1, d2, d3, in_d, K)
