"""What every metric asks of its inputs: shapes, ranges, finite values; and how torchmetrics is found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimbayes.extras import need

# How far a row of probabilities may be from 1: rounding of the type it came in, and no more.
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def probabilities_of(values: Any, what: str = "probabilities", axes: int = 2) -> Tensor:
    """Probabilities as float32 or float64 [..., N, C]; one axis less is the probability of class 1 of 2.

    >>> probabilities_of(torch.tensor([0.25, 1.0]))
    tensor([[0.7500, 0.2500],
            [0.0000, 1.0000]])
    """
    given = as_tensor(values)
    if not given.is_floating_point():
        raise TypeError(
            f"{what} are floating-point numbers, got {given.dtype}: pass softmax or sigmoid outputs"
        )
    shape = list(given.shape)
    if given.ndim not in (axes - 1, axes) or 0 in shape:
        names = ", ".join(["K", "N", "C"][-axes:])
        raise ValueError(
            f"{what} have shape [{names}] (without C: of class 1 of 2) and no empty axis, got {shape}"
        )
    p = finite(given, what)
    if (p < -1e-6).any() or (p > 1 + _TOLERANCE[given.dtype]).any():
        raise ValueError(
            f"{what} {shape} lie between {float(p.min()):.4g} and {float(p.max()):.4g}, outside [0, 1]: if "
            "these are logits, pass logits.softmax(-1), or logits.sigmoid() of a single output"
        )
    if given.ndim == axes - 1:
        return torch.stack((1 - p, p), -1)
    off = (p.sum(-1) - 1).abs().max()
    if off > _TOLERANCE[given.dtype]:
        raise ValueError(
            f"a row of {what} {shape} sums to 1 ± {float(off):.4g}: rows sum to one; if these are logits, "
            "pass logits.softmax(-1)"
        )
    return p


def as_tensor(values: Any) -> Tensor:
    """A tensor without gradient, on a device that has float64: the metrics are summed in it.

    >>> as_tensor([1, 2])
    tensor([1, 2])
    """
    tensor = _tensor(values).detach()
    if not hasattr(values, "dtype") and tensor.is_floating_point():
        tensor = torch.as_tensor(values, dtype=torch.float64)  # Python's own floats
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def _tensor(values: Any) -> Tensor:
    """``torch.as_tensor``, whose own words about what it does not take do not say where that was."""
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"metrics take numbers, as tensors, arrays or lists of one length, got {type(values).__name__} "
            f"{values!r:.60}: {error}"
        ) from None


def targets_of(values: Any, p: Tensor) -> Tensor:
    """Class indices int64 [N] that fit probabilities [..., N, C], on their device."""
    targets = _tensor(values).to(p.device)
    rows, classes = p.shape[-2:]
    if targets.is_floating_point() or targets.is_complex():
        raise TypeError(f"targets are integer class indices, got {targets.dtype}: pass targets.long()")
    if targets.shape != (rows,):
        raise ValueError(
            f"targets {list(targets.shape)} do not fit {rows} rows of probabilities: pass [{rows}]"
        )
    targets = targets.long()
    wrong = (targets < 0) | (targets >= classes)
    if wrong.any():
        raise ValueError(
            f"target {int(targets[wrong][0])} is out of range for {classes} classes: label from 0 to "
            f"{classes - 1}"
        )
    return targets


def finite(values: Any, what: str) -> Tensor:
    """Real numbers in float32 or float64, none of them NaN or infinite, at least one of them."""
    given = as_tensor(values)
    if given.is_complex():
        raise TypeError(f"{what} are real numbers, got {given.dtype}")
    wide = given if given.dtype in (torch.float32, torch.float64) else given.float()
    if not wide.numel():
        raise ValueError(f"{what} are empty, shape {list(wide.shape)}: pass at least one example")
    if not torch.isfinite(wide).all():
        bad = wide.numel() - int(torch.isfinite(wide).sum())
        raise ValueError(
            f"{bad} of {wide.numel()} elements of {what} are NaN or infinite: look at the model's outputs"
        )
    return wide


def same_shape(first: Tensor, second: Tensor, names: str) -> None:
    """Raise unless two tensors have one shape: broadcasting [N] against [N, 1] would average N² errors."""
    if first.shape != second.shape:
        raise ValueError(
            f"{names} have shapes {list(first.shape)} and {list(second.shape)}: reshape one of them"
        )


def torchmetrics_functional() -> Any:
    """``torchmetrics.functional``, or an ImportError that names the extra."""
    return need("torchmetrics.functional", "this metric", "metrics")
