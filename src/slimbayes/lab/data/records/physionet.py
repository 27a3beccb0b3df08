"""The intensive-care records of the PhysioNet challenge of 2012."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slimbayes.containers.bagging import Array, Bagging, Levels, bag, carried
from slimbayes.containers.datasets import DataError
from slimbayes.containers.files import locate, missing, read_npz, stratified_split
from slimbayes.containers.records import RecordDataset, Records
from slimbayes.lab.data.records.context import SUMMARIES, standardized, summaries
from slimbayes.lab.data.records.physionet_text import find_text, read_records_text

PHYSIONET_FILES = ("physionet2012_ab.npz", "physionet2012/set-a", "set-a")
PHYSIONET_HOME = "https://physionet.org/content/challenge-2012"
HORIZON = 48 * 3600  # s: a record holds the first two days of a stay
_KEYS = (
    "record_id",
    "set_id",
    "static",
    "static_names",
    "label",
    "offsets",
    "minute",
    "param",
    "value",
    "param_names",
)
_UNKNOWN = -1  # statics that were not taken down


def physionet2012(
    root: str | os.PathLike[str] | None = None,
    precision: int = 4 * 3600,
    older_than: int = -1,
    levels: int = 5,
    carry: bool = False,
    summary: Sequence[str] = ("last", "min", "max", "count"),
    validation: int = 800,
    split: int = 0,
) -> RecordDataset:
    """8,000 intensive-care stays of 48 hours, and whether the patient died in hospital.

    Set a trains and validates, set b tests. Levels, and the scaling of the context, are those of the training
    records alone. The context has the statics and, for each of the 37 parameters, what ``summary`` says; what
    was not measured is 0, the training mean, and its "count" says so.

    Args:
        root: the data root, with physionet2012_ab.npz in it, or with the challenge's own text files (set-a, set-b,
            Outcomes-a.txt, Outcomes-b.txt) there or in physionet2012.
        precision: of the time bags, in seconds.
        older_than: events older than this many seconds share a bag; −1 for none.
        levels: parts into which the training values of a parameter are cut.
        carry: let a parameter's last value stand in every later bag in which it was not measured.
        summary: any of "first", "last", "mean", "min", "max" and "count", or none of them.
        validation: how many records of set a validate, drawn in proportion to the classes.
        split: another number draws others.
    """
    unknown = [name for name in summary if name not in SUMMARIES]
    if unknown:
        raise DataError(f"summary={tuple(summary)}: {unknown[0]!r} is not one of {', '.join(SUMMARIES)}")
    arrays = _read(root)
    targets = torch.from_numpy(arrays["label"].astype(np.int64))
    train, held, test = _parts(arrays["set_id"], targets, validation, split)
    record, minute, codes, values = _events(arrays)
    bagging = Bagging(precision, older_than)
    training = np.isin(record, train.numpy())
    measured = Levels.of(codes[training], values[training], len(arrays["param_names"]) + 1, levels)
    context, names = _context(arrays, (record, minute, codes, values), tuple(summary), train)
    ages = HORIZON - minute * 60
    if carry:
        record, ages, codes, values = carried(record, ages, codes, values, bagging)
    bagged = bag(len(targets), record, ages, codes, measured(codes, values), bagging)
    whole = Records.of(bagged, context, targets, torch.from_numpy(arrays["record_id"]))
    return RecordDataset(
        "physionet2012",
        whole[train],
        whole[held],
        whole[test],
        ("", *map(str, arrays["param_names"])),
        measured.total,
        names,
        source="PhysioNet/Computing in Cardiology Challenge 2012: set a trains and validates, set b tests.",
        notes={"precision": precision, "older_than": older_than, "levels": levels, "carry": carry},
    )


def _read(root: str | os.PathLike[str] | None) -> dict[str, Array]:
    path = locate(root, PHYSIONET_FILES[:1])
    if path is not None:
        return read_npz(path, _KEYS)
    folder = find_text(root)
    if folder is None:
        raise missing(root, PHYSIONET_FILES, "PhysioNet 2012", PHYSIONET_HOME)
    return read_records_text(folder)


def _parts(sets: Array, targets: Tensor, validation: int, split: int) -> tuple[Tensor, Tensor, Tensor]:
    first, second = (torch.from_numpy(np.flatnonzero(sets == number)) for number in (0, 1))
    kept, held = stratified_split(targets[first], validation, split)
    return first[kept], first[held], second


def _events(arrays: dict[str, Array]) -> tuple[Array, Array, Array, Array]:
    """Record, minute, code (from 1 on) and value of every event."""
    sizes = np.diff(arrays["offsets"])
    record = np.repeat(np.arange(len(sizes)), sizes)
    minute = arrays["minute"].astype(np.int64)
    if len(minute) != len(record) or int(minute.max(initial=0)) * 60 > HORIZON:
        raise DataError("physionet2012: offsets and events do not fit together; make the file again")
    return record, minute, arrays["param"].astype(np.int64) + 1, arrays["value"].astype(np.float64)


def _context(
    arrays: dict[str, Array], events: tuple[Array, Array, Array, Array], kinds: tuple[str, ...], train: Tensor
) -> tuple[Tensor, tuple[str, ...]]:
    """Statics and summaries [N, C] and the names of the columns."""
    names = [str(name) for name in arrays["static_names"]]
    static = np.where(arrays["static"] == _UNKNOWN, np.nan, arrays["static"]).astype(np.float64)
    plain = [names.index(name) for name in names if name != "ICUType"]
    unit = static[:, names.index("ICUType")]
    kinds_of_unit = sorted(np.unique(unit[np.isfinite(unit)]))
    flags = np.stack([unit == kind for kind in kinds_of_unit], 1)
    columns = [standardized(static[:, plain], train.numpy()), np.isfinite(static[:, plain]), flags]
    titles = [names[column] for column in plain]
    found = [
        *titles,
        *(f"{title} known" for title in titles),
        *(f"ICUType {kind:g}" for kind in kinds_of_unit),
    ]
    if kinds:
        params = [str(name) for name in arrays["param_names"]]
        cells = summaries(len(static), *events, size=len(params) + 1, kinds=kinds)[:, 1:]
        columns += [standardized(cells.reshape(len(static), -1), train.numpy())]
        found += [f"{param} {kind}" for param in params for kind in kinds]
    return torch.from_numpy(np.concatenate(columns, 1).astype(np.float32)), tuple(found)
