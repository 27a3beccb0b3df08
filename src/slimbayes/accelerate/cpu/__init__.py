"""CPU kernels in C, compiled when slimbayes is installed; where there is no compiler the rest does without.

They make noise in the registers that use it, as the Triton kernels do on a GPU. ``SLIMBAYES_NATIVE=0`` or
``sb.fast_paths(native=False)`` turns them off.
"""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from slimbayes.accelerate import switches
from slimbayes.core.compiler import constant

KINDS = ("normal", "uniform", "cauchy", "sign")  # in the order of noise.c
_FLOAT32 = torch.float32

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


@constant
def compiled() -> bool:
    """Whether there are kernels, for code that is being compiled."""
    return _load() is not None


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


def addresses(
    tensors: Sequence[Tensor | None],
    numbers: Sequence[int],
    layout: Callable[[Tensor], bool] | None = None,
) -> list[int]:
    """Where the kernels find so many float32 numbers of each tensor; 0 for what there is not.

    They are contiguous, or as ``layout`` allows.

    Whatever others made passes here on its way into C, which reads and writes what is, or is not, at an address.

    >>> len(addresses([torch.zeros(3), None], [3, 3]))
    2
    >>> addresses([torch.zeros(3, device="meta")], [3])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    TypeError: a CPU kernel was handed a float32 tensor of shape (3,) on the device "meta", ...
    """
    found = []
    for tensor, size in zip(tensors, numbers):  # noqa: B905  # asked a hundred times in a small network's step
        place = 0
        if tensor is not None:
            if tensor.is_cpu and tensor.dtype is _FLOAT32 and tensor.numel() == size:  # noqa: SIM102
                if tensor.is_contiguous() or (layout is not None and layout(tensor)):
                    try:
                        # Of the views that leave a sign to their readers, imag of conj, only one number is contiguous.
                        place = tensor.data_ptr() if size > 1 or not tensor.is_neg() else 0
                    except RuntimeError:  # it stands for others: under vmap and grad
                        place = 0
            if not place and (size or tensor.numel()):
                raise _refusal(tensor, size)
        found.append(place)
    return found


def address(tensor: Tensor | None, size: int, layout: Callable[[Tensor], bool] = Tensor.is_contiguous) -> int:
    """``addresses`` of one tensor.

    >>> address(None, 3), address(torch.zeros(3), 3) > 0
    (0, True)
    """
    return addresses((tensor,), (size,), layout)[0]


def new(tensor: Tensor | None) -> int:
    """The address of a tensor that the caller has just made in the likeness of one that passed ``addresses``.

    >>> new(None)
    0
    """
    return 0 if tensor is None else tensor.data_ptr()


def dense(tensor: Tensor) -> bool:
    """Whether its numbers fill their memory without gaps, in any order of the axes.

    >>> dense(torch.zeros(2, 3, 4).movedim(1, 2)), dense(torch.zeros(3, 4)[:, :2])
    (True, False)
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _refusal(tensor: Tensor, numbers: int) -> Exception:
    """What is wrong with a tensor that the kernels cannot take, and what to do."""
    kind, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    what = f"a CPU kernel was handed a {kind} tensor of shape {shape}"
    if tensor.is_meta:
        return TypeError(
            f'{what} on the device "meta", where tensors have no values: build the network on the device of its '
            f"inputs, or give it memory there, model.to_empty(device=...), and load its weights"
        )
    if not tensor.is_cpu:
        return TypeError(
            f'{what} on the device "{tensor.device}": move the model and its inputs to one device, model.to(...)'
        )
    if tensor.dtype == _FLOAT32 and tensor.numel() != numbers:
        return RuntimeError(
            f"{what}, where it takes {numbers} numbers: the layer's input and its parameters do not fit together"
        )
    if tensor.dtype == _FLOAT32 and tensor.is_contiguous():
        return TypeError(
            f"{what} that has no memory of its own ({type(tensor).__name__}, as under torch.func): turn the kernels "
            f"off there, sb.fast_paths(native=False)"
        )
    return TypeError(
        f"{what} and strides {tensor.stride()}, where it takes float32 numbers that lie side by side: please report "
        f"it, and turn the kernels off meanwhile, sb.fast_paths(native=False)"
    )


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
        *addresses([out], [out.numel()], dense),
        out.numel(),
        KINDS.index(kind),
        seed,
        stream,
        torch.get_num_threads(),
    )
    return True
