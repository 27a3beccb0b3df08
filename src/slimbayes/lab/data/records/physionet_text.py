"""The text files of the PhysioNet challenge of 2012 as the arrays of physionet2012_ab.npz."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np

from slimbayes.containers.bagging import Array
from slimbayes.containers.datasets import DataError
from slimbayes.containers.files import find_root
from slimbayes.files import read_text, shortened

SETS = ("a", "b")
STATICS = ("Age", "Gender", "Height", "ICUType", "Weight")
PARAMETERS = (
    "Albumin", "ALP", "ALT", "AST", "Bilirubin", "BUN", "Cholesterol", "Creatinine", "DiasABP", "FiO2", "GCS",
    "Glucose", "HCO3", "HCT", "HR", "K", "Lactate", "Mg", "MAP", "MechVent", "Na", "NIDiasABP", "NIMAP", "NISysABP",
    "PaCO2", "PaO2", "pH", "Platelets", "RespRate", "SaO2", "SysABP", "Temp", "TroponinI", "TroponinT", "Urine",
    "WBC", "Weight",
)  # fmt: skip
_NUMBERS = {name: number for number, name in enumerate(PARAMETERS)}
_OUTCOME = "In-hospital_death"
_NOT_MEASURED = -1.0
_LARGEST = 64 << 20  # bytes of one file; the longest record has 50 thousand
_MINUTES = 60 * 24 * 365


def find_text(root: str | os.PathLike[str] | None) -> Path | None:
    """The folder with set-a, set-b and their outcomes: "physionet2012" in the data root, or the root itself."""
    base = find_root(root)
    for place in () if base is None else (base / "physionet2012", base):
        if all((place / f"set-{name}").is_dir() for name in SETS):
            return place
    return None


def read_records_text(folder: Path) -> dict[str, Array]:
    """All records of sets a and b, in the order of their numbers: arrays as in the .npz."""
    rows: list[tuple[int, int, int, list[float], list[tuple[int, int, float]]]] = []
    for number, name in enumerate(SETS):
        outcomes = _outcomes(folder / f"Outcomes-{name}.txt")
        for path in sorted((folder / f"set-{name}").glob("*.txt")):
            record, static, events = _record(path)
            if record not in outcomes:
                raise DataError(
                    f"{folder / f'Outcomes-{name}.txt'}: no record {record}, which {path} is: get both again"
                )
            rows.append((record, number, outcomes[record], static, events))
    if not rows:
        raise DataError(f"{folder}: set-a and set-b hold no records: unpack the archives there")
    events_of = [events for *_, events in rows]
    minute, param, value = (
        np.array([event[column] for events in events_of for event in events]) for column in range(3)
    )
    return {
        "record_id": np.array([row[0] for row in rows]), "set_id": np.array([row[1] for row in rows]),
        "label": np.array([row[2] for row in rows]), "static": np.array([row[3] for row in rows], dtype=np.float32),
        "static_names": np.array(STATICS), "param_names": np.array(PARAMETERS),
        "offsets": np.concatenate([[0], np.cumsum([len(events) for events in events_of])]),
        "minute": minute.astype(np.int64), "param": param.astype(np.int64), "value": value.astype(np.float32),
    }  # fmt: skip


def _record(path: Path) -> tuple[int, list[float], list[tuple[int, int, float]]]:
    """The number, the statics (the first mention of each) and the events of one file, by time."""
    number, statics = -1, dict.fromkeys(STATICS, _NOT_MEASURED)
    seen: set[str] = set()
    events = []
    for place, line in enumerate(_text(path).splitlines()[1:], 2):
        try:
            when, name, text = line.split(",")
            hours, minutes = when.split(":")
            minute, value = 60 * int(hours) + int(minutes), float(text)
            if name == "RecordID":
                number = int(value)
            elif name in statics and name not in seen:
                seen.add(name)
                statics[name] = value
            elif name and value != _NOT_MEASURED:
                events.append((minute, _NUMBERS[name], value))
            if not (0 <= minute < _MINUTES and math.isfinite(value)):
                raise ValueError("outside of two days, or not finite")
        except (ValueError, KeyError, OverflowError) as error:
            raise DataError(
                f"{path}, line {place}: {shortened(line)!r} is no time, parameter and value ({shortened(error)}): get "
                f"the file again"
            ) from None
    if number < 0:
        raise DataError(f"{path}: no RecordID: get the file again")
    return number, list(statics.values()), sorted(events, key=lambda event: event[0])


def _outcomes(path: Path) -> dict[int, int]:
    """Whether the patient of each record died in hospital."""
    if not path.is_file():
        raise DataError(f"{path} not found: get it where the records are from")
    header, *lines = _text(path).split() or [""]
    names = header.split(",")
    if "RecordID" not in names or _OUTCOME not in names:
        raise DataError(f"{path}: no columns RecordID and {_OUTCOME}; it has {shortened(header)}")
    first, last = names.index("RecordID"), names.index(_OUTCOME)
    try:
        return {int(cells[first]): int(cells[last]) for cells in (line.split(",") for line in lines)}
    except (ValueError, IndexError) as error:
        raise DataError(f"{path}: damaged ({shortened(error)}): get it again") from None


def _text(path: Path) -> str:
    try:
        return read_text(path, _LARGEST)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({shortened(error)}): get it again") from error
