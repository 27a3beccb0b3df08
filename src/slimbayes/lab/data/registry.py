"""Data sets by name or path, and which of them are there."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from slimbayes.containers.datasets import DataError, Dataset
from slimbayes.containers.files import find_root, locate
from slimbayes.containers.records import RecordDataset
from slimbayes.containers.streaming import IMAGENET_FILES, IMAGENET_HOME
from slimbayes.lab.data.embedded import EMBEDDED
from slimbayes.lab.data.images import (
    CIFAR_FILES,
    CIFAR_HOME,
    MNIST_FILES,
    MNIST_HOME,
    SVHN_HOME,
    cifar10,
    cifar100,
    mnist,
)
from slimbayes.lab.data.records.mimic import MIMIC_FILES, find_mimic3, mimic3
from slimbayes.lab.data.records.mimic_tables import MIMIC_HOME
from slimbayes.lab.data.records.physionet import PHYSIONET_FILES, PHYSIONET_HOME, physionet2012
from slimbayes.lab.data.tables import load_table
from slimbayes.lab.data.texts import IMDB_FILES, IMDB_HOME, imdb
from slimbayes.lab.data.uci import UCI, UCI_HOME, uci
from slimbayes.lab.data.userfiles import load_folder, load_npz

Root = str | os.PathLike[str] | None
Loaded = TypeVar("Loaded", Dataset, RecordDataset)

_FROM_ROOT: dict[str, Callable[..., Dataset]] = {
    "cifar10": cifar10,
    "cifar100": cifar100,
    "mnist": mnist,
    "imdb": imdb,
    **{f"uci/{name}": partial(uci, name) for name in UCI},
}
_FILES: dict[str, tuple[tuple[str, ...], str]] = {
    "cifar10": (CIFAR_FILES[10], CIFAR_HOME),
    "cifar100": (CIFAR_FILES[100], CIFAR_HOME),
    "mnist": (MNIST_FILES, MNIST_HOME),
    **{f"uci/{name}": (("uci.npz",), UCI_HOME) for name in UCI},
    "imdb": (IMDB_FILES, IMDB_HOME),
    "svhn": (("svhn_test.npz",), SVHN_HOME),
    "imagenet": (IMAGENET_FILES, IMAGENET_HOME),
    "physionet2012": (PHYSIONET_FILES, PHYSIONET_HOME),
    "mimic3": (MIMIC_FILES, MIMIC_HOME),
}
_RECORDS: dict[str, Callable[..., RecordDataset]] = {"physionet2012": physionet2012, "mimic3": mimic3}
_TABLES = (".csv", ".tsv", ".txt", ".parquet", ".pq")


def names() -> tuple[str, ...]:
    """Every data set that ``load`` knows by name: first those that need no files.

    >>> names()[:3]
    ('digits', 'breast_cancer', 'wine')
    """
    return (*EMBEDDED, *_FROM_ROOT)


def load(name: str | os.PathLike[str], root: Root = None, **options: Any) -> Dataset:
    """A data set by name ("digits", "cifar10", "uci/boston") or by the path of a file or folder.

    Files: CSV or Parquet tables (``target=``, see ``load_table``), .npz with 'inputs' and 'targets'
    (``load_npz``), folders of images (``load_folder``). ImageNet and sets like it do not fit into memory:
    ``stream``.

    Args:
        name: one of ``names()``, or a path.
        root: the folder of the data; None is the environment variable SLIMBAYES_DATA.
        options: of the set, e.g. ``split=1`` for another split, ``n=50`` for "cubic".

    >>> data = load("cubic", n=10)
    >>> data.task, len(data.train), data.shape
    ('regression', 10, (1,))
    """
    text = os.fspath(name)
    if not text:
        raise DataError(f"the name is empty; choose a file, a folder or one of {', '.join(names())}")
    if text in EMBEDDED:
        return _call(text, EMBEDDED[text], options)
    if text in _FROM_ROOT:
        return _call(text, _FROM_ROOT[text], {"root": root, **options})
    if text in _RECORDS:
        raise DataError(f"{text!r} holds timed events: use slimbayes.data.load_records({text!r}, root)")
    if text in ("imagenet", "svhn"):
        instead = "stream('imagenet', root)" if text == "imagenet" else "load_images('svhn', root)"
        why = "is read as it is used" if text == "imagenet" else "has no training split here"
        raise DataError(f"{text!r} {why}: use slimbayes.data.{instead}")
    return _load_path(text, root, options)


def load_records(name: str, root: Root = None, **options: Any) -> RecordDataset:
    """Medical records by name: "physionet2012" or "mimic3".

    Args:
        name: of the set.
        root: the folder of the data; None is the environment variable SLIMBAYES_DATA.
        options: of the set, e.g. ``precision=86400``, the length of a time bag in seconds: see
            ``slimbayes.lab.data.records.physionet2012`` and ``mimic3``.
    """
    if name not in _RECORDS:
        raise DataError(f"no records {name!r}: choose {' or '.join(_RECORDS)}")
    return _call(name, _RECORDS[name], {"root": root, **options})


def _load_path(text: str, root: Root, options: dict[str, Any]) -> Dataset:
    folder = find_root(root)
    places = [Path(text).expanduser(), *([folder / text] if folder is not None else [])]
    path = next((place for place in places if place.exists()), None)
    suffix = Path(text).suffix.lower()
    if path is None:
        if suffix in (*_TABLES, ".npz") or ("/" in text and not text.startswith("uci/")):
            looked = " and ".join(str(place.absolute().parent) for place in places)
            raise DataError(f"{text}: no such file or folder (looked in {looked})")
        close = difflib.get_close_matches(text, names(), n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise DataError(f"no data set {text!r}; {hint}Choose a file, a folder or one of {', '.join(names())}")
    if path.is_dir():
        return _call(text, load_folder, {"path": path, **options})
    if suffix == ".npz":
        return _call(text, load_npz, {"path": path, **options})
    if suffix in _TABLES:
        return _call(text, load_table, {"path": path, **options})
    raise DataError(f"{text}: a {suffix or 'file without suffix'}; give a .csv, .parquet, .npz or a folder")


def _call(name: str, function: Callable[..., Loaded], options: dict[str, Any]) -> Loaded:
    known = inspect.signature(function).parameters
    unknown = [option for option in options if option not in known]
    if unknown:
        allowed = [option for option in known if option not in ("path", "root", "name")]
        raise DataError(f"{name!r} has no option {unknown[0]!r}; it has {', '.join(allowed) or 'none'}")
    return function(**options)


@dataclass(frozen=True)
class Found:
    """Whether a named data set is there: ``where`` is "embedded", the path of its files, or None."""

    name: str
    where: str | None
    needs: tuple[str, ...]  # any of these under the data root; none for embedded sets
    home: str  # where to get them


def found(root: Root = None) -> tuple[Found, ...]:
    """Every named data set, and whether its files are under the data root.

    >>> [entry.where for entry in found()][:1]
    ['embedded']
    """
    entries = [Found(name, "embedded", (), "") for name in EMBEDDED]
    for name, (candidates, home) in _FILES.items():
        path = _FOUND[name](root) if name in _FOUND else locate(root, candidates)
        entries.append(Found(name, None if path is None else str(path), candidates, home))
    return tuple(entries)


def _imagenet(root: Root) -> Path | None:
    folder = find_root(root)
    for place in () if folder is None else (folder / "imagenet", folder):
        if (place / "train").is_dir() or any(place.glob("train-*.tar")):
            return place
    return None


# Folders whose content tells what they are.
_FOUND: dict[str, Callable[[Root], Path | None]] = {"imagenet": _imagenet, "mimic3": find_mimic3}


def describe(root: Root = None) -> str:
    """The data sets and where they are, one a line.

    >>> print(describe().splitlines()[0])
    digits         embedded
    """
    return "\n".join(f"{entry.name:14} {entry.where or 'not found: ' + entry.home}" for entry in found(root))
