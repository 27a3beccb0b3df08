"""Much noise at once: a function of one seed that torch's generator gives; in compiled code one opaque operation."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slimbayes.accelerate import cpu, switches
from slimbayes.accelerate.cpu import raw_noise
from slimbayes.core.custom_operation import operation
from slimbayes.core.keyed_noise import keyed_noise
from slimbayes.core.noise import KINDS, transformed
from slimbayes.core.paths import FastPath

# Fewer numbers than this are made faster by torch's own generator; a sign is one bit, so they pay earlier.
_FEWEST = {"normal": 1 << 16, "uniform": 1 << 15, "cauchy": 1 << 15, "sign": 1 << 12}
_FEWEST_NATIVE = 1 << 11
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
        """From raw bits and vectorised arithmetic on the CPU; opaque to the compiler."""
        if dtype not in _DTYPES:
            return None
        count = math.prod(size)
        if torch.compiler.is_compiling():
            # On a GPU always: a generator repeated for every pixel that reads a weight costs more than a launch.
            if device.type == "cuda" or (device.type == "cpu" and count >= _FEWEST_COMPILED[kind]):
                seed = torch.randint(1 << 62, (1,), device=device)
                made: Tensor = noise(seed, kind, size, dtype)
                return made
        elif device.type == "cpu" and count >= _fewest(kind) and not (transformed() or _traced()):
            seed_of_all = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
            return on_cpu(seed_of_all, kind, size, dtype)
        return None


def _traced() -> bool:
    """Whether torch.jit.trace is at work, which sees no memory filled by others than torch."""
    return torch._C._get_tracing_state() is not None


def _fewest(kind: str) -> int:
    return _FEWEST[kind] if cpu.library() is None else _FEWEST_NATIVE


def on_cpu(seed: int, kind: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Standard noise on the CPU, a function of the seed."""
    out = torch.empty(size, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device="cpu")
    if out.dtype == torch.float64 or not cpu.noise(out, kind, seed, KINDS.index(kind)):
        raw_noise.fill(out.view(-1).numpy(), kind, seed)
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
    if seed.device.type == "cpu":
        return on_cpu(int(seed), kind, size, dtype)
    if switches.paths.triton and seed.device.type == "cuda" and _has_triton():
        from slimbayes.accelerate.gpu.noise import philox_noise

        return philox_noise(seed, kind, size, dtype)
    # The seed stays on the device: its words are tensors where a key of numbers would be.
    key = (seed & 0xFFFFFFFF, seed >> 32)
    count = math.prod(size)
    flat = keyed_noise(kind, key, 0, None, None, None, (count,), dtype, seed.device)  # type: ignore[arg-type]
    return flat.reshape(tuple(size))


@noise.register_fake
def _(seed: Tensor, kind: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device=seed.device)


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
