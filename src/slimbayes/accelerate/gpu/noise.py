"""Noise on the GPU as a function of a seed that stays there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slimbayes.accelerate.gpu import plain_twins
from slimbayes.accelerate.gpu.launch import INTERPRETED, available, ceil_div, launch
from slimbayes.core.custom_operation import CustomOp

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
        return plain_twins.draw(kind, tuple(size), seed, stream, dtype)
    from slimbayes.accelerate.gpu.programs import noise as programs

    out = torch.empty(tuple(size), dtype=dtype, device=seed.device)
    count = math.prod(size)
    if count:
        programs_needed = ceil_div(count, 4 * _BLOCK)
        launch(
            programs.fill, programs_needed, out,
            out, seed, count, programs_needed * _BLOCK, stream, KIND=kind, BLOCK=_BLOCK, FAST=not INTERPRETED,
        )  # fmt: skip
    return out


def packed_signs(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random signs ±1 of this size, unpacked from one bit each where they are read: for compiled code.

    >>> packed_signs((3, 40), torch.float32, torch.device("cpu")).abs().sum()
    tensor(120.)
    """
    *rows, channels = size
    words = ceil_div(channels, 32)
    seed = torch.randint(0, 2**62, (1,), device=device)
    packed = torch.ops.slimbayes.random_words(seed, math.prod(rows) * words).view(*rows, words, 1)
    bits = (packed >> torch.arange(32, dtype=torch.int32, device=device)) & 1  # [..., words, 32]
    signs: Tensor = (1 - 2 * bits).to(dtype).flatten(-2)[..., :channels]
    return signs


def _words(seed: Tensor, count: int) -> Tensor:
    """Random 32-bit words [count], a pure function of the seed."""
    if not available(seed.device):
        source = torch.Generator(seed.device).manual_seed(int(seed))
        like = {"dtype": torch.int32, "device": seed.device}
        return torch.randint(-(2**31), 2**31, (count,), generator=source, **like)  # type: ignore[call-overload, no-any-return]
    from slimbayes.accelerate.gpu.programs import noise as programs

    out = torch.empty(count, dtype=torch.int32, device=seed.device)
    blocks = ceil_div(count, 4 * _BLOCK)
    if count:
        launch(programs.fill_words, blocks, out, out, seed, count, blocks * _BLOCK, BLOCK=_BLOCK)
    return out


_words_op = CustomOp("random_words", "(Tensor seed, SymInt count) -> Tensor", _words)


@_words_op.register_fake
def _(seed: Tensor, count: int) -> Tensor:
    return torch.empty(count, dtype=torch.int32, device=seed.device)
