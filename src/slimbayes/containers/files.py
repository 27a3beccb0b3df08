"""What every reader needs: optional packages, missing files, splits by key, npz archives without pickles."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimbayes import extras
from slimbayes.containers.archives import check_archive, check_text
from slimbayes.containers.datasets import DataError
from slimbayes.core.keyed_noise import layer_key, philox
from slimbayes.files import shortened

ROOT_VARIABLE = "SLIMBAYES_DATA"


def need(module: str, purpose: str) -> Any:
    """An optional module, imported when it is used; its absence names the extra to install.

    >>> need("json", "this example").dumps([1])
    '[1]'
    """
    return extras.need(module, purpose, "data")


def find_root(root: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder of the data: the argument, else the environment variable SLIMBAYES_DATA, else None.

    >>> find_root("somewhere").name
    'somewhere'
    """
    chosen = root if root is not None else os.environ.get(ROOT_VARIABLE) or None
    return None if chosen is None else Path(chosen).expanduser()


def locate(root: str | os.PathLike[str] | None, candidates: tuple[str, ...]) -> Path | None:
    """The first of the candidates (relative paths) that exists under the data root."""
    folder = find_root(root)
    if folder is None:
        return None
    return next((folder / name for name in candidates if (folder / name).exists()), None)


def require(root: str | os.PathLike[str] | None, candidates: tuple[str, ...], what: str, home: str) -> Path:
    """``locate``, or a DataError that says which file, where it was looked for, and where to get it."""
    path = locate(root, candidates)
    if path is None:
        raise missing(root, candidates, what, home)
    return path


def missing(
    root: str | os.PathLike[str] | None, candidates: tuple[str, ...], what: str, home: str
) -> DataError:
    """The error for files that are not there."""
    folder = find_root(root)
    if folder is None:
        where = f"no data root given: pass --data-root (root=...) or set {ROOT_VARIABLE}"
    else:
        where = f"looked in {folder}" + ("" if folder.is_dir() else ", which is not a folder")
    return DataError(f"{what} not found: {where}. Needed: {' or '.join(candidates)}. Get it from {home}")


def read_npz(path: Path, keys: tuple[str, ...]) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays of an .npz file by key; pickled objects, and archives that unpack without measure, are refused."""
    try:
        check_archive(path, keys)
        with np.load(path, allow_pickle=False) as archive:
            absent = [key for key in keys if key not in archive.files]
            if absent:
                raise DataError(
                    f"{path}: no array {', '.join(map(repr, absent))}; it has {shortened(', '.join(archive.files))}"
                )
            arrays = {key: archive[key] for key in keys}
        for key, array in arrays.items():
            check_text(path, key, array)
        return arrays
    except DataError:
        raise
    except Exception as error:  # zipfile and numpy raise a dozen types for damaged files
        raise _no_archive(path, error) from error


def _no_archive(path: Path, error: Exception) -> DataError:
    what = shortened(error) or type(error).__name__
    return DataError(f"{path}: not a readable .npz of plain arrays ({what}); save it again with numpy.savez")


def npz_keys(path: Path) -> list[str]:
    """The names of the arrays in an .npz file."""
    try:
        check_archive(path, ())
        with np.load(path, allow_pickle=False) as archive:
            return list(archive.files)
    except DataError:
        raise
    except Exception as error:
        raise _no_archive(path, error) from error


def permutation(
    count: int, seed: int, name: str, stream: int = 0, device: torch.device | str | None = None
) -> Tensor:
    """A random order of ``count`` things, a function of (seed, name, stream) on every machine and device.

    Things are sorted by a 62-bit Philox word of their number.

    >>> permutation(5, seed=0, name="example").sort().values.tolist()
    [0, 1, 2, 3, 4]
    """
    kind = torch.device("cpu" if device is None else device).type
    place = device if kind == "cuda" else "cpu"  # not every device multiplies 64-bit integers
    numbers = torch.arange(count, device=place)
    zero = torch.zeros((), dtype=torch.int64, device=place)
    words = philox((numbers, zero + stream, zero, zero), layer_key(seed, name))
    return ((words[0] << 30) ^ words[1]).argsort(stable=True).to(device or "cpu")


def permutations(
    count: int, seeds: Sequence[int], name: str, streams: Tensor, device: torch.device | str | None = None
) -> Tensor:
    """``permutation`` for every seed and every stream [E] at once, [seeds, E, count].

    >>> both = permutations(5, [0, 1], "example", torch.arange(3))
    >>> torch.equal(both[1, 2], permutation(5, seed=1, name="example", stream=2))
    True
    """
    kind = torch.device("cpu" if device is None else device).type
    place = device if kind == "cuda" else "cpu"
    keys = torch.tensor([layer_key(seed, name) for seed in seeds], device=place)  # [seeds, 2]
    numbers = torch.arange(count, device=place).expand(len(seeds), len(streams), count)
    zero = torch.zeros_like(numbers)
    epochs = zero + streams.to(place)[:, None]
    words = philox((numbers, epochs, zero, zero), (keys[:, :1, None], keys[:, 1:, None]))
    return ((words[0] << 30) ^ words[1]).argsort(dim=-1, stable=True).to(device or "cpu")


def as_fraction(test: float | str | os.PathLike[str]) -> float | None:
    """The fraction that ``test`` is, also as text from a command line; None for a file.

    >>> as_fraction("0.2"), as_fraction("test.csv")
    (0.2, None)
    """
    try:
        fraction = float(test)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    if not 0 < fraction < 1:
        raise DataError(f"test={test}: give a fraction of the rows between 0 and 1, or another file")
    return fraction


def random_split(count: int, test: int, seed: int) -> tuple[Tensor, Tensor]:
    """Row numbers (train, test), each ascending, ``test`` of them drawn at random.

    >>> train, test = random_split(10, 3, seed=0)
    >>> len(train), len(test), sorted(train.tolist() + test.tolist()) == list(range(10))
    (7, 3, True)
    """
    if not 0 < test < count:
        raise DataError(
            f"{test} of {count} rows for the test leaves one split empty: give a smaller fraction"
        )
    order = permutation(count, seed, "split")
    return order[test:].sort().values, order[:test].sort().values


def stratified_split(labels: Tensor, test: int, seed: int) -> tuple[Tensor, Tensor]:
    """Row numbers (train, test) with every class in proportion, by largest remainders; all classes in train.

    >>> labels = torch.tensor([0] * 6 + [1] * 4)
    >>> labels[stratified_split(labels, 5, seed=0)[1]].bincount().tolist()
    [3, 2]
    """
    if not 0 < test < len(labels):
        raise DataError(
            f"{test} of {len(labels)} rows for the test leaves one split empty: give a smaller fraction"
        )
    values, counts = labels.unique(return_counts=True)
    shares = counts.double() * test / len(labels)
    take = shares.floor().long()
    largest = (shares - take).argsort(descending=True, stable=True)[: test - int(take.sum())]
    take[largest] += 1
    take = take.minimum(counts - 1)  # a class must be seen in training, if it has one row only
    if int(take.sum()) == 0:
        raise DataError(f"no class of {len(labels)} rows has two: a stratified test split would be empty")
    order = permutation(len(labels), seed, "split")
    chosen = torch.cat([order[labels[order] == v][:n] for v, n in zip(values, take.tolist(), strict=True)])
    rest = torch.ones(len(labels), dtype=torch.bool)
    rest[chosen] = False
    return rest.nonzero()[:, 0], chosen.sort().values
