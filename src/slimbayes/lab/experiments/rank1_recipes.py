"""How the rank-1 paper's image networks are trained: rows; on CIFAR also sizes of each scale and recipes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slimbayes.lab.data import Scaling
from slimbayes.lab.experiments import rank1_settings as settings
from slimbayes.lab.experiments.catalogue import find
from slimbayes.lab.experiments.entry import Setting
from slimbayes.lab.experiments.finished import present
from slimbayes.lab.experiments.imagenet import SETTING as IMAGENET
from slimbayes.lab.experiments.images import Job
from slimbayes.lab.experiments.networks import Prepared, Recipe, Trained
from slimbayes.lab.experiments.rank1_probes import progress
from slimbayes.lab.experiments.session import Session, with_precision
from slimbayes.training import Training
from slimbayes.verbs.method_text import parse_stored

MAIN, MORE, ABLATIONS, WIDE = "cifar10", "cifar100", "cifar10-ablations", "cifar10-wide"
TUNING, SHARED = "cifar10-tuning", "cifar10-shared"  # searches on held-out images
HEAVY = "cifar10-heavy"  # the second one again, for Cauchys, over several seeds
SHORT, EQUAL = "cifar10-short", "cifar10-equal"  # ablations and main methods with what the second one chose
_TEN = (MAIN, ABLATIONS, WIDE, TUNING, SHARED, HEAVY, SHORT, EQUAL)
DATA = dict.fromkeys(_TEN, "cifar10") | {MORE: "cifar100"}
GAUSSIAN, CAUCHY = settings.GAUSSIAN, settings.CAUCHY
DETERMINISTIC, BATCH_ENSEMBLE = "Deterministic", "BatchEnsemble"
PAD = 2
ROWS = 512  # of a step, in all of the paper's networks on CIFAR
# The constants of the reference code at the paper's time, for CIFAR-10 and CIFAR-100 alike.
SCALING = Scaling((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), 1 / 255)


@dataclass(frozen=True)
class Row:
    """A network of a table: the paper's setting, its method, and the layers it is for."""

    setting: Setting
    method: str
    layers: str | None = None

    @property
    def samples(self) -> int:
        """Of the factors of every component, in evaluation."""
        return self.setting.samples


def _row(setting: Setting, label: str) -> Row:
    # Dropout is between the two convolutions of a block: on the inputs of its second norm.
    return Row(setting, setting.methods[label], "norm2" if label == "MC dropout" else None)


def _rows(entry: str) -> dict[str, Row]:
    """Every row of an entry, by its label."""
    return {label: _row(setting, label) for setting in find(entry).settings for label in setting.methods}


# Rows of the paper's ablations that are its main network under another name.
SAME = {
    "both": GAUSSIAN, "K = 4": GAUSSIAN, "Average": GAUSSIAN, "p = 0.001": GAUSSIAN, "Real (Normal)": GAUSSIAN,
    "KL summed": GAUSSIAN, "p = 0.01": GAUSSIAN,
}  # fmt: skip


@functools.cache
def rows_of(setting: str) -> Mapping[str, Row]:
    """The networks of a setting, by label.

    >>> list(rows_of("cifar100"))[:2]
    ['Deterministic', 'BatchEnsemble']
    """
    if setting == SHORT:
        return rows_of(ABLATIONS)
    if setting != ABLATIONS:
        entries = {
            IMAGENET: "rank1/table1",
            MORE: "rank1/table3",
            TUNING: "rank1/tuning",
            SHARED: "rank1/shared",
            HEAVY: "rank1/shared",
        }
        return _rows(entries.get(setting, "rank1/table2"))
    main = rows_of(MAIN)
    found = {label: main[label] for label in (GAUSSIAN, CAUCHY, BATCH_ENSEMBLE, DETERMINISTIC)}
    for entry in ("figure2", "figure3", "figure4", "figure-v1-5", "figure9", "collapse"):
        found |= {label: row for label, row in _rows(f"rank1/{entry}").items() if label not in SAME}
    few = settings.gaussian(options=", components_per_step=4", components=16)  # what the paper only suggests
    label = "K = 16, 4 per step"
    return found | {label: Row(settings.rank1_cifar({label: few}), few)}


@dataclass(frozen=True)
class Size:
    """What a scale makes of a setting."""

    share: float  # of the paper's epochs
    seeds: int
    corrupted: int  # test images that are corrupted, of each type and severity
    networks: Mapping[str, str] = field(default_factory=dict)  # in the place of the paper's
    data: str = ""  # likewise
    rows: tuple[str, ...] = ()  # that are run; none: all
    chunk: int = 2_500  # rows of one pass in evaluation
    probed: int = 2_000  # test images, or held-out ones, on which a network is looked at while it trains
    most_samples: int = 25
    steps: int | None = None  # so many, whatever the epochs
    probes: int = 20  # looks at a network while it trains
    held_out: int = 0  # training images that are not trained on
    equal: bool = False  # whether all rows take the epochs, and the images a step, of rank-1 networks
    chosen: settings.Chosen | None = None  # what a search chose for short schedules; None: the paper's values
    pad: int = PAD  # pixels on each side before images are cropped
    split: float | None = None  # the rate of steps of 512 images, which components share: all rows take it


def _narrow(depth: int, width: int, half: int) -> dict[str, str]:
    return {
        "wrn(depth=28, width=10)": f"wrn(depth={depth}, width={width})",
        "wrn(depth=28, width=5)": f"wrn(depth={depth}, width={half})",
    }


_TWO = ("Deterministic, l2 = 0.0002", "Rank-1 Gaussian, l2 = 0.0005, KL averaged, p = 0.01")
_ABLATED = (
    GAUSSIAN, "r (outputs)", "s (inputs)", "K = 1", "K = 2", "K = 8", "K = 16", "K = 16, 4 per step",
    *(f"p = {rate:g}" for rate in settings.NOISY),
)  # fmt: skip
_TRIED = (DETERMINISTIC, "Rank-1 Gaussian, p = 0.03")
_CLOSE = (f"{BATCH_ENSEMBLE}, close", *(f"{CAUCHY}, p = {rate}, close" for rate in settings.CLOSE))
_FOUR = (DETERMINISTIC, BATCH_ENSEMBLE, GAUSSIAN, CAUCHY)
_SMOKE = Size(
    0.0, 1, 20, _narrow(10, 1, 1), "digits", chunk=1_000, probed=30, most_samples=2, steps=4, probes=2
)
_DESK = Size(0.04, 1, 200, _narrow(10, 2, 1), chunk=1_000, probed=500)
_GPU = Size(0.08, 3, 1_000, _narrow(16, 4, 2), chunk=10_000, probed=1_000)
_SPLIT = replace(_GPU, chosen=settings.SHARED, pad=4, split=0.2)


def _held_out(size: Size) -> Size:
    """For a search: one seed, and nothing but held-out images."""
    return replace(size, held_out=5_000, equal=True, seeds=1, corrupted=0, probes=4)


SIZES: dict[tuple[str, str], Size] = {
    (MAIN, "smoke"): _SMOKE,
    (MAIN, "desk"): _DESK,
    (MAIN, "gpu"): replace(_GPU, share=0.1, equal=True, chosen=settings.TUNED),
    (MAIN, "paper"): Size(1.0, 10, 10_000),
    (MORE, "smoke"): replace(_SMOKE, rows=_FOUR),
    (MORE, "desk"): replace(_DESK, rows=_FOUR),
    (MORE, "gpu"): replace(_SPLIT, share=0.08, rows=_FOUR, equal=True),
    (MORE, "paper"): Size(1.0, 10, 10_000),
    (ABLATIONS, "smoke"): _SMOKE,
    (ABLATIONS, "desk"): _DESK,
    (ABLATIONS, "gpu"): replace(_GPU, networks=_narrow(16, 2, 1)),
    (ABLATIONS, "paper"): Size(1.0, 3, 10_000),
    (TUNING, "smoke"): replace(_SMOKE, held_out=100, equal=True, rows=_TWO),
    (TUNING, "desk"): _held_out(_DESK),
    (TUNING, "gpu"): _held_out(replace(_GPU, networks=_narrow(16, 2, 1))),
    (TUNING, "paper"): _held_out(Size(1.0, 1, 0)),
    (SHARED, "smoke"): replace(_SMOKE, held_out=100, equal=True, split=0.2, rows=_TRIED),
    (SHARED, "desk"): _held_out(replace(_DESK, split=0.2)),
    (SHARED, "gpu"): _held_out(replace(_SPLIT, share=0.08, chosen=None)),
    (SHARED, "paper"): _held_out(Size(1.0, 1, 0, split=0.2)),
    (HEAVY, "gpu"): replace(_held_out(replace(_SPLIT, share=0.08, chosen=None, rows=_CLOSE)), seeds=2),
    (EQUAL, "gpu"): replace(_SPLIT, share=0.08, rows=_FOUR, equal=True),
    (SHORT, "gpu"): replace(_SPLIT, share=0.08, networks=_narrow(16, 2, 1), equal=True, rows=_ABLATED),
    (WIDE, "gpu"): replace(
        _SPLIT, share=0.56, seeds=1, networks={}, rows=(DETERMINISTIC, GAUSSIAN), chosen=settings.WIDE
    ),  # the paper's own
}
SETTINGS = tuple(dict.fromkeys(setting for setting, _ in SIZES))
_LIKE = settings.gaussian_cifar().training  # of rank-1 networks


def size_of(setting: str, scale: str) -> Size:
    """The size of a setting at a scale."""
    return SIZES[setting, scale]


def row_of(setting: str, scale: str, label: str) -> Row:
    """A network of a setting as it is run at a scale.

    >>> [row_of("cifar10", scale, "BatchEnsemble").setting.training["l2"] for scale in ("paper", "gpu")]
    [0.0003, 0.0005]
    """
    row = rows_of(setting)[label]
    found = size_of(setting, scale).chosen
    if found is None:
        return row
    chosen = settings.short(row.setting, found)
    return replace(row, setting=chosen, method=chosen.methods[label])


def data_of(setting: str, scale: str) -> str:
    """The data set that is trained on.

    >>> data_of("cifar10-ablations", "gpu"), data_of("cifar100", "smoke")
    ('cifar10', 'digits')
    """
    return size_of(setting, scale).data or DATA[setting]


def prepare(session: Session, setting: str) -> Prepared:
    """The data of a setting as the paper prepares them: padded, cropped and flipped in training."""
    data, size = data_of(setting, session.scale), size_of(setting, session.scale)
    return session.prepared(data, None if data == "digits" else SCALING, size.held_out, pad=size.pad)


def network_of(setting: str, scale: str, label: str) -> str:
    """The network of a row at a scale.

    >>> network_of("cifar10", "gpu", "Ensemble 4×WRN-28-5")
    'wrn(depth=16, width=2)'
    """
    wanted = rows_of(setting)[label].setting.network
    return size_of(setting, scale).networks.get(wanted, wanted)


def epochs_of(setting: str, scale: str, label: str) -> int:
    """The paper's epochs in the proportion of the scale; those of rank-1 networks for all where rows are equal.

    >>> [epochs_of(setting, "gpu", "Deterministic") for setting in ("cifar10", "cifar10-wide")]
    [25, 112]
    """
    size, paper = size_of(setting, scale), rows_of(setting)[label].setting.training
    epochs: int = _LIKE["epochs"] if size.equal else paper["epochs"]
    return max(2, round(size.share * epochs))


def batch_of(setting: str, scale: str, label: str) -> int:
    """The images of a step: the paper's, or those of rank-1 networks for all where rows are equal.

    Where components share them, a step has the 512 rows of the paper's, each of another image.

    >>> [batch_of(setting, "gpu", "Deterministic") for setting in ("cifar10", "cifar10-wide")]
    [128, 512]
    """
    size, paper = size_of(setting, scale), rows_of(setting)[label].setting.training
    images: int = ROWS if size.split is not None else (_LIKE if size.equal else paper)["batch_size"]
    return images


def training_of(row: Row, epochs: int, batch_size: int | None = None, **options: Any) -> Training:
    """A row's training as in the paper over so many epochs; ``options`` are the machine's.

    Schedules are in proportion to the epochs. The rate follows the batch, as in the reference code.
    """
    paper = row.setting.training
    size: int = batch_size or paper["batch_size"]
    # The loss averages over members: with so many times the rate, and the penalty over it, each trains as if alone.
    members = getattr(parse_stored(row.method), "members", 1)
    values: dict[str, Any] = {
        **paper, "epochs": epochs, "batch_size": size, "lr": members * paper["lr"] * (size / paper["batch_size"]),
        "l2": paper["l2"] / members, "warmup": min(paper["warmup"], epochs / 4), **options,
    }  # fmt: skip
    return Training(**values)


def split_options(row: Row, lr: float) -> dict[str, Any]:
    """How a network trains at the rate ``lr`` when its components share the images of a step.

    Weights see the images of all components, and the rate is theirs. Factors see those of one, as in the paper's steps
    of 128 images, and keep its rate: the KL draws on them as it does there.

    >>> split_options(rows_of("cifar10")["Rank-1 Gaussian"], 0.2)
    {'lr': 0.2, 'split_batch': True, 'factor_lr_multiplier': 0.5}
    >>> split_options(rows_of("cifar10")["Deterministic"], 0.2)
    {'lr': 0.2}
    """
    method = parse_stored(row.method)
    if getattr(method, "components", 1) == 1:
        return {"lr": lr * getattr(method, "members", 1)}  # see training_of
    paper = row.setting.training
    multiplier = paper["factor_lr_multiplier"] * paper["lr"] / lr
    return {"lr": lr, "split_batch": True, "factor_lr_multiplier": multiplier}


def recipe(session: Session, setting: str, label: str) -> Recipe:
    """The recipe of a row on CIFAR."""
    row, epochs = row_of(setting, session.scale, label), epochs_of(setting, session.scale, label)
    batch, steps = batch_of(setting, session.scale, label), size_of(setting, session.scale).steps
    cuda = session.device.type == "cuda"
    some = "components_per_step" in row.method  # they are chosen in Python, which cannot be recorded
    shared = size_of(setting, session.scale).split
    options: dict[str, Any] = {} if shared is None else split_options(row, shared)
    training = training_of(
        row, epochs, batch, steps=steps, accelerator=session.device.type,
        precision="bf16-mixed" if cuda else "32-true", compile=cuda, capture=cuda and not some,
        checkpoint_every=2000 if cuda else 200, **options,
    )  # fmt: skip
    return Recipe(
        setting, "trained", label, network_of(setting, session.scale, label), data_of(setting, session.scale),
        row.method, training, row.layers,
    )  # fmt: skip


def train(session: Session, job: Job) -> Trained:
    """The trained network of a job, looked at while it trains."""
    with_precision(session)
    made, prepared = recipe(session, job.setting, job.label), prepare(session, job.setting)
    each = max(1, len(prepared.data.train) // made.training.batch_size)
    steps = made.training.length(each)
    size = size_of(job.setting, session.scale)
    probe = progress(session, size.probed)
    return session.trained(made, prepared, job.seed, probe, max(1, steps // size.probes))


def jobs_of(session: Session, setting: str, labels: tuple[str, ...] = ()) -> list[Job]:
    """The networks of a setting at the session's scale, of some rows or of all that it runs."""
    if (setting, session.scale) not in SIZES:
        return []
    size = size_of(setting, session.scale)
    wanted = dict.fromkeys(SAME.get(label, label) for label in labels) or rows_of(setting)
    known = size.rows or tuple(rows_of(setting))
    chosen = [label for label in wanted if label in known]
    seeds = session.seeds or size.seeds
    return present(session, [Job(setting, label, seed) for seed in range(seeds) for label in chosen], train)
