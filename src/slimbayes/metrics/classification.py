"""Scores of class probabilities: likelihood, accuracy, Brier score, ranking of binary scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimbayes.metrics.checks import as_tensor, finite, probabilities_of, targets_of, torchmetrics_functional


def nll(probabilities: Any, targets: Any) -> float:
    """Negative log-likelihood per example, in nats: −(1/N) Σ_n log p_n(y_n).

    Of averaged probabilities this is the mixture's. A probability of 0 at a target gives infinity.

    >>> round(nll([[0.5, 0.5], [0.25, 0.75]], [0, 1]), 4)
    0.4904
    """
    p = probabilities_of(probabilities)
    return float(-_picked(p, targets_of(targets, p)).double().log().mean())


def gibbs_nll(draws: Any, targets: Any) -> float:
    """The draws' own negative log-likelihood on average: −(1/DN) Σ_d Σ_n log p_dn(y_n), draws [D, N, C].

    By Jensen's inequality it is at least the ``nll`` of the averaged probabilities.

    >>> draws = torch.tensor([[[0.5, 0.5]], [[0.25, 0.75]]])
    >>> round(gibbs_nll(draws, [0]), 4), round(nll(draws.mean(0), [0]), 4)
    (1.0397, 0.9808)
    """
    p = probabilities_of(draws, "draws", axes=3)
    return float(-_picked(p, targets_of(targets, p)).double().log().mean())


def accuracy(probabilities: Any, targets: Any) -> float:
    """The share of examples whose most probable class is the target; the first of equals counts.

    >>> accuracy([[0.9, 0.1], [0.6, 0.4]], [0, 1])
    0.5
    """
    return top_k_accuracy(probabilities, targets, k=1)


def top_k_accuracy(probabilities: Any, targets: Any, k: int = 5) -> float:
    """The share of examples whose target is among the k most probable classes; ties go to the lower index.

    >>> top_k_accuracy([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]], [1, 2], k=2)
    0.5
    """
    p = probabilities_of(probabilities)
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= p.shape[-1]:
        raise ValueError(f"top_k_accuracy got k={k!r} for {p.shape[-1]} classes: pass 1 to {p.shape[-1]}")
    return float((target_rank(p, targets_of(targets, p)) < k).double().mean())


def target_rank(p: Tensor, targets: Tensor) -> Tensor:
    """How many classes stand before the target, [N]: the more probable, and of equals the lower index.

    >>> target_rank(torch.tensor([[0.4, 0.2, 0.4]]), torch.tensor([2]))
    tensor([1])
    """
    own = p.gather(-1, targets.unsqueeze(-1))  # [N, 1]
    earlier = torch.arange(p.shape[-1], device=p.device) < targets.unsqueeze(-1)  # [N, C]
    return ((p > own) | ((p == own) & earlier)).sum(-1)


def brier(probabilities: Any, targets: Any, tfp: bool = False) -> float:
    """Brier score, (1/N) Σ_n Σ_c (p_nc − 1[y_n = c])², from 0 to 2.

    For two classes this is twice (p − y)². ``tfp=True`` leaves out the constant: Σ_c p_c² − 2 p_y, from −1 to
    1, as the k-tied paper's tables do.

    >>> round(brier([[0.9, 0.1]], [0]), 4), round(brier([[0.9, 0.1]], [0], tfp=True), 4)
    (0.02, -0.98)
    """
    p = probabilities_of(probabilities).double()
    short = p.square().sum(-1) - 2 * _picked(p, targets_of(targets, p))  # [N]
    return float(short.mean()) + (0.0 if tfp else 1.0)


def auroc(scores: Any, labels: Any) -> float:
    """Area under the ROC curve: the probability that a positive example scores above a negative, ties ½.

    ``scores`` are any real numbers, higher for label 1. Needs torchmetrics.

    >>> auroc([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
    0.75
    """
    ranks, truth = _ranked(scores, labels, "auroc")
    return float(torchmetrics_functional().classification.binary_auroc(ranks, truth))


def auc_pr(scores: Any, labels: Any) -> float:
    """Area under the precision–recall curve as average precision: Σ_i (R_i − R_{i−1}) P_i.

    ``scores`` are any real numbers, higher for label 1. Needs torchmetrics.

    >>> round(auc_pr([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]), 4)
    0.8333
    """
    ranks, truth = _ranked(scores, labels, "auc_pr")
    return float(torchmetrics_functional().classification.binary_average_precision(ranks, truth))


class OODScores(NamedTuple):
    """How well a score tells unfamiliar inputs from familiar ones."""

    auroc: float
    aupr: float


def ood_scores(in_scores: Any, out_scores: Any) -> OODScores:
    """AUROC and AUPR of a score that is higher for out-of-distribution inputs, which are the positives.

    Entropy and mutual information are such scores. Needs torchmetrics.

    >>> ood_scores([0.1, 0.2, 0.3], [0.25, 0.9])
    OODScores(auroc=0.8333, aupr=0.8333)
    """
    inside, outside = finite(in_scores, "in_scores").flatten(), finite(out_scores, "out_scores").flatten()
    scores = torch.cat((inside.cpu().double(), outside.cpu().double()))
    labels = torch.arange(len(scores)) >= len(inside)
    return OODScores(auroc(scores, labels), auc_pr(scores, labels))


def _picked(p: Tensor, targets: Tensor) -> Tensor:
    index = targets.unsqueeze(-1).expand(*p.shape[:-1], 1)  # [..., N, 1]
    return p.gather(-1, index).squeeze(-1)


def _ranked(scores: Any, labels: Any, what: str) -> tuple[Tensor, Tensor]:
    """Scores as dense ranks in [0, 1]: torchmetrics squashes scores outside [0, 1], which makes new ties."""
    values, truth = finite(scores, "scores"), as_tensor(labels)
    if values.ndim != 1 or truth.shape != values.shape:
        raise ValueError(
            f"{what} takes scores and labels [N], got {list(values.shape)} and {list(truth.shape)}"
        )
    truth = truth.to(values.device)
    if not ((truth == 0) | (truth == 1)).all():
        raise ValueError(
            f"labels are 0 or 1, got {sorted(set(truth.tolist()))[:5]}: make one class the positive"
        )
    if truth.min() == truth.max():
        raise ValueError(f"{what} needs both labels, and all {len(truth)} are {int(truth[0])}")
    ranks = values.unique(return_inverse=True)[1]
    return ranks.double() / max(1, int(ranks.max())), truth.long()
