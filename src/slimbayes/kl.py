"""KL divergences between a posterior and its prior: closed forms by type, Monte Carlo where none exists."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td
from torch.distributions.kl import register_kl

from slimbayes import distributions as d

_Closed = Callable[[Any, Any], Tensor]
_TOTALS: dict[tuple[type, type], _Closed] = {}


def _total(q: type, p: type) -> Callable[[_Closed], _Closed]:
    # torch's own dispatch walks its registry with generators, which torch.compile cannot trace:
    # our exact pairs are looked up here, and registered with torch as well where they are elementwise.
    def keep(function: _Closed) -> _Closed:
        _TOTALS[(q, p)] = function
        return function

    return keep


@_total(d.Normal, d.Normal)
def normal_normal(q: td.Normal, p: td.Normal) -> Tensor:
    """log(σ_p/σ) + (σ² + (μ − μ_p)²)/(2σ_p²) − ½, elementwise.

    >>> one = torch.ones(())
    >>> float(normal_normal(td.Normal(0 * one, one), td.Normal(0 * one, one)))
    0.0
    """
    variance = (q.scale / p.scale).square()
    return 0.5 * (variance + ((q.loc - p.loc) / p.scale).square() - 1.0 - variance.log())


@_total(d.LogNormal, d.LogNormal)
@register_kl(d.LogNormal, d.LogNormal)
def lognormal_lognormal(q: d.LogNormal, p: d.LogNormal) -> Tensor:
    """The Normal formula in log-space: the KL does not change under the common map exp."""
    variance = (q.scale / p.scale).square()
    return 0.5 * (variance + ((q.loc - p.loc) / p.scale).square() - 1.0 - variance.log())


@_total(d.Cauchy, d.Cauchy)
@register_kl(td.Cauchy, td.Cauchy)
def cauchy_cauchy(q: td.Cauchy, p: td.Cauchy) -> Tensor:
    """log(((γ + γ_p)² + (m − m_p)²)/(4 γ γ_p)), elementwise (Chyzak and Nielsen 2019).

    >>> one = torch.ones(())
    >>> float(cauchy_cauchy(td.Cauchy(0 * one, one), td.Cauchy(0 * one, one)))
    0.0
    """
    numerator = (q.scale + p.scale).square() + (q.loc - p.loc).square()
    return numerator.log() - math.log(4.0) - q.scale.log() - p.scale.log()


@_total(d.HalfCauchy, d.HalfCauchy)
@register_kl(d.HalfCauchy, d.HalfCauchy)
def halfcauchy_halfcauchy(q: d.HalfCauchy, p: d.HalfCauchy) -> Tensor:
    """log((γ + γ_p)²/(4 γ γ_p)): the log-ratio is symmetric about the common location, so folding keeps it."""
    return 2.0 * (q.scale + p.scale).log() - math.log(4.0) - q.scale.log() - p.scale.log()


@_total(d.KTiedNormal, d.Normal)
def ktied_normal(q: d.KTiedNormal, p: td.Normal) -> Tensor:
    """The Normal formula summed, with Σσ² = Σ_ab (UᵀU)_ab (VᵀV)_ab: no m×n square is formed.

    Σ log σ = n Σ log u + m Σ log v for k = 1; it needs one pass over U Vᵀ for k ≥ 2.
    """
    squares = ((q.u.t() @ q.u) * (q.v.t() @ q.v)).sum()
    if q.u.shape[1] == 1:
        logs = q.v.shape[0] * q.u.log().sum() + q.u.shape[0] * q.v.log().sum()
    else:
        logs = (q.u @ q.v.t()).log().sum()
    elements = q.loc.numel()
    means = (q.loc - p.loc).square().sum()
    return 0.5 * (squares + means) / p.scale.square() - logs + elements * (p.scale.log() - 0.5)


@_total(d.Patch, d.Normal)
def patch_normal(q: d.Patch, p: td.Normal) -> Tensor:
    """Equation 6 of the EMP paper: Σ_k p_k ‖M_k‖²/(2σ_p²), plus n·KL(p‖uniform) for n indices.

    The second term is the entropy of the index, zero for uniform mixing; constants are left out.
    """
    energy = ((q.points - p.loc) / p.scale).square().flatten(1).sum(1)
    mixing = (q.probs * (q.probs.clamp_min(1e-30).log() + math.log(len(q.probs)))).sum()
    return 0.5 * (q.probs * energy).sum() + q.indices * mixing


@_total(d.Delta, d.Normal)
def delta_normal(q: d.Delta, p: td.Normal) -> Tensor:
    """‖M − μ_p‖²/(2σ_p²): a Normal of vanishing spread, up to its (infinite) constant."""
    return 0.5 * ((q.loc - p.loc) / p.scale).square().sum()


def monte_carlo(q: d.Spread, p: d.Spread) -> Tensor:
    """log q(x) − log p(x) at one x ~ q per element: for pairs without a closed form."""
    shape = q.loc.shape
    if q.noise == "cauchy":
        noise = torch.tan(torch.pi * (torch.rand(shape, dtype=q.loc.dtype, device=q.loc.device) - 0.5))
    else:
        noise = torch.randn(shape, dtype=q.loc.dtype, device=q.loc.device)
    x = q.from_noise(noise)
    return q.log_prob(x) - p.log_prob(x)


_MONTE_CARLO = {(d.Normal, d.Cauchy)}


def check_pair(q: type, p: type) -> None:
    """Raise unless KL(q‖p) is finite and known: called when a network is converted.

    >>> check_pair(d.Normal, d.Normal)
    """
    if (q, p) in _TOTALS or (q, p) in _MONTE_CARLO or q in (d.Delta, d.ScaledBernoulli):
        return
    if (q, p) == (d.Cauchy, d.Normal):
        raise ValueError(
            "a Cauchy posterior has no finite KL against a Normal prior (its second moment is infinite); "
            "use prior=sb.Cauchy(loc, scale)"
        )
    raise ValueError(
        f"the KL of a {q.__name__} posterior against a {p.__name__} prior is not defined here (their supports "
        f"differ or no formula is known); use a prior of the posterior's own family, sb.{q.__name__}(loc, scale)"
    )


def total_kl(q: td.Distribution, p: td.Distribution) -> Tensor:
    """KL(q‖p), summed over all elements.

    >>> zero, one = torch.zeros(3), torch.ones(3)
    >>> float(total_kl(d.Normal(zero + 1, one), d.Normal(zero, one)))
    1.5
    """
    q, p = at_least_float32(q), at_least_float32(p)
    closed = _TOTALS.get((type(q), type(p)))
    if closed is None:
        return monte_carlo(q, p).sum()  # type: ignore[arg-type]
    return closed(q, p).sum()


def at_least_float32(spread: Any) -> Any:
    """The same distribution with 16-bit parameters raised to float32: a KL sums millions of terms."""
    if isinstance(spread, d.KTiedNormal):
        tensors = (spread.loc, spread.u, spread.v)
    elif isinstance(spread, d.Delta):
        tensors = (spread.loc,)
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

    q(θ) = (1/K) Σ_k Π_layers q_k(θ_layer), so log q = logsumexp_k Σ_layers log q_k − log K, and the estimate is
    (1/K) Σ_j [log q(θ_j) − log p(θ_j)] with θ_j ~ q_j in every layer at once. Each term's q has a leading
    component axis [K, ...].
    """
    components = terms[0][0].loc.shape[0]
    log_q = terms[0][0].loc.new_zeros(components, components)  # [sample's component, density's component]
    log_p = terms[0][0].loc.new_zeros(components)
    for q, p in ((at_least_float32(q), at_least_float32(p)) for q, p in terms):
        if q.noise == "cauchy":
            noise = torch.tan(torch.pi * (torch.rand_like(q.loc) - 0.5))
        else:
            noise = torch.randn_like(q.loc)
        x = q.from_noise(noise)  # [K, d]
        log_q = log_q + q.log_prob(x.unsqueeze(1)).flatten(2).sum(2)  # [K, K]
        log_p = log_p + p.log_prob(x).flatten(1).sum(1)
    joint = log_q.logsumexp(1) - math.log(components)
    return (joint - log_p).mean()
