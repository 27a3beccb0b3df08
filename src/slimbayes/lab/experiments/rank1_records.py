"""How the rank-1 paper's networks for medical records are trained, and what is measured of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimbayes.containers.records import Part
from slimbayes.lab.data import RecordDataset, Records, load, load_records
from slimbayes.lab.data.records import Levels, bag
from slimbayes.lab.experiments import rank1_settings as settings
from slimbayes.lab.experiments.images import Job
from slimbayes.lab.experiments.networks import PreparedRecords, Recipe, Trained
from slimbayes.lab.experiments.session import Session
from slimbayes.metrics import auroc
from slimbayes.training import Training, mixed_seed
from slimbayes.verbs.evaluation import assess
from slimbayes.verbs.method_text import parse_stored

PHYSIONET, MIMIC = "physionet", "mimic"
GAUSSIAN, CAUCHY = settings.GAUSSIAN, settings.CAUCHY
DETERMINISTIC, BATCH_ENSEMBLE = "Deterministic", "BatchEnsemble"
VERSION = 1  # raise it when what is measured changes
RESAMPLED = 1000  # times, for an interval
_EMBEDDINGS = "^(codes|values)$"
_PARTS: tuple[Part, Part] = ("validation", "test")


@dataclass(frozen=True)
class Size:
    """What a scale makes of a setting."""

    data: str
    network: str
    epochs: int
    seeds: int
    batch_size: int = 128
    samples: int = 25  # of every component, in evaluation
    patience: int = 8  # epochs without a better validation NLL
    lr: float = 1e-3
    options: dict[str, Any] = field(default_factory=dict)  # of the data


_SMALL = "records(dense=32, hidden=64, dense_hidden=64)"
_PAPER = "records(dense=32, multiplier=0.85827, hidden=512, dense_hidden=512)"
SIZES: dict[tuple[str, str], Size] = {
    (PHYSIONET, "smoke"): Size("digits", "records(dense=4, hidden=8, dense_hidden=8)", 1, 1, samples=1),
    (PHYSIONET, "desk"): Size("physionet2012", _SMALL, 40, 5),
    (PHYSIONET, "gpu"): Size("physionet2012", _SMALL, 40, 25),
    (MIMIC, "paper"): Size("mimic3", _PAPER, 50, 25, lr=3.0352e-4),
}
SETTINGS = tuple(dict.fromkeys(setting for setting, _ in SIZES))


@dataclass(frozen=True)
class Way:
    """How a row's network is made: the methods of its embeddings and of its other layers, where they have one."""

    embeddings: str | None = None
    layers: str | None = None


def _normal(scale: float) -> str:
    return f"MeanField(prior=Normal(0.0, {scale}), stddev_init=0.01)"


_VECTORS = _normal(1.0)
_FOUR = "components=4, random_sign_init=0.5"
WAYS: dict[str, Way] = {
    DETERMINISTIC: Way(None, "Deterministic"),
    BATCH_ENSEMBLE: Way(None, f"BatchEnsemble({_FOUR})"),
    "Bayesian embeddings": Way(_VECTORS),
    "Fully Bayesian": Way(_VECTORS, _normal(0.3)),
    GAUSSIAN: Way(_VECTORS, f"Rank1({_FOUR}, prior=Normal(1.0, 0.1), dropout_rate=1e-3)"),
    CAUCHY: Way(_VECTORS, f"Rank1({_FOUR}, posterior='cauchy', prior=Cauchy(0.5, 1e-4), dropout_rate=5e-7)"),
    "Ensemble": Way(None, "DeepEnsemble(members=4)"),
}
KL_SHARE = {
    CAUCHY: 12_000 / 694_216
}  # of its full weight, at the end: the paper's Cauchy network stops early


def size_of(setting: str, scale: str) -> Size:
    """The size of a setting at a scale."""
    return SIZES[setting, scale]


def prepare(session: Session, setting: str) -> PreparedRecords:
    """The records of a setting: PhysioNet 2012 or MIMIC-III; in a smoke run images of digits, row after row."""
    size = size_of(setting, session.scale)
    return session.records(
        size.data,
        drawn
        if size.data == "digits"
        else lambda: load_records(size.data, session.data_root, **size.options),
        size.options,
    )


def drawn() -> RecordDataset:
    """Images of digits as records: a row of pixels is a bag, a column a code, and to be told are 5 to 9 from 0 to 4."""
    whole = load("digits")
    levels: Levels | None = None
    parts = []
    for split in (whole.train[:200], whole.train[200:300], whole.test[:100]):
        pixels = split.inputs.flatten(1).numpy()  # [N, 64]
        record, place = (axis.ravel() for axis in np.indices(pixels.shape))
        codes, values = place % 8 + 1, pixels.ravel().astype(np.float64)
        levels = levels or Levels.of(codes, values, 9)  # the training records'
        bagged = bag(len(pixels), record, (7 - place // 8) * 86_400, codes, levels(codes, values))
        context, ids = torch.zeros(len(pixels), 1), torch.arange(len(pixels))
        parts.append(Records.of(bagged, context, (split.targets >= 5).long(), ids))
    assert levels is not None
    train, validation, test = parts
    names = ("", *(f"column {column}" for column in range(8)))
    classes = ("0 to 4", "5 to 9")
    return RecordDataset(
        "digits", train, validation, test, names, levels.total, ("nothing",), classes, source=whole.source
    )


def recipe(session: Session, setting: str, label: str) -> Recipe:
    """The recipe of a row: Adam at a constant rate, and the weights of the best epoch by validation NLL."""
    size, way = size_of(setting, session.scale), WAYS[label]
    # The loss averages over members: with the penalty and the bound over it, each trains as if alone.
    members = 1 if way.layers is None else getattr(parse_stored(way.layers), "members", 1)
    training = Training(
        accelerator=session.device.type, epochs=size.epochs, batch_size=size.batch_size, optimizer="adam", lr=size.lr,
        schedule="constant", l2=1e-4 / members, clip_norm=7.29199 / math.sqrt(members), kl_annealing=0.8,
        kl_weight=KL_SHARE.get(label, 1.0), early_stopping=size.patience, log_every=1000,
    )  # fmt: skip
    method, layers, rest = way.layers, None, None
    if way.embeddings is not None:
        method, layers, rest = way.embeddings, _EMBEDDINGS, way.layers
    assert method is not None
    return Recipe(setting, "trained", label, size.network, size.data, method, training, layers, rest)


def train(session: Session, job: Job) -> Trained:
    """The trained network of a job."""
    return session.trained(recipe(session, job.setting, job.label), prepare(session, job.setting), job.seed)


def jobs_of(session: Session, setting: str) -> list[Job]:
    """The networks of a setting at the session's scale; none where it has no size there."""
    if (setting, session.scale) not in SIZES:
        return []
    seeds = session.seeds or size_of(setting, session.scale).seeds
    return [Job(setting, label, seed) for seed in range(seeds) for label in WAYS]


def measure(session: Session, job: Job) -> float:
    """Train a network and measure it on validation and test records; returns the seconds of training."""
    trained = train(session, job)
    for part in _PARTS:
        figures(session, trained, job, part)
    return trained.seconds


def figures(session: Session, trained: Trained, job: Job, part: Part) -> dict[str, Any]:
    """NLL, AUC-PR, ECE and AUROC on a part of the records; kept beside the network."""
    samples = size_of(job.setting, session.scale).samples
    key = f"{part}, {samples} samples, version {VERSION}"
    return dict(session.kept(trained, key, lambda: _figures(session, trained, job, part, samples)))


def _figures(session: Session, trained: Trained, job: Job, part: Part, samples: int) -> dict[str, Any]:
    batches = prepare(session, job.setting).data.batches(part, 400, device=session.device)
    with torch.random.fork_rng(devices=[session.device] if session.device.type == "cuda" else []):
        torch.manual_seed(mixed_seed(job.seed, 8))
        found = assess(trained.model.eval(), batches, samples=samples, seed=0, chunk=6_400)
    values, examples = found.compute(), found.examples
    right = (examples["prediction"] == examples["target"]).double()
    made = {name: values[name] for name in ("nll", "auc_pr", "ece", "auroc", "brier")}
    if "disagreement" in values:
        made["disagreement"] = values["disagreement"]
    times = 20 if session.scale == "smoke" else RESAMPLED
    low, high = interval(examples["score"], examples["target"], job.seed, times)
    made |= {"accuracy": 100 * float(right.mean()), "auroc_low": low, "auroc_high": high}
    return {**made, "errors": {"nll": float(examples["nll"].double().std() / len(right) ** 0.5)}}


def interval(scores: Tensor, labels: Tensor, seed: int = 0, times: int = RESAMPLED) -> tuple[float, float]:
    """The 2.5 and 97.5 % quantiles of the AUROC over records drawn with replacement.

    >>> low, high = interval(torch.linspace(0, 1, 200), (torch.arange(200) % 3 > 0).long())
    >>> low < 0.5 < high
    True
    """
    generator = torch.Generator().manual_seed(mixed_seed(seed, 9))
    scores, labels = scores.cpu(), labels.cpu()
    found = []
    for _ in range(times):
        rows = torch.randint(len(labels), (len(labels),), generator=generator)
        if 0 < int(labels[rows].sum()) < len(rows):
            found.append(auroc(scores[rows], labels[rows]))
    low, high = np.quantile(found, (0.025, 0.975))
    return float(low), float(high)
