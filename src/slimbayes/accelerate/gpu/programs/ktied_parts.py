# mypy: ignore-errors
"""What the passes of ktied.py share: factors of a row or a block, guarded loads and stores, the place of a program."""

from __future__ import annotations

from slimbayes.accelerate.gpu.programs.language import jit, tl


@jit
def row_logs(log_u, i, K: tl.constexpr):
    """log u of row i, up to four ranks; those over K repeat the first and are never used."""
    first = log_u + i * K
    l0 = tl.load(first).to(tl.float32)
    l1 = l0
    l2 = l0
    l3 = l0
    if K > 1:
        l1 = tl.load(first + 1).to(tl.float32)
    if K > 2:
        l2 = tl.load(first + 2).to(tl.float32)
    if K > 3:
        l3 = tl.load(first + 3).to(tl.float32)
    return l0, l1, l2, l3


@jit
def exponentials(l0, l1, l2, l3, K: tl.constexpr):
    """u of a row from its row_logs."""
    u0 = tl.exp(l0)
    u1 = u0
    u2 = u0
    u3 = u0
    if K > 1:
        u1 = tl.exp(l1)
    if K > 2:
        u2 = tl.exp(l2)
    if K > 3:
        u3 = tl.exp(l3)
    return u0, u1, u2, u3


@jit
def columns_v(log_v, j, n, K: tl.constexpr):
    """v of a block of columns, as row_logs, and 1 outside the weight."""
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
def dot(u0, u1, u2, u3, v0, v1, v2, v3, K: tl.constexpr):
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
def gather(t0, t1, t2, t3, g, w0, w1, w2, w3, K: tl.constexpr):
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
def line(pointer, j, inside, WHOLE: tl.constexpr):
    """A block of a row as it is stored; 0 outside."""
    return tl.load(pointer + j) if WHOLE else tl.load(pointer + j, mask=inside, other=0.0)


@jit
def four(pointer, ja, jb, jc, jd, in_a, in_b, in_c, in_d, WHOLE: tl.constexpr):
    """Four of them."""
    a = line(pointer, ja, in_a, WHOLE)
    b = line(pointer, jb, in_b, WHOLE)
    c = line(pointer, jc, in_c, WHOLE)
    d = line(pointer, jd, in_d, WHOLE)
    return a, b, c, d


@jit
def put(pointer, j, value, inside, WHOLE: tl.constexpr):
    """Store a block of a row."""
    value = value.to(pointer.dtype.element_ty)
    if WHOLE:
        tl.store(pointer + j, value)
    else:
        tl.store(pointer + j, value, mask=inside)


@jit
def add_square(total, m, center, inside, WHOLE: tl.constexpr):
    """total + (m − center)²."""
    shift = m - center
    if not WHOLE:
        shift = tl.where(inside, shift, 0.0)
    return total + shift * shift


@jit
def or_one(sigma, inside, WHOLE: tl.constexpr):
    """σ, and 1 outside."""
    return sigma if WHOLE else tl.where(inside, sigma, 1.0)


@jit
def place(n, steps, BN: tl.constexpr, GAP: tl.constexpr):
    """This program's first row, its place in the counter's order, and its first column.

    A run of 4·GAP columns has one counter for the columns c, c + GAP, c + 2·GAP and c + 3·GAP.
    """
    pid = tl.program_id(0)
    blocks = tl.cdiv(n, 4 * GAP) * (GAP // BN)
    block = pid % blocks
    column = (block // (GAP // BN)) * (4 * GAP) + (block % (GAP // BN)) * BN
    return (pid // blocks) * steps, block * BN, column


@jit
def at_lanes(counter, v):
    """The counter, unchanged, for no v is negative.

    It now has a loaded block's place in the threads, and so has the noise: else every row of it would move from
    the compiler's own choice to that of the loads through shared memory.
    """
    return tl.where(v < 0.0, 0, counter)
