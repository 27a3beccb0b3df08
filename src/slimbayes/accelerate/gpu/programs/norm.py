# mypy: ignore-errors
"""BatchNorm of rows with a factor before it and, after an optional ReLU, a factor behind it.

Memory is [R, P, C], channels last; P counts spatial positions. Sums over the positions of one row are the only
sweeps over the activations: everything else, the factors' gradients included, is arithmetic on [R, C].

The sweeps that only sum go from the last program to the first: what the operation before has written last, and what
the next sweep reads first, is then still in the cache.

Where rows are few, those sweeps take each row in S equal pieces: to them R counts pieces, P the positions of one,
and the factors of piece n are those of row n // S.
"""

from __future__ import annotations

from slimbayes.accelerate.gpu.programs.language import jit, tl


@jit
def _factor(f, at, mask, has):
    """The factor, or 1 where there is none: a flag at run time, so that one compiled program serves all cases."""
    return tl.load(f + at, mask=mask & (has != 0), other=1.0).to(tl.float32)


@jit
def moments(y, mean, m2, P, C, BP: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr):
    """Mean and sum of squared deviations over the positions of one row, for BC channels."""
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    c_blocks = tl.cdiv(C, BC)
    row = pid // c_blocks
    c = (pid % c_blocks) * BC + tl.arange(0, BC)
    keep = c < C
    base = row.to(tl.int64) * P * C
    pivot = tl.load(y + base + c, mask=keep, other=0.0).to(tl.float32)  # keeps the squares small
    first = tl.zeros((BP, BC), dtype=tl.float32)
    second = tl.zeros((BP, BC), dtype=tl.float32)
    for start in tl.range(0, P, BP, num_stages=STAGES):
        p = start + tl.arange(0, BP)
        inside = (p < P)[:, None] & keep[None, :]
        value = tl.load(y + base + p[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
        delta = tl.where(inside, value - pivot[None, :], 0.0)
        first += delta
        second += delta * delta
    a = tl.sum(first, axis=0)
    b = tl.sum(second, axis=0)
    at = row.to(tl.int64) * C + c
    tl.store(mean + at, pivot + a / P, mask=keep)
    tl.store(m2 + at, b - a * a / P, mask=keep)


@jit(do_not_specialize=["R", "S", "has_r"])
def statistics(mean, m2, r, out_mean, out_var, R, P, C, S, has_r, BR: tl.constexpr, BC: tl.constexpr):
    """Mean and variance of r∘y over all rows and positions, from the rows' own."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    keep = c < C
    total = tl.zeros((BR, BC), dtype=tl.float32)
    for start in range(0, R, BR):
        n = start + tl.arange(0, BR)
        inside = (n < R)[:, None] & keep[None, :]
        at = n[:, None].to(tl.int64) * C + c[None, :]
        factor = _factor(r, (n // S)[:, None].to(tl.int64) * C + c[None, :], inside, has_r)
        total += factor * tl.load(mean + at, mask=inside, other=0.0)
    center = tl.sum(total, axis=0) / R
    square = tl.zeros((BR, BC), dtype=tl.float32)
    for start in range(0, R, BR):
        n = start + tl.arange(0, BR)
        inside = (n < R)[:, None] & keep[None, :]
        at = n[:, None].to(tl.int64) * C + c[None, :]
        factor = _factor(r, (n // S)[:, None].to(tl.int64) * C + c[None, :], inside, has_r)
        shift = factor * tl.load(mean + at, mask=inside, other=0.0) - center[None, :]
        own = factor * factor * tl.load(m2 + at, mask=inside, other=0.0) + P * shift * shift
        square += tl.where(inside, own, 0.0)
    tl.store(out_mean + c, center, mask=keep)
    tl.store(out_var + c, tl.sum(square, axis=0) / R / P, mask=keep)


@jit(do_not_specialize=["has_r", "has_s", "relu"])
def normalize(
    y, r, s, mean, var, weight, bias, u, P, C, eps, has_r, has_s, relu,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """u = relu((r∘y − mean)/√(var + eps)·weight + bias)∘s, one tile of one row."""
    pid = tl.program_id(0)
    p_blocks = tl.cdiv(P, BP)
    c_blocks = tl.cdiv(C, BC)
    row = (pid // p_blocks) // c_blocks
    c = ((pid // p_blocks) % c_blocks) * BC + tl.arange(0, BC)
    p = (pid % p_blocks) * BP + tl.arange(0, BP)
    keep = c < C
    at = row.to(tl.int64) * C + c
    before = _factor(r, at, keep, has_r)
    gain = tl.load(weight + c, mask=keep, other=0.0) / tl.sqrt(tl.load(var + c, mask=keep, other=1.0) + eps)
    slope = (before * gain)[None, :]
    offset = tl.load(bias + c, mask=keep, other=0.0) - tl.load(mean + c, mask=keep, other=0.0) * gain
    base = row.to(tl.int64) * P * C
    where = p[:, None] * C + c[None, :]
    inside = (p < P)[:, None] & keep[None, :]
    z = tl.load(y + base + where, mask=inside, other=0.0).to(tl.float32) * slope + offset[None, :]
    z = tl.where((relu != 0) & (z < 0.0), 0.0, z)  # not a maximum, which would hide what is not a number
    z *= _factor(s, at, keep, has_s)[None, :]
    tl.store(u + base + where, z.to(u.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["RC", "S", "has_r", "relu"])
def gradient_sums(
    g, y, r, row_mean, mean, var, weight, bias, sums, P, C, eps, RC, S, has_r, relu,
    BP: tl.constexpr, BC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Σ g′ and Σ g′(y − mean of the row) over the positions of one row, g′ = g where the ReLU lets it pass."""
    pid = tl.num_programs(0) - 1 - tl.program_id(0)
    c_blocks = tl.cdiv(C, BC)
    row = pid // c_blocks
    c = (pid % c_blocks) * BC + tl.arange(0, BC)
    keep = c < C
    at = row.to(tl.int64) * C + c
    before = _factor(r, (row // S).to(tl.int64) * C + c, keep, has_r)
    gain = tl.load(weight + c, mask=keep, other=0.0) / tl.sqrt(tl.load(var + c, mask=keep, other=1.0) + eps)
    slope = (before * gain)[None, :]
    offset = tl.load(bias + c, mask=keep, other=0.0) - tl.load(mean + c, mask=keep, other=0.0) * gain
    center = tl.load(row_mean + at, mask=keep, other=0.0)[None, :]
    base = row.to(tl.int64) * P * C
    first = tl.zeros((BP, BC), dtype=tl.float32)
    second = tl.zeros((BP, BC), dtype=tl.float32)
    for start in tl.range(0, P, BP, num_stages=STAGES):
        p = start + tl.arange(0, BP)
        inside = (p < P)[:, None] & keep[None, :]
        where = p[:, None] * C + c[None, :]
        value = tl.load(y + base + where, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(g + base + where, mask=inside, other=0.0).to(tl.float32)
        grad = tl.where((value * slope + offset[None, :] > 0.0) | (relu == 0), grad, 0.0)
        first += grad
        second += grad * (value - center)
    tl.store(sums + at, tl.sum(first, axis=0), mask=keep)
    tl.store(sums + RC + at, tl.sum(second, axis=0), mask=keep)


@jit(do_not_specialize=["R", "RC", "S", "has_r", "has_s"])
def gradients(
    sums, row_mean, row_m2, r, s, mean, var, weight, bias, gr, gs, gw, gb, R, P, C, eps, RC, S, has_r, has_s,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Gradients of weight, bias and both factors from the sums over positions."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    keep = c < C
    center = tl.load(mean + c, mask=keep, other=0.0)[None, :]
    inverse = 1.0 / tl.sqrt(tl.load(var + c, mask=keep, other=1.0) + eps)[None, :]
    gain = tl.load(weight + c, mask=keep, other=0.0)[None, :] * inverse
    shift = tl.load(bias + c, mask=keep, other=0.0)[None, :]
    bias_sum = tl.zeros((BR, BC), dtype=tl.float32)
    weight_sum = tl.zeros((BR, BC), dtype=tl.float32)
    for start in range(0, R, BR):
        n = start + tl.arange(0, BR)
        inside = (n < R)[:, None] & keep[None, :]
        at = n[:, None].to(tl.int64) * C + c[None, :]
        whole = (n // S)[:, None].to(tl.int64) * C + c[None, :]
        before = _factor(r, whole, inside, has_r)
        behind = _factor(s, whole, inside, has_s)
        one = tl.load(sums + at, mask=inside, other=0.0)
        two = tl.load(sums + RC + at, mask=inside, other=0.0)
        own = tl.load(row_mean + at, mask=inside, other=0.0)
        centred = before * two + (before * own - center) * one  # Σ g′(r∘y − mean)
        bias_sum += tl.where(inside, behind * one, 0.0)
        weight_sum += tl.where(inside, behind * centred, 0.0)
        tl.store(gs + at, (gain * centred + shift * one).to(gs.dtype.element_ty), mask=inside & (has_s != 0))
    grad_bias = tl.sum(bias_sum, axis=0)[None, :]
    grad_weight = tl.sum(weight_sum, axis=0)[None, :] * inverse
    for start in range(0, R, BR):
        n = start + tl.arange(0, BR)
        inside = (n < R)[:, None] & keep[None, :]
        at = n[:, None].to(tl.int64) * C + c[None, :]
        whole = (n // S)[:, None].to(tl.int64) * C + c[None, :]
        before = _factor(r, whole, inside, has_r)
        behind = _factor(s, whole, inside, has_s)
        own = tl.load(row_mean + at, mask=inside, other=0.0)
        passed = tl.load(sums + RC + at, mask=inside, other=0.0) + own * tl.load(
            sums + at, mask=inside, other=0.0
        )  # Σ g′ y
        squares = tl.load(row_m2 + at, mask=inside, other=0.0)
        normal = inverse * (before * squares + P * own * (before * own - center))  # Σ x̂ y
        grad = gain * (behind * passed - (grad_bias * P * own + grad_weight * normal) / R / P)
        tl.store(gr + at, grad.to(gr.dtype.element_ty), mask=inside & (has_r != 0))
    column = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    tl.store(gw + column, grad_weight, mask=column < C)
    tl.store(gb + column, grad_bias, mask=column < C)


@jit(do_not_specialize=["R", "has_r", "has_s", "relu"])
def gradient(
    g, y, r, s, mean, var, weight, bias, gw, gb, gy, R, P, C, eps, has_r, has_s, relu,
    BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """gy = r·weight/√(var + eps)·(g′∘s − mean of it − x̂·mean of it∘x̂), one tile of one row."""
    pid = tl.program_id(0)
    p_blocks = tl.cdiv(P, BP)
    c_blocks = tl.cdiv(C, BC)
    row = (pid // p_blocks) // c_blocks
    c = ((pid // p_blocks) % c_blocks) * BC + tl.arange(0, BC)
    p = (pid % p_blocks) * BP + tl.arange(0, BP)
    keep = c < C
    at = row.to(tl.int64) * C + c
    before = _factor(r, at, keep, has_r)
    behind = _factor(s, at, keep, has_s)[None, :]
    inverse = 1.0 / tl.sqrt(tl.load(var + c, mask=keep, other=1.0) + eps)
    center = tl.load(mean + c, mask=keep, other=0.0)
    gain = tl.load(weight + c, mask=keep, other=0.0) * inverse
    scale = 1.0 / R / P
    common = (tl.load(gb + c, mask=keep, other=0.0) * scale)[None, :]
    along = (tl.load(gw + c, mask=keep, other=0.0) * scale * inverse)[None, :]
    base = row.to(tl.int64) * P * C
    where = p[:, None] * C + c[None, :]
    inside = (p < P)[:, None] & keep[None, :]
    value = tl.load(y + base + where, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(g + base + where, mask=inside, other=0.0).to(tl.float32)
    # The same expression as in the other sweeps, so that all agree on where the ReLU is open.
    offset = tl.load(bias + c, mask=keep, other=0.0) - center * gain
    grad = tl.where((value * (before * gain)[None, :] + offset[None, :] > 0.0) | (relu == 0), grad, 0.0)
    x = value * before[None, :] - center[None, :]
    result = (before * gain)[None, :] * (grad * behind - common - x * along)
    tl.store(gy + base + where, result.to(gy.dtype.element_ty), mask=inside)
