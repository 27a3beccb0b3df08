"""Standard noise that follows torch's generators: the plain one, and a fast one for the CPU and for compiled code."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slimbayes.accelerate import cpu, switches
from slimbayes.accelerate.cpu import raw_noise
from slimbayes.accelerate.custom_operation import operation
from slimbayes.core.keyed_noise import keyed_noise

KINDS = ("normal", "uniform", "sign", "cauchy")

# Fewer numbers than this are made faster by torch's own generator; a sign is one bit, so they pay earlier.
_FEWEST = {"normal": 1 << 16, "uniform": 1 << 15, "cauchy": 1 << 15, "sign": 1 << 12}
_FEWEST_NATIVE = 1 << 11
_FEWEST_COMPILED = {"normal": 1 << 13, "uniform": 1 << 12, "cauchy": 1 << 12, "sign": 1 << 11}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def fresh_noise(kind: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard noise that torch.manual_seed and torch's generator state govern.

    "normal", "uniform" in [0, 1), "sign" (±1) or "cauchy". With ``fast.paths.noise``, much noise on the CPU is
    a function of one 64-bit seed that torch's generator gives (``rawnoise``), and in compiled code it is one
    opaque operation (``slimbayes::noise``), because the compiler would else repeat the generator in every
    kernel that reads its numbers.

    >>> torch.manual_seed(0) is not None
    True
    >>> fresh_noise("sign", (2, 3), torch.float32, torch.device("cpu")).abs().sum()
    tensor(6.)
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of noise {kind!r}; use 'normal', 'uniform', 'sign' or 'cauchy'")
    if switches.paths.noise and dtype in _DTYPES:
        count = math.prod(size)
        if torch.compiler.is_compiling():
            # On a GPU always: a generator repeated for every pixel that reads a weight costs more than a launch.
            if device.type == "cuda" or (device.type == "cpu" and count >= _FEWEST_COMPILED[kind]):
                seed = torch.randint(1 << 62, (1,), device=device)
                made: Tensor = noise(seed, kind, size, dtype)
                return made
        elif device.type == "cpu" and count >= _fewest(kind) and not (transformed() or _traced()):
            seed_of_all = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
            return _on_cpu(seed_of_all, kind, size, dtype)
    return _plain(kind, size, dtype, device)


def _traced() -> bool:
    """Whether torch.jit.trace is at work, which sees no memory filled by others than torch."""
    return torch._C._get_tracing_state() is not None


def _fewest(kind: str) -> int:
    return _FEWEST[kind] if cpu.library() is None else _FEWEST_NATIVE


def transformed() -> bool:
    """Whether torch.func, forward-mode AD or a dispatch mode would see other than plain tensors."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch.autograd.forward_ad._current_level >= 0
    )


def _plain(kind: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The same from torch's own generators."""
    if kind == "normal":
        return torch.randn(size, dtype=dtype, device=device)
    uniform = torch.rand(size, dtype=dtype, device=device)
    if kind == "uniform":
        return uniform
    if kind == "sign":
        return (uniform < 0.5).to(dtype).mul(2.0).sub(1.0)
    return torch.tan(torch.pi * (uniform - 0.5))


def _on_cpu(seed: int, kind: str, size: Sequence[int], dtype: torch.dtype) -> Tensor:
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
        return _on_cpu(int(seed), kind, size, dtype)
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
