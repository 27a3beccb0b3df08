"""Shifts of the test data by name and severity, and data from elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from slimbayes.containers.datasets import DataError, Dataset, Split
from slimbayes.containers.files import locate
from slimbayes.lab.data.elsewhere import OutOfDistribution, out_of_distribution
from slimbayes.lab.data.shifts_images import TINY, Function
from slimbayes.lab.data.shifts_tables import TableShifts

__all__ = ["OutOfDistribution", "Shift", "out_of_distribution", "shift_names", "shifts_for"]

Root = str | os.PathLike[str] | None

_OFFICIAL = {"cifar10": ("CIFAR-10-C",), "cifar100": ("CIFAR-100-C",)}
_SMALLEST_CORRUPTED = 32  # pixels; below, the tables of the corruptions make no sense


@dataclass(frozen=True)
class Shift:
    """A change of raw test data with five severities; ``shifts_for(dataset)`` gives those that fit.

    ``apply(split, severity, seed)`` is the general form; calling the shift changes inputs alone, for the
    shifts that keep rows in place. Randomness is keyed by (seed, index of the example): a slice of the data
    with ``first`` its first index gives the slice of the shifted whole.

    >>> from slimbayes.lab.data import load
    >>> rotation = shifts_for(load("digits"), ["rotation"])[0]
    >>> len(rotation.apply(load("digits").test, severity=3))
    500
    """

    name: str
    description: str
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    moves_rows: bool = False  # whether it picks rows, so that targets move too and ``apply`` is needed
    _inputs: Function | None = field(default=None, repr=False)
    _split: Callable[[Split, int, int], Split] | None = field(default=None, repr=False)

    def __call__(self, inputs: Tensor, severity: int, seed: int = 0, first: int = 0) -> Tensor:
        """The raw inputs, shifted."""
        self._check(severity)
        if self._inputs is None:
            raise DataError(
                f"the shift {self.name!r} moves rows, targets included: use .apply(split, severity)"
            )
        return self._inputs(inputs, severity, seed, first)

    def apply(self, split: Split, severity: int, seed: int = 0, first: int = 0) -> Split:
        """The split, shifted: same number of examples, raw units."""
        self._check(severity)
        if self._split is not None:
            return self._split(split, severity, seed)
        return Split(self(split.inputs, severity, seed, first), split.targets)

    def _check(self, severity: int) -> None:
        if severity not in self.severities:
            raise DataError(f"severity={severity} of {self.name!r}: choose one of {list(self.severities)}")


def shift_names(dataset: Dataset, root: Root = None) -> tuple[str, ...]:
    """Every shift that this data set can have, the default ones first.

    >>> from slimbayes.lab.data import load
    >>> shift_names(load("digits"))
    ('rotation', 'noise', 'blur', 'contrast', 'occlusion')
    """
    return tuple(_available(dataset, root))


def shifts_for(dataset: Dataset, names: Iterable[str] | None = None, root: Root = None) -> tuple[Shift, ...]:
    """The shifts of a data set: by name, or the default ones.

    Tiny images: rotation, noise, blur, contrast, occlusion. Images from 32 pixels on: the 15 standard
    corruptions (the 4 extra ones and the tiny images' shifts by name). Tables: noise, missing, covariate,
    scale. With the official files CIFAR-10-C or CIFAR-100-C in the data root, "official/fog" and so on.

    >>> from slimbayes.lab.data import load
    >>> [shift.name for shift in shifts_for(load("wine"))]
    ['noise', 'missing', 'covariate', 'scale']
    """
    available = _available(dataset, root)
    wanted = [names] if isinstance(names, str) else names
    chosen = _defaults(dataset) if wanted is None else tuple(wanted)
    for name in chosen:
        if name not in available:
            raise DataError(f"no shift {name!r} for {dataset.name!r}; choose from {', '.join(available)}")
    return tuple(available[name] for name in chosen)


def _defaults(dataset: Dataset) -> tuple[str, ...]:
    if dataset.kind == "text":
        return ()
    if dataset.kind == "table":
        return ("noise", "missing", "covariate", "scale")
    if min(dataset.shape[-2:]) < _SMALLEST_CORRUPTED:
        return tuple(TINY)
    from slimbayes.lab.data.corruptions import CORRUPTIONS

    return tuple(CORRUPTIONS)


def _available(dataset: Dataset, root: Root) -> dict[str, Shift]:
    if dataset.kind == "text":
        return {}
    if dataset.kind == "table":
        return _tables(dataset)
    tiny = {name: Shift(name, text, _inputs=function) for name, (text, function) in TINY.items()}
    if min(dataset.shape[-2:]) < _SMALLEST_CORRUPTED:
        return tiny
    from slimbayes.lab.data.corruptions import CORRUPTIONS, EXTRA

    corruptions = {
        name: Shift(name, f"{name.replace('_', ' ')} (common corruptions)", _inputs=partial(_corrupt, name))
        for name in (*CORRUPTIONS, *EXTRA)
    }
    others = {name: shift for name, shift in tiny.items() if name not in corruptions}
    return {**corruptions, **others, **_official(dataset, root, tuple(corruptions))}


def _official(dataset: Dataset, root: Root, names: tuple[str, ...]) -> dict[str, Shift]:
    """The published corrupted images of CIFAR, where their files are: they take the test split's place."""
    folder = locate(root, _OFFICIAL[dataset.name]) if dataset.name in _OFFICIAL else None
    if folder is None:
        return {}
    return {
        f"official/{name}": Shift(
            f"official/{name}",
            f"{name.replace('_', ' ')}, the images of {folder.name}",
            moves_rows=True,
            _split=partial(_published, folder, name),
        )
        for name in names
        if (folder / f"{name}.npy").exists()
    }


def _published(folder: Path, name: str, split: Split, severity: int, seed: int) -> Split:
    from slimbayes.lab.data.corruptions.official import load_official

    images, labels = load_official(folder, name, severity)
    count = min(len(split), len(images))  # their order is their own: as many of them, from the first on
    return Split(images[:count], labels[:count]).to(split.inputs.device)


def _corrupt(name: str, images: Tensor, severity: int, seed: int, first: int) -> Tensor:
    from slimbayes.lab.data.corruptions import corrupt

    return corrupt(images, name, severity, seed=seed, first=first)


def _tables(dataset: Dataset) -> dict[str, Shift]:
    table = TableShifts(dataset.train.inputs.cpu())
    return {
        "noise": Shift("noise", "Gaussian noise of 0.1 to 1 standard deviations", _inputs=table.noise),
        "missing": Shift("missing", "10 to 50 % of the entries replaced by the mean", _inputs=table.missing),
        "covariate": Shift(
            "covariate",
            "rows resampled towards one end of the first principal component",
            moves_rows=True,
            _split=table.covariate,
        ),
        "scale": Shift("scale", "columns multiplied or divided by 1.05 to 1.5", _inputs=table.scale),
    }
