"""What decisions are made from: a Predictive, or the numbers of any other model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slimbayes.core.likelihoods import Bernoulli, Categorical
from slimbayes.core.predictive import Predictive
from slimbayes.metrics.checks import finite, probabilities_of


def class_probabilities(predictions: Any) -> Tensor:
    """Probabilities float64 [N, C] of a predictive, or of probabilities [N, C] or [N] (of class 1 of 2).

    >>> class_probabilities([[0.25, 0.75]])
    tensor([[0.2500, 0.7500]], dtype=torch.float64)
    """
    if isinstance(predictions, Predictive):
        likelihood, p = predictions.likelihood, predictions.mean
        if isinstance(likelihood, Bernoulli):
            p = p.reshape(len(p), -1).squeeze(1)  # several outputs are no classes: refused below
        elif not isinstance(likelihood, Categorical):
            raise TypeError(
                f"{type(likelihood).__name__} predicts no classes: use sb.Categorical or sb.Bernoulli, or for real "
                "targets ConformalIntervals and VarianceScale"
            )
        if p.ndim != (1 if isinstance(likelihood, Bernoulli) else 2):
            raise ValueError(
                f"the predictive has shape {list(predictions.shape)}: one decision per example needs [N, C]; flatten "
                "tokens or pixels into examples, and decide labels of several outputs one at a time"
            )
        predictions = p
    p = probabilities_of(predictions).double()
    return p / p.sum(-1, keepdim=True)  # rounding of float32 would count in cumulated sums


def class_axis_last(predictive: Predictive) -> Tensor:
    """The draws [D, N, C] of a classifier."""
    draws = predictive.draws
    if isinstance(predictive.likelihood, Categorical):
        draws = draws.movedim(predictive.likelihood.axis(draws.ndim - 1), -1)
        if draws.ndim == 3:
            return draws
    raise TypeError(
        f"logits of classes [D, N, C] are needed, and this is {predictive}: use another score, such as 'entropy'"
    )


def columns(values: Any, what: str) -> Tensor:
    """Numbers of N examples as float64 [N, T]."""
    given = finite(values, what).double()
    if given.ndim == 0:
        raise ValueError(f"{what} have no axis of examples: pass [N] or [N, T]")
    return given.reshape(len(given), -1)


def check_share(name: str, value: float) -> float:
    """A number strictly between 0 and 1.

    >>> check_share("alpha", 0.1)
    0.1
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < 1.0:
        raise ValueError(f"{name}={value!r}: pass a number strictly between 0 and 1")
    return float(value)


def ceiling(value: float) -> int:
    """The next whole number, with rounding of the float first: 0.7 of 10 are 7.

    >>> ceiling(0.7 * 10), ceiling(7.001)
    (7, 8)
    """
    return math.ceil(round(value, 9))


def uniform(count: int, seed: int | None, like: Tensor) -> Tensor:
    """Uniform numbers float64 [count], from torch's own generator or from a seed."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.rand(count, dtype=torch.float64, generator=generator).to(like.device)
