"""What is gained by leaving out the examples of which the model is least sure."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimbayes.core.options import is_number
from slimbayes.metrics.calibration import rounded, share_ties
from slimbayes.metrics.checks import finite, probabilities_of, targets_of


def aurc(predictions: Any, targets: Any = None) -> float:
    """Area under the risk–coverage curve: (1/N) Σ_i risk(i), the error rate among the i surest examples.

    ``predictions`` are probabilities [N, C] with ``targets``, sorted by their largest; or a pair (confidence,
    correct) of any score and 0/1 values. Examples of one score share their mean error; so do those whose
    largest probabilities agree to 1e-6, lest rounding rank them.

    >>> round(aurc(([0.9, 0.8, 0.7], [True, False, True])), 4)
    0.2778
    """
    return float(_risk(*_scored(predictions, targets)).mean())


def selective_risk(predictions: Any, targets: Any = None, coverage: float = 0.8) -> float:
    """The error rate among the surest share ``coverage`` of the examples, at least one of them.

    >>> selective_risk(([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 0]), coverage=0.5)
    0.0
    """
    if not (is_number(coverage) and 0.0 < coverage <= 1.0):
        raise ValueError(f"coverage={coverage!r}: pass a share of the examples above 0 and up to 1")
    risk = _risk(*_scored(predictions, targets))
    # Rounded first, so that 0.7 of 10 examples are 7 and not 8.
    return float(risk[max(1, math.ceil(round(coverage * len(risk), 9))) - 1])


def accuracy_at_coverage(predictions: Any, targets: Any = None, coverage: float = 0.8) -> float:
    """1 − ``selective_risk``.

    >>> accuracy_at_coverage(([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 0]), coverage=0.75)
    0.6667
    """
    return 1.0 - selective_risk(predictions, targets, coverage)


class RiskCoverage(NamedTuple):
    """The error rate among the surest examples, for every share of them that a threshold can keep."""

    coverage: list[float]
    risk: list[float]
    confidence: list[float]  # the least of those kept


def risk_coverage(predictions: Any, targets: Any = None) -> RiskCoverage:
    """The risk–coverage curve: one point for every distinct confidence, from the surest examples to all of them.

    ``predictions`` and ``targets`` as in ``aurc``, which is the area below it.

    >>> risk_coverage(([0.9, 0.8, 0.8, 0.7], [True, False, True, False]))
    RiskCoverage(coverage=[0.25, 0.75, 1.0], risk=[0.0, 0.3333, 0.5], confidence=[0.9, 0.8, 0.7])
    """
    confidence, correct = _scored(predictions, targets)
    risk = _risk(confidence, correct)
    ordered = confidence.sort(descending=True).values
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]  # the last of those that share a confidence
    place = last.nonzero().squeeze(1)
    coverage = (place + 1).double() / len(ordered)
    return RiskCoverage(coverage.tolist(), risk[place].tolist(), ordered[place].double().tolist())


def area_under_risk(confidence: Tensor, correct: Tensor) -> float:
    """``aurc`` of largest probabilities [N] and right or wrong [N].

    >>> area_under_risk(torch.tensor([0.9, 0.6]), torch.tensor([True, False]))
    0.25
    """
    return float(_risk(rounded(confidence), correct).mean())


def _risk(confidence: Tensor, correct: Tensor) -> Tensor:
    """The error rate of the i surest examples, [N] float64 for i = 1 .. N."""
    error = 1 - share_ties(confidence, correct)[confidence.argsort(descending=True)]
    return error.cumsum(0) / torch.arange(1, len(error) + 1, device=error.device)


def _scored(predictions: Any, targets: Any) -> tuple[Tensor, Tensor]:
    if targets is not None:
        p = probabilities_of(predictions)
        confidence, prediction = p.max(-1)
        return rounded(confidence), prediction == targets_of(targets, p)
    if not isinstance(predictions, (tuple, list)) or len(predictions) != 2:
        raise TypeError("pass probabilities with targets, or a pair (confidence, correct) without")
    confidence, correct = finite(predictions[0], "confidence"), finite(predictions[1], "correct")
    if confidence.ndim != 1 or confidence.shape != correct.shape:
        shapes = f"{list(confidence.shape)} and {list(correct.shape)}"
        raise ValueError(f"confidence and correct are [N] each, got {shapes}")
    if not ((correct == 0) | (correct == 1)).all():
        raise ValueError("correct holds 0 (wrong) or 1 (right) for every example")
    return confidence, correct.to(confidence.device)
