"""Tables of a user as data sets: CSV and Parquet files, with the columns to use and the one to predict."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimbayes.containers.datasets import DataError, Dataset, Split, Task
from slimbayes.containers.files import as_fraction, random_split, stratified_split
from slimbayes.files import shortened
from slimbayes.lab.data.columns import Columns, is_missing, matrix, read_columns
from slimbayes.lab.data.embedded import table

_CLASSES_AT_MOST = 20


def load_table(
    path: str | os.PathLike[str],
    target: str | Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    task: Task | None = None,
    test: float | str | os.PathLike[str] = 0.2,
    seed: int = 0,
) -> Dataset:
    """A CSV or Parquet file as a data set.

    Args:
        path: the file; its first line names the columns.
        target: the column to predict (several for regression).
        columns: the features; None is every other column.
        exclude: columns to leave out.
        task: None is classification if the target is text, or integers with at most 20 distinct values.
        test: the fraction of rows to test on (stratified by class), or another file with the same columns.
        seed: of that split.
    """
    path = Path(path)
    content = read_columns(path)
    targets = [target] if isinstance(target, str) else list(target or [])
    if not targets:
        raise DataError(
            f"{path}: say which column to predict with target=...; it has {shortened(', '.join(content.values))}"
        )
    given = [columns] if isinstance(columns, str) else columns
    left_out = {*targets, *([exclude] if isinstance(exclude, str) else exclude)}
    content.require([*targets, *(given or ()), *left_out])
    features = [name for name in (given if given is not None else content.values) if name not in left_out]
    if not features:
        raise DataError(f"{path}: no feature column is left beside the target and the excluded ones")
    fraction = as_fraction(test)
    contents = [content] if fraction is not None else [content, read_columns(Path(test))]  # type: ignore[arg-type]
    contents[-1].require([*targets, *features])
    if task not in (None, "classification", "regression"):
        raise DataError(f"task={task!r}: choose 'classification', 'regression' or None")
    chosen = task or _task_of(contents[0], targets)
    classes: tuple[str, ...] = ()
    if chosen == "classification":
        if len(targets) > 1:
            raise DataError(f"{path}: classification has one target, not {targets}: choose one of them")
        classes = _classes(contents[0], targets[0])
    wholes = [Split(matrix(c, features), _targets(c, targets, classes)) for c in contents]
    rows = _rows(wholes, fraction, classes, seed)
    whole = Split(*(torch.cat([getattr(w, part) for w in wholes]) for part in ("inputs", "targets")))
    return table(
        path.stem,
        whole,
        rows,
        features=tuple(features),
        classes=classes,
        outputs=() if classes else tuple(targets),
        source=f"{path.name}: {len(whole)} rows, {len(features)} features, target {', '.join(targets)}.",
    )


def _whole(value: Any) -> int | None:
    """The integer that a cell holds, or None."""
    if isinstance(value, (bool, int)):
        return int(value)
    if isinstance(value, str) and len(value) < 1000 and re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
        return int(value.strip())  # int alone keeps some of what \s is
    return None


def _task_of(content: Columns, targets: list[str]) -> Task:
    if len(targets) > 1:
        return "regression"
    values = [value for value in content.values[targets[0]] if not is_missing(value)]
    if all(_whole(value) is not None for value in values):
        few = len({_whole(value) for value in values}) <= _CLASSES_AT_MOST
        return "classification" if few else "regression"
    for value in values:
        try:
            float(value)
        except (TypeError, ValueError, OverflowError):
            return "classification"
    return "regression"


def _label(value: Any) -> str:
    whole = _whole(value)
    return str(value).strip() if whole is None or isinstance(value, bool) else str(whole)


def _classes(content: Columns, target: str) -> tuple[str, ...]:
    """Class names: integers in their order, text in the alphabet's."""
    found = {_label(value) for value in content.values[target] if not is_missing(value)}
    whole = all(_whole(name) is not None for name in found)
    classes = tuple(sorted(found, key=int) if whole else sorted(found))
    if len(classes) < 2:
        raise DataError(
            f"{content.path}: the target {target!r} has one value only ({shortened(', '.join(classes))})"
        )
    return classes


def _targets(content: Columns, targets: list[str], classes: tuple[str, ...]) -> Tensor:
    if not classes:
        return matrix(content, targets)  # [N, T]
    (target,) = targets
    numbers = {name: index for index, name in enumerate(classes)}
    labels = []
    for row, value in enumerate(content.values[target]):
        if is_missing(value):
            raise DataError(
                f"{content.path}: {content.where(row, target)}: the target is missing: drop the row"
            )
        if _label(value) not in numbers:
            raise DataError(
                f"{content.path}: {content.where(row, target)}: {shortened(_label(value))!r} is none of the "
                f"training file's classes ({shortened(', '.join(classes))})"
            )
        labels.append(numbers[_label(value)])
    return torch.tensor(labels)


def _rows(
    wholes: list[Split], fraction: float | None, classes: tuple[str, ...], seed: int
) -> tuple[Tensor, Tensor]:
    count = len(wholes[0])
    if fraction is None:
        return torch.arange(count), torch.arange(count, count + len(wholes[1]))
    number = max(1, round(fraction * count))
    if classes:
        return stratified_split(wholes[0].targets, number, seed)
    return random_split(count, number, seed)
