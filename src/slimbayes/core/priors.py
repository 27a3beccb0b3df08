"""Prior constructors: small frozen records that become distributions beside a tensor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimbayes.core import distributions as d
from slimbayes.core.options import check_positive, is_number


def _check(name: str, loc: float, scale: float) -> None:
    if not is_number(loc):
        raise ValueError(f"{name} prior: loc must be finite, got {loc!r}")
    check_positive(f"{name} prior: scale", scale, optional=False)


def _scalar(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=like.dtype, device=like.device)


class Prior(ABC):
    """A prior over the elements of one tensor."""

    @abstractmethod
    def distribution(self, like: Tensor, fan_in: int | None = None) -> Any:
        """The prior of a tensor like ``like``; ``fan_in`` is None for biases and factors."""

    def at(self, fan_in: int | None) -> Prior:
        """The prior with what follows from a fan-in put in: tensors of one such prior may be taken together."""
        return self

    def beside(self, like: Tensor, sizes: Sequence[int]) -> Any:
        """The prior of several tensors, side by side on the last axis of ``like`` with these sizes, or stacked."""
        return self.distribution(like)


@dataclass(frozen=True)
class Normal(Prior):
    """N(loc, scale²), elementwise.

    >>> Normal(0.0, 1.0)
    Normal(loc=0.0, scale=1.0)
    """

    loc: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check("Normal", self.loc, self.scale)

    def distribution(self, like: Tensor, fan_in: int | None = None) -> d.Normal:
        """The prior of a tensor like ``like``."""
        return d.Normal(_scalar(self.loc, like), _scalar(self.scale, like))


@dataclass(frozen=True)
class Cauchy(Prior):
    """Cauchy(loc, scale), elementwise.

    >>> Cauchy(1.0, 0.1)
    Cauchy(loc=1.0, scale=0.1)
    """

    loc: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check("Cauchy", self.loc, self.scale)

    def distribution(self, like: Tensor, fan_in: int | None = None) -> d.Cauchy:
        """The prior of a tensor like ``like``."""
        return d.Cauchy(_scalar(self.loc, like), _scalar(self.scale, like))


@dataclass(frozen=True)
class LogNormal(Prior):
    """exp(N(loc, scale²)): loc and scale in log-space.

    >>> LogNormal(0.0, 0.1)
    LogNormal(loc=0.0, scale=0.1)
    """

    loc: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check("LogNormal", self.loc, self.scale)

    def distribution(self, like: Tensor, fan_in: int | None = None) -> d.LogNormal:
        """The prior of a tensor like ``like``."""
        return d.LogNormal(_scalar(self.loc, like), _scalar(self.scale, like))


@dataclass(frozen=True)
class HalfCauchy(Prior):
    """loc + |Cauchy(0, scale)|.

    >>> HalfCauchy(1.0, 0.1)
    HalfCauchy(loc=1.0, scale=0.1)
    """

    loc: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check("HalfCauchy", self.loc, self.scale)

    def distribution(self, like: Tensor, fan_in: int | None = None) -> d.HalfCauchy:
        """The prior of a tensor like ``like``."""
        return d.HalfCauchy(_scalar(self.loc, like), _scalar(self.scale, like))


@dataclass(frozen=True)
class HeNormal(Prior):
    """N(0, 2/fan_in) for weights and N(0, 1) for biases: the k-tied paper's scaled prior.

    >>> q = HeNormal().distribution(torch.zeros(2, 8), fan_in=8)
    >>> float(q.scale)
    0.5
    """

    def distribution(self, like: Tensor, fan_in: int | None = None) -> d.Normal:
        """The prior of a tensor like ``like``."""
        return self.at(fan_in).distribution(like)

    def at(self, fan_in: int | None) -> Normal:
        """A Normal of that scale."""
        return Normal(0.0, 1.0 if fan_in is None else math.sqrt(2.0 / fan_in))


@dataclass(frozen=True)
class EmpiricalNormal(Prior):
    """N(loc, σ_p²) whose σ_p follows each tensor, in closed form, with the reference's inverse-gamma term.

    σ_p² = (Σσ² + Σ(μ − loc)² + 2β)/(n + 2α + 2) for a tensor of n elements, with α = 2.01 and β = 0.101; the KL is
    Σ KL(q‖N(loc, σ_p²)) − log InverseGamma(σ_p²; α, β). Without the last term, which σ_p² minimises together with the
    first, shrinking everything would cost nothing. ``loc`` is 1 for multiplicative factors.

    >>> EmpiricalNormal()
    EmpiricalNormal(loc=0.0)
    """

    loc: float = 0.0

    def __post_init__(self) -> None:
        _check("EmpiricalNormal", self.loc, 1.0)

    def distribution(self, like: Tensor, fan_in: int | None = None) -> d.EmpiricalNormal:
        """The prior of a tensor like ``like``."""
        return d.EmpiricalNormal(_scalar(self.loc, like))

    def beside(self, like: Tensor, sizes: Sequence[int]) -> d.EmpiricalNormal:
        """One scale for each of several tensors."""
        return d.EmpiricalNormal(_scalar(self.loc, like), tuple(sizes))


# By the names that files and texts have for them. One of your own is one more line: ``PRIORS["StudentT"] = StudentT``.
PRIORS: dict[str, type[Prior]] = {
    kind.__name__: kind for kind in (Normal, Cauchy, LogNormal, HalfCauchy, HeNormal, EmpiricalNormal)
}
