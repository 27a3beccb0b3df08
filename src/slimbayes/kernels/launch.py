"""Whether the kernels can run here, and how they are started."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
import threading
from typing import Any

import torch
from torch import Tensor

from slimbayes import fast

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _builds() -> bool:
    """Whether Triton can build its launcher here: it calls a C compiler, and that reads Python's headers."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return compiler is not None and os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))


# Found, not imported: importing Triton takes a second, and many programs never run a kernel. Known once and for
# all, for torch.compile reads this too.
_FOUND = (
    importlib.util.find_spec("triton") is not None
    and torch.version.hip is None  # the approximate functions are NVIDIA's
    and (INTERPRETED or _builds())
)


class _Recorder(threading.local):
    """Where set, kernels are noted with the kinds of their arguments instead of being started (``warming``)."""

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] | None = None


RECORDER = _Recorder()


def available(device: torch.device) -> bool:
    """True where the kernels run: on CUDA with Triton, or anywhere in Triton's interpreter (for tests).

    >>> available(torch.device("meta"))
    False
    """
    return fast.paths.triton and _FOUND and (device.type == "cuda" or (INTERPRETED and device.type == "cpu"))


def launch(kernel: Any, programs: int, where: Tensor, *args: Any, **meta: Any) -> None:
    """Start ``programs`` instances of a kernel on the tensor's own device (Triton takes the current one).

    ``args`` are the kernel's tensors and numbers in its own order, ``meta`` its constants and launch options.
    """
    if RECORDER.calls is not None:
        kinds = tuple(arg.dtype if isinstance(arg, Tensor) else arg for arg in args)
        RECORDER.calls.append((kernel, kinds, meta))
        return
    device = where.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            _start(kernel, programs, device, args, meta)
    else:
        _start(kernel, programs, device, args, meta)


# Triton binds, specialises and looks up its arguments in Python at every launch, which takes longer than a small
# kernel runs. What it compiled is therefore kept here, under all that it specialises on, and started directly.
# These are internals: any other version of Triton, and any surprise, means the ordinary launch.
_KNOWN = ("3.6.",)
_started: dict[tuple[Any, ...], Any] = {}
_direct: bool | None = None  # not known before Triton is imported
_runtime: Any = None  # Triton's settings, and the hooks of its profilers


def _start(kernel: Any, programs: int, device: int, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    global _direct
    if _direct is None:
        _direct = _knows_triton()
    if not _direct or device < 0 or _observed():
        kernel[(programs,)](*args, **meta)
        return
    key: list[Any] = [id(kernel), device, *meta.items()]
    values: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is int:
            # A constant if 1; a multiple of 16 or not; 32 or 64 bits.
            key.append(1 if arg == 1 else (arg % 16 == 0, -(2**31) <= arg < 2**31, arg < 2**63))
            values.append(arg)
        elif kind is float or kind is bool:
            key.append(kind)
            values.append(arg)
        elif not isinstance(arg, Tensor):
            kernel[(programs,)](*args, **meta)
            return
        else:  # to the launcher an address
            address = arg.data_ptr()
            key.append(arg.dtype)
            key.append(address % 16 == 0)
            values.append(address)
    found = _started.get(tuple(key))
    if found is None:
        compiled = kernel[(programs,)](*args, **meta)
        try:
            _started[tuple(key)] = _Started(compiled, kernel, len(args), meta)
        except (AttributeError, KeyError):
            _direct = False
        return
    try:
        found.run(programs, torch._C._cuda_getCurrentRawStream(device), values)
    except (TypeError, AttributeError, SystemError):  # refused before anything was started
        _direct = False
        kernel[(programs,)](*args, **meta)


class _Started:
    """A compiled kernel with the arguments of its launcher that do not change."""

    __slots__ = ("_head", "_kernel", "_launch", "_tail")

    def __init__(self, compiled: Any, kernel: Any, count: int, meta: dict[str, Any]) -> None:
        launcher = compiled.run
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            raise AttributeError("scratch memory is allocated at every launch")
        if any(isinstance(value, Tensor) for value in meta.values()):
            raise AttributeError("an address in the key would not be looked at again")
        self._kernel = kernel  # kept alive: its id is in the key
        self._launch = launcher.launch
        # cooperative, dependent launch, two scratch buffers, metadata twice, two hooks
        self._head = (
            compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl, None, None,
            compiled.packed_metadata, None, None, None,
        )  # fmt: skip
        self._tail = tuple(meta[name] for name in kernel.arg_names[count:])

    def run(self, programs: int, stream: int, values: list[Any]) -> None:
        self._launch(programs, 1, 1, stream, *self._head, *values, *self._tail)


def _knows_triton() -> bool:
    global _runtime
    if INTERPRETED:
        return False
    import triton  # type: ignore[import-not-found, unused-ignore]

    if not str(triton.__version__).startswith(_KNOWN) or not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        return False
    _runtime = triton.knobs.runtime
    return True


def _observed() -> bool:
    """Whether a profiler of Triton's wants to see every launch."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def ceil_div(a: int, b: int) -> int:
    """⌈a / b⌉.

    >>> ceil_div(7, 2)
    4
    """
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two ≥ n.

    >>> [power_of_two(n) for n in (1, 3, 64)]
    [1, 4, 64]
    """
    return 1 << (n - 1).bit_length()
