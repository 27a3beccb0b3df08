"""The noise of many networks: a function of (network's seed, layer, step, element), made for several steps at once.

What a network asks for is listed in a first pass. From then on the numbers of all networks, all layers and a few steps
come from one evaluation of Philox, and every network is given its own: no generator has a state, so the networks beside
it, the number of steps at once and an interruption have no effect.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slimbayes.core.context import Request, Supply
from slimbayes.core.keyed_noise import from_words, layer_key, philox

_NEUTRAL = {
    "uniform": 0.5,
    "sign": 1.0,
    "exponential": 1.0,
}  # what stands for noise in the first pass; else 0


def _blocks(request: Request) -> int:
    """Counters of Philox, four numbers each."""
    return (math.prod(request.size) + 3) // 4


class Listed(Supply):
    """Writes down what is asked for, and gives neutral values."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def noise(self, request: Request, device: torch.device) -> Tensor:
        """A constant."""
        self.requests.append(request)
        return torch.full(request.size, _NEUTRAL.get(request.kind, 0.0), dtype=request.dtype, device=device)


class Given(Supply):
    """Hands out noise that was made before, by its name."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        self.values = values

    def noise(self, request: Request, device: torch.device) -> Tensor:
        """The noise of this use, one network's."""
        value = self.values.get(request.name)
        if value is None or tuple(value.shape) != request.size or value.dtype != request.dtype:
            raise ValueError(
                f"{request.source!r} asks for {request.kind} noise of size {request.size} that it did not ask for in "
                f"the first pass: a network that takes another way from step to step is to be trained with sb.fit"
            )
        return value


class NoisePlan:
    """All noise of N networks with these seeds, each number from a word of its own.

    Number e of a request: Philox(key = hash(seed, source), counter = (⌊e / 4⌋, step, stream, 0))[e mod 4].

    >>> plan = NoisePlan([Request("normal", "fc", 0, (1, 1, 2, 3), torch.float32)], [5, 6], torch.device("cpu"))
    >>> both = plan.make(torch.tensor([7, 8]))["fc 0"]
    >>> both.shape
    torch.Size([2, 2, 1, 1, 2, 3])
    >>> alone = NoisePlan(plan.requests, [6], torch.device("cpu")).make(torch.tensor([8]))["fc 0"]
    >>> torch.equal(alone[0, 0], both[1, 1])
    True
    """

    def __init__(self, requests: Sequence[Request], seeds: Sequence[int], device: torch.device) -> None:
        kinds = sorted({(each.kind, str(each.dtype)) for each in requests})
        # By kind and type, so that each is one piece of the words.
        self.requests = sorted(requests, key=lambda each: kinds.index((each.kind, str(each.dtype))))
        self.blocks = sum(_blocks(each) for each in self.requests)
        lengths = torch.tensor([_blocks(each) for each in self.requests], dtype=torch.int64)

        def per_block(values: Tensor) -> Tensor:
            return values.repeat_interleave(lengths, dim=-1).to(device)

        keys = [[layer_key(seed, f"many {each.source}") for each in self.requests] for seed in seeds]
        words = torch.tensor(keys, dtype=torch.int64).view(len(seeds), len(self.requests), 2)
        self.keys = per_block(words[..., 0]), per_block(words[..., 1])  # [N, blocks]
        parts = [torch.arange(_blocks(each)) for each in self.requests]
        self.block = (
            torch.cat(parts).to(device) if parts else torch.zeros(0, dtype=torch.int64, device=device)
        )
        self.stream = per_block(torch.tensor([each.stream for each in self.requests], dtype=torch.int64))

    def make(self, steps: Tensor) -> dict[str, Tensor]:
        """The noise of these steps [T], by name, [T, N, *size]."""
        if not self.requests:
            return {}
        shape = (len(steps), *self.keys[0].shape)  # [T, N, blocks]
        counter = (
            self.block.expand(shape), steps[:, None, None].expand(shape), self.stream.expand(shape),
            torch.zeros_like(self.block).expand(shape),
        )  # fmt: skip
        words = philox(counter, self.keys)
        made: dict[str, Tensor] = {}
        start = 0
        for kind, dtype, members in self._pieces():
            end = start + sum(_blocks(each) for each in members)
            w0, w1, w2, w3 = (word[..., start:end] for word in words)
            values = from_words(kind, (w0, w1, w2, w3), dtype)  # [T, N, 4 blocks of this kind]
            at = 0
            for each in members:
                numbers = values[..., at : at + math.prod(each.size)]
                made[each.name] = numbers.reshape(*shape[:2], *each.size)
                at += 4 * _blocks(each)
            start = end
        return made

    def _pieces(self) -> list[tuple[str, torch.dtype, list[Request]]]:
        pieces: list[tuple[str, torch.dtype, list[Request]]] = []
        for each in self.requests:
            if not pieces or pieces[-1][:2] != (each.kind, each.dtype):
                pieces.append((each.kind, each.dtype, []))
            pieces[-1][2].append(each)
        return pieces
