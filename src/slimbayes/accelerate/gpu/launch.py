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

from slimbayes.accelerate import switches

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
    return (
        switches.paths.triton and _FOUND and (device.type == "cuda" or (INTERPRETED and device.type == "cpu"))
    )


def place(where: Tensor) -> int:
    """The index of the tensor's device, -1 for the CPU."""
    return where.get_device()


def launch(kernel: Any, programs: int, where: Tensor, *args: Any, **meta: Any) -> None:
    """Start ``programs`` instances of a kernel on the tensor's own device (Triton takes the current one).

    ``args`` are the kernel's tensors and numbers in its own order, ``meta`` its constants and launch options.
    """
    if RECORDER.calls is not None:
        kinds = tuple(arg.dtype if isinstance(arg, Tensor) else arg for arg in args)
        RECORDER.calls.append((kernel, kinds, meta))
        return
    device = place(where)
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
    signature = _signature(kernel, device, args, meta)
    if signature is None:
        kernel[(programs,)](*args, **meta)
        return
    key, values = signature
    found = _started.get(key)
    if found is None:
        compiled = kernel[(programs,)](*args, **meta)
        try:
            _started[key] = _Started(compiled, kernel, len(args), meta)
        except (AttributeError, KeyError):
            _direct = False
        return
    try:
        found.run(programs, torch._C._cuda_getCurrentRawStream(device), values)
    except (TypeError, AttributeError, SystemError):  # refused before anything was started
        _direct = False
        kernel[(programs,)](*args, **meta)


def _signature(
    kernel: Any, device: int, args: tuple[Any, ...], meta: dict[str, Any]
) -> tuple[tuple[Any, ...], list[Any]] | None:
    """All that Triton specialises on, and the arguments as the launcher takes them; None for a kind not known here."""
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
            return None
        else:  # to the launcher an address
            address = arg.data_ptr()
            key.append(arg.dtype)
            key.append(address % 16 == 0)
            values.append(address)
    return tuple(key), values


class Prepared:
    """A kernel with its grid, numbers and constants: what is left to a launch are the addresses of its tensors.

    For tensors of one device's memory and always the same types; whoever keeps it has these in the key. Their
    addresses may be multiples of 16 or not, which Triton compiles kernels of their own for.
    """

    __slots__ = ("_kernel", "_meta", "_numbers", "_programs", "_runs")

    def __init__(self, kernel: Any, programs: int, numbers: tuple[int, ...], meta: dict[str, Any]) -> None:
        self._kernel, self._programs, self._numbers, self._meta = kernel, programs, numbers, meta
        self._runs: dict[Any, tuple[Any, ...]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Start the kernel on these tensors, the first of its arguments."""
        global _direct
        device = place(tensors[0])
        if not _direct or device < 0 or RECORDER.calls is not None or device != torch.cuda.current_device():
            launch(self._kernel, self._programs, tensors[0], *tensors, *self._numbers, **self._meta)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        key: Any = device
        for address in addresses:
            if address & 15:
                key = (device, *[address & 15 == 0 for address in addresses])
                break
        known = self._runs.get(key)
        if known is None or _observed():
            args = (*tensors, *self._numbers)
            launch(self._kernel, self._programs, tensors[0], *args, **self._meta)
            signature = _signature(self._kernel, device, args, self._meta)
            found = None if signature is None else _started.get(signature[0])
            if found is not None:
                self._runs[key] = found.parts(self._programs, self._numbers)
            return
        run, grid, head, rest = known
        try:
            run(*grid, torch._C._cuda_getCurrentRawStream(device), *head, *addresses, *rest)
        except (TypeError, AttributeError, SystemError):  # refused before anything was started
            _direct = False
            launch(self._kernel, self._programs, tensors[0], *tensors, *self._numbers, **self._meta)


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

    def parts(self, programs: int, numbers: tuple[int, ...]) -> tuple[Any, ...]:
        """What ``run`` calls and hands over, but for the stream and the addresses of the tensors before ``numbers``."""
        return self._launch, (programs, 1, 1), self._head, (*numbers, *self._tail)


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
