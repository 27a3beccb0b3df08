# mypy: ignore-errors
"""Normal noise of a row in the fewest instructions, and the GPU's approximate functions it takes.

They flush denormal numbers, which spares the instructions that scale them: none occur here. FAST as in random.py.
"""

from __future__ import annotations

from slimbayes.accelerate.gpu.programs.language import jit, libdevice, tl
from slimbayes.accelerate.gpu.programs.random import pair_normal


@jit
def root(x, FAST: tl.constexpr):
    """√x."""
    if FAST:
        return tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        return tl.sqrt(x)


@jit
def inverse(x, FAST: tl.constexpr):
    """1/x."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        return 1.0 / x


@jit
def log2(x, FAST: tl.constexpr):
    """log₂ x."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        return tl.log2(x)


@jit
def normals(a, b, FAST: tl.constexpr):
    """random.pair_normal by the GPU's own functions: log₂, and 2π as part of the angle's one product."""
    if FAST:
        u = a.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
        turn = ((b >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
        angle = turn * 6.283185307179586 - 9.42477796076938
        # |·| costs nothing; the logarithm of 1 may come out as a tiny number of either sign.
        r = root(tl.abs(log2(u, True) * 1.3862943611198906), True)
        x = r * libdevice.fast_cosf(angle)
        y = r * libdevice.fast_sinf(angle)
    else:
        x, y = pair_normal(a, b, False)
    return x, y


@jit
def philox7(seed, c0, c1, c2, c3):
    """tl.philox of 7 rounds, with both halves of a product from one 64-bit multiplication."""
    key = seed.to(tl.uint64)
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    c0 = c0.to(tl.uint32)
    c1 = c1.to(tl.uint32)
    c2 = c2.to(tl.uint32)
    for _ in tl.static_range(7):
        p = c0.to(tl.uint64) * 0xD2511F53
        q = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (q >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = q.to(tl.uint32)
        c3 = p.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@jit
def row_noise(seed, j, i, stream, FAST: tl.constexpr):
    """Four blocks of row i. Only j varies inside a block: the first rounds are done once a row or a program."""
    a, b, c, d = philox7(seed, j, i, stream, 2)
    w, x = normals(a, b, FAST)
    y, z = normals(c, d, FAST)
    return w, x, y, z
