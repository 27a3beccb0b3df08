"""How the EMP paper's image networks are trained at each scale: CIFAR-100, CIFAR-10 with corruptions, and extras."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slimbayes.lab.data import Scaling
from slimbayes.lab.experiments.finished import present
from slimbayes.lab.experiments.images import Job
from slimbayes.lab.experiments.networks import Prepared, Recipe, Trained
from slimbayes.lab.experiments.session import Session, with_precision
from slimbayes.training import Training

EXTRAS = "cifar100-extras"
COMPONENTS = 5
PENALTY = 0.001  # λ = PENALTY / batch size
RATE = 0.005  # of dropout
# How far apart components start: Algorithm 1 has them random and says no more. Of the starts in the extras this one has
# the lowest NLL on held-out examples, for EMP within the error of 0.03 (results/emp/extras.gpu.json).
INIT_NOISE = 0.0
EXTRAS_NOISE = 0.1  # of the extras' rows that name no start
STARTS = (0.0, 0.03)  # other standard deviations that are tried there
PAD = 4
SCALING = Scaling(
    tuple(value / 255 for value in (125.3, 123.0, 113.9)),
    tuple(value / 255 for value in (63.0, 62.1, 66.7)),
    1 / 255,
)


@dataclass(frozen=True)
class Size:
    """What a scale makes of a setting."""

    data: str
    network: str
    epochs: int
    batch_size: int
    seeds: int
    samples: tuple[int, ...]  # numbers of draws whose averages are measured: one run has them all
    schedule: str = "cosine"
    held_out: int = 0
    corrupted: int = 0  # test images that are corrupted, of each type and severity
    chunk: int = 2_500  # rows of one pass in evaluation


_SMALL = "wrn(depth=10, width=1)"
_S = (1, 20, 100, 200)
_PYRAMID = "pyramidnet(depth=110, alpha=270)"
SIZES: dict[tuple[str, str], Size] = {
    ("cifar100", "smoke"): Size("digits", _SMALL, 2, 256, 1, (1, 2, 4, 6), chunk=256),
    ("cifar100", "desk"): Size("cifar100", _SMALL, 10, 256, 1, (1, 5, 20, 40), chunk=1_000),
    ("cifar100", "gpu"): Size("cifar100", "wrn(depth=28, width=4)", 30, 256, 3, _S),
    ("cifar100", "paper"): Size("cifar100", _PYRAMID, 400, 256, 3, _S, "constant"),
    ("cifar100-pyramidnet", "gpu"): Size("cifar100", _PYRAMID, 10, 256, 1, _S, chunk=1_000),
    ("cifar10-c", "smoke"): Size("digits", _SMALL, 2, 256, 1, (2,), corrupted=60),
    ("cifar10-c", "desk"): Size("cifar10", _SMALL, 10, 256, 1, (10,), corrupted=200, chunk=1_000),
    ("cifar10-c", "gpu"): Size("cifar10", "wrn(depth=16, width=4)", 30, 256, 3, (20,), corrupted=2_000),
    ("cifar10-c", "paper"): Size("cifar10", _PYRAMID, 400, 256, 3, (100,), "constant", corrupted=10_000),
    (EXTRAS, "smoke"): Size("digits", _SMALL, 2, 256, 1, (4,), held_out=100),
    (EXTRAS, "desk"): Size("cifar100", _SMALL, 10, 256, 1, (20,), held_out=5_000, chunk=1_000),
    (EXTRAS, "gpu"): Size("cifar100", "wrn(depth=16, width=4)", 20, 256, 3, (100,), held_out=5_000),
    (EXTRAS, "paper"): Size("cifar100", _PYRAMID, 400, 256, 3, (200,), "constant", held_out=5_000),
}  # fmt: skip
SETTINGS = tuple(dict.fromkeys(setting for setting, _ in SIZES))


_BOTH = "'norm', 'output'"


def _patched(kind: str, patch: str = _BOTH, more: str = "", noise: float = INIT_NOISE) -> str:
    return f"{kind}(components={COMPONENTS}, patch=({patch},), init_noise={noise}{more})"


def _extra(kind: str, patch: str = _BOTH, more: str = "", noise: float = EXTRAS_NOISE) -> str:
    return _patched(kind, patch, more, noise)


@dataclass(frozen=True)
class Way:
    """How a row's network is made: a method, the layers it is for, and the method of the others."""

    method: str
    layers: str | None = None
    rest: str | None = None
    keyed: bool = True  # draws by key; noise of every pixel comes from torch's generator, which is faster


_DROPPED = Way(f"MCDropout(rate={RATE})", "norm", keyed=False)
_VANILLA = Way("Deterministic")
_RANK1 = "Rank1(components=1, prior=Normal(1.0, 0.1))"
WAYS: dict[str, dict[str, Way]] = {
    "cifar100": {
        "EMP": Way(_patched("EMP")), "ECMP": Way(_patched("ECMP")), "Dropout": _DROPPED, "Vanilla": _VANILLA,
    },
    "cifar10-c": {
        "EMP (BN+out)": Way(_patched("EMP")), "EMP (BN)": Way(_patched("EMP", "'norm'")),
        "ECMP (BN+out)": Way(_patched("ECMP")), "ECMP (BN)": Way(_patched("ECMP", "'norm'")),
        "Dropout": _DROPPED, "Vanilla": _VANILLA,
    },
    EXTRAS: {
        "Vanilla": _VANILLA, "EMP": Way(_extra("EMP")),
        "EMP, learned mixing": Way(_extra("EMP", more=", learn_mixing=True")),
        "EMP, own statistics": Way(_extra("EMP", more=", own_statistics=True")),
        "EMP on norms": Way(_extra("EMP", "'norm'")),
        "EMP on norms, Rank1 elsewhere": Way(_extra("EMP", "'norm'"), "norm", _RANK1),
        "EMP on norms, dropout elsewhere": Way(
            _extra("EMP", "'norm'"), "norm", f"MCDropout(rate={RATE})", keyed=False
        ),
        "ECMP": Way(_extra("ECMP")),
        **{
            f"{kind}, start {noise}": Way(_extra(kind, noise=noise))
            for kind in ("EMP", "ECMP") for noise in STARTS
        },
    },
}  # fmt: skip
WAYS["cifar100-pyramidnet"] = WAYS["cifar100"]


def size_of(setting: str, scale: str) -> Size:
    """The size of a setting at a scale."""
    return SIZES[setting, scale]


def prepare(session: Session, setting: str) -> Prepared:
    """The data of a setting in the paper's units, padded by 4, cropped and flipped in training."""
    size = size_of(setting, session.scale)
    scaling = None if size.data == "digits" else SCALING
    return session.prepared(size.data, scaling, size.held_out, pad=PAD)


def recipe(session: Session, setting: str, label: str) -> Recipe:
    """The recipe of a row: Adam at 1e-3 and λ Σw² over everything, as in the paper."""
    size, way = size_of(setting, session.scale), WAYS[setting][label]
    cuda = session.device.type == "cuda"
    learned = "learn_mixing=True" in way.method  # its baseline lives between steps, which cannot be recorded
    options: dict[str, Any] = {
        "accelerator": session.device.type, "epochs": size.epochs, "batch_size": size.batch_size,
        "optimizer": "adam", "lr": 1e-3, "schedule": size.schedule, "l2": PENALTY / size.batch_size,
        "precision": "bf16-mixed" if cuda else "32-true", "capture": cuda and not learned,
        "checkpoint_every": 2000 if cuda else 200, "log_every": 200 if cuda else 50,
    }  # fmt: skip
    return Recipe(
        setting, "trained", label, size.network, size.data, way.method, Training(**options), way.layers, way.rest
    )  # fmt: skip


def train(session: Session, job: Job) -> Trained:
    """The trained network of a job."""
    with_precision(session)
    return session.trained(recipe(session, job.setting, job.label), prepare(session, job.setting), job.seed)


def jobs_of(session: Session, setting: str) -> list[Job]:
    """The networks of a setting at the session's scale; none where it has no size there."""
    if (setting, session.scale) not in SIZES:
        return []
    seeds = session.seeds or size_of(setting, session.scale).seeds
    return present(
        session, [Job(setting, label, seed) for seed in range(seeds) for label in WAYS[setting]], train
    )
