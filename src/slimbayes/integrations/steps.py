"""What the bridges to training loops of others have in common: batches as pairs, the size of the data, KL weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import SubsetRandomSampler

from slimbayes.core.objective import LinearAnnealing

Schedule = Callable[[int], float]
LABELS = ("labels", "label", "targets", "target")


def unpack(batch: Any) -> tuple[Any, Tensor | None]:
    """(inputs, targets) of a batch: a pair, or a mapping with labels; anything else is inputs alone.

    >>> unpack({"x": 1, "labels": 2}), unpack([1, 2]), unpack([1])
    (({'x': 1}, 2), (1, 2), (1, None))
    """
    if isinstance(batch, Mapping):
        found = [name for name in LABELS if name in batch]
        if len(found) > 1:
            raise ValueError(
                f"the batch has several targets, {found}: pass unpack=, which gives (inputs, targets)"
            )
        rest = {name: value for name, value in batch.items() if name not in found}
        return rest, batch[found[0]] if found else None
    if isinstance(batch, (tuple, list)):
        if len(batch) == 2:
            return batch[0], batch[1]
        if len(batch) == 1:
            return batch[0], None
        raise TypeError(
            f"the batch is a {type(batch).__name__} of {len(batch)}: batches are pairs (inputs, targets), several "
            "inputs in a tuple or dict; for others pass unpack=, a function that gives (inputs, targets)"
        )
    return batch, None


def size_of(loader: Any) -> int | None:
    """The number of training examples behind a DataLoader, or None where it does not say.

    Without batches (batch_size=None) an item may be an example or a batch of any size: that says nothing.

    >>> from torch.utils.data import DataLoader
    >>> size_of(DataLoader([1, 2, 3], batch_size=2)), size_of([[1, 2], [3]])
    (3, None)
    """
    batches = getattr(loader, "batch_sampler", None)
    if batches is None and getattr(loader, "batch_size", 0) is None:
        return None
    # Where batch_sampler= was given, the loader's own sampler is not the one that is used.
    sampler = getattr(batches, "sampler", None) or getattr(loader, "sampler", None)
    source: Any = sampler if isinstance(sampler, SubsetRandomSampler) else getattr(loader, "dataset", None)
    try:
        return len(source)
    except TypeError:
        return None


def schedule_of(annealing: float | Schedule, steps: float, start: float = 0.0) -> Schedule:
    """A KL weight by step: a schedule as it is, or linear growth until a share of all ``steps``.

    β(t) = 0 until start · steps, then linear, and 1 from annealing · steps on; 0 means 1 from the first step.

    >>> schedule_of(0.5, 100)(24), schedule_of(0.5, 100)(99), schedule_of(0.0, 100)(0)
    (0.5, 1.0, 1.0)
    """
    if callable(annealing):
        return annealing
    check_shares(annealing, start)
    if not math.isfinite(steps):
        raise ValueError(
            f"KL annealing over {annealing:g} of the run needs a run with an end: set max_steps or max_epochs, or give "
            "a schedule in steps, such as sb.LinearAnnealing(1000)"
        )
    first = int(start * steps)
    return LinearAnnealing(max(first + 1, round(annealing * steps)), first)


def check_shares(annealing: float, start: float) -> None:
    """Raise unless both are shares of a run, in that order.

    >>> check_shares(0.8, 0.0)
    """
    good = all(isinstance(value, (int, float)) and 0 <= value <= 1 for value in (annealing, start))
    if not good or (start and start >= annealing):
        raise ValueError(
            f"KL annealing needs shares of the run with 0 ≤ start < share ≤ 1, got share={annealing!r} and "
            f"start={start!r}; for steps give a schedule, such as sb.LinearAnnealing(1000)"
        )
