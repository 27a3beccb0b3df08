# mypy: ignore-errors
"""Random numbers in registers: Philox counters to normals, Cauchy variables, uniforms and signs.

A call gives four numbers for one counter (c0, c1, stream, tag) under the seed's 64-bit key. Counters that vary
along one axis each are left unbroadcast: the first rounds are then computed per row and per column only. FAST
takes the GPU's approximate functions (absolute error below 1e-6, far under the noise itself); the
interpreter has none.
"""

from __future__ import annotations

from slimbayes.accelerate.gpu.programs.language import jit, libdevice, tl


@jit
def pair_normal(a, b, FAST: tl.constexpr):
    """Two words to two normals (Box–Muller): r = sqrt(−2 log u), u = (a + ½)/2³², angle from 23 bits of b."""
    u = a.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    # The word's upper 23 bits as the fraction of a float in [1, 2): cheaper than an integer conversion.
    turn = ((b >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.5
    angle = turn * 6.283185307179586
    if FAST:
        r = tl.sqrt(tl.maximum(-2.0 * libdevice.fast_logf(u), 0.0))
        x = r * libdevice.fast_cosf(angle)
        y = r * libdevice.fast_sinf(angle)
    else:
        r = tl.sqrt(tl.maximum(-2.0 * tl.log(u), 0.0))
        x = r * tl.cos(angle)
        y = r * tl.sin(angle)
    return x, y


@jit
def sine_of_pi(v):
    """sin(πv)  for 0 ≤ v ≤ ½, to a relative 1e-7 down to v = 0: the tails of a Cauchy depend on it."""
    w = v * v
    p = 0.0821458866111282 - 0.00737043094571435 * w
    p = -0.5992645293207921 + p * w
    p = 2.550164039877345 + p * w
    p = -5.16771278004997 + p * w
    return v * (3.141592653589793 + p * w)


@jit
def word_cauchy(a):
    """±cot(πv) = tan(π(u − ½)): the sign from the upper bit, v in (0, ½] from the others."""
    v = (a & 0x7FFFFFFF).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    v = tl.minimum(v, 0.5)
    size = sine_of_pi(0.5 - v) / sine_of_pi(v)
    return tl.where(a >> 31 == 0, -size, size)


@jit
def word_sign(a):
    """−1 or 1, from the upper bit."""
    return tl.where(a >> 31 == 0, -1.0, 1.0)


@jit
def word_uniform(a):
    """A multiple of 2⁻²⁴ in [0, 1)."""
    return (a >> 8).to(tl.float32) * 5.960464477539063e-08


@jit
def four(
    seed, c0, c1, stream, TAG: tl.constexpr, KIND: tl.constexpr, ROUNDS: tl.constexpr, FAST: tl.constexpr
):
    """Four blocks of noise; KIND is "normal", "cauchy", "uniform" or "sign"."""
    a, b, c, d = tl.philox(seed, c0, c1, stream, TAG, ROUNDS)
    if KIND == "normal":
        w, x = pair_normal(a, b, FAST)
        y, z = pair_normal(c, d, FAST)
    elif KIND == "cauchy":
        w, x, y, z = word_cauchy(a), word_cauchy(b), word_cauchy(c), word_cauchy(d)
    elif KIND == "uniform":
        w, x, y, z = word_uniform(a), word_uniform(b), word_uniform(c), word_uniform(d)
    else:
        w, x, y, z = word_sign(a), word_sign(b), word_sign(c), word_sign(d)
    return w, x, y, z


@jit
def softplus(rho):
    """log(1 + exp(ρ)) = max(ρ, 0) + e·p(e), e = exp(−|ρ|), with log(1 + e)/e by Chebyshev interpolation.

    Small σ keep their digits (relative 2e-7), which log(1 + e) in float32 would lose, and no logarithm is taken.
    """
    e = tl.exp(-tl.abs(rho))
    p = 0.01954252743780671 - 0.0031760570527694654 * e
    p = -0.056373613209643736 + p * e
    p = 0.10543623839523661 + p * e
    p = -0.15269667104466478 + p * e
    p = 0.19663274269437397 + p * e
    p = -0.2495161626572586 + p * e
    p = 0.33329710499262943 + p * e
    p = -0.49999892648080163 + p * e
    return tl.maximum(rho, 0.0) + e * (1.0 + p * e)


@jit
def sigmoid(rho):
    """1/(1 + exp(−ρ)): the derivative of softplus."""
    return 1.0 / (1.0 + tl.exp(-rho))
