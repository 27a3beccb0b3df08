"""Conformal intervals of real targets: they hold the target with a promised probability, whatever the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimbayes.core.likelihoods import Gaussian
from slimbayes.core.predictive import Predictive
from slimbayes.decisions.conformal import conformal_quantile
from slimbayes.decisions.inputs import check_share, columns
from slimbayes.metrics.checks import same_shape

METHODS = ("absolute", "normalized", "quantile")


class ConformalIntervals:
    """Intervals that hold a new target with probability at least 1 − α (split conformal prediction).

    The conformal quantile q of held-out scores says how far an interval reaches. ``method``:

    - "absolute": s = |y − m|, the interval m ± q: as wide for every example.
    - "normalized": s = |y − m|/σ with the predictive standard deviation, m ± qσ: wider where the model is less sure.
    - "quantile": s = max(l − y, y − u) for the model's own interval [l, u] of level 1 − α, which becomes
      [l − q, u + q] (conformalised quantile regression, Romano et al. 2019).

    Predictions are a predictive of ``sb.Gaussian``, or the numbers of any model: m for "absolute", a pair (m, σ) for
    "normalized", a pair (l, u) for "quantile". Several targets per example [N, T] have a threshold each, and each its
    own promise.

    >>> intervals = ConformalIntervals("absolute", alpha=0.2).fit(torch.zeros(4), torch.tensor([0.1, -0.3, 0.2, 0.4]))
    >>> lower, upper = intervals(torch.tensor([1.0]))
    >>> lower, upper
    (tensor([0.6000]), tensor([1.4000]))
    """

    def __init__(self, method: str = "normalized", alpha: float = 0.1) -> None:
        if method not in METHODS:
            raise ValueError(f"method={method!r} is unknown; use one of {', '.join(map(repr, METHODS))}")
        self.method = method
        self.alpha = check_share("alpha", alpha)
        self.thresholds: Tensor | None = None  # [T]

    @torch.no_grad()
    def fit(self, predictions: Any, targets: Any) -> ConformalIntervals:
        """Calibrate on held-out predictions and their targets [N] or [N, T]."""
        first, second, _ = self._parts(predictions)
        y = columns(targets, "targets").to(first.device)
        same_shape(first, y, "predictions and targets, flattened to [N, T],")
        beyond = torch.maximum(first - y, y - second)  # the ends of an interval
        scores = beyond if self.method == "quantile" else (y - first).abs() / second
        found = [conformal_quantile(column, self.alpha) for column in scores.unbind(1)]
        self.thresholds = torch.tensor(found, dtype=torch.float64)
        return self

    @torch.no_grad()
    def __call__(self, predictions: Any) -> tuple[Tensor, Tensor]:
        """The lower and the upper ends, in the shape and type of the predictions."""
        if self.thresholds is None:
            raise ValueError(
                "these intervals are not calibrated: call fit(predictions, targets) on held-out data first"
            )
        first, second, like = self._parts(predictions)
        q = self.thresholds.to(first.device)
        if len(q) != first.shape[1]:
            raise ValueError(f"calibrated on {len(q)} targets, and these predictions have {first.shape[1]}")
        if self.method == "quantile":
            lower, upper = first - q, second + q
            crossed = lower > upper  # a negative q can do that to narrow intervals
            middle = (lower + upper) / 2
            lower, upper = torch.where(crossed, middle, lower), torch.where(crossed, middle, upper)
        else:
            lower, upper = first - q * second, first + q * second
        return lower.reshape(like.shape).to(like.dtype), upper.reshape(like.shape).to(like.dtype)

    def _parts(self, predictions: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Two columns [N, T], (m, 1), (m, σ) or (l, u), and a tensor of the shape that was given."""
        if isinstance(predictions, Predictive):
            if not isinstance(predictions.likelihood, Gaussian):
                raise TypeError(
                    f"{predictions.likelihood} predicts no real targets: for classes use ConformalSets"
                )
            mean = predictions.mean
            if self.method == "quantile":
                pair = predictions.interval(1 - self.alpha)
            elif self.method == "normalized":
                pair = mean, predictions.variance.sqrt()
            else:
                pair = mean, torch.ones_like(mean)
        elif self.method == "absolute":
            mean = torch.as_tensor(predictions)
            pair = mean, torch.ones_like(mean)
        else:
            names = "(mean, stddev)" if self.method == "normalized" else "(lower, upper)"
            if not isinstance(predictions, (tuple, list)) or len(predictions) != 2:
                raise TypeError(f"method={self.method!r} takes a predictive, or a pair {names}")
            pair = torch.as_tensor(predictions[0]), torch.as_tensor(predictions[1])
        first, second = (columns(each, "predictions") for each in pair)
        same_shape(first, second, "both parts of the predictions")
        if self.method == "normalized" and not (second > 0).all():
            raise ValueError("standard deviations must be positive: some are 0 or less")
        if self.method == "quantile" and (first > second).any():
            raise ValueError("(lower, upper): some lower ends are above the upper ones; swap the two")
        return first, second, pair[0]

    def __repr__(self) -> str:
        done = "not calibrated" if self.thresholds is None else f"thresholds {self.thresholds.tolist()}"
        return f"ConformalIntervals({self.method!r}, alpha={self.alpha:g}, {done})"
