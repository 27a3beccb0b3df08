# mypy: ignore-errors
# ruff: noqa: RUF005 (Triton adds tuples, and has no stars in them)
"""Local noise of a k-tied matrix product: y + √(T Bᵀ + extra)∘ε with T = (x∘x) A.

As in ktied.py a program is one warp that goes down its rows with the columns in its lanes, and the next row is on
its way while this one is worked on. The P columns of A or B, and the sums over rows that become their gradients,
are tuples of blocks in registers; T is P numbers to a row.
"""

from __future__ import annotations

from slimbayes.accelerate.gpu.programs.ktied_parts import four, line, place, put
from slimbayes.accelerate.gpu.programs.language import jit, tl
from slimbayes.accelerate.gpu.programs.rownoise import normals, philox7, root


@jit
def columns(matrix, j, inside, P: tl.constexpr):
    """The P columns of a matrix [n, P] at a block of its rows; 0 outside."""
    first = matrix + j * P
    found = (tl.load(first, mask=inside, other=0.0).to(tl.float32),)
    for p in tl.static_range(1, P):
        found = found + (tl.load(first + p, mask=inside, other=0.0).to(tl.float32),)
    return found


@jit
def numbers(matrix, i, P: tl.constexpr):
    """Row i of a float32 matrix [R, P]."""
    first = matrix + i * P
    found = (tl.load(first),)
    for p in tl.static_range(1, P):
        found = found + (tl.load(first + p),)
    return found


@jit
def zeros(zero, P: tl.constexpr):
    """P blocks of zeros."""
    found = (zero,)
    for _ in tl.static_range(1, P):
        found = found + (zero,)
    return found


@jit
def dot(first, t, b, P: tl.constexpr):
    """first + Σ_p t_p b_p."""
    total = first + t[0] * b[0]
    for p in tl.static_range(1, P):
        total += t[p] * b[p]
    return total


@jit
def gather(sums, h, t, P: tl.constexpr):
    """sums_p + h·t_p for every p."""
    found = (sums[0] + h * t[0],)
    for p in tl.static_range(1, P):
        found = found + (sums[p] + h * t[p],)
    return found


@jit
def row_sums(to, wa, wb, wc, wd, a, b, c, d, scale, P: tl.constexpr):
    """Store scale·Σ over the lanes of w·a_p, four blocks of them, for every p."""
    for p in tl.static_range(0, P):
        tl.store(to + p, scale * tl.sum(wa * a[p] + wb * b[p] + wc * c[p] + wd * d[p]))


@jit
def vector(values, j, inside, GIVEN: tl.constexpr):
    """A block of a vector, or zeros where there is none."""
    if GIVEN:
        return tl.load(values + j, mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.zeros(j.shape, tl.float32)


@jit
def in_lanes(counter, b):
    """The counter, in the place that a loaded block has in the threads (see ktied_parts.py)."""
    return tl.where(b == float("inf"), 0, counter)


@jit
def local_normals(seed, j, i, stream, FAST: tl.constexpr):
    """rownoise.row_noise under a tag of its own, for a seed may also make weights."""
    a, b, c, d = philox7(seed, j, i, stream, 3)
    w, x = normals(a, b, FAST)
    y, z = normals(c, d, FAST)
    return w, x, y, z


@jit(do_not_specialize=["R", "steps"])
def thin(x, a, part, R, n, steps, P: tl.constexpr, BN: tl.constexpr, WHOLE: tl.constexpr):
    """The part of T[i, p] = Σ_j x_ij² A_jp of its rows and BN columns, into ``part`` [blocks, R, P]."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(n, BN)
    block = pid % blocks
    row = (pid // blocks) * steps
    j = block * BN + tl.arange(0, BN)
    inside = j < n
    a_columns = columns(a, j, inside, P)
    part += block.to(tl.int64) * R * P
    last = tl.minimum(row + steps, R) - 1
    following = line(x + row * n, j, inside, WHOLE)
    for step in tl.range(0, last + 1 - row):
        i = row + step
        value = following.to(tl.float32)
        following = line(x + tl.minimum(i + 1, last) * n, j, inside, WHOLE)
        square = value * value
        for p in tl.static_range(0, P):
            tl.store(part + i * P + p, tl.sum(square * a_columns[p]))


@jit
def _noisy(
    y, first, shift, t, b, noise, P: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr, FAST: tl.constexpr
):
    """y + bias + √max(variance, tiny)·ε, and its ReLU; not a number where one of them is not."""
    variance = dot(first, t, b, P)
    deviation = root(tl.where(variance < 1.1754943508222875e-38, 1.1754943508222875e-38, variance), FAST)
    value = y.to(tl.float32)
    if BIAS:
        value += shift
    value += deviation * noise
    if RELU:
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return value


@jit
def _square(value, inside, WHOLE: tl.constexpr):
    """Before it is rounded: to round it apart from its neighbour is slow. 0 outside."""
    return value * value if WHOLE else tl.where(inside, value * value, 0.0)


@jit(do_not_specialize=["R", "stream", "steps"])
def noisy(
    y, t, b, extra, bias, next_a, out, part, seed, R, m, stream, steps,
    P: tl.constexpr, Q: tl.constexpr, EXTRA: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
    BN: tl.constexpr, GAP: tl.constexpr, UNROLL: tl.constexpr, WHOLE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """z = y + bias + √(T Bᵀ + extra)∘ε, or its ReLU, on its rows of four blocks of BN columns.

    With Q > 0 also their part of the next product's T, (z∘z) A, into ``part`` [blocks, R, Q].
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
    na, nb, nc, nd = ba, bb, bc, bd
    if Q > 0:
        na = columns(next_a, ja, in_a, Q)
        nb = columns(next_a, jb, in_b, Q)
        nc = columns(next_a, jc, in_c, Q)
        nd = columns(next_a, jd, in_d, Q)
    xa = vector(extra, ja, in_a, EXTRA)
    xb = vector(extra, jb, in_b, EXTRA)
    xc = vector(extra, jc, in_c, EXTRA)
    xd = vector(extra, jd, in_d, EXTRA)
    sa = vector(bias, ja, in_a, BIAS)
    sb = vector(bias, jb, in_b, BIAS)
    sc = vector(bias, jc, in_c, BIAS)
    sd = vector(bias, jd, in_d, BIAS)
    spot = in_lanes(counter + lane, ba[0])
    key = tl.load(seed)
    part += (counter // BN).to(tl.int64) * R * Q
    last = tl.minimum(row + steps, R) - 1
    ya, yb, yc, yd = four(y + row * m, ja, jb, jc, jd, in_a, in_b, in_c, in_d, WHOLE)
    following_t = numbers(t, row, P)
    for step in tl.range(0, last + 1 - row, loop_unroll_factor=UNROLL):
        i = row + step
        row_t = following_t
        za, zb, zc, zd = ya, yb, yc, yd
        following = tl.minimum(i + 1, last)
        ya, yb, yc, yd = four(y + following * m, ja, jb, jc, jd, in_a, in_b, in_c, in_d, WHOLE)
        following_t = numbers(t, following, P)
        ea, eb, ec, ed = local_normals(key, spot, i, stream, FAST)
        va = _noisy(za, xa, sa, row_t, ba, ea, P, BIAS, RELU, FAST)
        vb = _noisy(zb, xb, sb, row_t, bb, eb, P, BIAS, RELU, FAST)
        vc = _noisy(zc, xc, sc, row_t, bc, ec, P, BIAS, RELU, FAST)
        vd = _noisy(zd, xd, sd, row_t, bd, ed, P, BIAS, RELU, FAST)
        target = out + i * m
        put(target, ja, va, in_a, WHOLE)
        put(target, jb, vb, in_b, WHOLE)
        put(target, jc, vc, in_c, WHOLE)
        put(target, jd, vd, in_d, WHOLE)
        if Q > 0:
            qa = _square(va, in_a, WHOLE)
            qb = _square(vb, in_b, WHOLE)
            qc = _square(vc, in_c, WHOLE)
            qd = _square(vd, in_d, WHOLE)
            row_sums(part + i * Q, qa, qb, qc, qd, na, nb, nc, nd, 1.0, Q)
