"""CSV and Parquet files as named columns of numbers, with errors that name the row and the column."""

from __future__ import annotations

import csv
import difflib
import io
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimbayes.containers.archives import check_ordinary
from slimbayes.containers.datasets import DataError
from slimbayes.containers.files import need
from slimbayes.files import read_whole, shortened

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
_WORDS = {"true": 1.0, "false": 0.0}
_LARGEST = 3e38  # about float32's
MOST_CELLS = 20_000_000  # of a Parquet file that is much smaller than they


@dataclass(frozen=True)
class Columns:
    """A file's columns by name: text from CSV, Python values from Parquet; and how to name a cell."""

    path: Path
    values: dict[str, list[Any]]
    lines: Sequence[int] | None = None  # CSV: the line that each row ends on

    def where(self, row: int, column: str) -> str:
        """Such as "row 17, column 'age'": rows count from 1 after the header; the line if it differs."""
        line = "" if self.lines is None or self.lines[row] == row + 2 else f" (line {self.lines[row]})"
        return f"row {row + 1}{line}, column {shortened(column)!r}"

    def require(self, names: Sequence[str]) -> None:
        """Raise unless every name is a column; suggest the closest."""
        for name in names:
            if name not in self.values:
                known = [other for other in list(self.values)[:1000] if len(other) < 100]
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                there = shortened(", ".join(self.values), 500)
                raise DataError(f"{self.path}: no column {name!r}{hint}; it has {there}")


def read_table(path: str | os.PathLike[str], columns: Sequence[str]) -> tuple[Tensor, tuple[str, ...]]:
    """Some columns of a CSV or Parquet file, in the order given: float32 [N, D], and their names.

    Other columns are ignored. A missing column, an empty file, text or NaN among the values: DataError.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "rows.csv"
    >>> _ = file.write_text("a,b\\n1,2\\n3,4\\n")
    >>> read_table(file, ["b", "a"])
    (tensor([[2., 1.], [4., 3.]]), ('b', 'a'))
    """
    content = read_columns(Path(path))
    content.require(columns)
    return matrix(content, list(columns)), tuple(columns)


def read_columns(path: Path) -> Columns:
    """Every column of a CSV, TSV or Parquet file."""
    if not path.exists():
        raise DataError(f"{path}: no such file (looked in {path.parent.absolute()})")
    check_ordinary(path)
    if path.suffix.lower() in (".parquet", ".pq"):
        return _parquet(path)
    return _csv(path)


def _csv(path: Path) -> Columns:
    try:
        text = read_whole(path).decode("utf-8-sig")  # drops a byte-order mark
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8: save the file as UTF-8") from error
    if "\0" in text:
        raise DataError(f"{path}: it has zero bytes: not a text file, or UTF-16; save it as UTF-8")
    if not text.strip():
        raise DataError(f"{path}: the file is empty")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_separator(text), strict=True)
    rows: list[list[str]] = []
    ends: list[int] = []  # the line that each row ends on
    blanks: list[tuple[int, int]] = []  # blank lines: the number of rows before, and the line
    try:
        for row in reader:
            blank = not row or (len(row) == 1 and not row[0].strip())
            if not blank:
                rows.append(row)
                ends.append(reader.line_num)
            elif rows:
                blanks.append((len(rows), reader.line_num))
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: {error}") from error
    if not rows:  # nothing but quotes
        raise DataError(f"{path}: the file is empty")
    header = [name.strip() for name in rows[0]]
    _check_header(path, header)
    if len(rows) == 1:
        raise DataError(f"{path}: it has a header ({shortened(', '.join(header))}) but no rows")
    # In one column a blank line is an empty cell, unless only blank lines follow.
    if len(header) == 1 and blanks and blanks[0][0] < len(rows):
        raise DataError(f"{path}: line {blanks[0][1]} is empty: drop the row, or fill it in (impute) before")
    for row, line in zip(rows, ends, strict=True):
        if len(row) != len(header):
            raise DataError(
                f"{path}: line {line} has {len(row)} values, the header has {len(header)}: "
                "quote values that hold the separator"
            )
    columns = dict(zip(header, map(list, zip(*rows[1:], strict=True)), strict=True))
    return Columns(path, columns, ends[1:])


def _separator(text: str) -> str:
    """The most frequent of , ; tab | in the first line that is not blank; a comma if there is none."""
    header = text.lstrip().splitlines()[0]
    outside = "".join(header.split('"')[::2])  # separators inside quotes do not count
    return max(",;\t|", key=outside.count)


def _check_header(path: Path, header: list[str]) -> None:
    counts = Counter(header)
    twice = min((name for name, count in counts.items() if count > 1), default=None)
    if twice is not None:
        raise DataError(
            f"{path}: the column name {shortened(twice)!r} occurs {counts[twice]} times: rename them"
        )
    if "" in header:
        raise DataError(f"{path}: column {header.index('') + 1} has no name: give it one in the first line")


def _parquet(path: Path) -> Columns:
    parquet = need("pyarrow.parquet", "reading Parquet files")
    arrow = need("pyarrow", "reading Parquet files")
    try:
        with parquet.ParquetFile(
            path
        ) as file:  # not read_table, which takes columns from the names of folders too
            cells = file.metadata.num_rows * max(1, file.metadata.num_columns)
            if cells > MOST_CELLS and cells > 1000 * path.stat().st_size:
                raise DataError(
                    f"{path}: {cells:,} values in {path.stat().st_size:,} bytes, more than such a file should hold: "
                    f"if you trust it, save it as CSV"
                )
            content = file.read()
    except DataError:
        raise
    except (arrow.ArrowException, ArithmeticError, MemoryError, OSError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: not a readable Parquet file ({shortened(error)}); write it again"
        ) from error
    _check_header(path, list(content.column_names))
    if content.num_rows == 0 or not content.column_names:
        raise DataError(f"{path}: it has {content.num_rows} rows and {content.num_columns} columns: empty")
    try:
        return Columns(path, {name: content.column(name).to_pylist() for name in content.column_names})
    except (arrow.ArrowException, ArithmeticError, MemoryError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: values that Python does not hold ({shortened(error)}): save numbers"
        ) from error


def is_missing(value: Any) -> bool:
    """Whether a cell is empty: no text, "NA", "?", None, NaN.

    >>> is_missing(" NA "), is_missing(float("nan")), is_missing("0")
    (True, True, False)
    """
    if isinstance(value, str):
        return value.strip().lower() in MISSING
    return value is None or (isinstance(value, float) and math.isnan(value))


def matrix(content: Columns, names: list[str]) -> Tensor:
    """Some columns as float32 [N, D]; missing values and text are a DataError."""
    columns = []
    gaps: list[tuple[int, str]] = []
    for name in names:
        values = content.values[name]
        column = _fast(values)
        if column is None or not (np.abs(column) < _LARGEST).all():
            holes = [row for row, value in enumerate(values) if is_missing(value)]
            gaps += [(row, name) for row in holes]
            column = np.array(
                [0.0 if is_missing(v) else _number(content, row, name, v) for row, v in enumerate(values)]
            )
        columns.append(column)
    if gaps:
        row, name = min(gaps, key=lambda gap: gap[0])
        count = f"{len(gaps)} missing value{'s' if len(gaps) > 1 else ''}"
        raise DataError(
            f"{content.path}: {count} in {len({n for _, n in gaps})} of the columns, the first in "
            f"{content.where(row, name)}: drop those rows, or fill them in (impute) before"
        )
    return torch.from_numpy(np.stack(columns, 1).astype(np.float32))


def _fast(values: list[Any]) -> np.ndarray[Any, Any] | None:
    """The column in one go, or None: then each cell is looked at, to name the one that is wrong."""
    try:
        return np.fromiter(map(float, values), np.float64, len(values))
    except (TypeError, ValueError, OverflowError):
        return None


def _number(content: Columns, row: int, name: str, value: Any) -> float:
    text = str(value).strip()
    try:
        number = _WORDS[text.lower()] if text.lower() in _WORDS else float(value)
    except (TypeError, ValueError, OverflowError):
        comma = text.replace(",", "", 1).lstrip("+-").isdigit() and "," in text
        remedy = "write a decimal point" if comma else "encode it as numbers or exclude the column"
        message = f"{content.path}: {content.where(row, name)}: {shortened(text)!r} is not a number: {remedy}"
        raise DataError(message) from None
    if not math.isfinite(number) or abs(number) >= _LARGEST:
        raise DataError(
            f"{content.path}: {content.where(row, name)}: {shortened(text)!r} is not a finite float32 number"
        )
    return number
