"""What ``sb.fit`` trains on: tensors, data sets, loaders and iterables, all seen as numbered epochs of batches."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from slimbayes.containers.batches import Batches
from slimbayes.containers.datasets import Dataset, Scaling, Split
from slimbayes.containers.records import Part, RecordDataset
from slimbayes.containers.streaming import StreamedDataset
from slimbayes.training.settings import Training
from slimbayes.verbs.evaluation import as_pair

Batch = tuple[Any, Tensor]
_SAMPLERS = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


@runtime_checkable
class Source(Protocol):
    """Epochs of batches: a function of (seed, epoch number) alone, so that a run resumes where it stopped."""

    @property
    def num_data(self) -> int:
        """The number of training examples."""

    def __len__(self) -> int:
        """Batches per epoch."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, from the one numbered ``start``."""


def mixed_seed(*parts: int) -> int:
    """One 63-bit seed from several numbers (splitmix64 steps): the same everywhere, unlike ``hash``.

    >>> mixed_seed(0, 1) != mixed_seed(1, 0)
    True
    """
    state = 0
    for part in parts:
        state = (state ^ (part & (2**64 - 1))) + 0x9E3779B97F4A7C15 & (2**64 - 1)
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
        state = (state ^ state >> 27) * 0x94D049BB133111EB & (2**64 - 1)
        state ^= state >> 31
    return state >> 1


@dataclass
class LoaderSource:
    """A DataLoader or another iterable that can be iterated again and again.

    The random generators of torch, numpy and Python are seeded before every batch is asked for, from
    (seed, epoch, batch): a run that resumes skips batches and then sees the same ones. A DataLoader's samplers get a
    generator of their own, because with workers they are asked earlier: the order is one for any number of them.
    """

    batches: Iterable[Any]
    num_data: int
    seed: int
    length: int

    def __len__(self) -> int:
        return self.length

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches from the one numbered ``start``; earlier ones are read and dropped."""
        self._seed(number, -1)
        if hasattr(self.batches, "_num_iter_calls"):  # Fabric's loader counts epochs for its sampler
            self.batches._num_iter_calls = number
        with self._ordered(number):
            yield from self._read(number, start)

    def _read(self, number: int, start: int) -> Iterator[Batch]:
        iterator = iter(self.batches)
        for index in range(self.length):
            self._seed(number, index)
            try:
                batch = next(iterator)
            except StopIteration:
                raise ValueError(
                    f"epoch {number} of the training data ended after {index} batches, and {self.length} were "
                    f"expected: pass something that can be iterated again, such as a list or a DataLoader, "
                    f"not a generator"
                ) from None
            if index >= start:
                yield as_pair(batch, index)

    @contextmanager
    def _ordered(self, number: int) -> Iterator[None]:
        """Samplers that would ask torch's generator ask one that nothing else asks."""
        found = [getattr(self.batches, "sampler", None) if isinstance(self.batches, DataLoader) else None]
        found.append(getattr(getattr(self.batches, "batch_sampler", None), "sampler", None))
        own = [s for s in found if type(s) in _SAMPLERS and s.generator is None]  # type: ignore[union-attr]
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, 2, number, 1))
        for sampler in own:
            sampler.generator = generator  # type: ignore[union-attr]
        try:
            yield
        finally:
            for sampler in own:
                sampler.generator = None  # type: ignore[union-attr]

    def _seed(self, number: int, index: int) -> None:
        seed = mixed_seed(self.seed, 2, number, index + 1)
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)


def make_source(
    data: Any, settings: Training, num_data: int | None = None, fabric: Any = None, train: bool = True
) -> Source:
    """Anything ``sb.fit`` takes, as a Source: see there."""
    rank, world = (fabric.global_rank, fabric.world_size) if fabric is not None and train else (0, 1)
    device = fabric.device if fabric is not None else None
    scaling: Scaling | None = None
    target_scaling: Scaling | None = None
    augment: tuple[str, ...] = ()
    pad = 2
    if isinstance(data, Dataset):
        augment, pad = data.augment if train and settings.augment else (), data.pad
        scaling, target_scaling = data.scaling, data.target_scaling
        data = data.train if train else data.test
    split = as_split(data)
    divided = split is not None or isinstance(data, (StreamedDataset, RecordDataset))
    if settings.batch_size % world and divided:
        raise ValueError(
            f"batch_size={settings.batch_size} cannot be divided evenly among {world} processes, and uneven parts "
            f"would be weighted wrongly: use a multiple of {world}"
        )
    if split is not None:
        if len(split) < world:
            held = f"{len(split)} examples" if len(split) else "no examples"
            raise ValueError(f"the data hold {held}: pass at least {world}")
        return Batches(
            split, min(settings.batch_size, len(split) // world * world), scaling=scaling,
            target_scaling=target_scaling, seed=settings.seed, shuffle=train, augment=augment, rank=rank, world=world,
            drop_last=train, device=device, channels_last=settings.channels_last, pad=pad,
        )  # fmt: skip
    if isinstance(data, StreamedDataset):
        return data.batches(
            "train" if train else "test", settings.batch_size, rank=rank, world=world, drop_last=train,
            device=device, workers=settings.workers, channels_last=settings.channels_last,
        )  # fmt: skip
    if isinstance(data, RecordDataset):
        part: Part = "train" if train else "validation"
        count = len(data.part(part))
        if count < world:
            raise ValueError(f"the {part} part holds {count or 'no'} records: pass at least {world}")
        return data.batches(
            part, min(settings.batch_size, count // world * world), seed=settings.seed, rank=rank, world=world,
            drop_last=train, device=device,
        )  # fmt: skip
    if isinstance(data, Source):
        return data
    return _loader_source(data, settings.seed, num_data, fabric, world)


def _loader_source(data: Any, seed: int, num_data: int | None, fabric: Any, world: int) -> LoaderSource:
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes, dict, Iterator)):
        raise TypeError(
            f"fit cannot train on {type(data).__name__}: pass (inputs, targets) tensors, a slimbayes data set, a "
            f"DataLoader, or a list of (inputs, targets) batches (a generator can be read only once)"
        )
    if not hasattr(data, "__len__"):
        raise TypeError(f"{type(data).__name__} has no length: fit needs the number of batches per epoch")
    if num_data is None:
        dataset = getattr(data, "dataset", None)
        if dataset is None or not hasattr(dataset, "__len__"):
            raise ValueError(
                "num_data is missing: for an iterable of batches pass num_data=, the number of training "
                "examples, which scales the KL"
            )
        num_data = len(dataset)
    if isinstance(data, DataLoader) and fabric is not None and world > 1:
        data = fabric.setup_dataloaders(data, move_to_device=False)
    elif world > 1:
        raise TypeError(
            f"on {world} processes pass tensors, a slimbayes data set or a DataLoader: an iterable of "
            f"{type(data).__name__} cannot be divided among them"
        )
    if len(data) == 0:
        raise ValueError("the training data hold no batch: check batch_size and drop_last")
    return LoaderSource(data, num_data, seed, len(data))


def as_split(data: Any) -> Split | None:
    """A Split, or a pair of tensors as one; None for everything else.

    >>> len(as_split((torch.zeros(3, 1), torch.zeros(3))))
    3
    """
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        return Split(*data)
    return data if isinstance(data, Split) else None


def hold_out(data: Any, fraction: float, seed: int) -> tuple[Any, Any]:
    """Training data and a validation part of them, drawn at random by the seed.

    >>> train, validation = hold_out((torch.zeros(10, 1), torch.zeros(10)), 0.2, seed=0)
    >>> len(train), len(validation)
    (8, 2)
    """
    if not 0 < fraction < 1:
        raise ValueError(f"validation={fraction!r}: give a fraction between 0 and 1, or validation data")
    split = data.train if isinstance(data, Dataset) else as_split(data)
    if split is None:
        raise TypeError(
            f"validation={fraction} holds out examples of tensors and data sets, not of {type(data).__name__}: "
            f"pass validation data"
        )
    count = round(fraction * len(split))
    if not 0 < count < len(split):
        raise ValueError(f"validation={fraction} of {len(split)} examples leaves nothing on one side")
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(mixed_seed(seed, 3)))
    order = order.to(split.inputs.device)
    kept, held = split[order[count:].sort().values], split[order[:count].sort().values]
    if isinstance(data, Dataset):
        return replace(data, train=kept), replace(data, train=kept, test=held)
    return kept, held
