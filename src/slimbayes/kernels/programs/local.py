# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton adds tuples, and has no stars in them)
"""Local noise of a k-tied matrix product: y + √(T Bᵀ + extra)∘ε with T = (x∘x) A, and its gradients.

As in ktied.py a program is one warp that goes down its rows with the columns in its lanes. The P columns of A or
B, and the sums over rows that become their gradients, are tuples of blocks in registers; T is P numbers to a row.
"""

from __future__ import annotations

from slimbayes.kernels.programs.language import jit, tl
from slimbayes.kernels.programs.rownoise import normals, philox7, root


@jit
def _inverse_root(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        return 1.0 / tl.sqrt(tl.where(x < 1.1754943508222875e-38, 1.1754943508222875e-38, x))


@jit
def _columns(matrix, j, inside, P: tl.constexpr):
    """The P columns of a matrix [n, P] at a block of its rows; 0 outside."""
    first = matrix + j * P
    found = (tl.load(first, mask=inside, other=0.0).to(tl.float32),)
    for p in tl.static_range(1, P):
        found = found + (tl.load(first + p, mask=inside, other=0.0).to(tl.float32),)
    return found


@jit
def _numbers(matrix, i, P: tl.constexpr):
    """Row i of a float32 matrix [R, P]."""
    first = matrix + i * P
    found = (tl.load(first),)
    for p in tl.static_range(1, P):
        found = found + (tl.load(first + p),)
    return found


@jit
def _zeros(zero, P: tl.constexpr):
    found = (zero,)
    for _ in tl.static_range(1, P):
        found = found + (zero,)
    return found


@jit
def _dot(first, t, b, P: tl.constexpr):
    """first + Σ_p t_p b_p."""
    total = first + t[0] * b[0]
    for p in tl.static_range(1, P):
        total += t[p] * b[p]
    return total


@jit
def _gather(sums, h, t, P: tl.constexpr):
    """sums_p + h·t_p for every p."""
    found = (sums[0] + h * t[0],)
    for p in tl.static_range(1, P):
        found = found + (sums[p] + h * t[p],)
    return found


@jit
def _line(pointer, j, inside, WHOLE: tl.constexpr):
    return tl.load(pointer + j) if WHOLE else tl.load(pointer + j, mask=inside, other=0.0)


@jit
def _put(pointer, j, value, inside, WHOLE: tl.constexpr):
    value = value.to(pointer.dtype.element_ty)
    if WHOLE:
        tl.store(pointer + j, value)
    else:
        tl.store(pointer + j, value, mask=inside)


@jit
def _extra(extra, j, inside, EXTRA: tl.constexpr):
    if EXTRA:
        return tl.load(extra + j, mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.zeros(j.shape, tl.float32)


@jit(do_not_specialize=["R"])
def thin(x, a, part, R, n, P: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, WHOLE: tl.constexpr):
    """The part of T[i, p] = Σ_j x_ij² A_jp of STEPS rows and BN columns, into ``part`` [blocks, R, P].

    The next row is on its way while this one is summed: there is no other work to wait with.
    """
    pid = tl.program_id(0)
    blocks = tl.cdiv(n, BN)
    block = pid % blocks
    row = (pid // blocks) * STEPS
    j = block * BN + tl.arange(0, BN)
    inside = j < n
    columns = _columns(a, j, inside, P)
    part += block.to(tl.int64) * R * P
    last = tl.minimum(row + STEPS, R) - 1
    following = _line(x + row * n, j, inside, WHOLE)
    for step in tl.range(0, last + 1 - row):
        i = row + step
        value = following.to(tl.float32)
        following = _line(x + tl.minimum(i + 1, last) * n, j, inside, WHOLE)
        square = value * value
        for p in tl.static_range(0, P):
            tl.store(part + i * P + p, tl.sum(square * columns[p]))


@jit(do_not_specialize=["R"])
def thin_grad(
    x, a, d_thin, dx, part_a, R, n,
    P: tl.constexpr, DX: tl.constexpr, BN: tl.constexpr, STEPS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dx = 2x∘(dT Aᵀ) of STEPS rows and BN columns, and their part of dA = (x∘x)ᵀ dT, into [blocks, P, n]."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(n, BN)
    row = (pid // blocks) * STEPS
    j = (pid % blocks) * BN + tl.arange(0, BN)
    inside = j < n
    columns = _columns(a, j, inside, P)
    zero = tl.zeros((BN,), tl.float32)
    sums = _zeros(zero, P)
    last = tl.minimum(row + STEPS, R) - 1
    following = _line(x + row * n, j, inside, WHOLE)
    for step in tl.range(0, last + 1 - row):
        i = row + step
        value = following.to(tl.float32)
        following = _line(x + tl.minimum(i + 1, last) * n, j, inside, WHOLE)
        t = _numbers(d_thin, i, P)
        sums = _gather(sums, value * value, t, P)
        if DX:
            _put(dx + i * n, j, 2.0 * value * _dot(zero, t, columns, P), inside, WHOLE)
    part_a += (pid // blocks).to(tl.int64) * n * P
    for p in tl.static_range(0, P):
        tl.store(part_a + p * n + j, sums[p], mask=inside)


@jit
def _place(m, BN: tl.constexpr, GAP: tl.constexpr, STEPS: tl.constexpr):
    """This program's first row, its place in the counter's order, and its first column; as in ktied.py."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(m, 4 * GAP) * (GAP // BN)
    block = pid % blocks
    column = (block // (GAP // BN)) * (4 * GAP) + (block % (GAP // BN)) * BN
    return (pid // blocks) * STEPS, block * BN, column


@jit
def _spot(counter, b):
    """The counter, in the place that a loaded block has in the threads (see ktied.py)."""
    return tl.where(b == float("inf"), 0, counter)


@jit
def _noise(seed, j, i, stream, FAST: tl.constexpr):
    """rownoise.row_noise under a tag of its own, for a seed may also make weights."""
    a, b, c, d = philox7(seed, j, i, stream, 3)
    w, x = normals(a, b, FAST)
    y, z = normals(c, d, FAST)
    return w, x, y, z


@jit
def _deviation(first, t, b, P: tl.constexpr, FAST: tl.constexpr):
    """√max(variance, tiny); not a number where the variance is not."""
    variance = _dot(first, t, b, P)
    return root(tl.where(variance < 1.1754943508222875e-38, 1.1754943508222875e-38, variance), FAST)


@jit
def _slope(g, noise, first, t, b, P: tl.constexpr, FAST: tl.constexpr):
    """2h = g∘ε/√variance; a clamped variance has no slope."""
    variance = _dot(first, t, b, P)
    slope = g.to(tl.float32) * noise * _inverse_root(variance, FAST)
    return tl.where(variance <= 1.1754943508222875e-38, 0.0, slope)


@jit(do_not_specialize=["R", "stream"])
def noisy(
    y, t, b, extra, out, seed, R, m, stream,
    P: tl.constexpr, EXTRA: tl.constexpr, BN: tl.constexpr, GAP: tl.constexpr, STEPS: tl.constexpr,
    WHOLE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """y + √(T Bᵀ + extra)∘ε on STEPS rows of four blocks of BN columns."""
    row, counter, first = _place(m, BN, GAP, STEPS)
    lane = tl.arange(0, BN)
    ja = first + lane
    jb = ja + GAP
    jc = ja + 2 * GAP
    jd = ja + 3 * GAP
    in_a, in_b, in_c, in_d = ja < m, jb < m, jc < m, jd < m
    ba = _columns(b, ja, in_a, P)
    bb = _columns(b, jb, in_b, P)
    bc = _columns(b, jc, in_c, P)
    bd = _columns(b, jd, in_d, P)
    xa = _extra(extra, ja, in_a, EXTRA)
    xb = _extra(extra, jb, in_b, EXTRA)
    xc = _extra(extra, jc, in_c, EXTRA)
    xd = _extra(extra, jd, in_d, EXTRA)
    spot = _spot(counter + lane, ba[0])
    key = tl.load(seed)
    for step in tl.range(0, tl.minimum(STEPS, R - row)):
        i = row + step
        source = y + i * m
        ya = _line(source, ja, in_a, WHOLE)
        yb = _line(source, jb, in_b, WHOLE)
        yc = _line(source, jc, in_c, WHOLE)
        yd = _line(source, jd, in_d, WHOLE)
        row_t = _numbers(t, i, P)
        ea, eb, ec, ed = _noise(key, spot, i, stream, FAST)
        target = out + i * m
        _put(target, ja, ya.to(tl.float32) + _deviation(xa, row_t, ba, P, FAST) * ea, in_a, WHOLE)
        _put(target, jb, yb.to(tl.float32) + _deviation(xb, row_t, bb, P, FAST) * eb, in_b, WHOLE)
        _put(target, jc, yc.to(tl.float32) + _deviation(xc, row_t, bc, P, FAST) * ec, in_c, WHOLE)
        _put(target, jd, yd.to(tl.float32) + _deviation(xd, row_t, bd, P, FAST) * ed, in_d, WHOLE)


@jit
def _store_sums(to, j, sums, rest, m, inside, P: tl.constexpr, EXTRA: tl.constexpr):
    """The halves of the sums."""
    for p in tl.static_range(0, P):
        tl.store(to + p * m + j, 0.5 * sums[p], mask=inside)
    if EXTRA:
        tl.store(to + P * m + j, 0.5 * rest, mask=inside)


@jit(do_not_specialize=["R", "stream"])
def noisy_grad(
    grads, t, b, extra, part_t, part_b, seed, R, m, stream,
    P: tl.constexpr, EXTRA: tl.constexpr, BN: tl.constexpr, GAP: tl.constexpr, STEPS: tl.constexpr,
    WHOLE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """The parts of dT = h B, into [blocks, R, P], and of dB = hᵀT and dextra = Σ h, into [blocks, P (+ 1), m]."""
    row, counter, first = _place(m, BN, GAP, STEPS)
    lane = tl.arange(0, BN)
    ja = first + lane
    jb = ja + GAP
    jc = ja + 2 * GAP
    jd = ja + 3 * GAP
    in_a, in_b, in_c, in_d = ja < m, jb < m, jc < m, jd < m
    ba = _columns(b, ja, in_a, P)
    bb = _columns(b, jb, in_b, P)
    bc = _columns(b, jc, in_c, P)
    bd = _columns(b, jd, in_d, P)
    xa = _extra(extra, ja, in_a, EXTRA)
    xb = _extra(extra, jb, in_b, EXTRA)
    xc = _extra(extra, jc, in_c, EXTRA)
    xd = _extra(extra, jd, in_d, EXTRA)
    spot = _spot(counter + lane, ba[0])
    key = tl.load(seed)
    ra = tl.zeros((BN,), tl.float32)
    rb, rc, rd = ra, ra, ra
    sa = _zeros(ra, P)
    sb, sc, sd = sa, sa, sa
    part_t += (counter // BN).to(tl.int64) * R * P
    for step in tl.range(0, tl.minimum(STEPS, R - row)):
        i = row + step
        source = grads + i * m
        ga = _line(source, ja, in_a, WHOLE)
        gb = _line(source, jb, in_b, WHOLE)
        gc = _line(source, jc, in_c, WHOLE)
        gd = _line(source, jd, in_d, WHOLE)
        row_t = _numbers(t, i, P)
        ea, eb, ec, ed = _noise(key, spot, i, stream, FAST)
        ha = _slope(ga, ea, xa, row_t, ba, P, FAST)
        hb = _slope(gb, eb, xb, row_t, bb, P, FAST)
        hc = _slope(gc, ec, xc, row_t, bc, P, FAST)
        hd = _slope(gd, ed, xd, row_t, bd, P, FAST)
        sa = _gather(sa, ha, row_t, P)
        sb = _gather(sb, hb, row_t, P)
        sc = _gather(sc, hc, row_t, P)
        sd = _gather(sd, hd, row_t, P)
        if EXTRA:
            ra += ha
            rb += hb
            rc += hc
            rd += hd
        for p in tl.static_range(0, P):
            total = tl.sum(ha * ba[p] + hb * bb[p] + hc * bc[p] + hd * bd[p])
            tl.store(part_t + i * P + p, 0.5 * total)
    part_b += (row // STEPS).to(tl.int64) * m * (P + 1 if EXTRA else P)
    _store_sums(part_b, ja, sa, ra, m, in_a, P, EXTRA)
    _store_sums(part_b, jb, sb, rb, m, in_b, P, EXTRA)
    _store_sums(part_b, jc, sc, rc, m, in_c, P, EXTRA)
    _store_sums(part_b, jd, sd, rd, m, in_d, P, EXTRA)
