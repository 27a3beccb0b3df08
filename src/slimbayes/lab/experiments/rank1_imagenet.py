"""The rank-1 paper's networks on ImageNet: how they are trained, and what is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slimbayes.lab.experiments import imagenet, imagenet_data
from slimbayes.lab.experiments.imagenet import SETTING
from slimbayes.lab.experiments.imagenet_data import RAW, SIZES, Streamed
from slimbayes.lab.experiments.images import Job
from slimbayes.lab.experiments.networks import Recipe, Trained
from slimbayes.lab.experiments.rank1_curves import Corrupted
from slimbayes.lab.experiments.rank1_recipes import rows_of, training_of
from slimbayes.lab.experiments.session import Session
from slimbayes.metrics import Reliability


@dataclass(frozen=True)
class Run:
    """What a scale makes of the paper's networks; None, or nothing, is the paper's own."""

    seeds: int
    network: str = ""
    epochs: int | None = None
    batch_size: int | None = None
    most_samples: int = 4


RUNS = {"smoke": Run(1, "wrn(depth=10, width=1)", 1, 24, 2), "paper": Run(10)}


def jobs(session: Session) -> list[Job]:
    """A network for every row of Table 1 and seed; none at scales that have no ImageNet."""
    if session.scale not in RUNS:
        return []
    seeds = range(session.seeds or RUNS[session.scale].seeds)
    return [Job(SETTING, label, seed) for seed in seeds for label in rows_of(SETTING)]


def prepare(session: Session) -> Streamed:
    """The images as the reference code has them: resized by bicubic interpolation, and not normalised."""
    return imagenet_data.prepare(session, RAW, "bicubic")


def recipe(session: Session, label: str) -> Recipe:
    """The recipe of a row."""
    row, run = rows_of(SETTING)[label], RUNS[session.scale]
    epochs: int = run.epochs or row.setting.training["epochs"]
    training = training_of(row, epochs, run.batch_size, **imagenet.options(session))
    network, data = run.network or row.setting.network, SIZES[session.scale].data
    return Recipe(SETTING, "trained", label, network, data, row.method, training, row.layers)


def train(session: Session, job: Job) -> Trained:
    """The trained network of a job."""
    return imagenet.train(session, recipe(session, job.label), job.seed, prepare)


def samples_of(session: Session, label: str) -> int:
    """Samples of every component in evaluation.

    >>> [samples_of(Session("paper", "work"), label) for label in ("Rank-1 Gaussian", "Rank-1 Cauchy")]
    [1, 4]
    """
    return min(rows_of(SETTING)[label].samples, RUNS[session.scale].most_samples)


def measure(session: Session, job: Job) -> float:
    """Train a network and measure it, clean and corrupted; what is found is kept beside it. Returns the seconds."""
    with imagenet.alone(session, job.label, job.seed):
        found = train(session, job)
        clean(session, found)
        on_corrupted(session, found)
    return found.seconds


def clean(session: Session, trained: Trained) -> dict[str, Any]:
    """Figures on the test images, and their errors over examples."""
    return dict(_figures(session, trained, None))


def on_corrupted(session: Session, trained: Trained) -> Corrupted:
    """Figures by type of corruption, a list over severities."""
    size = SIZES[session.scale]
    return {
        name: [_figures(session, trained, (name, severity)) for severity in size.severities] for name in size.types
    }  # fmt: skip


def _figures(session: Session, trained: Trained, corruption: tuple[str, int] | None) -> dict[str, Any]:
    count = samples_of(session, trained.recipe.label)

    def make() -> dict[str, Any]:
        rows = imagenet.columns(session, trained, prepare(session), (count,), corruption)[count]
        figures = figures_of(rows)
        return figures if corruption is None else {k: v for k, v in figures.items() if k != "errors"}

    words = "clean" if corruption is None else f"{corruption[0]} {corruption[1]}"
    found: dict[str, Any] = imagenet.kept(session, trained, f"{words}, {count} samples", make)
    return found


def figures_of(rows: Tensor) -> dict[str, Any]:
    """NLL, accuracy and ECE (15 bins) of ``columns_of``, and the errors over examples of the first two."""
    confidence, right, _, nll = rows.unbind(1)
    parts = {"nll": nll.double(), "accuracy": 100 * right.double()}
    return {
        **{name: float(part.mean()) for name, part in parts.items()},
        "ece": Reliability.of(confidence.clamp_max(1.0), right.bool()).ece(),
        "errors": {name: float(part.std() / len(rows) ** 0.5) for name, part in parts.items()},
    }
