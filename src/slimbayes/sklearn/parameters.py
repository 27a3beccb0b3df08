"""Checks of the estimators' parameters, made by fit and never by the constructor."""

from __future__ import annotations

import math
import numbers
from typing import Any

NOISES = ("auto", "shared", "example")


def check_parameters(estimator: Any) -> None:
    """Raise on the first parameter that cannot be used, with what can."""
    for name in ("epochs", "train_samples", "samples", "n_iter_no_change"):
        _whole(name, getattr(estimator, name))
    if estimator.batch_size != "auto":
        _whole("batch_size", estimator.batch_size, " or 'auto'")
    for name in ("lr", "weight_decay", "kl_weight", "kl_annealing"):
        _real(name, getattr(estimator, name))
    if estimator.num_data is not None:
        _real("num_data", estimator.num_data)
        if estimator.num_data == 0:
            raise ValueError("num_data=0: give the size of the training set, or None")
    if not (_is_real(estimator.validation_fraction) and 0 < estimator.validation_fraction < 1):
        raise ValueError(
            f"validation_fraction={estimator.validation_fraction!r}: give a number between 0 and 1"
        )
    if estimator.noise not in NOISES:
        raise ValueError(f"noise={estimator.noise!r} is unknown; use one of {', '.join(map(repr, NOISES))}")


def _whole(name: str, value: Any, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name}={value!r}: give a whole number of at least 1{otherwise}")


def _real(name: str, value: Any) -> None:
    if not _is_real(value) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r}: give a finite number of at least 0")


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
