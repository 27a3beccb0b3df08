"""What is read of MIMIC-III: the tables of events, and the admissions to predict on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from slimbayes.containers.bagging import Array
from slimbayes.containers.datasets import DataError
from slimbayes.containers.files import missing
from slimbayes.core.keyed_noise import layer_key, philox
from slimbayes.lab.data.records.csvs import NO_TIME, Progress, find_table, integers, read_pieces, seconds

MIMIC_HOME = "https://physionet.org/content/mimiciii/1.4 (for credentialed readers)"
DAY = 86_400
_YEAR = 365.25 * DAY
_OLDEST = 91.4  # ages above 89 are shifted to 300; this is their median


@dataclass(frozen=True)
class EventTable:
    """Which columns of a table say what happened, when and how much, and which rows do not count.

    ``delay`` is added to the time: a date without the time of day is known to have passed when the day is over.
    """

    time: str
    code: str = "ITEMID"
    value: str | None = None
    without: dict[str, tuple[str, ...]] = field(default_factory=dict)
    delay: int = 0

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        value = () if self.value is None else (self.value,)
        return ("SUBJECT_ID", self.time, self.code, *value, *self.without)


EVENT_TABLES = {
    "CHARTEVENTS": EventTable("CHARTTIME", value="VALUENUM", without={"ERROR": ("1",)}),
    "LABEVENTS": EventTable("CHARTTIME", value="VALUENUM"),
    "INPUTEVENTS_CV": EventTable("CHARTTIME", value="AMOUNT"),
    "INPUTEVENTS_MV": EventTable(
        "STARTTIME", value="AMOUNT", without={"STATUSDESCRIPTION": ("Rewritten", "Stopped Rewritten")}
    ),
    "OUTPUTEVENTS": EventTable("CHARTTIME", value="VALUE", without={"ISERROR": ("1",)}),
    "PROCEDUREEVENTS_MV": EventTable("STARTTIME", without={"STATUSDESCRIPTION": ("Rewritten",)}),
    "ICUSTAYS": EventTable("INTIME", code="FIRST_CAREUNIT"),
    "PRESCRIPTIONS": EventTable("STARTDATE", code="DRUG", delay=DAY),
}


def table_path(folder: Path, name: str, optional: bool = False) -> Path:
    """The file of a table, or a DataError that says what to do without it."""
    path = find_table(folder, name)
    if path is not None:
        return path
    error = missing(folder, (f"{name}.csv", f"{name}.csv.gz"), f"MIMIC-III table {name}", MIMIC_HOME)
    hint = f", or leave it out: tables=[…] without {name!r}" if optional else ""
    raise DataError(f"{error}{hint}")


@dataclass(frozen=True, eq=False)
class Cohort:
    """Admissions to predict on, sorted by patient and time: one row each."""

    subject: Array  # int64 [N]
    admission: Array  # int64 [N]: HADM_ID
    start: Array  # int64 [N]: seconds since 1970
    moment: Array  # int64 [N]: of the prediction
    died: Array  # int64 [N]: in hospital, after that moment
    age: Array  # float64 [N]: years, NaN where unknown
    female: Array  # bool [N]
    kind: Array  # str [N]: ADMISSION_TYPE

    def __len__(self) -> int:
        return len(self.subject)

    def rows(self, chosen: Array) -> Cohort:
        """Some of the admissions."""
        return Cohort(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))


def read_cohort(folder: Path, hours: float, minimum_age: float, progress: Progress | None = None) -> Cohort:
    """Admissions that last longer than ``hours``, from ADMISSIONS and PATIENTS.

    The prediction is made ``hours`` after ADMITTIME; who has left or died by then is no case. An admission that is
    listed twice counts once.
    """
    path = table_path(folder, "ADMISSIONS")
    names = (
        "SUBJECT_ID",
        "HADM_ID",
        "ADMITTIME",
        "DISCHTIME",
        "DEATHTIME",
        "ADMISSION_TYPE",
        "HOSPITAL_EXPIRE_FLAG",
    )
    text = _whole(path, names, progress)
    subject, admission, flag = (
        integers(path, n, text[n]) for n in ("SUBJECT_ID", "HADM_ID", "HOSPITAL_EXPIRE_FLAG")
    )
    start, end, death = (seconds(path, n, text[n]) for n in ("ADMITTIME", "DISCHTIME", "DEATHTIME"))
    died = np.where(flag == -1, death != NO_TIME, flag == 1).astype(np.int64)
    moment = start + int(hours * 3600)
    stays = (start != NO_TIME) & ((end == NO_TIME) | (end > moment)) & ((death == NO_TIME) | (death > moment))
    _, first = np.unique(admission, return_index=True)
    stays &= np.isin(np.arange(len(start)), first)
    born, female = _patients(folder, subject, progress)
    age = np.where((born == NO_TIME) | (start == NO_TIME), np.nan, (start - born) / _YEAR)
    age = np.where(age > 89, _OLDEST, age)
    stays &= ~(age < minimum_age)
    if not stays.any():
        raise DataError(
            f"{path}: no admission of {len(start)} lasts longer than {hours:g} hours: nothing to predict"
        )
    order = np.flatnonzero(stays)[np.lexsort((admission[stays], start[stays], subject[stays]))]
    return Cohort(subject, admission, start, moment, died, age, female, text["ADMISSION_TYPE"]).rows(order)


def _patients(folder: Path, subject: Array, progress: Progress | None) -> tuple[Array, Array]:
    """Birth and sex of the patient of every admission."""
    path = table_path(folder, "PATIENTS")
    text = _whole(path, ("SUBJECT_ID", "GENDER", "DOB"), progress)
    known = integers(path, "SUBJECT_ID", text["SUBJECT_ID"])
    born = seconds(path, "DOB", text["DOB"])
    ids, first = np.unique(known, return_index=True)
    place = np.searchsorted(ids, subject).clip(max=max(0, len(ids) - 1))
    if not len(ids) or not (ids[place] == subject).all():
        absent = subject[ids[place] != subject][0] if len(ids) else subject[0]
        raise DataError(
            f"{path}: no patient {absent}, whom ADMISSIONS has: the tables are of different versions"
        )
    rows = first[place]
    return born[rows], np.char.upper(text["GENDER"][rows]) == "F"


def _whole(path: Path, names: tuple[str, ...], progress: Progress | None) -> dict[str, Array]:
    pieces = list(read_pieces(path, names, progress=progress))
    if not pieces:
        raise DataError(f"{path}: a header and no rows: get the file again")
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in names}


def parts_of(subject: Array, split: int = 0) -> Array:
    """0 (train), 1 (validation) or 2 (test) for every patient: 8, 1 and 1 of ten, a function of (id, split).

    >>> np.bincount(parts_of(np.arange(10_000))).tolist()
    [8066, 960, 974]
    """
    number = torch.from_numpy(np.ascontiguousarray(subject, dtype=np.int64))
    zero = torch.zeros((), dtype=torch.int64)
    word = philox((number, zero, zero, zero), layer_key(split, "mimic3.split"))[0]
    tenth = (word & 0xFFFFFFFF) * 10 >> 32
    parts: Array = ((tenth >= 8).long() + (tenth >= 9)).numpy()
    return parts
