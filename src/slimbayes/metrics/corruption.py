"""Errors on corrupted images relative to a baseline's: mCE and relative mCE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimbayes.metrics.checks import finite

# AlexNet's mean error over the five severities of ImageNet-C.
ALEXNET = {
    "gaussian_noise": 0.886428,
    "shot_noise": 0.894468,
    "impulse_noise": 0.922640,
    "defocus_blur": 0.819880,
    "glass_blur": 0.826268,
    "motion_blur": 0.785948,
    "zoom_blur": 0.798360,
    "snow": 0.866816,
    "frost": 0.826572,
    "fog": 0.819324,
    "brightness": 0.564592,
    "contrast": 0.853204,
    "elastic_transform": 0.646056,
    "pixelate": 0.717840,
    "jpeg_compression": 0.606500,
}

Errors = Mapping[str, Sequence[float] | float | Tensor] | Tensor | np.ndarray[Any, Any]


def corruption_errors(errors: Errors, baseline: str | Errors = "alexnet") -> dict[str, float]:
    """CE_c = 100 · mean_s E_cs / mean_s B_cs per corruption, with B the baseline's errors.

    ``errors`` maps a corruption to its error rates over severities, as fractions; or it is an array
    [corruptions, severities], with 15 rows in the order of ``ALEXNET``. ``baseline="alexnet"`` is
    the rank-1 paper's convention (AlexNet's published means on ImageNet-C); another network's ``errors``
    (EMP: the same network without Bayes) give Σ_s E_cs / Σ_s B_cs, as there are equally many severities.

    >>> corruption_errors({"fog": [0.2, 0.4]}, {"fog": [0.3, 0.3]})
    {'fog': 100.0}
    """
    ours = _rates(errors, "errors")
    theirs = _baseline(baseline, ours)
    return {name: _percent(rates.mean(), theirs[name].mean(), name) for name, rates in ours.items()}


def mean_corruption_error(errors: Errors, baseline: str | Errors = "alexnet") -> float:
    """mCE = mean_c CE_c, CE_c = 100 · mean_s E_cs / mean_s B_cs, in percent of the baseline's error.

    See ``corruption_errors`` for the arguments and the two conventions.

    >>> round(mean_corruption_error({"snow": [0.433408] * 5, "frost": [0.826572] * 5}), 4)
    75.0
    """
    return _mean(corruption_errors(errors, baseline))


def relative_mean_corruption_error(
    errors: Errors,
    clean_error: float,
    baseline_errors: str | Errors,
    baseline_clean_error: float,
) -> float:
    """rmCE = mean_c RCE_c, with RCE_c of ``relative_corruption_errors``.

    >>> round(relative_mean_corruption_error({"fog": [0.2, 0.4]}, 0.1, {"fog": [0.3, 0.7]}, 0.1), 4)
    50.0
    """
    return _mean(relative_corruption_errors(errors, clean_error, baseline_errors, baseline_clean_error))


def relative_corruption_errors(
    errors: Errors,
    clean_error: float,
    baseline_errors: str | Errors,
    baseline_clean_error: float,
) -> dict[str, float]:
    """RCE_c = 100 · (mean_s E_cs − E_clean) / (mean_s B_cs − B_clean): what corruption adds to the error.

    With S severities this is (Σ_s E_cs − S · E_clean) / (Σ_s B_cs − S · B_clean).

    >>> round(relative_corruption_errors({"fog": [0.2, 0.5]}, 0.1, {"fog": [0.3, 0.9]}, 0.1)["fog"], 4)
    50.0
    """
    ours = _rates(errors, "errors")
    theirs = _baseline(baseline_errors, ours)
    clean = float(_rates({"clean": clean_error}, "clean_error")["clean"])
    reference = float(_rates({"clean": baseline_clean_error}, "baseline_clean_error")["clean"])
    return {
        name: _percent(rates.mean() - clean, theirs[name].mean() - reference, name)
        for name, rates in ours.items()
    }


def _mean(values: dict[str, float]) -> float:
    return sum(values.values()) / len(values)


def _percent(value: Tensor, reference: Tensor, name: str) -> float:
    if reference <= 0:
        raise ValueError(
            f"the baseline's error on {name!r}, or what corruption adds to it, is {float(reference):.4g}: "
            "the ratio needs a positive one; leave this corruption out or take another baseline"
        )
    return 100 * float(value / reference)


def _rates(errors: Any, what: str) -> dict[str, Tensor]:
    if isinstance(errors, (Tensor, np.ndarray)) and errors.ndim == 2:
        names = list(ALEXNET) if len(errors) == len(ALEXNET) else [str(i) for i in range(len(errors))]
        errors = dict(zip(names, torch.as_tensor(errors), strict=True))
    if not isinstance(errors, Mapping) or not errors:
        raise TypeError(
            f"{what} are a non-empty dict of corruption to error rates over severities, got {errors!r}"
        )
    rates = {}
    for name, values in errors.items():
        rates[name] = finite(values, f"{what}[{name!r}]").double()
        if rates[name].ndim > 1 or (rates[name] < 0).any() or (rates[name] > 1).any():
            raise ValueError(
                f"{what}[{name!r}] = {values!r}: error rates over severities are fractions in [0, 1]; divide "
                "percentages by 100"
            )
    return rates


def _baseline(baseline: str | Errors, ours: dict[str, Tensor]) -> dict[str, Tensor]:
    if isinstance(baseline, str):
        if baseline != "alexnet":
            raise ValueError(f'baseline={baseline!r}: pass "alexnet" or a dict of the baseline\'s errors')
        theirs = {name: torch.tensor(mean, dtype=torch.float64) for name, mean in ALEXNET.items()}
    else:
        theirs = _rates(baseline, "baseline")
    missing = sorted(ours.keys() - theirs.keys())
    if missing:
        raise ValueError(f"the baseline has no error for {', '.join(missing)}; it has {', '.join(theirs)}")
    for name, rates in ours.items():
        if theirs[name].ndim and theirs[name].shape != rates.shape:
            shapes = f"{list(rates.shape)} and {list(theirs[name].shape)}"
            raise ValueError(f"errors and baseline on {name!r} have severities {shapes}: give both the same")
    return theirs
