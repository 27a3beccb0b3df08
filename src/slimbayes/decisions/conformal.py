"""Conformal prediction: sets of classes that hold the right one with a promised probability, whatever the model.

The promise is about new examples exchangeable with the held-out ones: P(y ∈ set) ≥ 1 − α, on average over both.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slimbayes.decisions.binomial import coverage_quantile
from slimbayes.decisions.inputs import ceiling, check_share, class_probabilities, uniform
from slimbayes.metrics.checks import finite, targets_of

METHODS = ("lac", "aps", "raps")
_OTHER_STREAM = 0x9E3779B9  # a seed given to fit and to a call must not give them the same numbers


def conformal_rank(count: int, alpha: float) -> int:
    """⌈(n + 1)(1 − α)⌉: which of n held-out scores, sorted, is the conformal quantile.

    >>> conformal_rank(99, 0.1), conformal_rank(9, 0.1)
    (90, 9)
    """
    return ceiling((count + 1) * (1 - check_share("alpha", alpha)))


def conformal_quantile(scores: Any, alpha: float = 0.1) -> float:
    """The ⌈(n + 1)(1 − α)⌉-th smallest of n scores: a new score is no larger with probability at least 1 − α.

    Without ties the probability is at most 1 − α + 1/(n + 1).

    >>> conformal_quantile([0.3, 0.1, 0.2, 0.4], alpha=0.25)
    0.4
    """
    values = finite(scores, "scores").double().flatten()
    rank = conformal_rank(len(values), alpha)
    if rank > len(values):
        raise ValueError(too_few(len(values), alpha, "calibration points"))
    return float(values.kthvalue(rank).values)


def too_few(count: int, alpha: float, what: str) -> str:
    """Why so few points cannot promise anything, and what would."""
    return (
        f"{count} {what} are too few for alpha={alpha:g}: no finite threshold covers {1 - alpha:.4g} of new cases for "
        f"sure. Give at least {ceiling(1 / alpha) - 1}, or take alpha={1 / (count + 1):.3g} or more"
    )


def coverage_range(count: int, alpha: float = 0.1, level: float = 0.95) -> tuple[float, float]:
    """Between what bounds the coverage lies, once n held-out points are chosen, with probability ``level``.

    Given the held-out points, the coverage of new ones is Beta(k, n + 1 − k) distributed with k = ⌈(n + 1)(1 − α)⌉,
    where scores have no ties.

    >>> [round(end, 3) for end in coverage_range(1000, alpha=0.1)]
    [0.881, 0.918]
    """
    rank = conformal_rank(count, alpha)
    if rank > count:
        raise ValueError(too_few(count, alpha, "calibration points"))
    tail = (1 - check_share("level", level)) / 2
    return coverage_quantile(tail, rank, count), coverage_quantile(1 - tail, rank, count)


class ConformalSets:
    """Sets of classes that hold the right one with probability at least 1 − α.

    A class y is in the set of x when its score is at most the conformal quantile of held-out scores. ``method``:

    - "lac": s = 1 − p_y, the smallest sets on average; hard examples may get none.
    - "aps": s = Σ_{c before y} p_c + u p_y over classes from the most probable on, u ~ Uniform(0, 1): sets grow with
      the difficulty (Romano et al. 2020). ``randomized=False`` is u = 1, which covers more than was asked for.
    - "raps": "aps" plus ``penalty`` for every class after the first ``free``: no very large sets (Angelopoulos et al.
      2021). Both are to be chosen before the calibration data are seen.

    ``by_class`` calibrates every class by itself (Mondrian): each is covered with 1 − α, not only their average.
    ``allow_empty=False`` puts the most probable class into sets that would be empty, which covers more.

    >>> p = torch.tensor([[0.6, 0.3, 0.1]] * 9)
    >>> sets = ConformalSets("lac", alpha=0.2).fit(p, torch.tensor([0] * 6 + [1] * 3))
    >>> round(sets.threshold, 4), sets(torch.tensor([[0.6, 0.3, 0.1], [0.9, 0.1, 0.0]]))
    (0.7, tensor([[ True,  True, False],
            [ True, False, False]]))
    """

    def __init__(
        self,
        method: str = "aps",
        alpha: float = 0.1,
        *,
        randomized: bool = True,
        penalty: float = 0.01,
        free: int = 5,
        by_class: bool = False,
        allow_empty: bool = False,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"method={method!r} is unknown; use one of {', '.join(map(repr, METHODS))}")
        if not (math.isfinite(penalty) and penalty >= 0):
            raise ValueError(f"penalty={penalty!r}: pass a number of at least 0")
        if isinstance(free, bool) or not isinstance(free, int) or free < 0:
            raise ValueError(f"free={free!r}: pass a whole number of classes without a penalty")
        self.method = method
        self.alpha = check_share("alpha", alpha)
        self.randomized = randomized
        self.penalty, self.free = penalty, free
        self.by_class, self.allow_empty = by_class, allow_empty
        self.thresholds: Tensor | None = None  # [C], or [1] for all classes
        self.classes: int | None = None  # C

    def fit(self, predictions: Any, targets: Any, seed: int | None = None) -> ConformalSets:
        """Calibrate on held-out predictions (a predictive, or probabilities [N, C]) and their classes [N]."""
        p = class_probabilities(predictions)
        y = targets_of(targets, p)
        self.classes = p.shape[1]
        own = (
            self.scores(p, None if seed is None else seed ^ _OTHER_STREAM)
            .gather(1, y.unsqueeze(1))
            .squeeze(1)
        )
        if not self.by_class:
            self.thresholds = torch.tensor([conformal_quantile(own, self.alpha)], dtype=torch.float64)
            return self
        found = []
        for label in range(p.shape[1]):
            mine = own[y == label]
            if not len(mine) or conformal_rank(len(mine), self.alpha) > len(mine):
                raise ValueError(
                    too_few(len(mine), self.alpha, f"calibration points of class {label}")
                    + ", or leave by_class out"
                )
            found.append(conformal_quantile(mine, self.alpha))
        self.thresholds = torch.tensor(found, dtype=torch.float64)
        return self

    @property
    def threshold(self) -> float:
        """The conformal quantile; of ``by_class`` the largest."""
        return float(self._fitted().max())

    def scores(self, predictions: Any, seed: int | None = None) -> Tensor:
        """How ill every class fits, float64 [N, C]: the right class's are compared with the threshold."""
        p = class_probabilities(predictions)
        if self.method == "lac":
            return 1 - p
        ordered, order = p.sort(dim=-1, descending=True, stable=True)  # of equals the lower class first
        u = uniform(len(p), seed, p) if self.randomized else p.new_ones(len(p))
        score = ordered.cumsum(-1) - (1 - u).unsqueeze(1) * ordered
        if self.method == "raps":
            rank = torch.arange(1, p.shape[1] + 1, device=p.device)
            score = score + self.penalty * (rank - self.free).clamp_min(0)
        return torch.empty_like(score).scatter_(1, order, score)

    def __call__(self, predictions: Any, seed: int | None = None) -> Tensor:
        """The sets, bool [N, C]. With a ``seed`` the random part of "aps" and "raps" repeats itself."""
        p = class_probabilities(predictions)
        limits = self._fitted().to(p.device)
        if self.classes != p.shape[1]:
            raise ValueError(f"calibrated on {self.classes} classes, and these predictions have {p.shape[1]}")
        chosen = self.scores(p, seed) <= limits
        if not self.allow_empty:
            empty = ~chosen.any(-1)
            chosen[empty, p[empty].argmax(-1)] = True
        return chosen

    def _fitted(self) -> Tensor:
        if self.thresholds is None:
            raise ValueError(
                "these sets are not calibrated: call fit(predictions, targets) on held-out data first"
            )
        return self.thresholds

    def __repr__(self) -> str:
        done = "not calibrated" if self.thresholds is None else f"threshold {self.threshold:.4g}"
        return f"ConformalSets({self.method!r}, alpha={self.alpha:g}, {done})"


def set_coverage(sets: Tensor, targets: Any) -> float:
    """The share of examples whose class is in its set.

    >>> set_coverage(torch.tensor([[True, False], [True, True]]), [1, 1])
    0.5
    """
    y = targets_of(targets, _sets(sets))
    return float(sets.gather(1, y.unsqueeze(1)).double().mean())


def set_size(sets: Tensor) -> float:
    """The mean number of classes in a set.

    >>> set_size(torch.tensor([[True, False], [True, True]]))
    1.5
    """
    return float(_sets(sets).sum(1).double().mean())


def _sets(sets: Any) -> Tensor:
    if not isinstance(sets, Tensor) or sets.dtype is not torch.bool or sets.ndim != 2 or not sets.numel():
        raise TypeError("sets are a bool tensor [N, C], as ConformalSets gives")
    return sets
