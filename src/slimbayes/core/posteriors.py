"""Modules that return a Distribution around a mean they do not own.

Every file entry reads in the same order: parameters, forward.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.core import distributions as d
from slimbayes.core.options import is_number

EPSILON = 1e-7


def positive(rho: Tensor) -> Tensor:
    """σ = softplus(ρ) + 1e-7, the reference's parameterisation of scales.

    >>> round(float(positive(torch.tensor(-3.4375))), 4)
    0.0316
    """
    return F.softplus(rho) + EPSILON


def inverse_softplus(sigma: Tensor) -> Tensor:
    """ρ = log(exp(σ) − 1).

    >>> round(float(inverse_softplus(torch.tensor(0.03164, dtype=torch.float64))), 2)
    -3.44
    """
    return torch.log(torch.expm1(sigma))


def dropout_stddev(rate: float) -> float:
    """σ0 = sqrt(p / (1 − p)): the Gaussian noise with the variance of dropout at rate p.

    >>> round(dropout_stddev(1e-3), 5)
    0.03164
    """
    if not (is_number(rate) and 0.0 < rate < 1.0):
        raise ValueError(f"dropout_rate must lie strictly between 0 and 1, got {rate!r}")
    return math.sqrt(rate / (1.0 - rate))


class _Cap(torch.autograd.Function):
    """min(σ, cap) whose gradient vanishes only where it would push σ further over the cap."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, sigma: Tensor, cap: float) -> Tensor:
        ctx.save_for_backward(sigma)
        ctx.cap = cap  # type: ignore[attr-defined]
        return sigma.clamp(max=cap)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        (sigma,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * ((sigma < ctx.cap) | (grad > 0)), None  # type: ignore[attr-defined]


class Posterior(nn.Module, ABC):
    """A spread: called with a mean, it returns the distribution around it."""

    @abstractmethod
    def forward(self, loc: Tensor) -> d.Spread:
        """Distribution around ``loc``."""

    def likeness(self) -> tuple[Any, ...] | None:
        """What posteriors that ``joint`` takes together have in common; None, the default: each stands alone."""
        return None

    def joint(self, posteriors: Sequence[Any], locs: Sequence[Tensor], components: bool) -> d.Spread:
        """One distribution of several tensors: [K, Σ numbers] where their first axis is ``components``, else flat."""
        raise NotImplementedError(f"{type(self).__name__} has a likeness, and needs a joint")


class Elementwise(Posterior, ABC):
    """One scale for every element, σ = min(softplus(ρ) + 1e-7, maximum)."""

    family: Callable[[Tensor, Tensor], Any]
    maximum: float | None = None

    def __init__(self, sigma: Tensor) -> None:
        super().__init__()
        self.rho = nn.Parameter(inverse_softplus(sigma))

    def forward(self, loc: Tensor) -> Any:
        """Distribution around ``loc``."""
        return self._around(loc, self.rho)

    def likeness(self) -> tuple[Any, ...]:
        """The family."""
        return type(self), self.maximum

    def joint(self, posteriors: Sequence[Any], locs: Sequence[Tensor], components: bool) -> Any:
        """All elements, one after the other."""
        return self._around(beside(locs, components), beside([one.rho for one in posteriors], components))

    def _around(self, loc: Tensor, rho: Tensor) -> Any:
        sigma = positive(rho)
        if self.maximum is not None:
            sigma = _Cap.apply(sigma, self.maximum)  # type: ignore[no-untyped-call]
        return type(self).family(loc, sigma)


def beside(tensors: Sequence[Tensor], components: bool) -> Tensor:
    """All their elements in one: [K, Σ numbers] where their first axis is ``components``, else [Σ numbers].

    >>> beside([torch.zeros(2, 3), torch.ones(2, 1)], components=True).shape
    torch.Size([2, 4])
    """
    flat = [tensor.flatten(1 if components else 0) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat, -1)


class NormalPosterior(Elementwise):
    """Normal(loc, σ), σ = min(softplus(ρ) + 1e-7, maximum).

    >>> q = NormalPosterior(torch.full((3,), 0.01))(torch.zeros(3))
    >>> bool(torch.allclose(q.scale, torch.tensor(0.01)))
    True
    """

    family = d.Normal

    def __init__(self, sigma: Tensor, maximum: float | None = None) -> None:
        super().__init__(sigma)
        self.maximum = maximum


class CauchyPosterior(Elementwise):
    """Cauchy(loc, γ), γ = softplus(ρ) + 1e-7."""

    family = d.Cauchy


class LogNormalPosterior(Elementwise):
    """exp(Normal(loc, σ)): loc is in log-space."""

    family = d.LogNormal


class HalfCauchyPosterior(Elementwise):
    """loc + |Cauchy(0, γ)|: loc is the edge of the support, shared with the prior and not trained."""

    family = d.HalfCauchy


class DeltaPosterior(Posterior):
    """A point: no parameters, no noise, no KL."""

    def forward(self, loc: Tensor) -> d.Delta:
        """Distribution around ``loc``."""
        return d.Delta(loc)


class BernoulliPosterior(Posterior):
    """loc·b/(1 − rate), b ~ Bernoulli(1 − rate): DropConnect's spread."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, loc: Tensor) -> d.ScaledBernoulli:
        """Distribution around ``loc``."""
        return d.ScaledBernoulli(loc, self.rate)


class KTiedPosterior(Posterior):
    """Normal(loc, (U Vᵀ)²), U and V stored as logs (Swiatkowski et al. 2020).

    The weight is seen as a matrix of its first axis against all others; at the start
    log u = log v = ½(log σ0 − log k) + N(0, 0.1), so that σ has mean about σ0.

    >>> q = KTiedPosterior((4, 3), rank=2, stddev=0.01)(torch.zeros(4, 3))
    >>> q.scale.shape, bool((q.scale > 0).all())
    (torch.Size([4, 3]), True)
    """

    def __init__(
        self,
        shape: tuple[int, int],
        rank: int,
        stddev: Tensor | float,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        value = stddev.log() if isinstance(stddev, Tensor) else math.log(stddev)
        start = 0.5 * (value - math.log(rank))
        m, n = shape
        self.log_u = nn.Parameter(start + 0.1 * torch.randn(m, rank, dtype=dtype, device=device))
        self.log_v = nn.Parameter(start + 0.1 * torch.randn(n, rank, dtype=dtype, device=device))

    def forward(self, loc: Tensor) -> d.KTiedNormal:
        """Distribution around ``loc``."""
        return d.KTiedNormal(loc, self.log_u.exp(), self.log_v.exp())

    def likeness(self) -> tuple[Any, ...]:
        """Matrices of one size, whose products are one call."""
        return type(self), self.log_u.shape, self.log_v.shape

    def joint(self, posteriors: Sequence[Any], locs: Sequence[Tensor], components: bool) -> d.KTiedNormal:
        """Flat means of a stack of factors, [M, m, k] and [M, n, k]."""
        if len(locs) == 1:
            return self(locs[0].flatten())  # type: ignore[no-any-return]
        u, v = (torch.stack([getattr(one, side) for one in posteriors]).exp() for side in ("log_u", "log_v"))
        return d.KTiedNormal(beside(locs, components), u, v)
