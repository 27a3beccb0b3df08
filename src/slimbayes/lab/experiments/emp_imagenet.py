"""The EMP paper's networks on ImageNet: how they are trained, and what is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slimbayes.lab.experiments.catalogue import find
from slimbayes.lab.experiments.emp_figures import figures_of
from slimbayes.lab.experiments.emp_recipes import INIT_NOISE, PENALTY
from slimbayes.lab.experiments.imagenet import SETTING, alone, columns, kept, options
from slimbayes.lab.experiments.imagenet import train as train_recipe
from slimbayes.lab.experiments.imagenet_data import SIZES, prepare
from slimbayes.lab.experiments.networks import Recipe, Trained
from slimbayes.lab.experiments.session import Session
from slimbayes.training import Training
from slimbayes.verbs.summary import summary

NORMS = r"(^|\.)(bn\d|norm\d?|downsample\.1)$"  # before which dropout stands, by their names


@dataclass(frozen=True)
class Run:
    """What a scale makes of the paper's networks."""

    network: str
    epochs: int
    batch_size: int
    seeds: int
    samples: tuple[int, ...]  # numbers of draws whose averages are measured: one run has them all
    corrupted: int  # draws on corrupted images


RUNS = {
    "smoke": Run("wrn(depth=10, width=1)", 1, 24, 1, (1, 2, 3, 4), 2),
    "paper": Run("resnet18", 100, 256, 1, (1, 20, 100, 200), 100),
}


@dataclass(frozen=True)
class Job:
    """One network to train, and whether it is measured on corrupted images."""

    setting: str
    label: str
    seed: int
    corrupted: bool = False

    def words(self) -> str:
        """What it is, for a line of progress."""
        return f"{self.setting} {self.label} seed {self.seed}{', corrupted images' if self.corrupted else ''}"


def methods() -> dict[str, str]:
    """Rows to methods, with the spread of the components at the start.

    >>> methods()["EMP (BN)"]
    "EMP(components=5, init_noise=0.0, patch=('norm',))"
    """
    setting = find("emp/table4").settings[0]
    start = f"components=5, init_noise={INIT_NOISE},"
    return {label: text.replace("components=5,", start) for label, text in setting.methods.items()}


def jobs(session: Session, labels: Sequence[str], corrupted: bool = False) -> list[Job]:
    """The networks of these rows; none at scales that have no ImageNet."""
    if session.scale not in RUNS:
        return []
    seeds = range(session.seeds or RUNS[session.scale].seeds)
    return [Job(SETTING, label, seed, corrupted) for seed in seeds for label in labels]


def recipe(session: Session, label: str) -> Recipe:
    """The recipe of a row: Adam at a constant rate and λ Σw² over everything, as in the paper."""
    run = RUNS[session.scale]
    values: dict[str, Any] = {
        **find("emp/table4").settings[0].training, "epochs": run.epochs, "batch_size": run.batch_size,
        "l2": PENALTY / run.batch_size, **options(session),
    }  # fmt: skip
    dropped = label == "Dropout"
    return Recipe(
        SETTING, "trained", label, run.network, SIZES[session.scale].data, methods()[label], Training(**values),
        NORMS if dropped else None, "Deterministic" if dropped else None,
    )  # fmt: skip


def train(session: Session, job: Job) -> Trained:
    """The trained network of a job."""
    return train_recipe(session, recipe(session, job.label), job.seed, prepare)


def overhead(session: Session, label: str) -> float:
    """The parameters that a method adds, as a fraction of the network's own."""
    data = prepare(session).data
    with torch.device("meta"):
        return summary(recipe(session, label).build(data.shape, data.num_outputs, seed=0)).overhead


def measure(session: Session, job: Job) -> float:
    """Train a network and measure what the tables will ask of it, beside which it is kept; returns the seconds."""
    with alone(session, job.label, job.seed):
        found = train(session, job)
        if job.corrupted:
            corruption_rates(session, found)
        else:
            by_samples(session, found)
    return found.seconds


def by_samples(session: Session, trained: Trained) -> dict[str, Any]:
    """Figures and reliability bins for every number of draws, by the number as text; kept beside the network."""
    samples = RUNS[session.scale].samples
    counts = (1,) if trained.recipe.label == "Vanilla" else samples

    def make() -> dict[str, Any]:
        found = columns(session, trained, prepare(session), counts)
        return {str(count): figures_of(rows) for count, rows in found.items()}

    found = kept(session, trained, f"by samples {list(counts)}", make)
    return {str(count): found.get(str(count), found["1"]) for count in samples}


def corruption_rates(session: Session, trained: Trained) -> dict[str, Any]:
    """Error rates: "clean", and by type of corruption a list over severities; kept beside the network."""
    size = SIZES[session.scale]
    count = 1 if trained.recipe.label == "Vanilla" else RUNS[session.scale].corrupted

    def error(corruption: tuple[str, int] | None) -> float:
        def make() -> float:
            rows = columns(session, trained, prepare(session), (count,), corruption)[count]
            return 1 - float(rows[:, 1].double().mean())

        words = "clean" if corruption is None else f"{corruption[0]} {corruption[1]}"
        return float(kept(session, trained, f"error of {count} samples, {words}", make))

    rates: dict[str, Any] = {"clean": error(None)}
    return rates | {name: [error((name, severity)) for severity in size.severities] for name in size.types}
