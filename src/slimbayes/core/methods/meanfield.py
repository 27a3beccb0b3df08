"""MeanField and KTied: Normal posteriors over the weights themselves (Blundell 2015; Swiatkowski 2020)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core import distributions as d
from slimbayes.core import priors
from slimbayes.core.kl import check_pair
from slimbayes.core.layers.base import Converted
from slimbayes.core.layers.table import is_weighted
from slimbayes.core.methods.base import (
    LATER,
    Method,
    Outline,
    Shared,
    Traits,
    check_choice,
    check_count,
    check_flag,
    check_least,
    check_positive,
    check_prior,
    needs_linear,
    needs_matrix,
    no_local,
)
from slimbayes.core.posteriors import KTiedPosterior, NormalPosterior, Posterior
from slimbayes.core.rules.base import Rule
from slimbayes.core.rules.meanfield import SampledRule
from slimbayes.sequences.kernels import Several

_AROUND = (priors.Normal, priors.HeNormal, priors.RelativeNormal)  # may lie around the posterior's own means
ESTIMATORS = ("shared", "flipout", "local")
NORMAL_PRIORS = (priors.Normal, priors.HeNormal, priors.EmpiricalNormal, priors.RelativeNormal)


@dataclass(frozen=True)
class MeanField(Method):
    """Independent Normals over weights, and over ``biases`` too where asked; the given weights become the means.

    ``estimator``: "shared" (one weight sample per draw), "flipout" (random signs per example) or "local"
    (sampled pre-activations; an approximation for convolutions). ``tied_mean`` puts the prior's mean at the
    posterior's, so that only σ is penalised. ``stddev_max`` caps σ. ``temperature`` multiplies the KL in ``elbo``,
    ``spread_rate`` the learning rate of the scales in ``sb.parameter_groups``.

    >>> MeanField(estimator="flipout").prior
    RelativeNormal(scale=0.5, precision=10.0)
    """

    prior: priors.Prior = field(default_factory=priors.RelativeNormal)
    stddev_init: float = 0.02
    estimator: str = "shared"
    biases: bool = False
    tied_mean: bool = False
    stddev_max: float | None = None
    temperature: float = field(default=0.05, metadata=LATER)
    spread_rate: float = field(default=4.0, metadata=LATER)

    def __post_init__(self) -> None:
        check_least("temperature", self.temperature)
        check_positive("spread_rate", self.spread_rate, optional=False)
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_positive("stddev_init", self.stddev_init, optional=False)
        check_positive("stddev_max", self.stddev_max)
        check_flag("biases", self.biases)
        check_flag("tied_mean", self.tied_mean)
        check_prior(self.prior)
        if self.stddev_max is not None and self.stddev_max < self.stddev_init:
            raise ValueError(f"stddev_max={self.stddev_max} is below stddev_init={self.stddev_init}")
        if self.tied_mean and not isinstance(self.prior, _AROUND):
            raise ValueError(
                f"tied_mean needs a Normal, HeNormal or RelativeNormal prior, got {self.prior!r}: give "
                "prior=sb.Normal(0.0, 1.0)"
            )
        check_pair(d.Normal, type(self.prior.distribution(torch.ones(1))))

    @classmethod
    def paper(cls, **overrides: Any) -> MeanField:
        """With the values of the experiments that we repeat; they stay what they are when defaults change.

        >>> MeanField.paper(estimator="flipout").prior
        Normal(loc=0.0, scale=1.0)
        """
        values: dict[str, Any] = {
            "prior": priors.Normal(0.0, 1.0), "stddev_init": 0.01, "estimator": "shared", "biases": True,
            "tied_mean": False, "stddev_max": None, "temperature": 1.0, "spread_rate": 1.0,
        }  # fmt: skip
        return cls(**{**values, **overrides})

    @property
    def traits(self) -> Traits:
        """What conversion and draws need to know."""
        return Traits(randomizes_weight=True, temperature=self.temperature, lr_multiplier=self.spread_rate)

    def selects(self, name: str, module: nn.Module, outline: Outline) -> bool:
        """Layers that multiply by a weight."""
        return is_weighted(module)

    def refuses(self, layer: type[Converted] | type[Several]) -> str | None:
        """Why this kind of layer cannot be converted, or None if it can."""
        if self.estimator == "shared":
            return None
        if self.estimator == "local" and layer.recurrent:
            return no_local(layer)
        return needs_linear(f"MeanField(estimator={self.estimator!r})", layer)

    def attach(self, layer: Converted, name: str, shared: Shared) -> Rule:
        """Add one σ per weight, and per bias when ``biases``."""

        def spread(tensor: Tensor) -> Posterior:
            return NormalPosterior(
                start_stddev(tensor, self.stddev_init * self.prior.unit(tensor)), self.stddev_max
            )

        return attach_sampled(layer, name, shared, spread, spread, self)


@dataclass(frozen=True)
class KTied(Method):
    """Normals over the weights whose standard deviations are σ = U Vᵀ of rank k; ``biases``, where asked, mean-field.

    "local" computes the variance of a Linear layer by k(k+1)/2 thin products. ``temperature`` multiplies the KL in
    ``elbo``, ``spread_rate`` the learning rate of U and V in ``sb.parameter_groups``: log σ moves by both.

    >>> KTied(rank=2).rank
    2
    """

    rank: int = 2
    prior: priors.Prior = field(default_factory=priors.RelativeNormal)
    stddev_init: float = 0.02
    estimator: str = "shared"
    biases: bool = False
    temperature: float = field(default=0.05, metadata=LATER)
    spread_rate: float = field(default=2.0, metadata=LATER)

    def __post_init__(self) -> None:
        check_least("temperature", self.temperature)
        check_positive("spread_rate", self.spread_rate, optional=False)
        check_count("rank", self.rank)
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_positive("stddev_init", self.stddev_init, optional=False)
        check_flag("biases", self.biases)
        if not isinstance(self.prior, NORMAL_PRIORS):
            raise ValueError(
                f"KTied needs a prior of {', '.join(p.__name__ for p in NORMAL_PRIORS)}, got {self.prior!r}"
            )

    @classmethod
    def paper(cls, **overrides: Any) -> KTied:
        """With the paper's values, which stay what they are when defaults change.

        >>> KTied.paper(rank=3).prior
        Normal(loc=0.0, scale=0.3)
        """
        values: dict[str, Any] = {
            "rank": 2, "prior": priors.Normal(0.0, 0.3), "stddev_init": 0.01, "estimator": "shared", "biases": True,
            "temperature": 1.0, "spread_rate": 1.0,
        }  # fmt: skip
        return cls(**{**values, **overrides})

    @property
    def traits(self) -> Traits:
        """What conversion and draws need to know."""
        return Traits(randomizes_weight=True, temperature=self.temperature, lr_multiplier=self.spread_rate)

    def selects(self, name: str, module: nn.Module, outline: Outline) -> bool:
        """Layers that multiply by a weight."""
        return is_weighted(module)

    def refuses(self, layer: type[Converted] | type[Several]) -> str | None:
        """Why this kind of layer cannot be converted, or None if it can."""
        if self.estimator == "shared":
            return needs_matrix("KTied", layer)
        if self.estimator == "local" and layer.recurrent:
            return no_local(layer)
        return needs_linear(f"KTied(estimator={self.estimator!r})", layer)

    def attach(self, layer: Converted, name: str, shared: Shared) -> Rule:
        """Add U and V for the weight, and one σ per bias when ``biases``."""

        def weight_spread(weight: Tensor) -> Posterior:
            shape = (weight.shape[0], weight[0].numel())
            first = self.stddev_init * self.prior.unit(weight)
            return KTiedPosterior(shape, self.rank, first, weight.dtype, weight.device)

        def bias_spread(bias: Tensor) -> Posterior:
            return NormalPosterior(start_stddev(bias, self.stddev_init * self.prior.unit(bias)))

        return attach_sampled(layer, name, shared, weight_spread, bias_spread, self)


def start_stddev(like: Tensor, stddev: Tensor | float) -> Tensor:
    """σ ~ N(σ0, (σ0/10)²), kept positive: the k-tied paper's mean-field start, N(0.01, 0.001)."""
    noise = torch.randn_like(like.detach())
    return stddev * (1.0 + 0.1 * noise).clamp_min(0.1)


def attach_sampled(
    layer: Converted,
    name: str,
    shared: Shared,
    weight_spread: Callable[[Tensor], Posterior],
    bias_spread: Callable[[Tensor], Posterior],
    method: MeanField | KTied,
) -> Rule:
    """The rule of a layer with random weight and bias; tied tensors share one spread and one sample."""
    weight, weight_source = _spread_of(layer.weight, f"{name}.weight", weight_spread, shared)
    bias, bias_source = None, None
    if method.biases and layer.bias is not None:
        bias, bias_source = _spread_of(layer.bias, f"{name}.bias", bias_spread, shared)
    tied_mean = isinstance(method, MeanField) and method.tied_mean
    return SampledRule(
        name, weight, bias, method.estimator, method.prior, tied_mean, weight_source, bias_source
    )


def _spread_of(
    tensor: Tensor, source: str, make: Callable[[Tensor], Posterior], shared: Shared
) -> tuple[Posterior, str]:
    known: tuple[Posterior, str] | None = shared.get(tensor, "spread")
    if known is not None:
        return known
    made = (make(tensor), source)
    shared.put(tensor, "spread", made)
    return made
