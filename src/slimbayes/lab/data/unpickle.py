"""Pickles of dicts, lists, text, bytes, integers and arrays, read without running anything they name.

The python version of CIFAR is pickled. An unrestricted ``pickle.load`` calls whatever the file asks for; here
a pickle may name NumPy's array and dtype constructors only (and the one that Python 3 writes for bytes), and
even those are stand-ins that record what they are given. Arrays are then made from the recorded shape, type
and bytes.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np

from slimbayes.containers.datasets import DataError
from slimbayes.files import read_whole, shortened

# The operations of plain data, by the names that pickletools gives them.
_OPERATIONS = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "
    "BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 "
    "EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS "
    "PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL REDUCE BUILD"
)
_LARGEST = 1 << 30  # bytes: CIFAR's largest file has 155 million
_TYPES = {"u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"}


class _Dtype:
    def __init__(self, code: Any, *_: Any) -> None:
        text = code.decode("ascii") if isinstance(code, bytes) else code
        if text not in _TYPES:
            raise pickle.UnpicklingError(f"an array of type {text!r}, not of numbers")
        self.code, self.order = text, "="

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode("ascii") if isinstance(state[1], bytes) else state[1]
        if order not in ("|", "<", ">", "=") or any(state[2:5]):
            raise pickle.UnpicklingError(f"an array type of structure {state!r}, not of plain numbers")
        self.order = order

    def dtype(self) -> np.dtype[Any]:
        return np.dtype(("" if self.order == "|" else self.order) + self.code)


class _Array:
    def __init__(self, *_: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def array(self) -> np.ndarray[Any, Any]:
        _, shape, dtype, fortran, raw = self.state
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes):
            raise pickle.UnpicklingError("an array without plain bytes")
        if not all(isinstance(n, int) and n >= 0 for n in shape):
            raise pickle.UnpicklingError(f"an array of shape {shape!r}")
        flat = np.frombuffer(raw, dtype.dtype())
        if flat.size != math.prod(shape):
            raise pickle.UnpicklingError(f"an array of shape {shape} with {flat.size} numbers")
        return flat.reshape(shape, order="F" if fortran else "C")


def _latin1(text: Any, encoding: Any = "latin1") -> bytes:
    """What Python 3 writes for bytes in protocol 2: ``_codecs.encode(text, "latin1")``."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"text to be encoded as {encoding!r}")
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Made anew for each name: a pickle can set attributes of what it is given, but of nothing that stays.
        if (module, name) in (("numpy", "dtype"), ("numpy", "ndarray")):
            return type(name, (_Dtype if name == "dtype" else _Array,), {})
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return type(name, (_Array,), {})
        if (module, name) == ("_codecs", "encode"):
            return lambda text, encoding="latin1": _latin1(text, encoding)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a file of plain data does not need")


def read_pickle(path: Path) -> Any:
    """The dicts, lists, text, bytes, numbers and arrays of a pickle; keys that are bytes become text.

    Anything else in the file (a class, a function) is a DataError, and is not run.
    """
    try:
        raw = read_whole(path, _LARGEST)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); get the original file") from error
    try:
        _scan(raw)
        return _plain(_Unpickler(io.BytesIO(raw), encoding="bytes").load(), 0, {})
    except Exception as error:  # a damaged pickle can fail in any operation
        raise DataError(
            f"{path}: not a pickle of plain data: {shortened(error)}; get the original file"
        ) from error


def _scan(raw: bytes) -> None:
    """Refuse operations that plain data do not need, before any is carried out."""
    allowed = set(_OPERATIONS.split())
    for count, (operation, argument, _) in enumerate(pickletools.genops(raw)):
        if operation.name not in allowed:
            raise pickle.UnpicklingError(f"it has the operation {operation.name}")
        # The memo is an array as long as its largest index: one number could ask for all memory.
        if operation.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(str(argument)) > count:
            raise pickle.UnpicklingError(f"its memo jumps to {argument}")


def _plain(value: Any, depth: int, done: dict[int, Any]) -> Any:
    """Arrays for stand-ins; each object once, since a list may hold another a thousand times."""
    if depth > 8:
        raise pickle.UnpicklingError("it is nested more than 8 levels deep")
    if id(value) in done:
        return done[id(value)]
    if value is None or isinstance(value, (bytes, str, int, float)):
        return value
    if isinstance(value, _Array):
        plain: Any = value.array()
    elif isinstance(value, dict):
        plain = {_text(key): _plain(entry, depth + 1, done) for key, entry in value.items()}
    elif isinstance(value, list):
        plain = [_plain(entry, depth + 1, done) for entry in value]
    else:
        raise pickle.UnpicklingError(f"it holds a {type(value).__name__}")
    done[id(value)] = plain
    return plain


def _text(key: Any) -> Any:
    return key.decode("utf-8", "replace") if isinstance(key, bytes) else key
