"""The EMP paper's regressions: every split and method of a data set, trained at once and measured."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.convert import bayesianize
from slimbayes.core.likelihoods import Gaussian
from slimbayes.core.predict import predict
from slimbayes.files import write_whole
from slimbayes.lab.data import Dataset, Scaling, Split
from slimbayes.lab.data import load as load_data
from slimbayes.lab.experiments.emp_regressions import SETS
from slimbayes.lab.experiments.session import Session, read_json
from slimbayes.lab.models.text import network_builder
from slimbayes.training import Training, fit_many, mixed_seed
from slimbayes.verbs.method_text import parse_stored
from slimbayes.verbs.provenance import commit, hardware, now

MEMBERS = 5
METHODS = {
    "ECMP": "ECMP(components=5, patch=('norm',))",
    "EMP": "EMP(components=5, patch=('norm',))",
    "Dropout": "MCDropout(rate=0.005)",
    "Ensemble": f"DeepEnsemble(members={MEMBERS})",
}
PATCHED = ("ECMP", "EMP")
TAU = 0.1  # the precision of the density, in the targets' own units
MEASURED = "measured.json"
MEASURE = 3  # raise it when what is measured changes
_HELD = {"cpu": 1 << 23, "cuda": 1 << 27}  # hidden units of all draws and examples at a time


@dataclass(frozen=True)
class Size:
    """What a scale makes of a data set."""

    data: str
    hidden: int
    epochs: int
    splits: int
    samples: int
    batch_size: int = 100


@dataclass(frozen=True)
class Job:
    """All splits of a data set with all methods; ``decayed``: those with patches, their norms decayed as well."""

    setting: str
    decayed: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        """The methods it trains."""
        return PATCHED if self.decayed else tuple(METHODS)

    def words(self) -> str:
        """What it is, for a line of progress."""
        return f"{self.setting}, {'norms decayed' if self.decayed else 'all methods'}"


def size_of(setting: str, scale: str) -> Size:
    """The paper's size, shortened at a desk; a smoke run has another data set.

    >>> size_of("uci/boston", "paper")
    Size(data='uci/boston', hidden=50, epochs=4000, splits=20, samples=10000, batch_size=100)
    """
    splits = next(row.splits for row in SETS.values() if row.data == setting)
    hidden = 100 if setting == "uci/protein" else 50
    if scale == "smoke":
        return Size("diabetes", 8, 4, 2, 50)
    if scale == "desk":  # a large set has as many epochs as a small one has in the time that there is
        epochs = {"uci/kin8nm": 300, "uci/naval": 200, "uci/power": 250, "uci/protein": 20}
        return Size(setting, hidden, epochs.get(setting, 4000), min(splits, 20), 1000)
    return Size(setting, hidden, 4000, splits, 10_000)


def jobs(session: Session) -> Sequence[Job]:
    """Two per data set; of one alone in a smoke run."""
    names = [row.data for row in SETS.values() if row.data != "uci/year"]
    names = names[:1] if session.scale == "smoke" else names
    return [Job(name, decayed) for decayed in (False, True) for name in names]


def training(session: Session, size: Size, decayed: bool = False) -> Training:
    """The paper's values: Adam at 1e-3, never tuned; torch's weight decay 0.01 is l2 = 0.005.

    Whether it touches the norms the paper does not say where it gives that number: not unless ``decayed``.
    """
    cuda = session.device.type == "cuda"
    return Training(
        accelerator=session.device.type, epochs=size.epochs, batch_size=size.batch_size, optimizer="adam", lr=1e-3,
        schedule="constant", l2=0.005, decay_norms=decayed, kl_annealing=0.0, augment=False, capture=cuda, compile=cuda,
        checkpoint_every=100_000 if cuda else 5000, log_every=20_000 if cuda else 1000,
    )  # fmt: skip


def loss_of(label: str, outputs: int) -> Gaussian:
    """A nll that is the mean squared error, and a constant.

    An ensemble's loss is the mean over its members: five times that makes each train as if alone.

    >>> loss_of("EMP", 2).precision, loss_of("Ensemble", 2).precision
    (1.0, 5.0)
    """
    return Gaussian(precision=2 * (MEMBERS if label == "Ensemble" else 1) / outputs)


def splits_run(session: Session, size: Size) -> int:
    """How many splits this call runs: the scale's, or as many as were asked for."""
    return min(size.splits, session.seeds or size.splits)


def splits_of(session: Session, size: Size) -> list[Dataset]:
    """The data set once for every split; energy and naval with both targets."""
    more: dict[str, Any] = {"root": session.data_root, "all_targets": True} if "uci" in size.data else {}
    found = [
        load_data(size.data, split=i, **more) for i in range(min(size.splits, session.seeds or size.splits))
    ]
    whole = hashlib.sha256("".join(data.fingerprint() for data in found).encode()).hexdigest()[:16]
    session.used[size.data] = {"fingerprint": whole, "source": found[0].source}
    return found


def network_of(label: str, size: Size) -> str:
    """The network of a row, as text: norms where there are patches.

    >>> network_of("Dropout", size_of("uci/boston", "paper"))
    "regression(hidden=50, normalization='none')"
    """
    norms = "" if label in ("EMP", "ECMP") else ", normalization='none'"
    return f"regression(hidden={size.hidden}{norms})"


def build(label: str, size: Size, data: Dataset, split: int) -> nn.Module:
    """The network of a row and split; the same whenever it is made."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mixed_seed(split, 5))
        network = network_builder(network_of(label, size))(data.shape, data.num_outputs)
        return bayesianize(network, parse_stored(METHODS[label]))


def measure(session: Session, job: Job) -> float:
    """Train every split and method of a data set, measure them, and keep the figures; returns the seconds."""
    return float(figures(session, job)["seconds"])


def figures(session: Session, job: Job) -> dict[str, Any]:
    """RMSE, density and training error of every method, one number per split: known, or measured now."""
    size = size_of(job.setting, session.scale)
    data = splits_of(session, size)
    values = training(session, size, job.decayed).to_dict()
    facts = json.loads(json.dumps({
        "version": MEASURE, "setting": job.setting, "size": asdict(size), "training": values, "splits": len(data),
        "methods": {label: METHODS[label] for label in job.labels},
        "data": session.used[size.data]["fingerprint"],
    }))  # fmt: skip
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    folder = session.work / "regressions" / f"{job.setting.replace('/', '-')}-{digest}"
    known = read_json(folder / MEASURED)
    if known is None or known.get("facts") != facts:
        session.check_time()
        known = {"facts": facts, **_trained(session, job, size, data, folder)}
        write_whole(folder / MEASURED, json.dumps(known))
    for run in known["runs"]:
        if run not in session.runs:
            session.runs.append(run)
    return known


def _trained(session: Session, job: Job, size: Size, data: list[Dataset], folder: Path) -> dict[str, Any]:
    """Every network of a data set trained, all at once, and what they predict."""
    rows = [(label, split) for label in job.labels for split in range(len(data))]
    models = [build(label, size, data[split], split) for label, split in rows]
    values = training(session, size, job.decayed)
    result = fit_many(
        models, [data[split] for _, split in rows], values, seeds=[split for _, split in rows], folder=folder,
        likelihood=[loss_of(label, data[split].num_outputs) for label, split in rows],
        callback=lambda step, found: session.check_time(), progress=session.progress, label=job.words(),
    )  # fmt: skip
    session.say(f"{job.words()}: {len(models)} networks in {result.seconds:.1f} s")
    found: dict[str, dict[str, list[float]]] = {}
    for (label, split), model in zip(rows, models, strict=True):
        draws = 1 if label == "Ensemble" else size.samples  # of each member
        figures = measured(model.to(session.device), data[split], replace(size, samples=draws))
        for name, value in figures.items():
            found.setdefault(label, {}).setdefault(name, []).append(value)
    origin = {"created": now(), "commit": commit(), "hardware": hardware(), "torch": torch.__version__}
    runs = [
        {
            "setting": job.setting, "purpose": "regression", "label": label, "seed": 0, "splits": len(data),
            "method": METHODS[label], "network": network_of(label, size), "data": size.data,
            "training": {name: getattr(values, name) for name in ("epochs", "batch_size", "lr", "l2", "decay_norms")},
            "steps": result.steps[rows.index((label, 0))], "seconds": result.seconds / len(job.labels), **origin,
        }
        for label in job.labels
    ]  # fmt: skip
    spread = data[0].target_scaling
    spreads = list(spread.std) if spread else []
    return {"figures": found, "seconds": result.seconds, "runs": runs, "target_std": spreads}


def measured(model: nn.Module, data: Dataset, size: Size) -> dict[str, float]:
    """Test RMSE and log predictive density per target, in the targets' own units; RMSE on training data too.

    LPD = (1/NT) Σ_n log (1/S) Σ_s Π_t N(y_nt; f_snt, 1/τ): the targets of an example are predicted together.
    """
    square, density = 0.0, 0.0
    for draws, targets in draws_of(model, data, data.test, size, size.samples):
        square += float((draws.mean(0) - targets).square().sum())
        density += float(log_density(draws, targets).sum())
    fitted = sum(
        float((draws.mean(0) - targets).square().sum())
        for draws, targets in draws_of(model, data, data.train, size, min(size.samples, 100))
    )
    test, train = data.test.targets.numel(), data.train.targets.numel()
    return {
        "rmse": math.sqrt(square / test),
        "lpd": density / test,
        "train_rmse": math.sqrt(fitted / train),
    }


def log_density(draws: Tensor, targets: Tensor) -> Tensor:
    """log (1/S) Σ_s Π_t N(y_t; f_st, 1/τ) of draws [S, N, T] and targets [N, T]: [N].

    >>> round(float(log_density(torch.zeros(3, 1, 1), torch.zeros(1, 1))), 3)
    -2.07
    """
    each = 0.5 * (math.log(TAU / (2 * math.pi)) - TAU * (draws - targets).square())  # [S, N, T]
    return each.sum(-1).logsumexp(0) - math.log(len(draws))


def draws_of(
    model: nn.Module, data: Dataset, split: Split, size: Size, samples: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Draws [S, n, T] and targets [n, T] in the targets' own units, as doubles, some rows at a time.

    A draw is one function of all rows: its noise is keyed, and the examples share it.
    """
    device = next(model.parameters()).device
    inputs = data.scaling(split.inputs).to(device)
    rows = max(1, min(len(inputs), _HELD[device.type] // (samples * size.hidden)))
    for start in range(0, len(inputs), rows):
        part = inputs[start : start + rows]
        found = predict(model, part, samples=samples, noise="shared", seed=0, likelihood=Gaussian())
        yield (
            _undone(found.draws, data.target_scaling),
            split.targets[start : start + rows].to(device).double(),
        )


def _undone(draws: Tensor, scaling: Scaling | None) -> Tensor:
    assert scaling is not None  # a regression has one
    return scaling.undo(draws.flatten(0, 1)).view(draws.shape).double()
