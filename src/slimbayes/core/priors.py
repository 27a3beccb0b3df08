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
from slimbayes.core.options import check_least, check_positive, is_number


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

    def unit(self, like: Tensor) -> Tensor | float:
        """What the scales of a posterior under this prior are counted in, for a tensor of these values."""
        return 1.0

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


LEAST_RMS = 1e-3  # of a tensor: matrices that start at 0 have a scale all the same


@dataclass(frozen=True)
class Neutral(Prior):
    """The posterior's own family, of this scale, around what changes nothing: for the factors of ``Rank1`` alone.

    Normal(1, scale²) for Normals, Cauchy(1, scale) for Cauchys; around 0 in log-space, and for additive factors.

    >>> Neutral(0.5)
    Neutral(scale=0.5)
    """

    scale: float = 0.1

    def __post_init__(self) -> None:
        _check("Neutral", 0.0, self.scale)

    def distribution(self, like: Tensor, fan_in: int | None = None) -> d.Normal:
        """None: which it is follows from the posterior, and ``Rank1`` puts that in its place."""
        raise ValueError(
            f"prior={self!r} is for the factors of Rank1; for weights use sb.Normal(0.0, {self.scale:g})"
        )


@dataclass(frozen=True)
class RelativeNormal(Prior):
    """Noise in proportion to the weights: N(μ, (scale · rms(μ))²) around means μ that are N(0, 1/precision).

    rms(μ) is the root mean square of the tensor's means (at least 0.001; no gradient passes through it). A posterior
    N(μ, σ²) pays Σ log(σ_p/σ) + σ²/(2σ_p²) − ½ + precision · μ²/2 with σ_p = scale · rms: what the data do not fix
    gets noise of that part of the weights' size, in layers of any width, and the means are as free as under weight
    decay of temperature · precision/num_data. First spreads (``stddev_init``) count in the same unit, rms(μ).

    >>> q = RelativeNormal(0.5).unit(torch.tensor([0.3, -0.4]))
    >>> round(float(q), 4)
    0.3536
    """

    scale: float = 0.5
    precision: float = 10.0

    def __post_init__(self) -> None:
        _check("RelativeNormal", 0.0, self.scale)
        check_least("RelativeNormal prior: precision", self.precision)

    def distribution(self, like: Tensor, fan_in: int | None = None) -> d.RelativeNormal:
        """The prior of a tensor like ``like``."""
        return self.beside(like, ())

    def beside(self, like: Tensor, sizes: Sequence[int]) -> d.RelativeNormal:
        """One scale for each of several tensors."""
        return d.RelativeNormal(_scalar(0.0, like), self.scale, self.precision, tuple(sizes))

    def unit(self, like: Tensor) -> Tensor:
        """rms of the tensor."""
        squares = like.detach().float().square().sum() / max(like.numel(), 1)
        return squares.sqrt().clamp_min(LEAST_RMS)


# By the names that files and texts have for them. One of your own is one more line: ``PRIORS["StudentT"] = StudentT``.
PRIORS: dict[str, type[Prior]] = {
    kind.__name__: kind
    for kind in (Normal, Cauchy, LogNormal, HalfCauchy, HeNormal, EmpiricalNormal, Neutral, RelativeNormal)
}
