"""Random weights by their parameters, and what a draw knows of the KL of those that it sampled.

A Normal prior is two numbers here, and the KL a few sums that the sampling operation makes beside its samples. They
are left in a ``Byproduct`` for the KL that follows the draw. The scale of a prior that follows its tensor comes from
the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.accelerate import switches
from slimbayes.core import distributions as d
from slimbayes.core import priors
from slimbayes.core.kl import ALPHA, BETA
from slimbayes.core.noise import transformed
from slimbayes.core.posteriors import KTiedPosterior, NormalPosterior, Posterior
from slimbayes.core.rules.base import Operation, Rule, parameter_of
from slimbayes.core.rules.meanfield import SampledRule


class Cost(NamedTuple):
    """The KL of one tensor, whose slopes are mean · (M − loc) and spread · σ − 1/σ."""

    kl: float
    mean: float
    spread: float


@dataclass
class RawPrior:
    """N(loc, scale²) for all elements; loc is None where it is the posterior's own mean.

    ``scale`` has no meaning where the prior ``follows`` the tensor.
    """

    loc: float | None
    scale: float
    follows: priors.RelativeNormal | priors.EmpiricalNormal | None = None

    @property
    def precision(self) -> float:
        """1/scale²."""
        return 1.0 / (self.scale * self.scale)

    def cost(self, sums: tuple[float, float, float], n: int) -> Cost:
        """½ (Σσ²/σ_p² + λ Σ(M − loc)²) + n (log σ_p − ½) − Σ log σ, from these sums over n elements.

        λ is 1/σ_p² but for ``RelativeNormal``; of ``EmpiricalNormal`` there is − log InverseGamma(σ_p²; α, β) too.

        >>> RawPrior(0.0, 1.0).cost((0.0, 2.0, 0.0), 2)
        Cost(kl=0.0, mean=1.0, spread=1.0)
        """
        distance, squares, logs = sums
        more = 0.0
        if isinstance(self.follows, priors.RelativeNormal):
            variance = self.follows.scale**2 * max(distance / max(n, 1), priors.LEAST_RMS**2)
            pull = self.follows.precision
        elif self.follows is not None:
            variance = (squares + distance + 2.0 * BETA) / (n + 2.0 * ALPHA + 2.0)
            pull = 1.0 / variance
            more = (
                (ALPHA + 1.0) * math.log(variance) + BETA * pull + math.lgamma(ALPHA) - ALPHA * math.log(BETA)
            )
        else:
            variance, pull = self.scale**2, 0.0 if self.loc is None else self.precision
        spread = 1.0 / variance
        kl = 0.5 * (n * (math.log(variance) - 1.0) + spread * squares + pull * distance) - logs + more
        return Cost(kl, pull, spread)

    def distribution(self, like: Tensor) -> Any:
        """The prior of a tensor like ``like``."""
        if self.follows is not None:
            return self.follows.distribution(like)
        return d.Normal(like if self.loc is None else like.new_tensor(self.loc), like.new_tensor(self.scale))


@dataclass
class Raw:
    """A posterior around ``loc`` by its parameters: (ρ,) of a Normal, (log U, log V) of a k-tied one."""

    loc: Tensor
    spread: tuple[Tensor, ...]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The mean and the parameters of the spread."""
        return (self.loc, *self.spread)


def version(tensor: Tensor) -> tuple[int, int, bool]:
    """What changes with a tensor's values, its memory (``p.data = ...``, ``model.to(...)``), or with its freezing.

    >>> x = torch.zeros(1)
    >>> before = version(x)
    >>> x.add_(1.0) is x and version(x) != before
    True
    """
    return -1 if tensor.is_inference() else tensor._version, tensor.data_ptr(), tensor.requires_grad


class LayerFacts:
    """All that decides how these layers' tensors are sampled: objects, compared by identity, and values.

    No layer is among them: whoever keeps the facts does not keep the network.
    """

    def __init__(self, layers: Sequence[tuple[Rule, Operation]], noise: str = "") -> None:
        self.noise = noise
        self.rules: list[int] = []
        self.objects: list[Any] = []
        self.values: list[Any] = []
        for rule, op in layers:
            if type(rule) is not SampledRule:
                continue
            self.rules.append(id(rule))
            self.values += (
                id(op), rule.estimator, rule.tied_mean, rule.name, rule.weight_source,
                rule.bias_source, op.fan_in, len(op._forward_pre_hooks),
            )  # fmt: skip
            self.objects.append(rule.prior)
            for which in ("weight", "bias"):
                mean, spread = parameter_of(op, which), rule._modules.get(which)
                self.objects += (mean, spread)
                if mean is not None:
                    self.values += (mean.dtype, mean.device)
                if spread is not None:
                    own = spread._parameters.values()
                    self.objects += (type(spread), *own)
                    self.values += (spread.__dict__.get("maximum"), *[p.dtype for p in own if p is not None])

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, LayerFacts)
            and (self.noise, self.rules) == (other.noise, other.rules)
            and self.values == other.values
            and len(self.objects) == len(other.objects)
            and all(map(is_, self.objects, other.objects))
        )

    __hash__ = None  # type: ignore[assignment]

    def explain(self, raws: Sequence[Raw]) -> bool:
        """Whether every tensor is among them, and no attribute or property that may change unseen."""
        seen = {id(fact) for fact in self.objects}
        return all([id(tensor) in seen for raw in raws for tensor in raw.parameters])

    def hold(self, layers: Sequence[Any]) -> bool:
        """Whether they are those of their rules among these converted layers still."""
        own = [(layer.bayes, layer) for layer in layers if id(layer.bayes) in self.rules]
        return self == LayerFacts(own, self.noise)


@dataclass
class Byproduct:
    """Of one operation that sampled random tensors: their parameters as they were, their priors, and their KL."""

    sources: list[str]
    raws: list[Raw]
    priors: list[RawPrior | None]  # None: another layer's, or no Normal
    facts: LayerFacts | None = None  # None: nothing tells whether they are the layers' own still
    total: Tensor | None = None  # the KL
    noise: tuple[int, int] = (-1, 0)  # the seed and the first stream of noise that can be made again
    draws: int = 0
    versions: list[tuple[int, int, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.versions = [version(tensor) for tensor in self.tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """All parameters, tensor by tensor."""
        return [tensor for raw in self.raws for tensor in raw.parameters]

    @property
    def names(self) -> list[str]:
        """The sources of the tensors whose KL follows from this."""
        return [s for s, prior in zip(self.sources, self.priors, strict=True) if prior is not None]

    def noise_of(self, source: str) -> tuple[int, int]:
        """The seed and the first stream of the noise of one of its tensors."""
        seed, stream = self.noise
        return seed, stream + self.draws * self.sources.index(source)

    def valid(self, layers: Sequence[object]) -> bool:
        """Whether there is a KL to take over: the tensors still belong to these layers, and have not changed."""
        if torch.compiler.is_compiling() or self.total is None or self.facts is None:
            return False  # compiled code has no part in a graph made outside of it
        if not switches.paths.weights or transformed():
            return False
        return [version(tensor) for tensor in self.tensors] == self.versions and self.facts.hold(layers)

    def kl(self) -> Tensor:
        """KL of all its tensors that have a prior here."""
        assert self.total is not None
        return self.total if torch.is_grad_enabled() else self.total.detach()


def spread_of(posterior: Posterior | None) -> tuple[Tensor, ...]:
    """The parameters of a spread that the fast paths know, else none."""
    if type(posterior) is NormalPosterior and posterior.maximum is None:
        return (posterior.rho,)
    if type(posterior) is KTiedPosterior:
        return posterior.log_u, posterior.log_v
    return ()


def raw_spread(posterior: Posterior | None, mean: Tensor) -> Raw | None:
    """The posterior's parameters where the fast paths know what to do with them, else None."""
    if posterior is None or not switches.paths.weights or torch.compiler.is_compiling() or transformed():
        return None
    raw = Raw(mean, spread_of(posterior))
    if not raw.spread:
        return None
    if mean.dtype not in (torch.float32, torch.float64):
        return None
    for tensor in raw.parameters:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.dtype != mean.dtype:
            return None
    return raw


def raw_prior(prior: priors.Prior, fan_in: int | None, tied: bool) -> RawPrior | None:
    """The numbers of a Normal prior, None for any other."""
    if type(prior) is priors.Normal:
        return RawPrior(None if tied else prior.loc, prior.scale)
    if type(prior) is priors.HeNormal:
        return RawPrior(None if tied else 0.0, 1.0 if fan_in is None else math.sqrt(2.0 / fan_in))
    if type(prior) is priors.RelativeNormal:
        return RawPrior(0.0, math.nan, prior)
    if type(prior) is priors.EmpiricalNormal:
        return RawPrior(prior.loc, math.nan, prior)
    return None
