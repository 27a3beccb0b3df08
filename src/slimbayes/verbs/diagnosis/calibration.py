"""Whether intervals hold what they promise on validation data, and whether stated probabilities can be believed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.conversion import find_record
from slimbayes.core.likelihoods import Likelihood
from slimbayes.metrics import Evaluation
from slimbayes.metrics.calibration import Reliability
from slimbayes.verbs.diagnosis import limits
from slimbayes.verbs.diagnosis.behaviour import noisy
from slimbayes.verbs.diagnosis.findings import Finding
from slimbayes.verbs.evaluation import assess

_LEVEL = 0.9  # of the intervals of an evaluation
_SURER = "Train shorter or on more data, give the KL more weight, predict with more draws"
_WIDER = "Let the noise learn (sb.Gaussian(learn='global')), start with narrower weights"
_LESS_SURE = "Train longer, lower the temperature of the method or kl_weight, start with less noise"


def believable(
    model: nn.Module, validation: Any, samples: int, seed: int, likelihood: Likelihood | None
) -> Iterator[Finding]:
    """Findings on a pair (inputs, targets) of validation data, or on batches of them."""
    batches = [validation] if isinstance(validation, tuple) and len(validation) == 2 else validation
    least = -(-limits.DRAWS // find_record(model).components) if noisy(model) else 1
    yield from judged(assess(model, batches, max(samples, least), seed, likelihood))


def judged(evaluation: Evaluation) -> Iterator[Finding]:
    """Findings on an evaluation of validation data."""
    columns = evaluation.examples
    if evaluation.classes is None:
        yield from _intervals(columns)
    else:
        yield from _probabilities(columns["confidence"].double(), columns["prediction"] == columns["target"])


def _intervals(columns: dict[str, Tensor]) -> Iterator[Finding]:
    """Coverage of 90 % intervals; the targets of one example count as one, since they may go together."""
    inside = (columns["lower"] <= columns["target"]) & (columns["target"] <= columns["upper"])  # [N, T]
    covered, count = float(inside.double().mean()), len(inside)
    chance = 2 * math.sqrt(_LEVEL * (1 - _LEVEL) / count)
    low, high = limits.COVERAGE
    if low - chance <= covered <= high + chance:
        return
    narrow = covered < _LEVEL
    yield Finding(
        "overconfident" if narrow else "underconfident", "warning", "",
        f"90 % intervals cover {covered:.1%} of {count} validation targets, {chance:.1%} either way would be chance",
        "Intervals are too narrow: targets lie outside more often than they say"
        if narrow
        else "Intervals are too wide: they are never wrong and say little",
        (_SURER if narrow else _WIDER)
        + ", or scale the variance afterwards (slimbayes.decisions.VarianceScale, ConformalIntervals)",
        covered, low if narrow else high,
    )  # fmt: skip


def _probabilities(confidence: Tensor, correct: Tensor) -> Iterator[Finding]:
    """ECE beyond that of a calibrated model: of n_b examples in a bin, mean c(1 − c), the gap is √(2v/π) on average."""
    bins = Reliability.of(confidence, correct)
    found, count = bins.ece(), len(confidence)
    where = torch.bucketize(
        confidence, torch.linspace(0, 1, len(bins.count) + 1, dtype=confidence.dtype)[1:-1]
    )
    variance = torch.zeros(len(bins.count), dtype=torch.float64)
    variance.index_add_(0, where, confidence * (1 - confidence))  # of the number of hits in a bin
    chance = float((2 * variance / math.pi).sqrt().sum()) / count
    chance += 2 * math.sqrt(float(variance.sum()) * (1 - 2 / math.pi)) / count
    limit = chance + limits.CALIBRATION
    if not found > limit:
        return
    sure = float(confidence.mean()) - float(correct.double().mean())
    yield Finding(
        "overconfident" if sure > 0 else "underconfident", "warning", "",
        f"the ECE is {found:.1%} on {count} validation examples, chance gives up to {chance:.1%}; confidence is "
        f"{abs(sure):.1%} {'above' if sure > 0 else 'below'} accuracy",
        "The model is surer than it is right" if sure > 0 else "The model is right more often than it says",
        (_SURER if sure > 0 else _LESS_SURE)
        + ", or set the temperature of the outputs afterwards (slimbayes.decisions.Temperature)",
        found, limit,
    )  # fmt: skip
