"""How far members of an ensemble disagree."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimbayes.metrics.checks import probabilities_of, targets_of

_EPSILON = 1e-7


def disagreement(draws: Any, targets: Any = None, normalize: bool = True, samples: int = 1) -> float:
    """The share of examples on which two members predict different classes, on average over pairs.

    (2 / K(K−1)) Σ_{j<k} (1/N) Σ_n 1[argmax p_j ≠ argmax p_k], divided by 1 − accuracy of the ensemble + 1e-7
    where ``targets`` are given, unless ``normalize=False``. ``draws`` are the members' probabilities
    [K, N, C]; with ``samples=S`` draws [K · S, N, C], component-major, whose samples are averaged first.

    >>> members = [[[0.9, 0.1], [0.8, 0.2]], [[0.7, 0.3], [0.4, 0.6]]]
    >>> disagreement(members), round(disagreement(members, targets=[0, 1]), 4)
    (0.5, 1.0)
    """
    p = _members(draws, samples)
    raw = float(pairs_that_differ(p.argmax(-1), p.shape[-1]).mean())
    if targets is None or not normalize:
        return raw
    right = p.mean(0).argmax(-1) == targets_of(targets, p)
    return normalized(raw, float(right.double().mean()))


def pairwise_kl(draws: Any, samples: int = 1) -> float:
    """KL(p_j ‖ p_k) = Σ_c p_jc log(p_jc / p_kc), averaged over ordered pairs of members and examples.

    >>> round(pairwise_kl([[[0.5, 0.5]], [[0.25, 0.75]]]), 4)
    0.1373
    """
    p = _members(draws, samples).double()
    log_p = p.clamp_min(torch.finfo(torch.float64).tiny).log()
    own = (p * log_p).sum(-1).mean()  # [K, N] to the mean of −H
    # Σ_{j≠k} p_j·log p_k from sums over members, so that no [K, K, N] is formed.
    cross = (p.sum(0) * log_p.sum(0)).sum(-1) - (p * log_p).sum(-1).sum(0)  # [N]
    return float(own - cross.mean() / (len(p) * (len(p) - 1)))


def pairwise_cosine(draws: Any, samples: int = 1) -> float:
    """The cosine of the angle between two members' probability vectors, averaged over pairs and examples.

    >>> round(pairwise_cosine([[[1.0, 0.0]], [[0.6, 0.4]]]), 4)
    0.8321
    """
    unit = F.normalize(_members(draws, samples).double(), dim=-1)  # [K, N, C]
    count = len(unit)
    both = unit.sum(0).square().sum(-1) - unit.square().sum(-1).sum(0)  # [N], ordered pairs
    return float(both.mean() / (count * (count - 1)))


def pairs_that_differ(predictions: Tensor, classes: int) -> Tensor:
    """The share of pairs of members with different predictions, [N] float64, from predictions [K, N].

    >>> pairs_that_differ(torch.tensor([[0], [0], [2]]), 3)
    tensor([0.6667], dtype=torch.float64)
    """
    members, rows = predictions.shape
    votes = torch.zeros(rows, classes, dtype=torch.float64, device=predictions.device)
    votes.scatter_add_(1, predictions.T, torch.ones_like(predictions.T, dtype=torch.float64))  # [N, C]
    return 1 - (votes * (votes - 1)).sum(-1) / (members * (members - 1))


def normalized(raw: float, accuracy: float) -> float:
    """Disagreement per error: raw / (1 − accuracy + 1e-7).

    >>> round(normalized(0.1, 0.8), 4)
    0.5
    """
    return raw / (1 - accuracy + _EPSILON)


def _members(draws: Any, samples: int) -> Tensor:
    p = probabilities_of(draws, "draws", axes=3)  # [K · S, N, C]
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1 or len(p) % samples:
        raise ValueError(
            f"samples={samples!r} does not divide {len(p)} draws: pass the samples per component"
        )
    members: Tensor = p.unflatten(0, (-1, samples)).mean(1)  # [K, N, C]
    if len(members) < 2:
        raise ValueError(f"{len(p)} draws of {samples} samples are one member: disagreement needs at least 2")
    return members
