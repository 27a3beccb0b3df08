"""Calibration after training: one temperature for the draws of a classifier, one scale for real targets."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor, nn

from slimbayes.core.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from slimbayes.core.predictive import Predictive

LARGEST = 100.0  # temperatures and scales are looked for between its inverse and itself
_GRID = 41  # values tried first: the nll of a mixture may have more than one minimum
_TOLERANCE = 1e-7  # of log T
_HELD = 1 << 22  # outputs in float64 at a time
_GOLDEN = (math.sqrt(5) - 1) / 2


class Temperature:
    """softmax(f_d / T) for every draw d, with T fitted on held-out data: temperature scaling of a mixture.

        T = argmin −(1/N) Σ_n log Σ_d w_d softmax(f_d(x_n) / T)_{y_n}

    T is that of the mixture, not of averaged logits: averaging the probabilities of draws already softens them, so
    that a Bayesian network is often under-confident where its draws are calibrated. ``likelihood`` says what the
    outputs mean, by default ``sb.Categorical()``; ``sb.Bernoulli()`` works alike.

    >>> draws = torch.tensor([[[2.0, 0.0]] * 4])  # one draw; right in 3 cases of 4: log(3) is the calibrated logit
    >>> temperature = Temperature().fit(draws, torch.tensor([0, 0, 0, 1]))
    >>> round(temperature.value, 5), round(2 / math.log(3), 5)
    (1.82048, 1.82048)
    >>> temperature(draws)[0, 0].softmax(0)
    tensor([0.7500, 0.2500])
    """

    def __init__(self, value: float = 1.0, likelihood: Likelihood | None = None) -> None:
        self.base = Categorical() if likelihood is None else likelihood
        _check_classes(self.base)
        self.value = float(value)
        _ = self.likelihood  # refuses what is no temperature

    @torch.no_grad()
    def fit(self, draws: Tensor | Predictive, targets: Tensor) -> Temperature:
        """Set ``value`` to the T of least nll on held-out ``draws`` [D, N, C], or a predictive, and ``targets``.

        Log-probabilities do as well as logits. Outputs are compared in float64, a part at a time. The search looks at
        41 values from 1/100 to 100 and then narrows the best one down: the nll of one draw has a single minimum in T,
        that of a mixture may have several.
        """
        weights = None
        if isinstance(draws, Predictive):
            _check_classes(draws.likelihood)
            self.base, weights, draws = draws.likelihood, draws._weights, draws.draws
        plain = _at(
            self.base, 1.0
        )  # T divides the network's own outputs, whatever temperature they had before
        plain.check(draws, targets)
        parts = list(_parts(draws.detach(), targets))

        def nll(log_t: float) -> float:
            return sum(_mixture_nll(plain, d.double() / math.exp(log_t), y, weights) for d, y in parts)

        self.value = math.exp(_least(nll, "temperature"))
        return self

    @property
    def likelihood(self) -> Any:
        """The likelihood with this temperature, for ``sb.predict``, ``sb.evaluate`` and ``sb.elbo``."""
        return _at(self.base, self.value)

    @overload
    def __call__(self, draws: Tensor) -> Tensor: ...
    @overload
    def __call__(self, draws: Predictive) -> Predictive: ...
    def __call__(self, draws: Tensor | Predictive) -> Tensor | Predictive:
        """Draws divided by T, or the predictive with this temperature in place of its own."""
        if isinstance(draws, Tensor):
            return draws / self.value
        _check_classes(draws.likelihood)
        made = _at(draws.likelihood, self.value)
        return type(draws)(made, None, draws.draws, draws._weights)

    def __repr__(self) -> str:
        return f"Temperature({self.value:.6g})"


class VarianceScale:
    """The whole predictive of real targets widened by s around its mean, with s fitted on held-out data.

        p'(y) = p(m + (y − m)/s)/s,    Var'[y] = s² Var[y],    s = argmin −(1/N) Σ_n log p'(y_n)

    Both kinds of uncertainty grow alike: draws move away from their mean and their noise grows.

    >>> predictive = Gaussian(precision=1.0).predictive(torch.zeros(1, 4))
    >>> scale = VarianceScale().fit(predictive, torch.tensor([-2.0, 2.0, 2.0, -2.0]))
    >>> round(scale.value, 5), scale(predictive).variance
    (2.0, tensor([4., 4., 4., 4.]))
    """

    def __init__(self, value: float = 1.0) -> None:
        if not 0.0 < value < math.inf:
            raise ValueError(f"value={value!r}: pass a positive finite factor of standard deviations")
        self.value = float(value)

    @torch.no_grad()
    def fit(self, predictive: Predictive, targets: Tensor) -> VarianceScale:
        """Set ``value`` to the scale of least nll on a held-out predictive and its targets."""
        _check_gaussian(predictive)
        predictive.likelihood.check(predictive.draws, targets)
        wide = type(predictive)(
            copy.deepcopy(predictive.likelihood).double(),
            None,
            predictive.draws.double(),
            predictive._weights,
        )

        def nll(log_s: float) -> float:
            return -float(_scaled(wide, math.exp(log_s)).log_prob(targets.double()).mean())

        self.value = math.exp(_least(nll, "variance scale"))
        return self

    def __call__(self, predictive: Predictive) -> Predictive:
        """The predictive with standard deviations ``value`` times as large."""
        _check_gaussian(predictive)
        return _scaled(predictive, self.value)

    def __repr__(self) -> str:
        return f"VarianceScale({self.value:.6g})"


def _scaled(predictive: Predictive, scale: float) -> Predictive:
    likelihood, draws = predictive.likelihood, predictive.draws
    assert isinstance(likelihood, Gaussian)
    loc, log_precision = likelihood.components(draws)
    centre = predictive.mean
    moved = centre + scale * (loc - centre)
    if likelihood.learn == "per_example":
        made = Gaussian(learn="per_example")
        moved = torch.cat((moved, log_precision - 2 * math.log(scale)), dim=-1)
    elif likelihood.learn == "global" and likelihood.log_precision.dim():  # a noise for every output
        made = Gaussian(learn="global", outputs=len(likelihood.log_precision))
        narrower = likelihood.log_precision.detach() - 2 * math.log(scale)
        made.log_precision = nn.Parameter(narrower, requires_grad=False)
    else:
        made = Gaussian(precision=float(log_precision.detach().flatten()[0].exp()) / scale**2)
    return type(predictive)(made, None, moved, predictive._weights)


def _check_classes(likelihood: Any) -> None:
    if not isinstance(likelihood, Categorical | Bernoulli):
        remedy = "; real targets have sb.decisions.VarianceScale" if isinstance(likelihood, Gaussian) else ""
        raise TypeError(
            f"a temperature divides the logits of sb.Categorical or sb.Bernoulli, got {likelihood}{remedy}"
        )


def _check_gaussian(predictive: Any) -> None:
    if not isinstance(predictive, Predictive) or not isinstance(predictive.likelihood, Gaussian):
        what = predictive.likelihood if isinstance(predictive, Predictive) else type(predictive).__name__
        raise TypeError(
            f"a variance scale takes the predictive of sb.Gaussian, from sb.predict(..., likelihood=...), got {what}; "
            "classes have sb.decisions.Temperature"
        )


def _at(likelihood: Any, temperature: float) -> Any:
    if isinstance(likelihood, Categorical):
        return Categorical(likelihood.class_axis, likelihood.ignore_index, temperature)
    return Bernoulli(temperature)


def _parts(draws: Tensor, targets: Tensor) -> Any:
    rows = max(1, _HELD // max(1, draws[:, :1].numel()))
    return zip(draws.split(rows, 1), targets.split(rows), strict=True)


def _mixture_nll(likelihood: Any, draws: Tensor, targets: Tensor, weights: Tensor | None) -> float:
    """−Σ_n log Σ_d w_d p_d(y_n)."""
    log_p = likelihood.log_prob(draws, targets)  # [D, n]
    if weights is None:
        return -float((log_p.logsumexp(0) - math.log(len(log_p))).sum())
    return -float((log_p + weights.to(log_p).log().unsqueeze(1)).logsumexp(0).sum())


def _least(loss: Callable[[float], float], what: str) -> float:
    """Where a function of a log-scale is least: the best of a grid, narrowed down by golden sections."""
    end = math.log(LARGEST)
    grid = [end * (2 * i / (_GRID - 1) - 1) for i in range(_GRID)]
    found = [loss(x) for x in grid]
    best = min(range(_GRID), key=found.__getitem__)
    if best in (0, _GRID - 1):
        warnings.warn(
            f"the {what} of least nll is {math.exp(grid[best]):g}, the end of what is tried: the held-out data are too "
            "few, or all right or all wrong; give more of them",
            stacklevel=3,
        )
        return grid[best]
    low, high = grid[best - 1], grid[best + 1]
    inner = [high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)]
    values = [loss(x) for x in inner]
    while high - low > _TOLERANCE:
        if values[0] < values[1]:
            high, inner[1], values[1] = inner[1], inner[0], values[0]
            inner[0] = high - _GOLDEN * (high - low)
            values[0] = loss(inner[0])
        else:
            low, inner[0], values[0] = inner[0], inner[1], values[1]
            inner[1] = low + _GOLDEN * (high - low)
            values[1] = loss(inner[1])
    return (low + high) / 2
