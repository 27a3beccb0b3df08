"""KL divergences between a posterior and its prior: closed forms by type, Monte Carlo where none exists."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td
from torch.distributions.kl import register_kl

from slimbayes.core import distributions as d
from slimbayes.core.noise import fresh_noise
from slimbayes.core.paths import ASKED, first
from slimbayes.core.priors import LEAST_RMS

_Formula = Callable[[Any, Any], Tensor]
_CLOSED: dict[tuple[type, type], _Formula] = {}


def closed(q: type, p: type, torch_pair: tuple[type, type] | None = None) -> Callable[[_Formula], _Formula]:
    """Register a formula for an exact pair of our types, and with torch where torch has none.

    torch's own dispatch walks its registry with generators, which torch.compile cannot trace.
    """

    def keep(formula: _Formula) -> _Formula:
        _CLOSED[(q, p)] = formula
        if torch_pair is not None:
            register_kl(*torch_pair)(formula)
        return formula

    return keep


@closed(d.Normal, d.Normal)
@closed(d.LogNormal, d.LogNormal, (d.LogNormal, d.LogNormal))
def normal_normal(q: td.Normal | d.LogNormal, p: td.Normal | d.LogNormal) -> Tensor:
    """log(σ_p/σ) + (σ² + (μ − μ_p)²)/(2σ_p²) − ½, elementwise; log-normals have it in log-space.

    >>> one = torch.ones(())
    >>> float(normal_normal(td.Normal(0 * one, one), td.Normal(0 * one, one)))
    0.0
    """
    ratio = q.scale / p.scale  # the logarithm of its square may be infinite
    return 0.5 * (ratio.square() + ((q.loc - p.loc) / p.scale).square() - 1.0) - ratio.log()


@closed(d.Cauchy, d.Cauchy, (td.Cauchy, td.Cauchy))
def cauchy_cauchy(q: td.Cauchy, p: td.Cauchy) -> Tensor:
    """log(((γ + γ_p)² + (m − m_p)²)/(4 γ γ_p)), elementwise (Chyzak and Nielsen 2019).

    >>> one = torch.ones(())
    >>> float(cauchy_cauchy(td.Cauchy(0 * one, one), td.Cauchy(0 * one, one)))
    0.0
    """
    both = torch.hypot(q.scale + p.scale, q.loc - p.loc)  # its square may be too large
    return 2.0 * both.log() - math.log(4.0) - q.scale.log() - p.scale.log()


@closed(d.HalfCauchy, d.HalfCauchy, (d.HalfCauchy, d.HalfCauchy))
def halfcauchy_halfcauchy(q: d.HalfCauchy, p: d.HalfCauchy) -> Tensor:
    """log((γ + γ_p)²/(4 γ γ_p)): the Cauchy's, for its log-ratio is symmetric about the common location."""
    return 2.0 * (q.scale + p.scale).log() - math.log(4.0) - q.scale.log() - p.scale.log()


@closed(d.KTiedNormal, d.Normal)
def ktied_normal(q: d.KTiedNormal, p: td.Normal) -> Tensor:
    """The Normal formula summed, with Σσ² = Σ_ab (UᵀU)_ab (VᵀV)_ab: no m×n square is formed.

    Σ log σ = n Σ log u + m Σ log v for k = 1; k ≥ 2 needs one pass over U Vᵀ.
    """
    means = (q.loc - p.loc).square().sum()
    elements = q.loc.numel()
    constant = elements * (p.scale.log() - 0.5)
    return 0.5 * (_squares(q).sum() + means) / p.scale.square() - _log_sigma(q) + constant


def _squares(q: d.KTiedNormal) -> Tensor:
    """Σσ² of a weight, or of each in a stack: Σ_ab (UᵀU)_ab (VᵀV)_ab."""
    return ((q.u.mT @ q.u) * (q.v.mT @ q.v)).sum((-2, -1))


def _log_sigma(q: d.KTiedNormal) -> Tensor:
    """Σ log σ of all elements."""
    m, n = q.u.shape[-2], q.v.shape[-2]
    logs: Tensor | None = None
    if q.u.shape[-1] == 1:
        logs = n * q.u.log().sum() + m * q.v.log().sum()
    elif ASKED.log_sigma and q.u.dim() == 2:
        logs = first(ASKED.log_sigma, q.u.log(), q.v.log())
    if logs is None:
        least = torch.finfo(q.u.dtype).tiny
        u_most, v_most = (
            x.detach().amax(-1, keepdim=True).clamp_min(least) for x in (q.u, q.v)
        )  # σ may be tiny
        logs = ((q.u / u_most) @ (q.v / v_most).mT).log().sum()
        logs = logs + n * u_most.log().sum() + m * v_most.log().sum()
    return logs


@closed(d.Normal, d.EmpiricalNormal)
def normal_empirical(q: td.Normal, p: d.EmpiricalNormal) -> Tensor:
    """The Normal formula summed, with σ_p² = (Σσ² + Σ(μ − μ_p)² + 2β)/(n + 2α + 2), minus log InverseGamma(σ_p²; α, β).

    >>> one = torch.ones(1)
    >>> float(normal_empirical(d.Normal(0 * one, one), d.EmpiricalNormal(0 * one))) > 0.0
    True
    """
    squares = q.scale.square() + (q.loc - p.loc).square()
    if len(p.sizes) < 2:
        return _empirical([squares.sum()], [squares.numel()]) - q.scale.log().sum()
    rows = squares.numel() // squares.shape[-1]
    sums = [own.sum() for own in squares.split(list(p.sizes), -1)]
    return _empirical(sums, [rows * size for size in p.sizes]) - q.scale.log().sum()


@closed(d.KTiedNormal, d.EmpiricalNormal)
def ktied_empirical(q: d.KTiedNormal, p: d.EmpiricalNormal) -> Tensor:
    """The same for σ = U Vᵀ, without an m×n square: weights of a stack have a σ_p each."""
    squares = _squares(q)  # [] or [M]
    means = (q.loc - p.loc).square().reshape(*squares.shape, -1).sum(-1)
    return _empirical([squares + means], [q.loc.numel() // squares.numel()]) - _log_sigma(q)


@closed(d.Normal, d.RelativeNormal)
def normal_relative(q: td.Normal, p: d.RelativeNormal) -> Tensor:
    """Σ log(σ_p/σ) + σ²/(2σ_p²) − ½ + precision · μ²/2, σ_p = scale · rms of each tensor's means.

    >>> mu = torch.tensor([3.0, -3.0])
    >>> float(normal_relative(d.Normal(mu, 0.5 * mu.abs()), d.RelativeNormal(mu, 0.5, 0.0)))
    0.0
    """
    spreads, means = q.scale.square(), q.loc.square()
    if len(p.sizes) < 2:
        return _relative([(spreads.sum(), means.sum(), means.numel())], p) - q.scale.log().sum()
    rows = means.numel() // means.shape[-1]
    pieces = zip(spreads.split(list(p.sizes), -1), means.split(list(p.sizes), -1), p.sizes, strict=True)
    return _relative([(s.sum(), m.sum(), rows * n) for s, m, n in pieces], p) - q.scale.log().sum()


@closed(d.KTiedNormal, d.RelativeNormal)
def ktied_relative(q: d.KTiedNormal, p: d.RelativeNormal) -> Tensor:
    """The same for σ = U Vᵀ, without an m×n square: weights of a stack have a scale each."""
    squares = _squares(q)  # [] or [M]
    means = q.loc.square().reshape(*squares.shape, -1).sum(-1)
    return _relative([(squares, means, q.loc.numel() // squares.numel())], p) - _log_sigma(q)


def _relative(sums: Sequence[tuple[Tensor, Tensor, int]], p: d.RelativeNormal) -> Tensor:
    """Σ over tensors of ½ Σσ²/σ_p² + n (log σ_p − ½) + ½ precision Σμ², from Σσ², Σμ² and n of each."""
    total: Tensor | None = None
    for spreads, means, n in sums:
        variance = _relative_variance(means, n, p)
        part = (0.5 * (spreads / variance + n * (variance.log() - 1.0) + p.precision * means)).sum()
        total = part if total is None else total + part
    assert total is not None
    return total


def _relative_variance(means: Tensor, n: int, p: d.RelativeNormal) -> Tensor:
    return p.scale**2 * (means.detach() / max(n, 1)).clamp_min(LEAST_RMS**2)


ALPHA, BETA = 2.01, 0.101  # the reference's


def fitted(q: Any, p: Any) -> Any:
    """The prior with its scale, where that follows from the posterior.

    >>> round(float(fitted(d.Normal(torch.zeros(2), torch.ones(2)), d.EmpiricalNormal(torch.zeros(()))).scale), 3)
    0.524
    """
    if isinstance(p, d.RelativeNormal):
        return d.Normal(q.loc, _relative_variance(q.loc.square().sum(), q.loc.numel(), p).sqrt())
    if not isinstance(p, d.EmpiricalNormal):
        return p
    squares = (q.scale.square() + (q.loc - p.loc).square()).sum()
    return d.Normal(p.loc, ((squares + 2.0 * BETA) / (q.loc.numel() + 2.0 * ALPHA + 2.0)).sqrt())


def _empirical(squares: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """Σ over tensors of c (1 + log σ_p²) − n/2 − log(β^α/Γ(α)), for n elements and c = n/2 + α + 1.

    ``squares``: Σ(σ² + (μ − μ_p)²) of a tensor, or of several that have as many elements. It is the least of
    KL − log InverseGamma over σ_p², so that no gradient has to pass through σ_p² by itself.
    """
    total: Tensor | None = None
    for own, n in zip(squares, counts, strict=True):
        c = 0.5 * n + ALPHA + 1.0
        constant = c * (1.0 - math.log(2.0 * c)) - 0.5 * n - ALPHA * math.log(BETA) + math.lgamma(ALPHA)
        part = (c * (own + 2.0 * BETA).log() + constant).sum()
        total = part if total is None else total + part
    assert total is not None
    return total


@closed(d.Patch, d.Normal)
def patch_normal(q: d.Patch, p: td.Normal) -> Tensor:
    """Equation 6 of the EMP paper: Σ_k p_k ‖M_k‖²/(2σ_p²), plus n·KL(p‖uniform) for n indices.

    The second term is the entropy of the index, zero for uniform mixing; constants are left out.
    """
    energy = ((q.points - p.loc) / p.scale).square().flatten(1).sum(1)
    mixing = (q.probs * (q.probs.clamp_min(1e-30).log() + math.log(len(q.probs)))).sum()
    return 0.5 * (q.probs * energy).sum() + q.indices * mixing


@closed(d.Delta, d.Normal)
def delta_normal(q: d.Delta, p: td.Normal) -> Tensor:
    """‖M − μ_p‖²/(2σ_p²): a Normal of vanishing spread, up to its (infinite) constant."""
    return 0.5 * ((q.loc - p.loc) / p.scale).square().sum()


def _sample(q: d.Spread) -> Tensor:
    assert q.noise is not None
    return q.from_noise(fresh_noise(q.noise, tuple(q.loc.shape), q.loc.dtype, q.loc.device))


def monte_carlo(q: d.Spread, p: d.Spread) -> Tensor:
    """log q(x) − log p(x) at one x ~ q per element: for pairs without a closed form."""
    x = _sample(q)
    return q.log_prob(x) - p.log_prob(x)


_MONTE_CARLO = {(d.Normal, d.Cauchy)}


def check_pair(q: type, p: type) -> None:
    """Raise unless KL(q‖p) is finite and known: called when a network is converted.

    >>> check_pair(d.Normal, d.Normal)
    """
    if (q, p) in _CLOSED or (q, p) in _MONTE_CARLO or q in (d.Delta, d.ScaledBernoulli):
        return
    if (q, p) == (d.Cauchy, d.Normal):
        raise ValueError(
            "a Cauchy posterior has no finite KL against a Normal prior (its second moment is infinite); "
            "use prior=sb.Cauchy(loc, scale)"
        )
    if p in (d.EmpiricalNormal, d.RelativeNormal):
        raise ValueError(
            f"sb.{p.__name__} is the prior of Normal posteriors, whose spread it follows, and this posterior is "
            f"{q.__name__}; use a prior of its own family, such as sb.{q.__name__}(loc, scale)"
        )
    raise ValueError(
        f"the KL of a {q.__name__} posterior against a {p.__name__} prior is not defined here (their "
        f"supports differ or no formula is known); use a prior of the posterior's own family, "
        f"sb.{q.__name__}(loc, scale)"
    )


def total_kl(q: Any, p: Any) -> Tensor:
    """KL(q‖p), summed over all elements.

    >>> zero, one = torch.zeros(3), torch.ones(3)
    >>> float(total_kl(d.Normal(zero + 1, one), d.Normal(zero, one)))
    1.5
    """
    if isinstance(q, td.Distribution):  # raw parameters are of no 16-bit type
        q, p = at_least_float32(q), at_least_float32(p)
    formula = _CLOSED.get((type(q), type(p)))
    if formula is None:
        return monte_carlo(q, p).sum()
    return formula(q, p).sum()


def at_least_float32(spread: Any) -> Any:
    """The same distribution with 16-bit parameters raised to float32: a KL sums millions of terms."""
    tensors: tuple[Tensor, ...]
    if isinstance(spread, d.KTiedNormal):
        tensors = (spread.loc, spread.u, spread.v)
    elif isinstance(spread, d.Delta):
        tensors = (spread.loc,)
    elif isinstance(spread, d.EmpiricalNormal):
        return d.EmpiricalNormal(
            spread.loc.to(torch.promote_types(spread.loc.dtype, torch.float32)), spread.sizes
        )
    elif isinstance(spread, d.RelativeNormal):
        return spread  # its numbers are Python's
    elif isinstance(spread, d.Patch):
        if spread.points.dtype.itemsize >= 4:
            return spread
        return d.Patch(spread.points.float(), spread.probs.float(), spread.indices)
    else:
        tensors = (spread.loc, spread.scale)
    if tensors[0].dtype.itemsize >= 4:
        return spread
    return type(spread)(*(tensor.float() for tensor in tensors))


def mixture_kl(terms: Sequence[tuple[d.Spread, d.Spread]]) -> Tensor:
    """KL of the joint mixture over all terms, by one sample of every component.

    q(θ) = (1/K) Σ_k Π_layers q_k(θ_layer), so log q = logsumexp_k Σ_layers log q_k − log K, and the estimate
    is (1/K) Σ_j [log q(θ_j) − log p(θ_j)] with θ_j ~ q_j in every layer at once. Each term's q has a leading
    component axis [K, ...].
    """
    components = terms[0][0].loc.shape[0]
    log_q = terms[0][0].loc.new_zeros(components, components)  # [sample's component, density's component]
    log_p = terms[0][0].loc.new_zeros(components)
    for q, p in ((at_least_float32(q), at_least_float32(p)) for q, p in terms):
        x = _sample(q)  # [K, d]
        log_q = log_q + q.log_prob(x.unsqueeze(1)).flatten(2).sum(2)  # [K, K]
        log_p = log_p + p.log_prob(x).flatten(1).sum(1)
    joint = log_q.logsumexp(1) - math.log(components)
    return (joint - log_p).mean()
