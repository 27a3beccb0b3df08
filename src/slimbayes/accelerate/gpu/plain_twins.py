"""Noise of the plain twins: a function of the value of a seed tensor and of a stream number."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def draw(kind: str, shape: tuple[int, ...], seed: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
    """Standard noise of a kind ("normal", "cauchy", "uniform", "sign") on the seed's device.

    >>> seed = torch.tensor([3])
    >>> bool((draw("normal", (2,), seed, 0, torch.float32) == draw("normal", (2,), seed, 0, torch.float32)).all())
    True
    """
    # The odd multiplier spreads the streams over all 64 bits: neighbouring seeds share none of them.
    value = (int(seed.item()) + stream * 0x9E3779B97F4A7C15) % 2**63
    wide = dtype if dtype.itemsize >= 4 else torch.float32
    source = torch.Generator(seed.device).manual_seed(value)
    uniform = kind != "normal"
    noise = (torch.rand if uniform else torch.randn)(shape, generator=source, dtype=wide, device=seed.device)
    if kind == "cauchy":  # 2⁻²⁵ keeps the pole at u = 0 finite
        noise = torch.tan(math.pi * (noise + 2.0**-25 - 0.5))
    elif kind == "sign":
        noise = (noise < 0.5).to(wide).mul(2.0).sub(1.0)
    return noise.to(dtype)
