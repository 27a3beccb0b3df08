"""The mean of what a run has learned over the last part of its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Averages:
    """m ← m + (w − m) / min(n, part · steps) after step n: a plain mean at first, then one that forgets.

    ``tensors`` are a model's own, by name; means, factors, spreads and BatchNorm's statistics are all averaged, counts
    are not.

    >>> w = torch.zeros(1)
    >>> averages = Averages({"w": w}, 0.5, steps=4)
    >>> for step in (1, 2, 3, 4):
    ...     averages.add(step, [w.fill_(step)])
    >>> float(averages.means["w"])
    3.125
    """

    def __init__(self, tensors: dict[str, Tensor], part: float, steps: int) -> None:
        self.window = part * steps
        self.means = {name: value.detach().clone() for name, value in tensors.items() if _averaged(value)}

    def add(self, step: int, tensors: list[Tensor]) -> None:
        """Take in the values after ``step``, in the order of the names."""
        own = [value.detach() for value in tensors if _averaged(value)]
        torch._foreach_lerp_(list(self.means.values()), own, 1.0 / max(1.0, min(step, self.window)))

    @contextmanager
    def instead(self, tensors: dict[str, Tensor]) -> Iterator[None]:
        """Inside, the model has the means."""
        own = {name: tensors[name].detach().clone() for name in self.means}
        self.put(tensors)
        try:
            yield
        finally:
            for name, value in own.items():
                tensors[name].detach().copy_(value)

    @torch.no_grad()
    def put(self, tensors: dict[str, Tensor]) -> None:
        """Give the model the means for good."""
        for name, value in self.means.items():
            tensors[name].copy_(value)


def _averaged(value: Tensor) -> bool:
    return value.is_floating_point()
