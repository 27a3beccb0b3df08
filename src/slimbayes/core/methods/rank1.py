"""Rank1 and BatchEnsemble: W ∘ r sᵀ, one (r, s) per component (Dusenberry 2020; Wen 2020)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core import posteriors, priors
from slimbayes.core.kl import check_pair
from slimbayes.core.layers.base import Converted
from slimbayes.core.layers.table import is_weighted
from slimbayes.core.methods.base import (
    LATER,
    Method,
    Outline,
    Shared,
    Traits,
    add_component_axis,
    check_choice,
    check_count,
    check_flag,
    check_least,
    check_positive,
    check_prior,
    needs_linear,
)
from slimbayes.core.options import is_number
from slimbayes.core.rules.base import Rule
from slimbayes.core.rules.rank1 import Factor, Rank1Rule
from slimbayes.sequences.kernels import Several

REDUCTIONS = ("sum", "mean", "monte_carlo")
SIDES = ("both", "input", "output")
_APART = -0.5  # how far components begin apart in the first layer: as Neutral(0.5) has them


@dataclass(frozen=True)
class Family:
    """A posterior of the factors: what is around a location, from start scales [K, C]; and its default prior."""

    posterior: Callable[[Tensor], posteriors.Posterior]
    prior: Callable[[float], priors.Prior]  # of the neutral value, 1 or 0: the paper's
    jitter: bool = False  # of the start scales
    positive: bool = False  # never around 0
    edge: bool = False  # the location is the prior's: one apart from it would make the KL infinite
    dropout_rate: float = 0.01  # where none is asked for


# By what ``posterior=`` calls them. One of your own is one more line: ``FAMILIES["student"] = Family(...)``.
FAMILIES = {
    "normal": Family(posteriors.NormalPosterior, lambda one: priors.Normal(one, 0.1), jitter=True),
    "cauchy": Family(posteriors.CauchyPosterior, lambda one: priors.Cauchy(one, 0.1), dropout_rate=1e-6),
    "lognormal": Family(
        posteriors.LogNormalPosterior, lambda one: priors.LogNormal(0.0, 0.1), jitter=True, positive=True
    ),
    "halfcauchy": Family(
        posteriors.HalfCauchyPosterior, lambda one: priors.HalfCauchy(one, 0.1), edge=True, dropout_rate=1e-6
    ),
    "delta": Family(lambda sigma: posteriors.DeltaPosterior(), lambda one: priors.Normal(one, 0.1)),
}


@dataclass(frozen=True)
class Rank1(Method):
    """W ∘ r sᵀ, distributions over r and s only: y = r ∘ (W (s ∘ x)) + b, per component.

    ``posterior``: "normal", "cauchy", "lognormal", "halfcauchy" or "delta". ``prior=Neutral(scale)`` is the posterior's
    own family at location 1 (0 in log-space, and for additive perturbations); None is that with scale 0.1, the paper's.
    ``random_sign_init`` v > 0 starts locations at ±1 with probability v of +1, v ≤ 0 at Normal(1, |v|). None sets the
    components apart in the first converted layer alone, in its input factor, at Normal(1, 0.5²), and starts all others
    at 1: from there they part by themselves, and the network begins near the one that was given.
    ``dropout_rate`` p starts σ at sqrt(p/(1 − p)); None is 0.01, and 1e-6 for Cauchys, whose tails are heavy.
    ``kl_reduction``: "sum" over components as the reference, "mean" (the convexity bound), or "monte_carlo" (the KL of
    the joint mixture). ``clip`` bounds samples.
    ``random``: which of the factors have a distribution, "both", "input" (s) or "output" (r); the other is a point
    estimate for each component, as BatchEnsemble's: trained, without noise and KL. ``temperature`` multiplies the KL in
    ``elbo``; ``spread_rate`` the learning rate of the factors' scales in ``sb.parameter_groups``, so that noise which
    the data do not bear is gone within a short run.

    >>> Rank1(components=2, posterior="cauchy").prior
    Neutral(scale=0.5)
    """

    components: int = 4
    posterior: str = "normal"
    prior: priors.Prior | None = priors.Neutral(0.5)
    factors: str = "both"
    perturbation: str = "multiplicative"
    random_sign_init: float | None = None
    dropout_rate: float | None = None
    kl_reduction: str = "mean"
    clip: float | None = 10.0
    components_per_step: int | None = None
    train_base: bool = True
    random: str = field(default="both", metadata=LATER)
    temperature: float = field(default=1.0, metadata=LATER)
    spread_rate: float = field(default=20.0, metadata=LATER)

    def __post_init__(self) -> None:
        check_least("temperature", self.temperature)
        check_positive("spread_rate", self.spread_rate, optional=False)
        check_count("components", self.components)
        check_choice("posterior", self.posterior, tuple(FAMILIES))
        check_choice("factors", self.factors, SIDES)
        check_choice("perturbation", self.perturbation, ("multiplicative", "additive"))
        check_choice("kl_reduction", self.kl_reduction, REDUCTIONS)
        check_choice("random", self.random, SIDES)
        check_positive("clip", self.clip)
        check_flag("train_base", self.train_base)
        check_prior(self.prior, optional=True)
        if isinstance(self.prior, priors.RelativeNormal):
            raise ValueError(
                f"prior={self.prior!r} is noise in proportion to weights, and Rank1's factors lie around "
                f"{self._neutral:g}, of no size of their own; use prior=sb.Neutral(0.5) for the posterior's own family "
                f"there, or sb.KTied()"
            )
        if self.random_sign_init is not None:
            _check_sign_init(self.random_sign_init)
        if self.posterior != "delta":
            posteriors.dropout_stddev(self.first_rate)
        if self.perturbation == "additive" and (self.random_sign_init or 0) > 0:
            raise ValueError(
                f"random_sign_init={self.random_sign_init} draws ±1, which has no meaning for additive "
                f"factors around 0; use a value ≤ 0, the standard deviation of their start"
            )
        if self.perturbation == "additive" and FAMILIES[self.posterior].positive:
            raise ValueError(
                f"additive factors are centred at 0, which a {self.posterior} never is; use posterior='normal'"
            )
        if self.components_per_step is not None:
            check_count("components_per_step", self.components_per_step)
            if self.components_per_step > self.components:
                raise ValueError(
                    f"components_per_step={self.components_per_step} exceeds components={self.components}"
                )
        if self.random != "both":
            self._check_random()
        if self.kl_reduction == "monte_carlo" and isinstance(self.prior, priors.EmpiricalNormal):
            raise ValueError(
                f"kl_reduction='monte_carlo' needs the density of a prior that is the same for all samples, and "
                f"{self.prior!r} follows the posterior; use kl_reduction='sum' or 'mean', or prior=sb.Normal(1.0, 0.1)"
            )
        if self.posterior != "delta":
            one = torch.ones(1)
            q = type(FAMILIES[self.posterior].posterior(one)(one))
            check_pair(q, type(self._prior().distribution(one)))

    @classmethod
    def paper(cls, **overrides: Any) -> Rank1:
        """With the paper's values, which stay what they are when defaults change.

        >>> Rank1.paper(components=2).kl_reduction
        'sum'
        """
        values: dict[str, Any] = {
            "components": 4, "posterior": "normal", "prior": None, "factors": "both", "perturbation": "multiplicative",
            "random_sign_init": -0.5, "dropout_rate": 1e-3, "kl_reduction": "sum", "clip": 10.0,
            "components_per_step": None, "train_base": True, "random": "both", "temperature": 1.0,
            "spread_rate": 1.0,
        }  # fmt: skip
        return cls(**{**values, **overrides})

    @property
    def first_rate(self) -> float:
        """The ``dropout_rate``, or what the family of the posterior begins with."""
        return FAMILIES[self.posterior].dropout_rate if self.dropout_rate is None else self.dropout_rate

    def _check_random(self) -> None:
        if self.posterior == "delta":
            raise ValueError(
                f"random={self.random!r} has no meaning with posterior='delta', of which no factor has a distribution; "
                f"leave random='both', or use another posterior"
            )
        if self.factors not in ("both", self.random):
            raise ValueError(
                f"random={self.random!r} with factors={self.factors!r} leaves nothing random: the only factor there is "
                f"would be a point; use factors='both' or random={self.factors!r}"
            )

    @property
    def traits(self) -> Traits:
        """What conversion and draws need to know."""
        return Traits(
            components=self.components, step_components=self.components_per_step, trains_base=self.train_base,
            noisy=self.posterior != "delta", temperature=self.temperature, lr_multiplier=self.spread_rate,
        )  # fmt: skip

    def selects(self, name: str, module: nn.Module, outline: Outline) -> bool:
        """Layers that multiply by a weight."""
        return is_weighted(module)

    def refuses(self, layer: type[Converted] | type[Several]) -> str | None:
        """Why this kind of layer cannot be converted, or None if it can."""
        return needs_linear("Rank1", layer)

    def attach(self, layer: Converted, name: str, shared: Shared) -> Rule:
        """Add the factors and one bias per component."""
        inputs = sum(slot.size for slot in layer.input_slots)
        output = inner = None
        given = self.random_sign_init
        start = apart = 0.0 if given is None else given  # apart: of the input factor, or of the only one
        if given is None and shared.claim("components apart"):
            apart = _APART
        if self.factors != "input":
            own = apart if self.factors == "output" else start
            output = self._factor(layer.output_size, layer.weight, self.random == "input", own)
        if self.factors != "output":
            inner = self._factor(inputs, layer.weight, self.random == "output", apart)
        add_component_axis(layer, "bias", self.components, shared)
        additive = self.perturbation == "additive"
        return Rank1Rule(name, self.components, output, inner, additive, self.clip, self.kl_reduction)

    @property
    def _neutral(self) -> float:
        return 0.0 if self.perturbation == "additive" else 1.0

    def _prior(self) -> priors.Prior:
        if self.prior is None or isinstance(self.prior, priors.Neutral):
            return _own_prior(FAMILIES[self.posterior], self._neutral, self.prior)
        return self.prior

    def _factor(self, size: int, like: Tensor, point: bool, start: float) -> Factor:
        neutral, shape = self._neutral, (self.components, size)
        prior = self._prior()
        family = FAMILIES[self.posterior]
        if point or self.posterior == "delta":
            return Factor(
                start_locations(shape, start, neutral, like),
                posteriors.DeltaPosterior(),
                prior,
            )
        spread = family.posterior(start_scales(shape, self.first_rate, family.jitter, like))
        if family.edge:
            edge = torch.full(shape, prior.loc, dtype=like.dtype, device=like.device)  # type: ignore[attr-defined]
            return Factor(edge, spread, prior, trainable=False)
        return Factor(start_locations(shape, start, neutral, like), spread, prior)


@dataclass(frozen=True)
class BatchEnsemble(Method):
    """Rank1 with point factors: K networks that share every weight matrix (Wen et al. 2020).

    >>> BatchEnsemble(components=8).components
    8
    """

    components: int = 4
    random_sign_init: float = -0.5

    def __post_init__(self) -> None:
        check_count("components", self.components)
        _check_sign_init(self.random_sign_init)

    @property
    def traits(self) -> Traits:
        """What conversion and draws need to know."""
        return Traits(components=self.components, noisy=False)

    def selects(self, name: str, module: nn.Module, outline: Outline) -> bool:
        """Layers that multiply by a weight."""
        return is_weighted(module)

    def refuses(self, layer: type[Converted] | type[Several]) -> str | None:
        """Why this kind of layer cannot be converted, or None if it can."""
        return needs_linear("BatchEnsemble", layer)

    def attach(self, layer: Converted, name: str, shared: Shared) -> Rule:
        """Add the factors and one bias per component."""
        same = Rank1.paper(
            components=self.components, posterior="delta", random_sign_init=self.random_sign_init, clip=None
        )
        return same.attach(layer, name, shared)


@functools.cache
def _own_prior(family: Family, neutral: float, like: priors.Neutral | None) -> priors.Prior:
    """The family's own prior, one object for all factors: they are compared to be sampled together."""
    own: Any = family.prior(neutral)
    return own if like is None else replace(own, scale=like.scale)  # type: ignore[no-any-return]


def _check_sign_init(value: float) -> None:
    if not is_number(value) or value > 1:
        raise ValueError(
            f"random_sign_init must be a probability in (0, 1] or minus a standard deviation, got {value!r}"
        )


def start_locations(shape: tuple[int, int], sign_init: float, neutral: float, like: Tensor) -> Tensor:
    """±1 with probability ``sign_init`` of +1 if positive, else Normal(neutral, |sign_init|).

    >>> start_locations((2, 3), 1.0, 1.0, torch.zeros(())).unique().tolist()
    [1.0]
    """
    if sign_init > 0:
        chosen = torch.rand(shape, device=like.device) < sign_init
        return chosen.to(like.dtype) * 2.0 - 1.0
    return neutral + abs(sign_init) * torch.randn(shape, dtype=like.dtype, device=like.device)


def start_scales(shape: tuple[int, int], rate: float, jitter: bool, like: Tensor) -> Tensor:
    """σ with ρ = ρ0 (or TruncatedNormal(ρ0, 0.1) within two deviations), softplus(ρ0) = sqrt(p/(1 − p)).

    >>> round(float(start_scales((1, 1), 1e-3, False, torch.zeros(()))), 5)
    0.03164
    """
    sigma = torch.full(shape, posteriors.dropout_stddev(rate), dtype=like.dtype, device=like.device)
    rho = posteriors.inverse_softplus(sigma)
    if jitter:
        noise = nn.init.trunc_normal_(torch.empty_like(rho), 0.0, 0.1, -0.2, 0.2)
        rho = rho + noise
    return nn.functional.softplus(rho)
