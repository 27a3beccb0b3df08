"""Valid files, damaged: bytes flipped, cut, doubled, joined, and words put in. The same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

_BYTES = (0, 1, 10, 13, 34, 39, 44, 45, 48, 57, 58, 91, 123, 127, 128, 255)


class Mutator:
    """An endless series of damaged inputs.

    >>> first = Mutator([b"abc"], (), 0).next()
    >>> first == Mutator([b"abc"], (), 0).next()
    True
    """

    def __init__(self, seeds: Sequence[bytes], words: Sequence[str], seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = [bytes(one) for one in seeds]
        self.words = [word.encode("utf-8") for word in words]

    def next(self) -> bytes:
        """One input: a valid file with one to six changes."""
        data = bytearray(self.random.choice(self.pool))
        for _ in range(self.random.choice((1, 1, 2, 3, 6))):
            self._change(data)
        return bytes(data[: 1 << 18])

    def _change(self, data: bytearray) -> None:
        source = self.random
        kind = source.randrange(8)
        at = source.randrange(len(data) + 1)
        end = min(len(data), at + source.choice((1, 2, 4, 8, 32, 128)))
        if kind == 0 and at < len(data):
            data[at] ^= 1 << source.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = source.choice(_BYTES)
        elif kind == 2:
            del data[at:end]
        elif kind == 3:
            data[at:at] = data[at:end] * source.choice((1, 2, 50))
        elif kind == 4 and self.words:
            data[at:at] = source.choice(self.words)
        elif kind == 5 and self.words:
            data[at:end] = source.choice(self.words)
        elif kind == 6:
            other = source.choice(self.pool)
            start = source.randrange(len(other) + 1)
            data[at:at] = other[start : start + source.choice((4, 32, 256))]
        else:
            number = source.choice(
                (0, 1, -1, 2**31 - 1, 2**31, 2**63 - 1, 2**64, 10**9, source.randrange(1000))
            )
            digits = [i for i, byte in enumerate(data) if 48 <= byte <= 57]
            if digits:
                place = source.choice(digits)
                data[place : place + 1] = str(number).encode()
