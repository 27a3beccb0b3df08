"""Figures of the EMP paper's image networks: accuracy and calibration."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from slimbayes.metrics import Reliability

BINS, FEWEST = 20, 5  # of the calibration errors: equal bins, those of at most 5 examples dropped


def figures_of(rows: Tensor) -> dict[str, Any]:
    """Figures of ``columns_of`` in the paper's units, their errors over examples, and the bins of a curve."""
    confidence, right, five, nll = rows.unbind(1)
    bins = Reliability.of(confidence.clamp_max(1.0), right.bool(), BINS)
    parts = {"accuracy": 100 * right.double(), "top5": 100 * five.double(), "nll": nll.double()}
    return {
        **{name: float(part.mean()) for name, part in parts.items()},
        "ece_percent": 100 * bins.ece(FEWEST), "mce_percent": 100 * bins.mce(FEWEST),
        "errors": {name: float(part.std() / len(rows) ** 0.5) for name, part in parts.items()},
        "bins": bins.to_dict(),
    }  # fmt: skip
