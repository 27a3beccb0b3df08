"""Scores of real targets: errors, densities, intervals; and the signal-to-noise ratio of gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimbayes.core.predictive import Predictive
from slimbayes.metrics.checks import finite, same_shape


def rmse(mean: Any, targets: Any) -> float:
    """Root mean squared error: sqrt((1/NT) Σ (mean − y)²), over examples and targets.

    >>> round(rmse([1.0, 2.0], [1.0, 4.0]), 4)
    1.4142
    """
    return float(_error(mean, targets).square().mean().sqrt())


def mae(mean: Any, targets: Any) -> float:
    """Mean absolute error: (1/NT) Σ |mean − y|.

    >>> mae([1.0, 2.0], [1.0, 4.0])
    1.0
    """
    return float(_error(mean, targets).abs().mean())


@torch.no_grad()
def log_predictive_density(predictive: Any, targets: Any = None, target_scaling: Any = None) -> float:
    """log p(y|x) per target: (1/NT) Σ_n log (1/D) Σ_d p(y_n|x_n, d); the negative of a regression's nll.

    ``predictive`` comes from ``sb.predict``; or pass log-densities alone, which are averaged as they are.
    ``target_scaling``: predictive and targets are in its scaled units, the density is per original unit,
    smaller by log(std / unit).

    >>> import slimbayes as sb
    >>> predictive = sb.Gaussian(precision=0.1).predictive(torch.zeros(3, 5, 2))
    >>> round(log_predictive_density(predictive, torch.zeros(5, 2)), 3)
    -2.07
    """
    if not isinstance(predictive, Predictive):
        if targets is not None:
            raise TypeError("pass a predictive with targets, or log-densities alone")
        return float(finite(predictive, "log-densities").double().mean())
    if targets is None:
        raise TypeError("the density of a predictive needs targets")
    density = predictive.log_prob(torch.as_tensor(targets, device=predictive.mean.device)).double()  # [N]
    each = predictive.expected_entropy.numel() // len(predictive)  # targets of an example
    if target_scaling is None:
        return float(density.mean()) / each
    if len(target_scaling.std) != each:
        raise ValueError(
            f"target_scaling has {len(target_scaling.std)} columns, the predictive {each} targets"
        )
    units = (torch.tensor(target_scaling.std, dtype=torch.float64) / target_scaling.unit).log()
    return float(density.mean()) / each - float(units.mean())


def coverage(lower: Any, upper: Any, targets: Any) -> float:
    """The share of targets inside [lower, upper].

    >>> coverage([0.0, 0.0], [1.0, 1.0], [0.5, 2.0])
    0.5
    """
    low, high = _ends(lower, upper)
    y = finite(targets, "targets").to(low)
    same_shape(low, y, "intervals and targets")
    return float(((low <= y) & (y <= high)).double().mean())


def interval_width(lower: Any, upper: Any) -> float:
    """The mean of upper − lower.

    >>> interval_width([0.0, 0.0], [1.0, 2.0])
    1.5
    """
    low, high = _ends(lower, upper)
    return float((high - low).mean())


class CoverageCurve(NamedTuple):
    """The share of targets found inside the central interval of each level; calibrated where they agree."""

    level: list[float]
    coverage: list[float]


def coverage_curve(
    predictive: Predictive, targets: Any, levels: Sequence[float] | None = None
) -> CoverageCurve:
    """Coverage of the central intervals of ``levels``, 0.05 to 0.95 by default.

    >>> import slimbayes as sb
    >>> predictive = sb.Gaussian().predictive(torch.zeros(1, 4))
    >>> coverage_curve(predictive, torch.tensor([0.0, 0.5, 1.0, 3.0]), [0.5, 0.9])
    CoverageCurve(level=[0.5, 0.9], coverage=[0.5, 0.75])
    """
    chosen = [i / 20 for i in range(1, 20)] if levels is None else [float(level) for level in levels]
    y = torch.as_tensor(targets, device=predictive.mean.device)
    if y.numel() == predictive.mean.numel() and y.ndim == 1:
        y = y.view(predictive.mean.shape)  # [N] for [N, 1]
    return CoverageCurve(chosen, [coverage(*predictive.interval(level), y) for level in chosen])


def crps(samples: Any, targets: Any) -> float:
    """Continuous ranked probability score of samples [S, N, ...]: (1/S) Σ|x_i − y| − (1/2S²) Σ|x_i − x_j|.

    In the targets' units, 0 at best; of one sample the absolute error.

    >>> crps([[0.0], [2.0]], [1.0])
    0.5
    """
    x, y = finite(samples, "samples").double(), finite(targets, "targets").double()
    same_shape(x[0], y, "a sample and the targets")
    count = len(x)
    # Σ_ij |x_i − x_j| = 2 Σ_i (2i − S − 1) x_(i) of the sorted samples, i from 1.
    weights = 2 * torch.arange(1, count + 1, dtype=x.dtype, device=x.device) - count - 1
    spread = (x.sort(0).values * weights.view(-1, *[1] * y.ndim)).sum(0) / count**2
    return float(((x - y.to(x)).abs().mean(0) - spread).mean())


def gradient_snr(gradients: Any) -> float:
    """Signal-to-noise ratio of gradients: the mean over parameters of E[g²] / Var[g] over the leading axis.

    ``gradients`` [batches, ...], or a sequence of the same parameters' gradients, one per batch; the variance
    is 1/n, so that the ratio is at least 1. Parameters whose gradient is always 0 do not count; one that is
    constant otherwise gives infinity.

    >>> round(gradient_snr([[1.0, 1.0], [3.0, -1.0]]), 4)
    3.0
    """
    if isinstance(gradients, (list, tuple)) and gradients and isinstance(gradients[0], Tensor):
        gradients = torch.stack(list(gradients))
    g = finite(gradients, "gradients").double().flatten(1)  # [batches, parameters]
    if len(g) < 2:
        raise ValueError(
            f"gradients of {len(g)} batch have no variance: pass at least 2 along the leading axis"
        )
    alive = (g != 0).any(0)
    if not alive.any():
        raise ValueError("all gradients are 0: these parameters took no part in the loss")
    return float((g.square().mean(0) / g.var(0, correction=0))[alive].mean())


def _error(mean: Any, targets: Any) -> Tensor:
    centre = finite(mean, "mean").double()
    y = finite(targets, "targets").to(centre)
    same_shape(centre, y, "mean and targets")
    return centre - y


def _ends(lower: Any, upper: Any) -> tuple[Tensor, Tensor]:
    low = finite(lower, "lower").double()
    high = finite(upper, "upper").to(low)
    same_shape(low, high, "lower and upper")
    if (low > high).any():
        raise ValueError(
            "a lower end lies above its upper end: pass (lower, upper) as predictive.interval gives them"
        )
    return low, high
