"""Prepared records in a folder that appears whole or not at all, bound to the files they came from."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimbayes.containers.bagging import Array, Bagged
from slimbayes.containers.datasets import DataError
from slimbayes.containers.records import Records
from slimbayes.files import SUFFIX, read_json

_VERSION = 1  # of the layout; another one is made anew
_TYPES = {
    "codes": "<i4", "levels": "<i4", "counts": "<i4", "bags": "<i4", "offsets": "<i8", "ages": "<f4", "starts": "<i8",
    "context": "<f4", "targets": "<i8", "ids": "<i8",
}  # fmt: skip


def key_of(facts: dict[str, Any]) -> str:
    """A name for what records are made of: the first 16 hexadecimal digits of the SHA-256 of the facts.

    >>> key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    True
    """
    text = json.dumps({**facts, "version": _VERSION}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write into, renamed to ``target`` at the end; after an error nothing of it is left."""
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}{SUFFIX}")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise DataError(
            f"{target.parent}: cannot write the prepared records there ({error.strerror}): pass cache=, a folder"
        ) from error
    try:
        yield partial
        with contextlib.suppress(
            FileExistsError, OSError
        ):  # another process was faster, with the same content
            os.replace(partial, target)
        if not target.is_dir():
            raise DataError(f"{target}: cannot be written: pass cache=, another folder")
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class Writer:
    """Columns of records, appended to files: no more in memory than what is being written."""

    def __init__(self, folder: Path, columns: int) -> None:
        folder.mkdir()
        self.folder, self.columns, self.rows = folder, columns, 0
        self.ends = {"offsets": 0, "starts": 0}
        for name in self.ends:
            self._append(name, np.zeros(1))

    def add(self, bagged: Bagged, context: Array, targets: Array, ids: Array) -> None:
        """More records, after those that are there."""
        for name in ("codes", "levels", "counts", "bags", "ages"):
            self._append(name, getattr(bagged, name))
        for name in self.ends:
            column = getattr(bagged, name)
            self._append(name, column[1:] + self.ends[name])
            self.ends[name] += int(column[-1])
        self._append("context", context)
        self._append("targets", targets)
        self._append("ids", ids)
        self.rows += len(targets)

    def facts(self) -> dict[str, Any]:
        """What a reader needs: rows, columns of the context, and the size of every file."""
        sizes = {name: self._path(name).stat().st_size for name in _TYPES}
        return {"rows": self.rows, "columns": self.columns, "bytes": sizes}

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.bin"

    def _append(self, name: str, column: Array) -> None:
        with open(self._path(name), "ab") as file:
            np.ascontiguousarray(column, dtype=_TYPES[name]).tofile(file)


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    """The last file of a folder of records."""
    with open(folder / "facts.json", "w", encoding="utf-8") as file:
        json.dump(facts, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_facts(folder: Path) -> dict[str, Any]:
    """What was written beside the records."""
    try:
        facts: dict[str, Any] = read_json(folder / "facts.json")
        if not isinstance(facts, dict):
            raise ValueError("no mapping")
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}: damaged ({error}): delete this folder, it is made again") from error
    return facts


def read_records(folder: Path, facts: dict[str, Any]) -> Records:
    """Records as they lie on disk, mapped into memory: pages are read when they are needed."""
    columns: dict[str, Tensor] = {}
    for name, kind in _TYPES.items():
        path = folder / f"{name}.bin"
        size, expected = path.stat().st_size if path.exists() else -1, facts["bytes"][name]
        if size != expected:
            found = "missing" if size < 0 else f"{size} bytes, not {expected}"
            raise DataError(f"{path}: {found}: delete {folder.parent}, it is made again")
        array = np.memmap(path, dtype=kind, mode="c") if size else np.zeros(0, dtype=kind)
        columns[name] = torch.from_numpy(array)
    columns["context"] = columns["context"].reshape(facts["rows"], facts["columns"])
    return Records(**columns)
