"""Much noise at once: a function of one seed that torch's generator gives; in compiled code one opaque operation."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slimbayes.accelerate import cpu, switches
from slimbayes.accelerate.cpu.weights import new_seed
from slimbayes.accelerate.situation import by_pointers
from slimbayes.core.custom_operation import operation
from slimbayes.core.keyed_noise import keyed_noise
from slimbayes.core.noise import KINDS
from slimbayes.core.paths import FastPath

_FEWEST = 1 << 11  # numbers below which torch's own generator takes less time
_FEWEST_COMPILED = {"normal": 1 << 13, "uniform": 1 << 12, "cauchy": 1 << 12, "sign": 1 << 11}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class BulkNoise(FastPath):
    """torch's CPU generator makes its numbers one by one in one thread, and a compiler repeats it in every kernel."""

    def on(self) -> bool:
        """By ``noise``."""
        return switches.paths.noise

    def noise(
        self, kind: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """By the kernels in C on the CPU; opaque to the compiler."""
        if dtype not in _DTYPES:
            return None
        count = math.prod(size)
        if torch.compiler.is_compiling():
            ours = device.type == "cpu" and _suits(dtype) and switches.paths.native and cpu.compiled()
            # On a GPU always: a generator repeated for every pixel that reads a weight costs more than a launch.
            if device.type == "cuda" or (ours and count >= _FEWEST_COMPILED[kind]):
                seed = torch.randint(1 << 62, (1,), device=device)
                made: Tensor = noise(seed, kind, size, dtype)
                return made
        elif device.type == "cpu" and count >= _FEWEST and _suits(dtype) and cpu.library() is not None:
            return on_cpu(new_seed(), kind, size, dtype) if by_pointers() else None
        return None


def _suits(dtype: torch.dtype) -> bool:
    """Whether the kernels make noise of this type."""
    return dtype != torch.float64


def on_cpu(seed: int, kind: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Standard noise by the kernels, a function of the seed."""
    out = torch.empty(size, dtype=torch.float32, device="cpu")
    cpu.noise(out, kind, seed, KINDS.index(kind))
    if dtype.itemsize > 2:
        return out
    if kind == "uniform":
        # Cut, not rounded, for rounding would close the interval at 1: P(u < p) stays p wherever 16 bits have p.
        kept = -1 << (16 if dtype == torch.bfloat16 else 13)
        out.view(torch.int32).bitwise_and_(kept)
    elif kind == "cauchy":
        out.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return out.to(dtype)


@operation("noise", "(Tensor seed, str kind, SymInt[] size, ScalarType dtype) -> Tensor")
def noise(seed: Tensor, kind: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Standard noise on the seed's device, a pure function of the seed [1]: what compiled code calls."""
    if seed.device.type == "cpu" and cpu.library() is not None and _suits(dtype):
        return on_cpu(int(seed), kind, size, dtype)
    if switches.paths.triton and seed.device.type == "cuda" and _has_triton():
        from slimbayes.accelerate.gpu.noise import philox_noise

        return philox_noise(seed, kind, size, dtype)
    # The seed stays on its device: its words are tensors where a key of numbers would be.
    key = (seed & 0xFFFFFFFF, seed >> 32)
    count = math.prod(size)
    flat = keyed_noise(kind, key, 0, None, None, None, (count,), dtype, seed.device)
    return flat.reshape(tuple(size))


@noise.register_fake
def _(seed: Tensor, kind: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device=seed.device)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
