"""CPU kernels in C, compiled when slimbayes is installed; where there is no compiler the rest does without.

They make noise in the registers that use it, as the Triton kernels do on a GPU. ``SLIMBAYES_NATIVE=0`` or
``sb.fast_paths(native=False)`` turns them off.
"""

from __future__ import annotations

import ctypes
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from slimbayes.accelerate import switches

KINDS = ("normal", "uniform", "cauchy", "sign")  # in the order of noise.c

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_UINT, _ULONG, _FLOAT = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float
_ARGUMENTS: dict[str, list[type[ctypes._SimpleCData]]] = {  # type: ignore[type-arg]
    "slimbayes_use_threads": [_POINTER],
    "slimbayes_noise": [_POINTER, _LONG, _INT, _ULONG, _UINT, _INT],
    "slimbayes_sweep_slots": [_POINTER, *[_LONG] * 5],
    "slimbayes_sweep": [*[_POINTER] * 11, *[_LONG] * 6, _INT, _INT, _FLOAT, _ULONG, _UINT, _INT],
    "slimbayes_factor": [_POINTER, *[_LONG] * 3, _INT, _ULONG, _UINT, _INT],
    "slimbayes_normal_kl": [*[_POINTER] * 3, _LONG, _FLOAT, _FLOAT, _POINTER, _INT],
    "slimbayes_normal_kl_gradients": [*[_POINTER] * 3, _LONG, *[_FLOAT] * 3, _POINTER, _POINTER, _INT],
    "slimbayes_fold": [*[_POINTER] * 8, *[_LONG] * 4, _INT, _INT],
    "slimbayes_lstm_inputs": [*[_POINTER] * 3, *[_LONG] * 7, _INT],
    "slimbayes_lstm_forward": [_POINTER, *[_LONG] * 3, _INT],
    "slimbayes_lstm_backward": [_POINTER, *[_LONG] * 3, _INT],
    "slimbayes_sample_weights": [_POINTER, _LONG, _LONG, _ULONG, _POINTER, _INT],
    "slimbayes_weight_gradients": [_POINTER, _LONG, _LONG, _ULONG, _INT],
}
_RETURNS = {"slimbayes_sample_weights": _INT, "slimbayes_weight_gradients": _INT}  # 1: memory lacks


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there are none, they are turned off, or code is being traced."""
    return _load() if switches.paths.native and not torch.compiler.is_compiling() else None


def state() -> str:
    """In words, whether there are kernels, and if not what to do.

    >>> state().startswith("CPU kernels")
    True
    """
    if not switches.paths.native:
        return "CPU kernels: turned off (SLIMBAYES_NATIVE or SLIMBAYES_FAST)"
    if _load() is None:
        return "CPU kernels: not compiled; with a C compiler at hand, install slimbayes again"
    return "CPU kernels: compiled" + ("" if _openmp() else ", one thread: torch has no GNU OpenMP")


@cache
def _load() -> ctypes.CDLL | None:
    path = Path(__file__).with_name("_kernels" + (sysconfig.get_config_var("EXT_SUFFIX") or ".so"))
    if not path.exists():
        return None
    try:
        found = ctypes.CDLL(str(path))
        for name, arguments in _ARGUMENTS.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, _RETURNS.get(name)
    except (OSError, AttributeError):  # of another machine, or of other sources than these
        return None
    found.slimbayes_use_threads(_openmp())
    return found


def _openmp() -> int | None:
    """Where the OpenMP library that torch has loaded starts its threads; None if there is another kind or none."""
    for path in sorted(Path(torch.__file__).with_name("lib").glob("libgomp*.so*")):
        try:
            return ctypes.cast(ctypes.CDLL(str(path)).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def noise(out: Tensor, kind: str, seed: int, stream: int = 0) -> bool:
    """Fill a contiguous float32 tensor on the CPU with standard noise; False if there are no kernels to do it.

    The numbers are a function of kind, seed and stream alone: for i and j 32-bit words of SFC32,

        "normal"   √(−2 log u) times cos πt and sin πt, u = (⌊i/2⌋ + ½)/2³¹, t = j/2³¹ (Box and Muller 1958)
        "uniform"  ⌊i/2⁸⌋/2²⁴, in [0, 1)
        "cauchy"   cot(π(i + ½)/2³²), i signed
        "sign"     +1 or −1 by the uppermost bit of i

    >>> a, b = torch.zeros(3), torch.zeros(5)
    >>> noise(a, "normal", 7) == noise(b, "normal", 7)
    True
    >>> torch.equal(a, b[:3])
    True
    """
    kernels = library()
    if kernels is None:
        return False
    kernels.slimbayes_noise(
        out.data_ptr(), out.numel(), KINDS.index(kind), seed, stream, torch.get_num_threads()
    )
    return True
