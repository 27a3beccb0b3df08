"""Distributions with the three views that layers need: a point, a map from noise, a density."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch import distributions as td


def bounded_exp(x: Tensor) -> Tensor:
    """exp x, at most the largest number there is: an infinite slope would make a NaN of a gradient of zero.

    >>> bounded_exp(torch.tensor([0.0, 1e4])).isfinite()
    tensor([True, True])
    """
    return x.clamp(max=math.log(torch.finfo(x.dtype).max) * (1.0 - torch.finfo(x.dtype).eps)).exp()


def broadcast(loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one shape; torch's own way to see to it takes several times as long as a small network's layer."""
    if loc.shape == scale.shape:
        return loc, scale
    loc, scale = torch.broadcast_tensors(loc, scale)
    return loc, scale


class Normal(td.Normal):
    """N(loc, scale²), reparameterised: x = loc + scale·ε with ε standard normal."""

    noise = "normal"

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = broadcast(loc, scale)
        td.Distribution.__init__(self, self.loc.shape, validate_args=False)

    def point(self) -> Tensor:
        """The mean."""
        return self.loc

    def from_noise(self, epsilon: Tensor) -> Tensor:
        """Map standard noise to a sample."""
        return torch.addcmul(self.loc, self.scale, epsilon)


class Cauchy(td.Cauchy):
    """Cauchy(loc, scale): x = loc + scale·ε with ε standard Cauchy; it has no mean, its point is loc."""

    noise = "cauchy"

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = broadcast(loc, scale)
        td.Distribution.__init__(self, self.loc.shape, validate_args=False)

    def point(self) -> Tensor:
        """The location (the median)."""
        return self.loc

    def from_noise(self, epsilon: Tensor) -> Tensor:
        """Map standard noise to a sample."""
        return torch.addcmul(self.loc, self.scale, epsilon)


class LogNormal(td.Distribution):
    """x = exp(loc + scale·ε): loc and scale live in log-space; the point is the median exp(loc)."""

    noise = "normal"
    arg_constraints = {}

    loc: Tensor
    scale: Tensor

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = broadcast(loc, scale)
        super().__init__(self.loc.shape, validate_args=False)

    def point(self) -> Tensor:
        """The median."""
        return self.loc.exp()

    def from_noise(self, epsilon: Tensor) -> Tensor:
        """Map standard noise to a sample."""
        return bounded_exp(self.loc + self.scale * epsilon)

    def log_prob(self, value: Tensor) -> Tensor:
        """log N(log x; loc, scale²) − log x."""
        log_value = value.log()
        z = (log_value - self.loc) / self.scale
        return -0.5 * z * z - self.scale.log() - 0.5 * math.log(2 * math.pi) - log_value


class HalfCauchy(td.Distribution):
    """x = loc + scale·|ε| with ε standard Cauchy: the upper half of a Cauchy, folded at loc."""

    noise = "cauchy"
    arg_constraints = {}

    loc: Tensor
    scale: Tensor

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = broadcast(loc, scale)
        super().__init__(self.loc.shape, validate_args=False)

    def point(self) -> Tensor:
        """The location (the mode)."""
        return self.loc

    def from_noise(self, epsilon: Tensor) -> Tensor:
        """Map standard noise to a sample."""
        return self.loc + self.scale * epsilon.abs()

    def log_prob(self, value: Tensor) -> Tensor:
        """log 2 − log π − log scale − log(1 + z²) for value ≥ loc, −inf below."""
        z = (value - self.loc) / self.scale
        inside = math.log(2 / math.pi) - self.scale.log() - torch.log1p(z * z)
        return torch.where(z >= 0, inside, torch.full_like(inside, -math.inf))


class Delta(td.Distribution):
    """All mass on loc: the degenerate case that makes BatchEnsemble of Rank1."""

    noise = None
    arg_constraints = {}

    def __init__(self, loc: Tensor) -> None:
        self.loc = loc
        super().__init__(loc.shape, validate_args=False)

    def point(self) -> Tensor:
        """The location."""
        return self.loc

    def from_noise(self, epsilon: Tensor) -> Tensor:
        """Map any noise to the location, at the noise's shape."""
        return self.loc.expand_as(epsilon)


class ScaledBernoulli(td.Distribution):
    """x = loc·b/(1 − rate) with b ~ Bernoulli(1 − rate): mean loc, so that the point is the plain network."""

    noise = "uniform"
    arg_constraints = {}

    def __init__(self, loc: Tensor, rate: float) -> None:
        self.loc = loc
        self.rate = rate
        super().__init__(loc.shape, validate_args=False)

    def point(self) -> Tensor:
        """The mean."""
        return self.loc

    def from_noise(self, epsilon: Tensor) -> Tensor:
        """Map uniform noise to a sample: kept where u ≥ rate."""
        return self.loc * (epsilon >= self.rate) / (1.0 - self.rate)


class KTiedNormal(td.Distribution):
    """N(loc, (U Vᵀ)²) over a weight seen as an m×n matrix; U [m, k] and V [n, k] are positive.

    Of a stack of weights U and V have one axis more, in front, and the means may be flat.
    """

    noise = "normal"
    arg_constraints = {}

    def __init__(self, loc: Tensor, u: Tensor, v: Tensor) -> None:
        self.loc = loc
        self.u = u
        self.v = v
        super().__init__(loc.shape, validate_args=False)

    @property
    def scale(self) -> Tensor:
        """σ = U Vᵀ at the weight's own shape, in the type of its factors even under autocast."""
        device = self.u.device.type
        if not torch.is_autocast_enabled(device):
            return (self.u @ self.v.mT).reshape(self.loc.shape)
        with torch.autocast(device_type=device, enabled=False):
            return (self.u @ self.v.mT).reshape(self.loc.shape)

    def point(self) -> Tensor:
        """The mean."""
        return self.loc

    def from_noise(self, epsilon: Tensor) -> Tensor:
        """Map standard noise to a sample."""
        return torch.addcmul(self.loc, self.scale, epsilon)

    def log_prob(self, value: Tensor) -> Tensor:
        """log N(x; loc, σ²), elementwise."""
        scale = self.scale
        z = (value - self.loc) / scale
        return -0.5 * z * z - scale.log() - 0.5 * math.log(2 * math.pi)


class Patch(td.Distribution):
    """K points M_k with probabilities p_k (one index for all, or one per element): EMP and ECMP.

    ``indices`` counts the independent categorical variables: 1 for EMP, the number of elements for ECMP.
    """

    noise = None
    arg_constraints = {}

    def __init__(self, points: Tensor, probs: Tensor, indices: int) -> None:
        self.points = points
        self.probs = probs
        self.indices = indices
        super().__init__(points.shape[1:], validate_args=False)

    def point(self) -> Tensor:
        """Σ_k p_k M_k, written around M_0 so that equal components give exactly themselves."""
        first = self.points[0]
        shift: Tensor = torch.tensordot(self.probs.to(first.dtype), self.points - first, dims=1)
        return first + shift


class EmpiricalNormal(td.Distribution):
    """N(loc, σ_p²) as a prior alone: its σ_p follows from the posterior that is held against it.

    ``sizes``: of tensors side by side on the last axis, each with a σ_p of its own; none where it is one tensor.
    """

    noise = None
    arg_constraints = {}

    def __init__(self, loc: Tensor, sizes: tuple[int, ...] = ()) -> None:
        self.loc = loc
        self.sizes = sizes
        super().__init__(loc.shape, validate_args=False)


class RelativeNormal(td.Distribution):
    """N(μ, (scale · rms)²) around each tensor's own means μ, as a prior alone; the means are N(0, 1/precision).

    ``sizes`` as of ``EmpiricalNormal``.
    """

    noise = None
    arg_constraints = {}

    def __init__(self, loc: Tensor, scale: float, precision: float, sizes: tuple[int, ...] = ()) -> None:
        self.loc = loc
        self.scale = scale
        self.precision = precision
        self.sizes = sizes
        super().__init__(loc.shape, validate_args=False)


def without_row(tensor: Tensor, row: int | None, axis: int = 0) -> Tensor:
    """The tensor but for one row of an axis; itself where that is None.

    >>> without_row(torch.tensor([5.0, 6.0, 7.0]), 1).tolist()
    [5.0, 7.0]
    """
    if row is None:
        return tensor
    parts = tensor.narrow(axis, 0, row), tensor.narrow(axis, row + 1, tensor.shape[axis] - row - 1)
    return torch.cat(parts, axis)


Spread = Normal | Cauchy | LogNormal | HalfCauchy | Delta | ScaledBernoulli | KTiedNormal


def with_parameters(spread: Spread, change: Callable[[Tensor], Tensor]) -> Spread:
    """The spread, made for this call alone, with its location and scale changed."""
    spread.loc = change(spread.loc)
    if "scale" in spread.__dict__:  # not a scale that is computed from other tensors
        spread.scale = change(spread.scale)  # type: ignore[misc,union-attr]
    return spread
