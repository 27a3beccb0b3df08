"""``compare``: several methods on one data set, over seeds, clean and shifted, in one process or several."""

from __future__ import annotations

import concurrent.futures
import csv
import dataclasses
import hashlib
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from slimbayes.core.methods import Deterministic
from slimbayes.files import read_json, write_whole
from slimbayes.lab.compare.bench import Bench, spread
from slimbayes.lab.config import CompareConfig, Contender
from slimbayes.lab.data import DataError, Dataset, Split, StreamedDataset
from slimbayes.lab.data import load as load_data
from slimbayes.lab.processes import workers
from slimbayes.lab.runs import Facts, Run, open_data
from slimbayes.verbs.method_text import parse_method

_STREAMED = 2000
Say = Callable[[str], None]
Cell = dict[str, Any]
Task = tuple[int, str]  # seed, and the label of a contender


def compare(
    config: CompareConfig,
    folder: str | Path | None = None,
    data_root: str | None = None,
    resume: bool = False,
    progress: bool = True,
    say: Say = lambda text: None,
    data: Dataset | None = None,
    jobs: int = 1,
) -> dict[str, Any]:
    """Train every contender with every seed, measure each on clean and shifted test data, return the results.

    With a ``folder`` every finished (method, seed) is kept there, and ``resume=True`` takes those that were
    trained with the same configuration instead of training them again. ``jobs`` processes share the work, each
    with one CPU thread; they read ``config.data`` themselves, so ``data`` and several jobs do not go together.
    The result is what ``slimbayes.report`` reads.
    """
    if jobs > 1 and data is not None:
        raise ValueError(f"jobs={jobs} processes read the data by name: leave data= out, or use jobs=1")
    start = time.monotonic()
    data = data or load_data(config.data, root=data_root, **config.data_options)
    bench = Bench(config, data, data_root)
    contenders = {contender.label: contender for contender in config.contenders}
    tasks: list[Task] = [(seed, label) for seed in config.seeds for label in contenders]
    keys = {(seed, label): bench.key(contenders[label], seed) for seed, label in tasks}
    found: dict[Task, Cell] = {}
    paths = {task: _path(folder, task) for task in tasks}
    if resume:
        kept = {task: _read_cell(paths[task], keys[task]) for task in tasks}
        found = {task: cell for task, cell in kept.items() if cell is not None}
        if found:
            say(f"{_count(len(found), 'run')} of {len(tasks)} kept from before")
    rest = [task for task in tasks if task not in found]
    measured = _alone(bench, rest, progress) if jobs == 1 else _together(config, data_root, rest, jobs)
    for task, cell in measured:
        found[task] = {"key": keys[task], **cell}
        path = paths[task]
        if path is not None:
            write_whole(path, json.dumps(found[task]))
        say(f"[{len(found)}/{len(tasks)}] {task[1]}, seed {task[0]}: {_brief(cell['run'])}")
    methods: dict[str, dict[str, Any]] = {}
    for task in tasks:
        entry = methods.setdefault(task[1], {**found[task]["method"], "runs": []})
        entry["runs"].append(found[task]["run"])
    title = f"{data.name}: {_count(len(config.contenders), 'method')}, {_count(len(config.seeds), 'seed')}"
    return bench.results(title, list(methods.values()), time.monotonic() - start)


def _alone(bench: Bench, tasks: list[Task], progress: bool) -> Iterator[tuple[Task, Cell]]:
    contenders = {contender.label: contender for contender in bench.config.contenders}
    for seed, label in tasks:
        yield (seed, label), bench.measure(contenders[label], seed, progress, f"{label}, seed {seed}")


def _together(
    config: CompareConfig, data_root: str | None, tasks: list[Task], jobs: int
) -> Iterator[tuple[Task, Cell]]:
    """As they finish; the quickest last, so that no process waits long for the others."""
    with workers(min(jobs, len(tasks)) or 1, _prepare, (config, data_root)) as pool:
        contenders = {contender.label: contender for contender in config.contenders}
        order = sorted(tasks, key=lambda task: isinstance(contenders[task[1]].parsed, Deterministic))
        waiting = {pool.submit(_work, seed, contenders[label]): (seed, label) for seed, label in order}
        for done in concurrent.futures.as_completed(waiting):
            yield waiting[done], done.result()


_bench: Bench | None = None  # of a process that works for another


def _prepare(config: CompareConfig, data_root: str | None) -> None:
    global _bench
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    torch.set_num_threads(1)
    _bench = Bench(config, load_data(config.data, root=data_root, **config.data_options), data_root)


def _work(seed: int, contender: Contender) -> Cell:
    assert _bench is not None
    return _bench.measure(contender, seed, progress=False, label=contender.label)


def _path(folder: str | Path | None, task: Task) -> Path | None:
    return None if folder is None else Path(folder) / "runs" / f"{_slug(task[1])}-{task[0]}.json"


def _read_cell(path: Path | None, key: str) -> dict[str, Any] | None:
    """A kept measurement of the same configuration, or None."""
    if path is None or not path.exists():
        return None
    try:
        cell: dict[str, Any] = read_json(path)
        return cell if cell["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _slug(label: str) -> str:
    digest = hashlib.sha256(label.encode()).hexdigest()[:6]
    readable = re.sub(r"[^A-Za-z0-9]+", "-", label).strip("-")[:40]
    return readable if readable == label else f"{readable}-{digest}"


def _brief(run: dict[str, Any]) -> str:
    clean = run["clean"]
    shifted = [metrics["nll"] for rows in run["shifted"].values() for metrics in rows.values()]
    tail = f", shifted {sum(shifted) / len(shifted):.3f}" if shifted else ""
    return f"NLL {clean['nll']:.3f}{tail}, trained in {run['train_seconds']:.1f} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def evaluate_run(
    run: Run, folder: Path, *, data: str | None = None, data_options: dict[str, Any] | None = None,
    data_root: str | None = None, shifts: tuple[str, ...] | None = None, max_test: int | None = None,
    draws: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Measure one trained run as ``compare`` does, on its own test data or on others of the same layout."""
    start = time.monotonic()
    if draws is not None:
        run = dataclasses.replace(run, config=dataclasses.replace(run.config, draws=draws))
    one = run.config
    options = data_options or (one.data_options if data is None else {})
    opened = open_data(data or one.data, data_root, options)
    chosen = _in_memory(opened, max_test) if isinstance(opened, StreamedDataset) else opened
    found = Facts.of(chosen)
    if (
        data is None
        and not isinstance(opened, StreamedDataset)
        and found.fingerprint != run.facts.fingerprint
    ):
        raise DataError(
            f"the data {one.data!r} are not those the model was trained on (fingerprint {found.fingerprint}, not "
            f"{run.facts.fingerprint}): what is held out of them now may have been trained on. If they are new data, "
            f"name them with --data"
        )
    for name in ("task", "shape", "classes", "features", "outputs"):
        mine, theirs = getattr(run.facts, name), getattr(found, name)
        if mine != theirs:
            raise DataError(f"the model was trained on {name} {mine}, the data {chosen.name!r} have {theirs}")
    # The model's own scaling: the same numbers must mean the same to it in every data set.
    chosen = dataclasses.replace(chosen, scaling=run.facts.scaling, target_scaling=run.facts.target_scaling)
    label = type(parse_method(one.method)).__name__
    config = CompareConfig(
        data or one.data, options, one.network, (Contender(label, one.method),),
        (one.training.seed,), one.draws, shifts, max_test=max_test, training=one.training,
    )  # fmt: skip
    bench = Bench(config, chosen, data_root)
    history, seconds = _training_of(folder)
    figures = bench.figures(run, history, seconds, one.training.seed)
    methods = [{**bench.entry(config.contenders[0], run), "runs": [figures]}]
    return bench.results(f"{chosen.name}: {label}", methods, time.monotonic() - start)


def _in_memory(data: StreamedDataset, max_test: int | None) -> Dataset:
    """Test images of a stream, as many as are asked for or 2,000, without its training images."""
    rows = spread(len(data.test), max_test or _STREAMED).tolist()
    images, labels = zip(*(data.test[row] for row in rows), strict=True)
    test = Split(torch.stack(images), torch.tensor(labels))
    source = f"{data.source} Of the test images, {len(rows)}, evenly spaced."
    return Dataset(data.name, data.task, data.kind, test[:0], test, data.scaling, data.classes, source=source)


def _training_of(folder: Path) -> tuple[list[dict[str, float]], float | None]:
    """The history and the training time that a run left in its folder, if it did."""
    try:
        with open(folder / "history.csv", newline="") as file:
            rows = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
        return rows, read_json(folder / "run.json")["seconds"]
    except (OSError, ValueError, KeyError, TypeError, csv.Error):
        return [], None
