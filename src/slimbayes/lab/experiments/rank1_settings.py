"""How the rank-1 paper trained and tested (Dusenberry et al., 2020).

The values are those of its tables, and of the reference code where the two differ.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slimbayes.lab.experiments.entry import Setting

_SGD = {"optimizer": "sgd", "momentum": 0.9, "schedule": "steps", "augment": True}
_CIFAR = {**_SGD, "decay": 0.2, "warmup": 1.0, "noise": "example", "reduction": "average", "samples": 1}
# B = 128 distinct images, each seen by four components: 512 rows, as in the baselines of 512 images
_LONG = {**_CIFAR, "lr": 0.1, "batch_size": 128, "epochs": 250, "milestones": [0.4, 0.8, 0.9]}
_SHORT = {**_CIFAR, "lr": 0.4, "batch_size": 512, "epochs": 200, "milestones": [0.3, 0.6, 0.8]}
_IMAGENET = {
    **_SGD, "decay": 0.1, "milestones": [1 / 3, 2 / 3, 8 / 9], "l2": 1e-4, "decay_norms": False, "samples": 1,
}  # fmt: skip
_IMAGENET_LONG = {
    **_IMAGENET,
    "lr": 0.4,
    "batch_size": 1024,
    "epochs": 135,
    "warmup": 7.0,
    "noise": "example",
    "reduction": "average",
}

GAUSSIAN, CAUCHY = "Rank-1 Gaussian", "Rank-1 Cauchy"
NOISY = (0.1, 0.2, 0.3)  # rates at which Gaussians begin in Figure 5 of arXiv v1, beside the tables'
CLOSE = ("1e-10", "1e-8", "1e-7", "1e-6")  # rates of Cauchys that are tried with components that begin close
_AVERAGED = ", kl_reduction='mean'"
_L2 = {10: 1e-4, 100: 3e-4}
_SIGNS = {10: -0.5, 100: -1.0}
_CAUCHY_SCALE = {10: 0.1, 100: 0.01}
_WORDS = {
    10: "Padded by 2 pixels to 36 × 36, cropped to 32, flipped; all 50,000 images train. CIFAR-10-C has 15 types of "
    "corruption, 5 severities each.",
    100: "Padded by 2 pixels to 36 × 36, cropped to 32, flipped; all 50,000 images train. CIFAR-100-C is made by the "
    "authors, with 17 types (no motion, no snow; saturate, spatter, speckle, gaussian_blur beside), 5 severities each.",
}
_CROPS = (
    "Crops of 8 to 100 % of the area at ratios 3/4 to 4/3, flipped, bicubic; tests on the centre crop of 224 from 256; "
    "pixels go in as they are, 0 to 255. "
    "ImageNet-C has 15 types, 5 severities each. Norms are not decayed."
)


def gaussian(classes: int = 10, options: str = "", components: int = 4, rate: float = 1e-3) -> str:
    """The method of Tables 2, 3 and 5: mixtures of Normals, prior N(1, 0.1²).

    >>> gaussian()
    'Rank1(components=4, prior=Normal(1, 0.1), random_sign_init=-0.5, dropout_rate=0.001)'
    """
    return (
        f"Rank1(components={components}, prior=Normal(1, 0.1), random_sign_init={_SIGNS[classes]}, "
        f"dropout_rate={rate}{options})"
    )


def cauchy(classes: int = 10, rate: str = "1e-6") -> str:
    """The same with mixtures of Cauchys, prior scale 0.1 on CIFAR-10 and 0.01 on CIFAR-100."""
    return (
        f"Rank1(components=4, posterior='cauchy', prior=Cauchy(1, {_CAUCHY_SCALE[classes]}), "
        f"random_sign_init={_SIGNS[classes]}, dropout_rate={rate})"
    )


def rank1_cifar(
    methods: Mapping[str, str], classes: int = 10, name: str = "", samples: int = 1, **training: Any
) -> Setting:
    """WRN-28-10 on CIFAR as rank-1 networks are trained, with other methods or other training values."""
    values = {
        **_LONG,
        "l2": _L2[classes],
        "kl_annealing": 0.8,
        "factor_lr_multiplier": 1.0,
        **training,
    }
    data = f"cifar{classes}"
    return Setting(
        name or data, "wrn(depth=28, width=10)", data, methods, values, samples, f"{_WORDS[classes]} "
        "Norms are shared by the components."
    )  # fmt: skip


def gaussian_cifar(classes: int = 10, **options: Any) -> Setting:
    """The rank-1 Gaussian of Tables 2 and 3: one sample per component in evaluation."""
    return rank1_cifar({GAUSSIAN: gaussian(classes)}, classes, **options)


def cauchy_cifar(classes: int = 10) -> Setting:
    """The rank-1 Cauchy of Tables 2 and 3: four samples per component in evaluation."""
    return rank1_cifar({CAUCHY: cauchy(classes)}, classes, f"cifar{classes}-cauchy", samples=4)


def batch_ensemble_cifar(classes: int = 10) -> Setting:
    """BatchEnsemble as of the paper: the learning rate of its factors is that of the rest."""
    methods = {"BatchEnsemble": "BatchEnsemble(components=4, random_sign_init=-0.5)"}
    setting = rank1_cifar(methods, classes, f"cifar{classes}-batchensemble", l2=3e-4)
    return replace(setting, training={k: v for k, v in setting.training.items() if k != "kl_annealing"})


def _baseline(
    classes: int, part: str, methods: Mapping[str, str], width: int = 10, words: str = "", **training: Any
) -> Setting:
    data = f"cifar{classes}"
    inputs = f"{_WORDS[classes]} {words}".strip()
    network = f"wrn(depth=28, width={width})"
    return Setting(f"{data}-{part}", network, data, methods, {**_SHORT, "l2": 2e-4, **training}, 1, inputs)


def baselines_cifar(classes: int = 10) -> tuple[Setting, ...]:
    """The other baselines of Tables 2 and 3, at 512 images per step."""
    flipout = (
        "MeanField(prior=Normal(0, 0.1), stddev_init=1e-3, estimator='flipout', biases=False, tied_mean=True)"
    )
    return (
        _baseline(classes, "deterministic", {"Deterministic": "Deterministic"}),
        _baseline(
            classes, "dropout", {"MC dropout": "MCDropout(rate=0.1)"}, lr=0.2, l2=3e-4,
            words="Dropout is between the two convolutions of a block: on the inputs of its second norm.",
        ),
        _baseline(
            classes, "vi", {"MFVI BNN": flipout}, epochs=250, kl_annealing=0.8, l2=4e-4,
            words="l2 is on norms and biases alone; one sample on clean images, five on corrupted ones; 95 % train.",
        ),
        ensemble_cifar(classes, 5),
        ensemble_cifar(classes, 10),
    )  # fmt: skip


def ensemble_cifar(classes: int = 10, width: int = 5) -> Setting:
    """Four networks of different seeds, their probabilities averaged."""
    label = f"Ensemble 4×WRN-28-{width}"
    return _baseline(classes, f"ensemble-28-{width}", {label: "DeepEnsemble(members=4)"}, width)


def cifar(classes: int) -> tuple[Setting, ...]:
    """Everything in Table 2 (CIFAR-10) or 3 (CIFAR-100)."""
    deterministic, *others = baselines_cifar(classes)
    middle = (batch_ensemble_cifar(classes), *others[:2], gaussian_cifar(classes), cauchy_cifar(classes))
    return (deterministic, *middle, *others[2:])


def tuned(l2: float) -> tuple[Setting, ...]:
    """What is tried on held-out images with a penalty l2: the four main methods, all with the same penalties.

    >>> [len(setting.methods) for setting in tuned(5e-4)]
    [1, 1, 3, 3]
    """
    ways = (("KL summed", "", 1e-3), ("KL averaged", _AVERAGED, 1e-3), ("KL averaged", _AVERAGED, 1e-2))
    normals = {
        f"{GAUSSIAN}, l2 = {l2:g}, {words}, p = {rate:g}": gaussian(options=option, rate=rate)
        for words, option, rate in ways
    }
    heavy = {f"{CAUCHY}, l2 = {l2:g}, p = {rate}": cauchy(rate=rate) for rate in ("1e-6", "1e-8", "1e-10")}
    others = (baselines_cifar()[0], batch_ensemble_cifar())
    return (
        *(_with(setting, l2) for setting in others),
        rank1_cifar(normals, name=f"cifar10-normal-{l2:g}", l2=l2),
        rank1_cifar(heavy, name=f"cifar10-cauchy-{l2:g}", samples=4, l2=l2),
    )


@dataclass(frozen=True)
class Chosen:
    """What a search on held-out images chose for short schedules, where the paper's values are for long ones."""

    search: str  # the entry
    l2: float
    rate: float  # at which Gaussians begin
    heavy_rate: str  # at which Cauchys do
    options: str = ""  # of Gaussians
    heavy_options: str = ""
    schedule: str = ""  # of the learning rate; "": the paper's steps
    distance: float | None = None  # of components, at first; None: the paper's


TUNED = Chosen("rank1/tuning", 5e-4, 1e-2, "1e-10", _AVERAGED)
SHARED = Chosen("rank1/shared", 5e-4, 1e-2, "1e-10", _AVERAGED, _AVERAGED, "cosine", 0.2)
WIDE = replace(SHARED, rate=6e-2, distance=0.1)  # of WRN-28-10, which takes more noise


def short(setting: Setting, chosen: Chosen = TUNED) -> Setting:
    """A setting with the values that a short schedule wants: the penalty, and how rank-1 networks begin.

    What was not searched stays: the rates, and all of mean-field networks, whose penalty is on norms and biases alone.

    >>> short(gaussian_cifar()).methods["Rank-1 Gaussian"][-39:], short(baselines_cifar()[0]).training["l2"]
    ("dropout_rate=0.01, kl_reduction='mean')", 0.0005)
    """
    if "MFVI BNN" in setting.methods:
        return setting
    methods = {label: _begun(method, chosen) for label, method in setting.methods.items()}
    if chosen.distance is not None:
        methods = {label: _near(method, chosen.distance) for label, method in methods.items()}
    training = {**setting.training, "l2": chosen.l2, **_schedule(chosen.schedule)}
    return replace(setting, methods=methods, training=training)


def _begun(method: str, chosen: Chosen) -> str:
    """A rank-1 method that begins as was chosen where it has the tables' rate; a rate of its own it keeps."""
    papers, ours, options = ("0.001", f"{chosen.rate:g}", chosen.options)
    if "cauchy" in method:
        papers, ours, options = ("1e-6", chosen.heavy_rate, chosen.heavy_options)

    def change(found: re.Match[str]) -> str:
        return f"dropout_rate={ours if found[1] == papers else found[1]}{options}"

    return re.sub(r"dropout_rate=([\d.e-]+)", change, method)


def shared() -> tuple[Setting, ...]:
    """What is tried on held-out images where components share each batch: schedules, noise, first distances, penalties.

    >>> [list(setting.methods) for setting in shared()][:2]
    [['Deterministic, steps'], ['Deterministic']]
    """
    l2, plain, ensemble = 5e-4, baselines_cifar()[0], batch_ensemble_cifar()
    rates = (1e-3, 1e-2, 3e-2, 1e-1)
    normals = {f"{GAUSSIAN}, p = {rate:g}": gaussian(options=_AVERAGED, rate=rate) for rate in rates}
    more = {f"{GAUSSIAN}, p = 0.03, KL summed": gaussian(rate=3e-2)}
    more |= {
        f"{GAUSSIAN}, p = {rate:g}, {words}": _near(normals[f"{GAUSSIAN}, p = {rate:g}"], distance)
        for rate, words, distance in ((3e-2, "close", 0.2), (1e-2, "close", 0.2), (1e-2, "closer", 0.1))
    }
    heavy = {f"{CAUCHY}, p = {rate}": cauchy(rate=f"{rate}{_AVERAGED}") for rate in ("1e-8", "1e-10")}
    heavy |= {f"{CAUCHY}, p = {rate}, close": _near(cauchy(rate=f"{rate}{_AVERAGED}"), 0.2) for rate in CLOSE}
    (label, points), *_ = ensemble.methods.items()
    points_near = {
        f"{label}, {words}": _near(points, far) for words, far in (("close", 0.2), ("closer", 0.1))
    }
    steps = {f"{GAUSSIAN}, p = 0.01, steps": normals[f"{GAUSSIAN}, p = 0.01"]}
    light = {f"{GAUSSIAN}, p = 0.03, l2 = {l2 / 2:g}": normals[f"{GAUSSIAN}, p = 0.03"]}

    def tried(setting: Setting, part: str, schedule: str = "cosine", penalty: float = l2) -> Setting:
        values = {**setting.training, "l2": penalty, **_schedule(schedule)}
        return replace(setting, name=f"cifar10-{part}", training=values)

    return (
        replace(tried(plain, "plain-steps", ""), methods={f"{label}, steps": m for label, m in plain.methods.items()}),
        tried(plain, "plain"), tried(replace(ensemble, methods={**ensemble.methods, **points_near}), "batchensemble"),
        tried(rank1_cifar(steps, samples=4), "normal-steps", ""),
        tried(rank1_cifar({**normals, **more}, samples=4), "normal"),
        tried(rank1_cifar(light, samples=4), "normal-light", penalty=l2 / 2),
        tried(rank1_cifar(heavy, samples=4), "cauchy"),
    )  # fmt: skip


def _near(method: str, distance: float) -> str:
    """The same with components at another distance from each other, at first."""
    return re.sub(r"random_sign_init=-[\d.]+", f"random_sign_init=-{distance:g}", method)


def _schedule(name: str) -> dict[str, Any]:
    return {"schedule": name} if name else {}


def _with(setting: Setting, l2: float) -> Setting:
    """The same with another penalty, which its label names."""
    methods = {f"{label}, l2 = {l2:g}": method for label, method in setting.methods.items()}
    training = {**setting.training, "l2": l2}
    return replace(setting, name=f"{setting.name}-{l2:g}", methods=methods, training=training)


def _imagenet(
    part: str, methods: Mapping[str, str], training: Mapping[str, Any], samples: int = 1
) -> Setting:
    name = f"imagenet-{part}" if part else "imagenet"
    return Setting(name, "resnet50", "imagenet", methods, training, samples, _CROPS)


def imagenet() -> tuple[Setting, ...]:
    """What Table 1 trains; its MCMC rows are quoted from other papers."""
    annealed = {**_IMAGENET_LONG, "kl_annealing": 2 / 3, "factor_lr_multiplier": 1.0}
    short = {**_IMAGENET, "lr": 1.6, "batch_size": 4096, "epochs": 90, "warmup": 5.0}
    start = "components=4, random_sign_init"
    normal = f"Rank1({start}=-0.75, prior=Normal(1, 0.05), dropout_rate=1e-3)"
    heavy = f"Rank1({start}=-0.5, posterior='cauchy', prior=Cauchy(1, 0.005), dropout_rate=1e-6)"
    ensemble = {**_IMAGENET_LONG, "factor_lr_multiplier": 0.25}
    return (
        _imagenet("deterministic", {"Deterministic": "Deterministic"}, short),
        _imagenet("batchensemble", {"BatchEnsemble": f"BatchEnsemble({start}=-0.5)"}, ensemble),
        _imagenet("", {GAUSSIAN: normal}, annealed),
        _imagenet("cauchy", {CAUCHY: heavy}, annealed, samples=4),
        _imagenet("ensemble", {"Ensemble 4×ResNet-50": "DeepEnsemble(members=4)"}, short),
    )


def mimic() -> tuple[Setting, ...]:
    """The two rank-1 networks of Tables 4 and 7."""
    common = {
        "optimizer": "adam", "schedule": "constant", "l2": 1e-4, "samples": 1, "time bags, s": 86400,
    }  # fmt: skip
    normal = {
        **common, "lr": 3.0352e-4, "batch_size": 128, "steps": 25_000, "clip_norm": 7.29199,
        "factor_lr_multiplier": 1.0, "kl_annealing_steps": 20_000, "aggregate older than, s": -1,
    }  # fmt: skip
    heavy = {
        **common, "lr": 1e-3, "batch_size": 32, "steps": 12_000, "clip_norm": 1.83987,
        "factor_lr_multiplier": 0.575, "kl_annealing_steps": 694_216, "aggregate older than, s": 60 * 60 * 24 * 90,
    }  # fmt: skip
    start = "components=4, random_sign_init=0.5"
    methods = (
        {GAUSSIAN: f"Rank1({start}, prior=Normal(1, 0.1), dropout_rate=1e-3)"},
        {CAUCHY: f"Rank1({start}, posterior='cauchy', prior=Cauchy(0.5, 1e-4), dropout_rate=5e-7)"},
    )
    networks = (
        "records(dense=32, multiplier=0.85827, hidden=512, dense_hidden=512)",
        "records(dense=16, multiplier=0.984215, hidden=512, dense_hidden=512)",
    )
    words = "Embeddings have Normal posteriors; LSTM and dense layers have rank-1 factors."
    return (
        Setting("mimic", networks[0], "mimic3", methods[0], normal, 25, words),
        Setting("mimic-cauchy", networks[1], "mimic3", methods[1], heavy, 25, words),
    )
