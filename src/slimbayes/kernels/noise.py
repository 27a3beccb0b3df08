"""Noise on the GPU as a function of a seed that stays there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slimbayes.kernels import plain
from slimbayes.kernels.launch import INTERPRETED, available, ceil_div, launch

KINDS = ("normal", "uniform", "sign", "cauchy")
_BLOCK = 512


def philox_noise(seed: Tensor, kind: str, size: Sequence[int], dtype: torch.dtype, stream: int = 0) -> Tensor:
    """Standard noise from Philox (10 rounds) under the key ``seed``, one int64 on the device.

    "normal" by Box and Muller, up to 6.76 either side; "uniform" in [0, 1) in steps of 2⁻²⁴; "sign" ±1; "cauchy"
    tan(π(u − ½)). Streams of one seed are independent. Without the kernels the numbers are torch's.

    >>> philox_noise(torch.tensor([3]), "sign", (2, 3), torch.float32).abs().sum()
    tensor(6.)
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of noise {kind!r}; use 'normal', 'uniform', 'sign' or 'cauchy'")
    if not available(seed.device):
        return plain.draw(kind, tuple(size), seed, stream, dtype)
    from slimbayes.kernels.programs import noise as programs

    out = torch.empty(tuple(size), dtype=dtype, device=seed.device)
    count = math.prod(size)
    if count:
        programs_needed = ceil_div(count, 4 * _BLOCK)
        launch(
            programs.fill, programs_needed, out,
            out, seed, count, programs_needed * _BLOCK, stream, KIND=kind, BLOCK=_BLOCK, FAST=not INTERPRETED,
        )  # fmt: skip
    return out
