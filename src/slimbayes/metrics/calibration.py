"""Are the probabilities right? Calibration errors and the reliability diagram, of the most probable class."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from slimbayes.metrics.checks import probabilities_of, targets_of


@dataclass(frozen=True, eq=False)
class Reliability:
    """Examples in bins of confidence: how many, how sure and how often right; 0 where a bin is empty."""

    edges: Tensor  # [bins + 1]
    count: Tensor  # [bins]
    confidence: Tensor  # [bins] mean of the largest probability
    accuracy: Tensor  # [bins] share of right predictions

    @staticmethod
    def of(confidence: Tensor, correct: Tensor, bins: int = 15) -> Reliability:
        """From the largest probability [N] and whether that class was right [N].

        >>> Reliability.of(torch.tensor([0.6, 0.9]), torch.tensor([False, True]), bins=2).count
        tensor([0, 2])
        """
        if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
            raise ValueError(f"bins must be a positive integer, got {bins!r}")
        edges = torch.arange(bins + 1, device=confidence.device, dtype=torch.float64) / bins
        # In the confidence's own type, so that 0.7 in float32 lies in the bin that starts at 0.7.
        inner = edges[1:-1].to(confidence.dtype)
        index = torch.bucketize(confidence, inner, right=True)  # [lo, hi); the last holds 1
        count = torch.bincount(index, minlength=bins)
        filled = count.clamp_min(1).double()
        sure, right = (
            torch.zeros(bins, dtype=torch.float64, device=index.device).scatter_add(0, index, each.double())
            / filled
            for each in (confidence, correct)
        )
        return Reliability(edges, count, sure, right)

    def ece(self, min_count: int = 0, total: Literal["all", "kept"] = "all") -> float:
        """Σ_b (n_b / n) |accuracy_b − confidence_b| over bins of more than ``min_count`` examples."""
        kept = self._kept(min_count)
        if total not in ("all", "kept"):
            raise ValueError(f'total={total!r}: pass "all" or "kept"')
        n = self.count.sum() if total == "all" else self.count[kept].sum()
        return float((self._gaps() * self.count)[kept].sum() / n) if kept.any() else math.nan

    def mce(self, min_count: int = 0) -> float:
        """max_b |accuracy_b − confidence_b| over bins of more than ``min_count`` examples."""
        kept = self._kept(min_count)
        return float(self._gaps()[kept].max()) if kept.any() else math.nan

    def to_dict(self) -> dict[str, list[float]]:
        """Lists, for JSON."""
        return {name: tensor.tolist() for name, tensor in vars(self).items()}

    def _gaps(self) -> Tensor:
        return (self.accuracy - self.confidence).abs()

    def _kept(self, min_count: int) -> Tensor:
        if isinstance(min_count, bool) or not isinstance(min_count, int) or min_count < 0:
            raise ValueError(f"min_count must be an integer of at least 0, got {min_count!r}")
        return self.count > min_count


def reliability(probabilities: Any, targets: Any, bins: int = 15) -> Reliability:
    """The reliability diagram: ``bins`` equal bins [lo, hi) of the largest probability.

    >>> diagram = reliability([[0.9, 0.1], [0.7, 0.3], [0.55, 0.45]], [0, 0, 1], bins=4)
    >>> diagram.count, diagram.accuracy[2:]
    (tensor([0, 0, 2, 1]), tensor([0.5000, 1.0000], dtype=torch.float64))
    """
    return Reliability.of(*_confidence(probabilities, targets), bins)


def ece(
    probabilities: Any,
    targets: Any,
    bins: int = 15,
    min_count: int = 0,
    total: Literal["all", "kept"] = "all",
) -> float:
    """Expected calibration error: Σ_b (n_b / n) |accuracy_b − confidence_b|.

    Equal bins [lo, hi) of the largest probability. Bins of at most ``min_count`` examples are dropped; n
    counts all examples, or with ``total="kept"`` only those of the bins that stay. NaN if none stays.
    ``bins=15`` is the rank-1 and k-tied papers' ECE, ``bins=20, min_count=5`` the EMP paper's.

    >>> round(ece([[0.9, 0.1], [0.8, 0.2]], [0, 1], bins=2), 4)
    0.35
    """
    return reliability(probabilities, targets, bins).ece(min_count, total)


def mce(probabilities: Any, targets: Any, bins: int = 15, min_count: int = 0) -> float:
    """Maximum calibration error: max_b |accuracy_b − confidence_b|, with the bins of ``ece``.

    >>> round(mce([[0.9, 0.1], [0.6, 0.4]], [0, 1], bins=5), 4)
    0.6
    """
    return reliability(probabilities, targets, bins).mce(min_count)


def adaptive_ece(probabilities: Any, targets: Any, bins: int = 15) -> float:
    """Calibration error over bins of equal mass: the sorted confidences cut in ``bins`` near-equal parts.

    Σ_b (n_b / N) |accuracy_b − confidence_b|. Examples of one confidence, to 1e-6, share their mean accuracy,
    so that neither their order nor rounding matters. Fewer examples than bins: one each.

    >>> round(adaptive_ece([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4]], [0, 0, 1], bins=2), 4)
    0.1667
    """
    return equal_mass_error(*_confidence(probabilities, targets), bins)


def equal_mass_error(confidence: Tensor, correct: Tensor, bins: int = 15) -> float:
    """``adaptive_ece`` from the largest probability [N] and whether that class was right [N].

    >>> equal_mass_error(torch.tensor([0.5, 0.5]), torch.tensor([True, False]))
    0.0
    """
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"bins must be a positive integer, got {bins!r}")
    key = rounded(confidence)
    gap = share_ties(key, correct.double() - confidence.double())[key.argsort()]
    parts = gap.tensor_split(min(bins, len(gap)))
    return float(torch.stack([part.sum().abs() for part in parts]).sum() / len(gap))


def rounded(confidence: Tensor) -> Tensor:
    """Confidences to the nearest 2⁻²⁰, for sorting: many are 1 up to rounding, which must not rank them.

    >>> rounded(torch.tensor([1.0, 0.9999999, 0.99999])).unique().numel()
    2
    """
    return (confidence.double() * 2**20).round() / 2**20


def share_ties(keys: Tensor, values: Tensor) -> Tensor:
    """Each value replaced by the mean over examples of the same key, float64.

    >>> share_ties(torch.tensor([1.0, 2.0, 1.0]), torch.tensor([0, 1, 1]))
    tensor([0.5000, 1.0000, 0.5000], dtype=torch.float64)
    """
    groups, count = keys.unique(return_inverse=True, return_counts=True)[1:]
    sums = torch.zeros(len(count), dtype=torch.float64, device=keys.device).scatter_add(
        0, groups, values.double()
    )
    means: Tensor = sums / count
    return means[groups]


def _confidence(probabilities: Any, targets: Any) -> tuple[Tensor, Tensor]:
    p = probabilities_of(probabilities)
    confidence, prediction = p.max(-1)
    return confidence, prediction == targets_of(targets, p)
