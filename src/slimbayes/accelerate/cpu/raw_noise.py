"""Noise on the CPU: raw 64-bit words, and torch's vectorised and threaded arithmetic on pieces of them.

torch's CPU generator makes its numbers one by one in one thread. Here the words come from SFC64 (C. Doty-Humphrey's
"small fast chaotic" generator, in NumPy; it passes PractRand and TestU01's BigCrush), and torch turns a whole piece
of them into noise while it is in the cache.

The words are taken in the order of the numbers, and each number is a function of its words alone, so the number of
threads has no effect on the result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]

# Most numbers to a piece: with its words and one scratch tensor 5 MB, shared by the caches of the cores at work;
# halves of smaller pieces would be too small for torch to share them among threads.
PIECE = 1 << 19
_GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ over the golden ratio: a third word of state with no pattern
_WARM_UP = 24  # steps after which each bit of the state depends on every bit of the seed; its author takes 18
_INTEGER = {4: np.int32, 8: np.int64}


def fill(out: Array, kind: str, seed: int) -> None:
    """Write standard noise into ``out``, a flat float32 or float64 array.

    With f a signed integer of b = 32 bits (64 for float64), f′ another one, and each used once:

        "normal"   √(−ln((f/2^(b−1))² + 2^(−2b))) times cos and sin of πf′/2^(b−1), up to 6.66 either side
                   (Box and Muller 1958)
        "uniform"  f/2ᵇ + ½ cut to 24 (53) bits, in [0, 1)
        "cauchy"   1/tan(π(f + ½)/2ᵇ), up to 2.7e9 (float64: 5.9e18) either side
        "sign"     one bit of f each, +1 or −1

    >>> out = np.empty(5, np.float32)
    >>> fill(out, "sign", 3)
    >>> bool((abs(out) == 1).all())
    True
    """
    make = _KINDS[kind]
    words = Words(seed, list(_KINDS).index(kind))
    numbers = torch.from_numpy(out)
    with torch.no_grad():
        for start, stop in pieces(out.size):
            make(numbers[start:stop], words)


def pieces(count: int) -> list[tuple[int, int]]:
    """Where the pieces of ``count`` numbers start and stop: as few and as equal as can be, of even length.

    >>> pieces(5), pieces(PIECE + 2) == [(0, PIECE // 2 + 2), (PIECE // 2 + 2, PIECE + 2)]
    ([(0, 5)], True)
    """
    if count == 0:
        return []
    size = -(-count // -(-count // PIECE))
    size += size % 2
    return [(start, min(start + size, count)) for start in range(0, count, size)]


class _Local(threading.local):
    """One generator for each thread: to make one takes longer than to set its state."""

    source: Any = None


_LOCAL = _Local()


class Words:
    """The stream of 64-bit words that belongs to a seed and a kind of noise; one at a time in a thread."""

    def __init__(self, seed: int, number: int) -> None:
        if _LOCAL.source is None:
            _LOCAL.source = np.random.SFC64(0)
        state = np.array([seed, 0, (_GOLDEN + number) % 2**64, 1], np.uint64)
        _LOCAL.source.state = {
            "bit_generator": "SFC64",
            "state": {"state": state},
            "has_uint32": 0,
            "uinteger": 0,
        }
        _LOCAL.source.random_raw(_WARM_UP, output=False)

    def take(self, count: int) -> Array:
        """The next 64-bit words."""
        words: Array = _LOCAL.source.random_raw(count)
        return words

    def integers(self, count: int, like: Tensor) -> Tensor:
        """The next ``count`` signed integers of as many bits as ``like`` has to a number."""
        size = like.element_size()
        words = self.take(-(-count * size // 8)).view(_INTEGER[size])
        return torch.from_numpy(words)[:count]


def _normal(out: Tensor, words: Words) -> None:
    half = -(-len(out) // 2)
    bits = 8 * out.element_size()
    whole = out if len(out) == 2 * half else out.new_empty(2 * half)
    whole.copy_(words.integers(2 * half, whole))
    radius, angle = whole[:half], whole[half:]
    tiny = out.new_full((), 2.0 ** (-2 * bits))  # never log 0; nothing near 1 is changed
    torch.addcmul(tiny, radius, radius, value=2.0 ** (2 - 2 * bits), out=radius)
    radius.log_().neg_().sqrt_()
    angle.mul_(math.pi * 2.0 ** (1 - bits))
    sine = torch.sin(angle)
    angle.cos_().mul_(radius)
    radius.mul_(sine)
    if whole is not out:
        out.copy_(whole[: len(out)])


def _uniform(out: Tensor, words: Words) -> None:
    drop = 8 if out.element_size() == 4 else 11
    out.copy_(words.integers(len(out), out).bitwise_right_shift_(drop))
    out.mul_(2.0 ** (drop - 8 * out.element_size())).add_(0.5)


def _cauchy(out: Tensor, words: Words) -> None:
    out.copy_(words.integers(len(out), out))
    out.add_(0.5).mul_(math.pi * 2.0 ** (-8 * out.element_size())).tan_().reciprocal_()


_SIGNS = 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1) - 1.0  # [byte, bit]
_TABLES: dict[int, Array] = {4: _SIGNS.astype(np.float32), 8: _SIGNS.astype(np.float64)}


def _sign(out: Tensor, words: Words) -> None:
    count = -(-len(out) // 8)
    table = _TABLES[out.element_size()]
    indices = words.take(-(-count // 8)).view(np.uint8)[:count]
    array = out.numpy()
    if len(out) % 8 == 0:
        np.take(table, indices, axis=0, out=array.reshape(count, 8), mode="clip")
    else:
        array[:] = np.take(table, indices, axis=0).reshape(-1)[: len(out)]


# Their order is part of a stream's key: add at the end.
_KINDS: dict[str, Callable[[Tensor, Words], None]] = {
    "normal": _normal,
    "uniform": _uniform,
    "cauchy": _cauchy,
    "sign": _sign,
}
KINDS = tuple(_KINDS)
