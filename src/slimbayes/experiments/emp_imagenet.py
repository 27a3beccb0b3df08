"""The EMP paper's networks on ImageNet: how they are trained, on one or several devices, and what is measured."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimbayes.checkpoint import CheckpointError
from slimbayes.data import Scaling
from slimbayes.data.corruptions import corrupt
from slimbayes.data.streaming import StreamBatches
from slimbayes.experiments.catalogue import find
from slimbayes.experiments.emp_figures import columns_of, figures_of, running_means
from slimbayes.experiments.emp_imagenet_data import SIZES, prepare
from slimbayes.experiments.emp_recipes import INIT_NOISE, PENALTY
from slimbayes.experiments.networks import MODEL, Recipe, Trained
from slimbayes.experiments.session import Session, read_json, with_precision
from slimbayes.files import write_whole
from slimbayes.summary import summary
from slimbayes.training import Training
from slimbayes.training.step import channels_last

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SETTING = "imagenet"
NORMS = r"(^|\.)(bn\d|norm\d?|downsample\.1)$"  # before which dropout stands, by their names
KEPT, VERSION = "imagenet.json", 1  # raise it when what is measured changes
_RAW = Scaling((0.0,) * 3, (1.0,) * 3)


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
    if session.scale not in SIZES:
        return []
    seeds = range(session.seeds or SIZES[session.scale].seeds)
    return [Job(SETTING, label, seed, corrupted) for seed in seeds for label in labels]


def recipe(session: Session, label: str) -> Recipe:
    """The recipe of a row: Adam at a constant rate and λ Σw² over everything, as in the paper."""
    size = SIZES[session.scale]
    cuda = session.device.type == "cuda"
    options: dict[str, Any] = {
        **find("emp/table4").settings[0].training, "epochs": size.epochs, "batch_size": size.batch_size,
        "l2": PENALTY / size.batch_size, "accelerator": session.device.type, "workers": size.workers,
        "precision": "bf16-mixed" if cuda else "32-true", "checkpoint_every": 2000,
    }  # fmt: skip
    dropped = label == "Dropout"
    return Recipe(
        SETTING, "trained", label, size.network, size.data, methods()[label], Training(**options),
        NORMS if dropped else None, "Deterministic" if dropped else None,
    )  # fmt: skip


def train(session: Session, job: Job) -> Trained:
    """The trained network of a job; the processes that are to train it together are started with the first."""
    with_precision(session)
    made = recipe(session, job.label)
    session.processes.launch(made.training)
    # Of the data it asks for shapes and a key, which a stream has too.
    return session.trained(made, prepare(session), job.seed)  # type: ignore[arg-type]


def overhead(session: Session, label: str) -> float:
    """The parameters that a method adds, as a fraction of the network's own."""
    data = prepare(session).data
    with torch.device("meta"):
        return summary(recipe(session, label).build(data.shape, data.num_outputs, seed=0)).overhead


def measure(session: Session, job: Job) -> float:
    """Train a network and measure what the tables will ask of it, beside which it is kept; returns the seconds."""
    with _alone(session, job):
        found = train(session, job)
        if job.corrupted:
            corruption_rates(session, found)
        else:
            by_samples(session, found)
    return found.seconds


@contextlib.contextmanager
def _alone(session: Session, job: Job) -> Iterator[None]:
    """Jobs of one network in several processes: the second waits for the first, and then finds it trained."""
    if fcntl is None or session.processes.number > 1:
        yield
        return
    slug = re.sub(r"[^A-Za-z0-9]+", "-", job.label).strip("-").lower()
    path = session.work / SETTING / f"{slug}-{job.seed}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, by a kill too
        yield


def by_samples(session: Session, trained: Trained) -> dict[str, Any]:
    """Figures and reliability bins for every number of draws, by the number as text; kept beside the network."""
    size = SIZES[session.scale]
    counts = (1,) if trained.recipe.label == "Vanilla" else size.samples

    def make() -> dict[str, Any]:
        return {str(count): figures_of(rows) for count, rows in _columns(session, trained, counts).items()}

    found = kept(session, trained, f"by samples {list(counts)}", make)
    return {str(count): found.get(str(count), found["1"]) for count in size.samples}


def corruption_rates(session: Session, trained: Trained) -> dict[str, Any]:
    """Error rates: "clean", and by type of corruption a list over severities; kept beside the network."""
    size = SIZES[session.scale]
    count = 1 if trained.recipe.label == "Vanilla" else size.corrupted

    def error(corruption: tuple[str, int] | None) -> float:
        def make() -> float:
            return 1 - float(_columns(session, trained, (count,), corruption)[count][:, 1].double().mean())

        words = "clean" if corruption is None else f"{corruption[0]} {corruption[1]}"
        return float(kept(session, trained, f"error of {count} samples, {words}", make))

    rates: dict[str, Any] = {"clean": error(None)}
    return rates | {name: [error((name, severity)) for severity in size.severities] for name in size.types}


def _columns(
    session: Session, trained: Trained, counts: Sequence[int], corruption: tuple[str, int] | None = None
) -> dict[int, Tensor]:
    """``columns_of`` all test images for every number of draws, [N, 4]: every process measures a part of each batch."""
    size, data = SIZES[session.scale], prepare(session).data
    batch = even_batch(len(data.test), size.chunk, session.processes.number)
    batches = StreamBatches(
        data.test, batch, _RAW, session.processes.rank, session.processes.number, device=session.device,
        workers=size.workers,
    )  # fmt: skip
    model = trained.model
    if session.device.type == "cuda":
        channels_last(model)
    found: dict[int, list[Tensor]] = {count: [] for count in counts}
    for index, (images, labels) in enumerate(batches.epoch(0)):
        first, raw = batches.rows(index)[0], images.to(torch.uint8)
        if corruption is not None:
            raw = corrupt(raw, *corruption, first=first)
        x = data.scaling(raw).contiguous(memory_format=torch.channels_last)
        for block, means in running_means(model, x, counts, size.chunk, first=first):
            for count, p in zip(counts, means, strict=True):
                found[count].append(columns_of(p, labels[block]).cpu())
        session.processes.by_first(session.check_time)
    return {count: torch.cat(session.processes.gathered(torch.cat(parts))) for count, parts in found.items()}


def even_batch(count: int, most: int, processes: int) -> int:
    """The largest batch up to ``most`` whose last, short one still has a row for every process.

    >>> even_batch(50, 16, 4), even_batch(48, 16, 4)
    (15, 16)
    """
    batch = max(processes, min(most, count))
    while batch > processes and 0 < count % batch < processes:
        batch -= 1
    return batch


def kept(session: Session, trained: Trained, key: str, make: Callable[[], Any]) -> Any:
    """What ``make`` gives, from beside the network if it was measured of these weights before.

    ``make`` is called in all processes or in none.
    """
    path, weights = trained.folder / KEPT, trained.folder / MODEL
    if not weights.is_file():
        raise CheckpointError(
            f"the weights in {str(trained.folder)!r} are gone: delete the folder to train again"
        )
    state = {"version": VERSION, "weights": hashlib.sha256(weights.read_bytes()).hexdigest()[:16]}
    known = (read_json(path) or {}) if session.processes.first else {}
    known = session.processes.agreed(known if known.get("state") == state else {"state": state})
    if key not in known:
        session.processes.by_first(session.check_time)
        known[key] = make()
        if session.processes.first:
            write_whole(path, json.dumps(known))
    return known[key]
