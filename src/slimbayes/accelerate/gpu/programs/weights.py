# mypy: ignore-errors
"""Weight samples of mean-field Normals with the sums their KL needs, and their gradients.

The noise lives in registers: four numbers to a counter, for four parts of the weight that are a quarter of it
apart. Philox runs 7 rounds, the fewest that pass all of TestU01's BigCrush (Salmon et al. 2011), for it is
the larger part of the arithmetic. FORM as in ktied.py.
"""

from __future__ import annotations

from slimbayes.accelerate.gpu.programs.language import jit, libdevice, tl
from slimbayes.accelerate.gpu.programs.random import four, softplus


@jit
def _log(x, FAST: tl.constexpr):
    return libdevice.fast_logf(x) if FAST else tl.log(x)


@jit
def _sample_part(mean, out, noise_out, at, mask, sigma, noise, center, FORM: tl.constexpr):
    """Store M + σ∘ε, M or σ∘ε of one part; the squares (M − center)² come back."""
    value = sigma * noise
    m = tl.load(mean + at, mask=mask, other=0.0).to(tl.float32)
    if FORM == "sample":
        tl.store(out + at, (m + value).to(out.dtype.element_ty), mask=mask)
    if FORM == "mean" or FORM == "both":
        tl.store(out + at, m.to(out.dtype.element_ty), mask=mask)
    if FORM == "noise" or FORM == "both":
        tl.store(noise_out + at, value.to(noise_out.dtype.element_ty), mask=mask)
    shift = tl.where(mask, m - center, 0.0)
    return shift * shift


@jit
def _grad_part(
    grads, noise_grads, mean, out, at, mask, noise, twice, center, FORM: tl.constexpr, STATS: tl.constexpr
):  # fmt: skip
    """Store gM = gW + 2·g₀·(M − center) of one part; gW∘ε comes back."""
    g = tl.load(grads + at, mask=mask, other=0.0).to(tl.float32)
    total = g
    if FORM == "noise":
        total = tl.zeros(g.shape, tl.float32)
    if FORM == "mean":
        g = tl.zeros(g.shape, tl.float32)
    if FORM == "both":
        g = tl.load(noise_grads + at, mask=mask, other=0.0).to(tl.float32)
    if STATS:
        m = tl.load(mean + at, mask=mask, other=0.0).to(tl.float32)
        total += twice * (m - center)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
    return g * noise


@jit
def _field_sigma(rho, at, mask, cap, CAP: tl.constexpr):
    """σ = min(softplus(ρ) + 1e-7, cap), 1 outside; and ρ itself."""
    raw = tl.load(rho + at, mask=mask, other=0.0).to(tl.float32)
    sigma = softplus(raw) + 1e-7
    if CAP:
        sigma = tl.minimum(sigma, cap)
    return tl.where(mask, sigma, 1.0), raw


@jit(do_not_specialize=["stream"])
def field_sample(
    mean, rho, out, noise, partial, seed, size, quarter, stream, center, cap,
    CAP: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """M, σ∘ε or their sum on four runs of BLOCK; Σ(M − center)², Σσ² and Σ log σ of them go to ``partial``."""
    pid = tl.program_id(0)
    at = pid * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = four(tl.load(seed), at, at * 0, stream, 3, "normal", 7, FAST)
    in_a = at < size
    in_b = at + quarter < size
    in_c = at + 2 * quarter < size
    in_d = at + 3 * quarter < size
    sa, _ = _field_sigma(rho, at, in_a, cap, CAP)
    sb, _ = _field_sigma(rho, at + quarter, in_b, cap, CAP)
    sc, _ = _field_sigma(rho, at + 2 * quarter, in_c, cap, CAP)
    sd, _ = _field_sigma(rho, at + 3 * quarter, in_d, cap, CAP)
    squares = _sample_part(mean, out, noise, at, in_a, sa, a, center, FORM)
    squares += _sample_part(mean, out, noise, at + quarter, in_b, sb, b, center, FORM)
    squares += _sample_part(mean, out, noise, at + 2 * quarter, in_c, sc, c, center, FORM)
    squares += _sample_part(mean, out, noise, at + 3 * quarter, in_d, sd, d, center, FORM)
    spread = tl.where(in_a, sa * sa, 0.0) + tl.where(in_b, sb * sb, 0.0)
    spread += tl.where(in_c, sc * sc, 0.0) + tl.where(in_d, sd * sd, 0.0)
    tl.store(partial + 3 * pid, tl.sum(squares))
    tl.store(partial + 3 * pid + 1, tl.sum(spread))
    # σ ≥ 1e-7, so the product of four is a float.
    tl.store(partial + 3 * pid + 2, tl.sum(_log((sa * sb) * (sc * sd), FAST)))


@jit
def _field_grad_part(
    rho, d_rho, at, mask, by_noise, spread, logs, cap, CAP: tl.constexpr, STATS: tl.constexpr
):  # fmt: skip
    """Store gρ = (gW∘ε + 2·g₁·σ + g₂/σ)·sigmoid(ρ), zero where it would push σ over its cap."""
    raw = tl.load(rho + at, mask=mask, other=0.0).to(tl.float32)
    slope = by_noise
    if STATS or CAP:
        free = softplus(raw) + 1e-7
        sigma = free
        if CAP:
            sigma = tl.minimum(free, cap)
        if STATS:
            slope += spread * sigma + logs / sigma
        if CAP:
            slope = tl.where((free < cap) | (slope > 0.0), slope, 0.0)
    e = tl.exp(-tl.abs(raw))
    slope = slope * (tl.where(raw < 0.0, e, 1.0) / (1.0 + e))
    tl.store(d_rho + at, slope.to(d_rho.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["stream"])
def field_grad(
    grads, noise_grads, mean, rho, d_mean, d_rho, d_stats, seed, size, quarter, stream, center, cap,
    CAP: tl.constexpr, FORM: tl.constexpr, STATS: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """gM and gρ on four runs of BLOCK."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b, c, d = four(tl.load(seed), at, at * 0, stream, 3, "normal", 7, FAST)
    twice = 2.0 * tl.load(d_stats) if STATS else 0.0
    spread = 2.0 * tl.load(d_stats + 1) if STATS else 0.0
    logs = tl.load(d_stats + 2) if STATS else 0.0
    in_a = at < size
    in_b = at + quarter < size
    in_c = at + 2 * quarter < size
    in_d = at + 3 * quarter < size
    ga = _grad_part(grads, noise_grads, mean, d_mean, at, in_a, a, twice, center, FORM, STATS)
    gb = _grad_part(grads, noise_grads, mean, d_mean, at + quarter, in_b, b, twice, center, FORM, STATS)
    gc = _grad_part(grads, noise_grads, mean, d_mean, at + 2 * quarter, in_c, c, twice, center, FORM, STATS)
    gd = _grad_part(grads, noise_grads, mean, d_mean, at + 3 * quarter, in_d, d, twice, center, FORM, STATS)
    _field_grad_part(rho, d_rho, at, in_a, ga, spread, logs, cap, CAP, STATS)
    _field_grad_part(rho, d_rho, at + quarter, in_b, gb, spread, logs, cap, CAP, STATS)
    _field_grad_part(rho, d_rho, at + 2 * quarter, in_c, gc, spread, logs, cap, CAP, STATS)
    _field_grad_part(rho, d_rho, at + 3 * quarter, in_d, gd, spread, logs, cap, CAP, STATS)
