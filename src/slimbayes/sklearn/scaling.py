"""Standardisation with weights: a column minus its mean, over its deviation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Standardization:
    """x ↦ (x − mean)/scale per column, and back; identity with mean 0 and scale 1.

    >>> found = Standardization.of(np.array([[1.0, 5.0], [3.0, 5.0]]))
    >>> found.apply(np.array([[3.0, 5.0]])), found.scale
    (array([[1., 0.]]), array([1., 1.]))
    """

    mean: Any  # [...] of a row
    scale: Any

    @classmethod
    def of(cls, values: Any, weights: Any = None, active: bool = True) -> Standardization:
        """μ = Σ w_i x_i / Σ w_i and σ² = Σ w_i (x_i − μ)² / Σ w_i; a constant column has scale 1."""
        if not active:
            return cls(np.zeros(values.shape[1:]), np.ones(values.shape[1:]))
        wide = np.asarray(values, dtype=np.float64)
        if weights is not None:
            counted = np.asarray(weights) > 0
            wide, weights = wide[counted], np.asarray(weights)[counted]
        # A sum over many rows rounds: less the first row, that of a constant column is 0.
        mean = wide[0] + np.average(wide - wide[0], axis=0, weights=weights)
        variance = np.average(np.square(wide - mean), axis=0, weights=weights)
        # What rounding leaves of a constant column is no spread; the bound is scikit-learn's.
        rounding = len(wide) * np.finfo(np.float64).eps
        constant = (wide.min(0) == wide.max(0)) | (
            variance <= rounding * variance + np.square(rounding * mean)
        )
        return cls(mean, np.where(constant, 1.0, np.sqrt(variance)))

    def apply(self, values: Any) -> Any:
        """In units of deviations, float64; values that need no change as they are."""
        if not self.mean.any() and (self.scale == 1).all():
            return np.asarray(values)
        return (np.asarray(values, dtype=np.float64) - self.mean) / self.scale

    def restore(self, values: Any) -> Any:
        """Back in the units of the data."""
        return np.asarray(values, dtype=np.float64) * self.scale + self.mean
