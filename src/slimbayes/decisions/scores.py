"""How unsure a prediction is, as one number per example: for abstention and for inputs unlike the training data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slimbayes.core.predictive import Predictive, entropy
from slimbayes.decisions.conformal import conformal_quantile
from slimbayes.decisions.inputs import check_share, class_axis_last, class_probabilities
from slimbayes.metrics.checks import finite
from slimbayes.metrics.classification import OODScores, ood_scores


def _entropy(given: Any) -> Tensor:
    return given.entropy if isinstance(given, Predictive) else entropy(class_probabilities(given).log(), -1)


def _energy(given: Predictive) -> Tensor:
    """−T log Σ_c exp(f_c/T), on average over draws."""
    draws = class_axis_last(given).double()
    heat = float(given.likelihood.temperature)  # type: ignore[arg-type]
    return _averaged(-heat * (draws / heat).logsumexp(-1), given)


def _averaged(values: Tensor, given: Predictive) -> Tensor:
    """Σ_d w_d v_d of values [D, N]."""
    mean: Tensor = torch.tensordot(given.weights.to(values), values, dims=1)
    return mean


SCORES: dict[str, Callable[[Any], Tensor]] = {
    "max_probability": lambda given: 1 - class_probabilities(given).amax(-1),
    "margin": lambda given: 1 - class_probabilities(given).topk(2, -1).values.diff(dim=-1).abs().squeeze(-1),
    "entropy": _entropy,
    "expected_entropy": lambda given: given.expected_entropy,
    "mutual_information": lambda given: given.mutual_information,
    "energy": _energy,
    "max_logit": lambda given: _averaged(-class_axis_last(given).double().amax(-1), given),
    "variance": lambda given: given.variance,
    "epistemic": lambda given: given.epistemic,
}
_OF_PROBABILITIES = ("max_probability", "margin", "entropy")
Score = str | Callable[[Any], Tensor]


@torch.no_grad()
def uncertainty(predictions: Any, score: Score = "max_probability") -> Tensor:
    """How unsure the model is of every example, float64 [N]: higher is less sure.

    Classes: "max_probability" (1 − max_c p_c), "margin" (1 − the lead of the first over the second class), "entropy"
    H[y], "expected_entropy", "mutual_information" (what the draws disagree about), "energy" (−T log Σ_c exp(f_c/T))
    and "max_logit" (−max_c f_c), both on average over draws. Real targets: "variance", "epistemic" (of the draws'
    means) and the entropies. ``predictions`` are a predictive, or for the first three probabilities [N, C]. Several
    targets of an example are added up. ``score`` may be a function of the predictions, too.

    >>> uncertainty(torch.tensor([[0.9, 0.1], [0.6, 0.4]], dtype=torch.float64))
    tensor([0.1000, 0.4000], dtype=torch.float64)
    """
    if isinstance(score, str) and score not in SCORES:
        raise ValueError(
            f"score={score!r} is unknown; use one of {', '.join(map(repr, SCORES))}, or a function"
        )
    if isinstance(score, str) and not isinstance(predictions, Predictive) and score not in _OF_PROBABILITIES:
        raise TypeError(f"{score!r} is a score of draws: give the predictive that sb.predict returns")
    values = finite((SCORES[score] if isinstance(score, str) else score)(predictions), "scores").double()
    return values.reshape(len(values), -1).sum(1)


class Detector:
    """Finds inputs unlike the training data: those more uncertain than in-distribution ones, at a chosen rate.

    The threshold is the conformal quantile of in-distribution scores: a new in-distribution input is called
    unfamiliar with probability at most ``false_positive_rate``. Use data that the model was not trained on.

    >>> familiar = torch.tensor([[0.99, 0.01]] * 15 + [[0.9, 0.1]] * 4, dtype=torch.float64)
    >>> detector = Detector("entropy", false_positive_rate=0.05).fit(familiar)
    >>> detector(torch.tensor([[0.99, 0.01], [0.5, 0.5]])), detector.p_values([[0.5, 0.5]])
    (tensor([False,  True]), tensor([0.0500], dtype=torch.float64))
    """

    def __init__(self, score: Score = "entropy", false_positive_rate: float = 0.05) -> None:
        self.score = score
        self.false_positive_rate = check_share("false_positive_rate", false_positive_rate)
        self.threshold: float | None = None
        self._familiar = torch.empty(0)

    def fit(self, predictions: Any) -> Detector:
        """Set the threshold from predictions of held-out in-distribution inputs."""
        found = uncertainty(predictions, self.score)
        self.threshold = conformal_quantile(found, self.false_positive_rate)
        self._familiar = found.sort().values
        return self

    def __call__(self, predictions: Any) -> Tensor:
        """Which inputs are unfamiliar, bool [N]."""
        found, limit = uncertainty(predictions, self.score), self._limit()
        return found > limit

    def p_values(self, predictions: Any) -> Tensor:
        """(1 + #{held-out scores ≥ s})/(n + 1), float64 [N]: at most t with probability at most t in-distribution."""
        self._limit()
        found = uncertainty(predictions, self.score)
        below = torch.searchsorted(self._familiar.to(found.device), found)
        return (1 + len(self._familiar) - below).double() / (1 + len(self._familiar))

    def measure(self, inside: Any, outside: Any) -> OODScores:
        """AUROC and AUPR of the score between predictions of both kinds of inputs. Needs torchmetrics."""
        return ood_scores(uncertainty(inside, self.score), uncertainty(outside, self.score))

    def _limit(self) -> float:
        if self.threshold is None:
            raise ValueError("this detector has no threshold: call fit on in-distribution predictions first")
        return self.threshold

    def __repr__(self) -> str:
        name = self.score if isinstance(self.score, str) else getattr(self.score, "__name__", "score")
        done = "not fitted" if self.threshold is None else f"threshold {self.threshold:.4g}"
        return f"Detector({name!r}, false_positive_rate={self.false_positive_rate:g}, {done})"
