"""In-hospital death in MIMIC-III, from its CSV tables: the task of the rank-1 paper's Table 4."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slimbayes.containers.bagging import Array, Bagging, Levels, bag
from slimbayes.containers.datasets import DataError
from slimbayes.containers.files import find_root, missing
from slimbayes.containers.records import RecordDataset
from slimbayes.lab.data.records.cache import Writer, key_of, new_folder, read_facts, read_records, write_facts
from slimbayes.lab.data.records.context import standardized
from slimbayes.lab.data.records.csvs import ROWS, Progress, find_table, identity
from slimbayes.lab.data.records.mimic_events import Scattered, Statistics, pairs, scatter
from slimbayes.lab.data.records.mimic_tables import (
    EVENT_TABLES,
    MIMIC_HOME,
    Cohort,
    parts_of,
    read_cohort,
    table_path,
)

MIMIC_FILES = ("mimic3", "mimiciii", "mimic-iii-clinical-database-1.4")
_PARTITIONS = 64  # files of events: each must fit into memory
_KINDS = ("ELECTIVE", "EMERGENCY", "NEWBORN", "URGENT")
_PARTS = ("train", "validation", "test")
_RARE = "rare"


@dataclass(frozen=True)
class _Options:
    """What decides the content of the prepared records."""

    hours: float
    precision: int
    older_than: int
    levels: int
    dense: int
    minimum_count: int
    minimum_age: float
    history: bool
    split: int
    tables: tuple[str, ...]


def mimic3(
    root: str | os.PathLike[str] | None = None,
    hours: float = 24.0,
    precision: int = 86_400,
    older_than: int = -1,
    levels: int = 5,
    dense: int = 100,
    minimum_count: int = 50,
    minimum_age: float = 0.0,
    history: bool = True,
    split: int = 0,
    tables: Sequence[str] = tuple(EVENT_TABLES),
    cache: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> RecordDataset:
    """Admissions of MIMIC-III, what was known of them ``hours`` after they began, and whether they ended in death.

    Eight of ten patients train, one validates and one tests: a patient is in one part only. The tables are read
    once, in pieces, and the records are kept in a folder that is bound to the files and options. Codes, levels and
    the scaling of the age come from the training patients.

    Args:
        root: the data root, with a folder of the tables (mimic3, mimiciii, mimic-iii-clinical-database-1.4) or the
            tables themselves, plain or .gz.
        hours: from the admission to the prediction; who has left or died by then is no case.
        precision: of the time bags, in seconds.
        older_than: events older than this many seconds share a bag; −1 for none, 7,776,000 for the paper's 90 days.
        levels: parts into which the training values of a code are cut.
        dense: how many codes keep their values, the most frequent ones.
        minimum_count: codes with fewer training events are one code, "rare"; so are codes never seen in training.
        minimum_age: in years, at the admission.
        history: use events from before the admission, as of earlier stays.
        split: another number draws other patients.
        tables: of events: any of ``EVENT_TABLES``.
        cache: where to keep prepared records; None is "slimbayes-cache" beside the tables.
        progress: gets a sentence every few seconds, e.g. ``print``.
    """
    folder = find_mimic3(root)
    if folder is None:
        wanted = tuple(f"{name}/ADMISSIONS.csv[.gz]" for name in MIMIC_FILES)
        raise missing(root, (*wanted, "ADMISSIONS.csv[.gz]"), "MIMIC-III", MIMIC_HOME)
    unknown = [name for name in tables if name not in EVENT_TABLES]
    if unknown or not tables:
        raise DataError(f"tables={list(tables)}: choose some of {', '.join(EVENT_TABLES)}")
    options = _Options(
        float(hours), precision, older_than, levels, dense, minimum_count, float(minimum_age), history, split,
        tuple(name for name in EVENT_TABLES if name in tables),
    )  # fmt: skip
    if hours <= 0 or dense < 0 or minimum_count < 1:
        raise DataError(f"hours={hours}, dense={dense}, minimum_count={minimum_count}: give positive numbers")
    Bagging(precision, older_than)  # checks them
    paths = {name: table_path(folder, name, optional=True) for name in options.tables}
    sources = [
        identity(p)
        for p in (table_path(folder, "ADMISSIONS"), table_path(folder, "PATIENTS"), *paths.values())
    ]
    key = key_of({"options": asdict(options), "sources": sources})
    target = (Path(cache) if cache is not None else folder / "slimbayes-cache") / key
    if not (target / "facts.json").exists():
        with new_folder(target) as partial:
            facts = _prepare(folder, paths, options, partial, progress)
            write_facts(partial, {**facts, "options": asdict(options), "sources": sources})
    return _opened(target, options)


def find_mimic3(root: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder with the tables of MIMIC-III, or None."""
    base = find_root(root)
    for place in () if base is None else (*(base / name for name in MIMIC_FILES), base):
        if find_table(place, "ADMISSIONS") is not None:
            return place
    return None


def _opened(target: Path, options: _Options) -> RecordDataset:
    facts = read_facts(target)
    train, validation, test = (read_records(target / part, facts["parts"][part]) for part in _PARTS)
    return RecordDataset(
        "mimic3", train, validation, test, tuple(facts["codes"]), facts["levels"], tuple(facts["context"]),
        source=f"MIMIC-III: death in hospital, predicted {options.hours:g} hours after the admission.",
        notes={**facts["options"], "admissions": facts["admissions"]},
    )  # fmt: skip


def _prepare(
    folder: Path, paths: dict[str, Path], options: _Options, partial: Path, progress: Progress | None
) -> dict[str, Any]:
    """Read the tables and write the records; returns what is to be known of them."""
    cohort = read_cohort(folder, options.hours, options.minimum_age, progress)
    tables = {name: (path, EVENT_TABLES[name]) for name, path in paths.items()}
    with tempfile.TemporaryDirectory(dir=partial, prefix="events-") as scratch:
        found = scatter(tables, cohort, Path(scratch), _PARTITIONS, ROWS, progress)
        statistics = Statistics.of(found, cohort, options.split, options.history)
        numbers, names, levels = _vocabulary(found.names, statistics, options)
        context, columns = _context(cohort, parts_of(cohort.subject, options.split))
        writers = [Writer(partial / part, len(columns)) for part in _PARTS]
        for partition in range(found.partitions):
            _write(found, partition, cohort, context, (numbers, levels), options, writers)
            if progress is not None and (partition + 1) % 8 == 0:
                progress(f"records: {partition + 1} of {found.partitions} parts")
    return {
        "parts": {part: writer.facts() for part, writer in zip(_PARTS, writers, strict=True)},
        "codes": names, "levels": levels.total, "context": columns, "admissions": len(cohort),
    }  # fmt: skip


def _vocabulary(
    names: list[str], statistics: Statistics, options: _Options
) -> tuple[Array, list[str], Levels]:
    """The number of every code (1 is "rare"), the names by number, and the levels of the frequent ones."""
    frequent = np.flatnonzero(statistics.events >= options.minimum_count)
    frequent = frequent[np.argsort([names[code] for code in frequent], kind="stable")]
    numbers = np.ones(len(names), dtype=np.int64)
    numbers[frequent] = np.arange(len(frequent)) + 2
    # Ties are broken by name: the order in which codes are met must not matter.
    valued = frequent[np.argsort(-statistics.valued[frequent], kind="stable")][: options.dense]
    sample = [(numbers[code], values) for code in valued for values in statistics.sample[code]]
    codes = np.concatenate([np.full(len(v), c) for c, v in sample]) if sample else np.zeros(0, dtype=np.int64)
    values = np.concatenate([v for _, v in sample]) if sample else np.zeros(0)
    levels = Levels.of(codes, values, len(frequent) + 2, options.levels)
    return numbers, ["", _RARE, *(names[code] for code in frequent)], levels


def _context(cohort: Cohort, part: Array) -> tuple[Array, list[str]]:
    """Age, sex and kind of admission [N, C], and the names of the columns."""
    age = standardized(cohort.age[:, None], np.flatnonzero(part == 0))
    kinds = np.stack([np.char.upper(cohort.kind) == kind for kind in _KINDS], 1)
    columns = (age, np.isfinite(cohort.age)[:, None], cohort.female[:, None], kinds)
    return np.concatenate(columns, 1).astype(np.float32), [
        "age",
        "age known",
        "female",
        *map(str.lower, _KINDS),
    ]


def _write(
    found: Scattered, partition: int, cohort: Cohort, context: Array, meaning: tuple[Array, Levels],
    options: _Options, writers: list[Writer],
) -> None:  # fmt: skip
    """The records of one partition's patients, each to its part."""
    numbers, levels = meaning
    events = found.read(partition)
    here = np.flatnonzero(cohort.subject % found.partitions == partition)
    part = parts_of(cohort.subject[here], options.split)
    for number, writer in enumerate(writers):
        rows = here[part == number]
        chosen = cohort.rows(rows)
        record, place = pairs(events, chosen, options.history)
        seen, codes = events[place], numbers[events["code"][place]]
        ages = chosen.moment[record] - seen["time"]
        bagging = Bagging(options.precision, options.older_than)
        bagged = bag(len(rows), record, ages, codes, levels(codes, seen["value"]), bagging)
        writer.add(bagged, context[rows], chosen.died, chosen.admission)
