# mypy: ignore-errors
"""BatchNorm beside a residual sum: the sum, the factors on both sides of it and the sums over positions in one sweep.

Memory is [R, P, C], channels last, as in ``programs.norm``, whose other programs these go with. Rows may be
cut in S pieces, as there: then a row is a piece, P the positions of one, and R the number of whole rows.
"""

from __future__ import annotations

from slimbayes.accelerate.gpu.programs.language import jit, tl
from slimbayes.accelerate.gpu.programs.norm import _factor


@jit(do_not_specialize=["S", "has_q"])
def sum_moments(
    y, r, x, q, v, mean, m2, P, C, S, has_q, BP: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr
):
    """v = r∘y + q∘x, with mean and sum of squared deviations of v over the positions of one row."""
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    c_blocks = tl.cdiv(C, BC)
    row = pid // c_blocks
    c = (pid % c_blocks) * BC + tl.arange(0, BC)
    keep = c < C
    at = row.to(tl.int64) * C + c
    whole = (row // S).to(tl.int64) * C + c
    own = _factor(r, whole, keep, 1)
    other = _factor(q, whole, keep, has_q)
    base = row.to(tl.int64) * P * C
    pivot = tl.load(y + base + c, mask=keep, other=0.0).to(tl.float32) * own
    pivot += tl.load(x + base + c, mask=keep, other=0.0).to(tl.float32) * other
    first = tl.zeros((BP, BC), dtype=tl.float32)
    second = tl.zeros((BP, BC), dtype=tl.float32)
    for start in tl.range(0, P, BP, num_stages=STAGES):
        p = start + tl.arange(0, BP)
        inside = (p < P)[:, None] & keep[None, :]
        where = p[:, None] * C + c[None, :]
        value = tl.load(y + base + where, mask=inside, other=0.0).to(tl.float32) * own[None, :]
        value += tl.load(x + base + where, mask=inside, other=0.0).to(tl.float32) * other[None, :]
        kept = value.to(v.dtype.element_ty)
        tl.store(v + base + where, kept, mask=inside)
        delta = tl.where(inside, kept.to(tl.float32) - pivot[None, :], 0.0)  # of what later sweeps will read
        first += delta
        second += delta * delta
    a = tl.sum(first, axis=0)
    b = tl.sum(second, axis=0)
    tl.store(mean + at, pivot + a / P, mask=keep)
    tl.store(m2 + at, b - a * a / P, mask=keep)


@jit(do_not_specialize=["R", "S", "has_g", "has_q", "has_s", "relu"])
def sum_gradient(
    gu, gv, y, r, x, q, v, s, mean, var, weight, bias, gw, gb, gy, gx, gr, gq, R, P, C, S, eps,
    has_g, has_q, has_s, relu, BP: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of v = r∘y + q∘x, that of its other readers included, on to both sides: gy, gx, gr and gq."""
    pid = tl.program_id(0)
    c_blocks = tl.cdiv(C, BC)
    row = pid // c_blocks
    c = (pid % c_blocks) * BC + tl.arange(0, BC)
    keep = c < C
    at = row.to(tl.int64) * C + c
    whole = (row // S).to(tl.int64) * C + c
    own = _factor(r, whole, keep, 1)[None, :]
    other = _factor(q, whole, keep, has_q)[None, :]
    behind = _factor(s, whole, keep, has_s)[None, :]
    inverse = 1.0 / tl.sqrt(tl.load(var + c, mask=keep, other=1.0) + eps)
    center = tl.load(mean + c, mask=keep, other=0.0)
    gain = tl.load(weight + c, mask=keep, other=0.0) * inverse
    offset = (tl.load(bias + c, mask=keep, other=0.0) - center * gain)[None, :]
    scale = 1.0 / R / S / P
    common = (tl.load(gb + c, mask=keep, other=0.0) * scale)[None, :]
    along = (tl.load(gw + c, mask=keep, other=0.0) * scale * inverse)[None, :]
    gain = gain[None, :]
    base = row.to(tl.int64) * P * C
    own_sum = tl.zeros((BP, BC), dtype=tl.float32)
    other_sum = tl.zeros((BP, BC), dtype=tl.float32)
    for start in tl.range(0, P, BP, num_stages=STAGES):
        p = start + tl.arange(0, BP)
        inside = (p < P)[:, None] & keep[None, :]
        where = p[:, None] * C + c[None, :]
        value = tl.load(v + base + where, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(gu + base + where, mask=inside, other=0.0).to(tl.float32)
        # The same expression as in the other sweeps, so that all agree on where the ReLU is open.
        grad = tl.where((value * gain + offset > 0.0) | (relu == 0), grad, 0.0)
        total = gain * (grad * behind - common - (value - center[None, :]) * along)
        total += tl.load(gv + base + where, mask=inside & (has_g != 0), other=0.0).to(tl.float32)
        own_sum += total * tl.load(y + base + where, mask=inside, other=0.0).to(tl.float32)
        other_sum += total * tl.load(x + base + where, mask=inside & (has_q != 0), other=0.0).to(tl.float32)
        tl.store(gy + base + where, (total * own).to(gy.dtype.element_ty), mask=inside)
        tl.store(gx + base + where, (total * other).to(gx.dtype.element_ty), mask=inside)
    tl.store(gr + at, tl.sum(own_sum, axis=0).to(gr.dtype.element_ty), mask=keep)
    tl.store(gq + at, tl.sum(other_sum, axis=0).to(gq.dtype.element_ty), mask=keep & (has_q != 0))


@jit(do_not_specialize=["has_r", "has_s", "has_t", "relu"])
def normalize_sum(
    y, r, x, s, t, mean, var, weight, bias, z, u, w, P, C, eps, has_r, has_s, has_t, relu,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """z = relu((r∘y − mean)/√(var + eps)·weight + bias + x), u = z∘s and w = z∘t, one tile of one row."""
    pid = tl.program_id(0)
    p_blocks = tl.cdiv(P, BP)
    c_blocks = tl.cdiv(C, BC)
    row = (pid // p_blocks) // c_blocks
    c = ((pid // p_blocks) % c_blocks) * BC + tl.arange(0, BC)
    p = (pid % p_blocks) * BP + tl.arange(0, BP)
    keep = c < C
    at = row.to(tl.int64) * C + c
    gain = tl.load(weight + c, mask=keep, other=0.0) / tl.sqrt(tl.load(var + c, mask=keep, other=1.0) + eps)
    slope = (_factor(r, at, keep, has_r) * gain)[None, :]
    offset = tl.load(bias + c, mask=keep, other=0.0) - tl.load(mean + c, mask=keep, other=0.0) * gain
    base = row.to(tl.int64) * P * C
    where = p[:, None] * C + c[None, :]
    inside = (p < P)[:, None] & keep[None, :]
    value = tl.load(y + base + where, mask=inside, other=0.0).to(tl.float32) * slope + offset[None, :]
    value += tl.load(x + base + where, mask=inside, other=0.0).to(tl.float32)
    value = tl.where((relu != 0) & (value < 0.0), 0.0, value)  # keeps what is not a number
    kept = value.to(z.dtype.element_ty)
    tl.store(z + base + where, kept, mask=inside)
    value = kept.to(tl.float32)
    first = _factor(s, at, keep, has_s)[None, :]
    second = _factor(t, at, keep, has_t)[None, :]
    tl.store(u + base + where, (value * first).to(u.dtype.element_ty), mask=inside & (has_s != 0))
    tl.store(w + base + where, (value * second).to(w.dtype.element_ty), mask=inside & (has_t != 0))


@jit(do_not_specialize=["RC", "S", "has_g", "has_s", "has_t", "relu"])
def summed_gradients(
    gz, gu, gw, z, y, s, t, row_mean, g, gs, gt, sums, P, C, RC, S, has_g, has_s, has_t, relu,
    BP: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """g = (gz + gu∘s + gw∘t) where the ReLU is open, Σ gu∘z, Σ gw∘z, Σ g and Σ g(y − mean of the row), for one row."""
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    c_blocks = tl.cdiv(C, BC)
    row = pid // c_blocks
    c = (pid % c_blocks) * BC + tl.arange(0, BC)
    keep = c < C
    at = row.to(tl.int64) * C + c
    whole = (row // S).to(tl.int64) * C + c
    one = _factor(s, whole, keep, has_s)[None, :]
    two = _factor(t, whole, keep, has_t)[None, :]
    center = tl.load(row_mean + at, mask=keep, other=0.0)[None, :]
    base = row.to(tl.int64) * P * C
    s_sum = tl.zeros((BP, BC), dtype=tl.float32)
    t_sum = tl.zeros((BP, BC), dtype=tl.float32)
    first = tl.zeros((BP, BC), dtype=tl.float32)
    second = tl.zeros((BP, BC), dtype=tl.float32)
    for start in tl.range(0, P, BP, num_stages=STAGES):
        p = start + tl.arange(0, BP)
        inside = (p < P)[:, None] & keep[None, :]
        where = p[:, None] * C + c[None, :]
        value = tl.load(z + base + where, mask=inside, other=0.0).to(tl.float32)
        total = tl.load(gz + base + where, mask=inside & (has_g != 0), other=0.0).to(tl.float32)
        inner = tl.load(gu + base + where, mask=inside & (has_s != 0), other=0.0).to(tl.float32)
        s_sum += inner * value
        total += inner * one
        inner = tl.load(gw + base + where, mask=inside & (has_t != 0), other=0.0).to(tl.float32)
        t_sum += inner * value
        total += inner * two
        kept = tl.where((value > 0.0) | (relu == 0), total, 0.0).to(g.dtype.element_ty)
        tl.store(g + base + where, kept, mask=inside)
        passed = kept.to(tl.float32)
        before = tl.load(y + base + where, mask=inside, other=0.0).to(tl.float32)
        first += passed
        second += passed * (before - center)
    tl.store(gs + at, tl.sum(s_sum, axis=0).to(gs.dtype.element_ty), mask=keep & (has_s != 0))
    tl.store(gt + at, tl.sum(t_sum, axis=0).to(gt.dtype.element_ty), mask=keep & (has_t != 0))
    tl.store(sums + at, tl.sum(first, axis=0), mask=keep)
    tl.store(sums + RC + at, tl.sum(second, axis=0), mask=keep)
