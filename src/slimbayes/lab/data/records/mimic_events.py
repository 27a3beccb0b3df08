"""MIMIC-III's events on disk, by patient: read once, in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from slimbayes.containers.bagging import Array, by_code
from slimbayes.lab.data.records.csvs import NO_TIME, Progress, integers, numbers, read_pieces, seconds
from slimbayes.lab.data.records.mimic_tables import Cohort, EventTable, parts_of

EVENT = np.dtype([("subject", "<i8"), ("time", "<i8"), ("code", "<i4"), ("value", "<f4")])
_SAMPLE = 20_000  # training values kept for each code: enough for its quantiles


@dataclass
class Scattered:
    """Events in files by patient, sorted when they are read: ``scatter`` writes them."""

    folder: Path
    partitions: int
    names: list[str] = field(default_factory=list)  # of the codes, by number

    def path(self, partition: int) -> Path:
        """The file of a partition."""
        return self.folder / f"{partition:04}.events"

    def read(self, partition: int) -> Array:
        """Events of a partition by patient, time, code and value, each once."""
        path = self.path(partition)
        events = np.fromfile(path, dtype=EVENT) if path.exists() else np.zeros(0, dtype=EVENT)
        order = np.lexsort((events["value"], events["code"], events["time"], events["subject"]))
        events = events[order]
        again = np.zeros(len(events), dtype=bool)
        again[1:] = np.logical_and.reduce(
            [events[name][1:] == events[name][:-1] for name in ("subject", "time", "code")]
        )
        value = events["value"]
        again[1:] &= (value[1:] == value[:-1]) | (np.isnan(value[1:]) & np.isnan(value[:-1]))
        return events[~again]


def scatter(
    tables: dict[str, tuple[Path, EventTable]],
    cohort: Cohort,
    folder: Path,
    partitions: int,
    rows: int,
    progress: Progress | None = None,
) -> Scattered:
    """Write every event that some admission's prediction may know to the file of its patient."""
    found = Scattered(folder, partitions)
    numbered: dict[tuple[str, str], int] = {}
    last = _last_moments(cohort)
    for name, (path, table) in tables.items():
        for piece in read_pieces(path, table.columns, rows, progress):
            keep = np.ones(len(piece["SUBJECT_ID"]), dtype=bool)
            for column, values in table.without.items():
                keep &= ~np.isin(piece[column], values)
            piece = {column: text[keep] for column, text in piece.items()}
            events, codes = _events(path, table, piece, last)
            distinct, inverse = np.unique(codes, return_inverse=True)
            for text in distinct:
                numbered.setdefault((name, str(text)), len(numbered))
            lookup = np.array([numbered[name, str(text)] for text in distinct], dtype=np.int32)
            events["code"] = lookup[inverse.reshape(-1)] if len(distinct) else 0
            _append(found, events)
    found.names = [f"{name}/{text}" for name, text in numbered]
    return found


def _last_moments(cohort: Cohort) -> tuple[Array, Array]:
    """Patients, ascending, and their latest prediction."""
    subjects, first = np.unique(cohort.subject, return_index=True)
    return subjects, np.maximum.reduceat(cohort.moment, first)


def _events(
    path: Path, table: EventTable, piece: dict[str, Array], last: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Events that may be used, without code numbers, and their codes as text."""
    subject = integers(path, "SUBJECT_ID", piece["SUBJECT_ID"])
    when = seconds(path, table.time, piece[table.time])
    place = np.searchsorted(last[0], subject).clip(max=len(last[0]) - 1)
    code = np.char.strip(piece[table.code])
    keep = (last[0][place] == subject) & (when != NO_TIME) & (code != "")
    keep &= np.where(when == NO_TIME, False, when <= last[1][place] - table.delay)
    events = np.zeros(int(keep.sum()), dtype=EVENT)
    events["subject"], events["time"] = subject[keep], when[keep] + table.delay
    events["value"] = np.nan if table.value is None else numbers(path, table.value, piece[table.value])[keep]
    return events, code[keep]


def _append(found: Scattered, events: Array) -> None:
    place = events["subject"] % found.partitions
    events = events[np.argsort(place, kind="stable")]
    ends = np.cumsum(np.bincount(place, minlength=found.partitions))
    for partition, part in enumerate(np.split(events, ends[:-1])):
        if len(part):
            with open(found.path(partition), "ab") as file:
                part.tofile(file)


def pairs(events: Array, cohort: Cohort, history: bool) -> tuple[Array, Array]:
    """Which event each admission may know, as (row of the cohort, row of the events), all admissions in turn.

    Those of its patient up to the prediction; without ``history`` from the admission on.
    """
    begin, end = (
        np.searchsorted(events["subject"], cohort.subject),
        np.searchsorted(events["subject"], cohort.subject, side="right"),
    )
    rows, places = [], []
    for row, (first, stop) in enumerate(zip(begin, end, strict=True)):
        when = events["time"][first:stop]
        low = 0 if history else int(np.searchsorted(when, cohort.start[row]))
        high = int(np.searchsorted(when, cohort.moment[row], side="right"))
        places.append(np.arange(first + low, first + max(low, high)))
        rows.append(np.full(len(places[-1]), row))
    none = [np.zeros(0, dtype=np.int64)]
    return np.concatenate(rows or none), np.concatenate(places or none)


@dataclass
class Statistics:
    """How often codes occur in the training admissions, how often with a value, and some of these values."""

    events: Array  # int64 [codes]
    valued: Array  # int64 [codes]
    sample: list[list[Array]]  # values, by code

    @staticmethod
    def of(found: Scattered, cohort: Cohort, split: int, history: bool) -> Statistics:
        """Count over all partitions; patients are in them by their number's remainder, so any one is a sample."""
        count = len(found.names)
        totals = Statistics(
            np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64), [[] for _ in range(count)]
        )
        training = cohort.rows(parts_of(cohort.subject, split) == 0)
        for partition in range(found.partitions):
            events = found.read(partition)
            chosen = training.rows(training.subject % found.partitions == partition)
            _, places = pairs(events, chosen, history)
            totals._add(events[np.unique(places)])
        return totals

    def _add(self, events: Array) -> None:
        self.events += np.bincount(events["code"], minlength=len(self.events))
        events = events[np.isfinite(events["value"])]
        before = self.valued.copy()
        self.valued += np.bincount(events["code"], minlength=len(self.valued))
        for code, values in by_code(events["code"], events["value"]):
            if before[code] < _SAMPLE:
                self.sample[code].append(values[: _SAMPLE - before[code]].copy())
