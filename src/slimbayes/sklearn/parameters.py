"""The estimators' parameters: checked by fit, never by the constructor, and what they stand for."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from slimbayes.core.methods import Method
from slimbayes.verbs.method_text import parse_method

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


def resolve(method: Any) -> Method | list[Any]:
    """A method from its text, and rules ``[(selector, method)]`` with theirs.

    >>> resolve("Rank1(components=2)").components
    2
    """
    if isinstance(method, Method):
        return method
    if isinstance(method, str):
        return parse_method(method)
    if (
        isinstance(method, Sequence)
        and method
        and all(isinstance(r, Sequence) and len(r) == 2 for r in method)
    ):
        return [(selector, resolve(inner)) for selector, inner in method]
    raise TypeError(
        f"method={method!r}: give a method such as sb.Rank1(components=4), its text 'Rank1(components=4)', or rules "
        f"[(selector, method), ...]"
    )


def chosen_device(device: Any) -> torch.device:
    """The device that a parameter names; "auto" is the GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"device={device!r} is no device: give 'cpu', 'cuda', 'cuda:1' or 'auto'") from error


def dtype_of(model: nn.Module) -> torch.dtype:
    """The type of a network's numbers."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def place_of(model: nn.Module) -> torch.device:
    """Where a network is."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
