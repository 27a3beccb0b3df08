"""Large CSV tables, plain or gzipped, read in pieces: one column of text at a time, then of numbers."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from slimbayes.containers.archives import check_ordinary, lines
from slimbayes.containers.bagging import Array
from slimbayes.containers.datasets import DataError
from slimbayes.files import shortened

Progress = Callable[[str], None]
ROWS = 100_000  # of one piece
NO_TIME = np.iinfo(np.int64).min  # where a time is empty
_BLOCK = 5_000  # rows that are held as lists
_EVERY = 5.0  # s between two words of progress


def find_table(folder: Path, name: str) -> Path | None:
    """The file of a table: NAME.csv or NAME.csv.gz, in capitals or not."""
    for stem in (name.upper(), name.lower()):
        for suffix in (".csv", ".csv.gz"):
            if (folder / f"{stem}{suffix}").is_file():
                return folder / f"{stem}{suffix}"
    return None


def read_pieces(
    path: Path, columns: Sequence[str], rows: int = ROWS, progress: Progress | None = None
) -> Iterator[dict[str, Array]]:
    """Some columns of a CSV file in pieces of so many rows, as arrays of text, by name.

    Names are compared without regard to case. A missing column, a row of another length and a damaged file are
    a DataError that names them. ``progress`` gets a sentence every few seconds.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.csv"
    >>> _ = path.write_text("X,y,z\\n1,2,3\\n4,,6\\n")
    >>> [piece["y"].tolist() for piece in read_pieces(path, ("Y", "x"), rows=1) for piece in [{"y": piece["Y"]}]]
    [['2'], ['']]
    """
    check_ordinary(path)
    size, said, done = max(1, path.stat().st_size), time.monotonic(), 0
    with _opened(path) as raw:
        try:
            stream = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
            # A plain file is no longer than it is, a packed one may be a line of any length.
            reader = csv.reader(lines(text, path) if path.suffix == ".gz" else text)
            header = next(reader, None)
            places = _places(path, header, columns)
            for cells in _columns(path, reader, len(header or ()), places, rows):
                done += len(cells[0])
                yield {
                    name: np.array(column, dtype=np.str_) for name, column in zip(columns, cells, strict=True)
                }
                if progress is not None and time.monotonic() - said > _EVERY:
                    said = time.monotonic()
                    progress(f"{path.name}: {done:,} rows, {raw.tell() / size:.0%} of the file")
        except (OSError, EOFError, zlib.error, csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}: damaged after row {done} ({error}): get the file again, or unpack it to .csv"
            ) from error
    if progress is not None:
        progress(f"{path.name}: {done:,} rows")


def _opened(path: Path) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}): get the file again") from error


def _places(path: Path, header: list[str] | None, columns: Sequence[str]) -> list[int]:
    names = [name.strip().upper() for name in header or ()]
    absent = [name for name in columns if name.upper() not in names]
    if absent:
        there = shortened(", ".join(header or ()), 500) or "no header"
        raise DataError(
            f"{path}: no column {', '.join(absent)}; it has {there}. Use the CSV tables of MIMIC-III 1.4 as they are"
        )
    return [names.index(name.upper()) for name in columns]


def _columns(
    path: Path, reader: Iterator[list[str]], width: int, places: Sequence[int], rows: int
) -> Iterator[list[list[str]]]:
    """Columns of so many rows each; few whole rows are held at a time, which the garbage collector would walk."""
    done = 0
    cells: list[list[str]] = [[] for _ in places]
    while block := list(islice(reader, min(_BLOCK, rows))):
        if set(map(len, block)) != {width}:
            block = _checked(path, block, width, done)
        done += len(block)
        for column, place in zip(cells, places, strict=True):
            column.extend(map(itemgetter(place), block))
        if len(cells[0]) >= rows:
            yield cells
            cells = [[] for _ in places]
    if cells[0]:
        yield cells


def _checked(path: Path, block: list[list[str]], width: int, done: int) -> list[list[str]]:
    for number, row in enumerate(block, done + 1):
        if row and len(row) != width:
            raise DataError(f"{path}: row {number} has {len(row)} fields and the header {width}: repair it")
    return [row for row in block if row]  # blank lines, as at the end of some files


def integers(path: Path, name: str, column: Array, missing: int = -1) -> Array:
    """Text as int64; empty cells are ``missing``.

    >>> integers(Path("a.csv"), "ID", np.array(["7", ""])).tolist()
    [7, -1]
    """
    return _converted(path, name, np.where(column == "", str(missing), column), np.int64, "a whole number")


def numbers(path: Path, name: str, column: Array) -> Array:
    """Text as float64; empty cells are NaN.

    >>> numbers(Path("a.csv"), "VALUENUM", np.array(["1.5", ""])).tolist()
    [1.5, nan]
    """
    return _converted(path, name, np.where(column == "", "nan", column), np.float64, "a number")


def seconds(path: Path, name: str, column: Array) -> Array:
    """Times such as 2101-10-20 19:08:00 as seconds since 1970, int64; empty cells are NO_TIME.

    >>> seconds(Path("a.csv"), "CHARTTIME", np.array(["1970-01-02 00:00:01", "1970-01-02"])).tolist()
    [86401, 86400]
    """
    return _converted(path, name, column, np.dtype("datetime64[s]"), "a time").astype(np.int64)


def _converted(path: Path, name: str, column: Array, kind: Any, what: str) -> Array:
    try:
        return column.astype(kind)
    except (ValueError, OverflowError):
        for cell in column:  # find it, to name it
            try:
                np.array([cell]).astype(kind)
            except (ValueError, OverflowError):
                raise DataError(
                    f"{path}, column {name}: {shortened(cell)!r} is not {what}: repair it"
                ) from None
        raise


def identity(path: Path) -> dict[str, object]:
    """What tells a file from its other versions without reading all of it: size, time, both ends.

    >>> sorted(identity(Path(__file__)))
    ['ends', 'modified', 'name', 'size']
    """
    found, end = path.stat(), 1 << 20
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(end))
        file.seek(max(0, found.st_size - end), os.SEEK_SET)
        digest.update(file.read(end))
    return {
        "name": path.name,
        "size": found.st_size,
        "modified": found.st_mtime_ns,
        "ends": digest.hexdigest()[:16],
    }
