"""Noise of the plain twins: a function of the value of a seed tensor and of a stream number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slimbayes.core.keyed_noise import keyed_noise


def draw(kind: str, shape: tuple[int, ...], seed: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
    """Standard noise of a kind ("normal", "cauchy", "uniform", "sign") on the seed's device.

    >>> seed = torch.tensor([3])
    >>> bool((draw("normal", (2,), seed, 0, torch.float32) == draw("normal", (2,), seed, 0, torch.float32)).all())
    True
    """
    # The odd multiplier spreads the streams over all 64 bits: neighbouring seeds share none of them.
    value = (int(seed.item()) + stream * 0x9E3779B97F4A7C15) % 2**63
    wide = dtype if dtype.itemsize >= 4 else torch.float32
    key = value & 0xFFFFFFFF, value >> 32
    flat = keyed_noise(kind, key, 0, None, None, None, (math.prod(shape),), wide, seed.device)
    return flat.reshape(shape).to(dtype)
