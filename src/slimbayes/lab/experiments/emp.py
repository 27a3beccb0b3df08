"""The EMP paper's tables and figures (Chang et al., 2019)."""

from __future__ import annotations

from dataclasses import replace

from slimbayes.lab.experiments import emp_corruptions as corruptions
from slimbayes.lab.experiments import emp_regressions as regressions
from slimbayes.lab.experiments.entry import Experiment, Printed, Setting

_ADAM = {
    "optimizer": "adam",
    "lr": 1e-3,
    "schedule": "constant",
    "batch_size": 256,
    "l2": 0.001 / 256,
    "samples": 1,
}
_BASELINES = {"Dropout": "MCDropout(rate=0.005)", "Vanilla": "Deterministic"}
_PATCHED = {name: f"{name}(components=5, patch=('norm', 'output'))" for name in ("EMP", "ECMP")}
_FOUR = {
    f"{name} ({what})": f"{name}(components=5, patch={patch})"
    for name in ("EMP", "ECMP")
    for what, patch in (("BN+out", "('norm', 'output')"), ("BN", "('norm',)"))
}
_DROPPED = "Dropout stands before every norm: on the inputs of the norms."
_IMAGENET = Setting(
    "imagenet", "resnet18", "imagenet", {**_FOUR, **_BASELINES}, {**_ADAM, "epochs": 100, "augment": True}, 200,
    f"Random crops resized to 224 × 224. {_DROPPED}",
)  # fmt: skip
_IMAGENET_C = replace(_IMAGENET, name="imagenet-c", samples=100)
_CIFAR100 = Setting(
    "cifar100", "pyramidnet(depth=110, alpha=270)", "cifar100", {**_PATCHED, **_BASELINES},
    {**_ADAM, "epochs": 400, "augment": True}, 200,
    "Padded by 4 pixels, cropped to 32, flipped; mean (125.3, 123.0, 113.9) / 255, standard deviation "
    f"(63.0, 62.1, 66.7) / 255. {_DROPPED}",
)  # fmt: skip
_CIFAR10_C = replace(
    _CIFAR100, name="cifar10-c", data="cifar10", methods=_IMAGENET.methods, samples=100,
    inputs="Ours, not the paper's: CIFAR-10 with slimbayes' own corruptions, at five severities. "
    f"{_CIFAR100.inputs}",
)  # fmt: skip

_QUALITY = ("top5", "accuracy", "ece_percent", "mce_percent")
_BINS = (
    "Calibration errors: 20 equal bins of the top class's probability, bins of at most 5 examples dropped."
)
_OPEN = (
    "Not said: whether norms share their running statistics, whether an assignment is drawn per batch or per example, "
    "whether probabilities or logits are averaged, how components start, n after bins are dropped, and "
    "the learning rate's schedule."
)
_PENALTY = (
    "λ = 0.001 / batch size on all components alike: the 1/K of Equation 6 on patched parameters is dropped, as in "
    "the paper's experiments; torch's weight_decay is 2λ."
)
_MEAN = (
    "Algorithm 1 divides by s + 1 from s = 1 and shrinks the mean by S / (S + 1); 1 / s is right. Appendix B's "
    "likelihood lacks 1 / S."
)
_ENTROPY = (
    "The entropy of the mixture is bounded as Σ p_k H_k ≤ H(q) ≤ Σ p_k H_k + log K, not above by Σ p_k H_k; harmless "
    "for gradients, as is KD / 2 where D / 2 belongs. The last sum of the KL runs over shared layers."
)
_ERRATA = (_BINS, _OPEN, _PENALTY, _MEAN, _ENTROPY)
_VANILLA = (
    "Errors are divided by those of the vanilla ResNet-18, not AlexNet's; sums run over five severities."
)
_RELATIVE = (
    "The denominator of the relative error is printed with the model's clean error; it must be vanilla's."
)
_AHEAD = "The text has EMP and ECMP ahead; ECMP's 102 and 101 are behind dropout and the vanilla network."
_ROBUST = "EMP and ECMP are more robust to corruption than dropout and the vanilla network, EMP most."

_TABLE1 = Printed(
    "overhead", "Parameters in millions and overhead in %",
    ("ResNet-18", "ResNet-18 overhead", "PyramidNet", "PyramidNet overhead"),
    {
        "Mean-field Gaussian": (23.4, 100, 57.0, 100), "PBP": (23.4, 100, 57.0, 100),
        "MNFG": (3510, 29900, 8550, 29900), "Dropout": (11.7, 0.0, 28.5, 0.0), "EMP": (13.8, 17.9, 28.8, 1.10),
    },
)  # fmt: skip
_TABLE3 = Printed(
    "parameters", "Parameters, K = 5", ("MLP, L = H = 100", "ResNet-18", "PyramidNet"),
    {
        "EMP": (1_129_100, 13_779_912, 28_825_299), "ECMP": (1_129_100, 13_779_912, 28_825_299),
        "Dropout": (1_009_900, 11_689_512, 28_511_307), "DropConnect": (1_009_900, 11_689_512, 28_511_307),
        "Explicit ensemble": (5_049_500, 58_447_560, 142_556_535),
    },
)  # fmt: skip
_TABLE4 = Printed(
    "imagenet", "ImageNet, ResNet-18", ("overhead_percent", *_QUALITY),
    {
        "EMP (BN+out)": (17.9, 87.2, 67.0, 3.91, 6.83), "EMP (BN)": (0.328, 86.8, 66.6, 5.74, 11.0),
        "ECMP (BN+out)": (17.9, 87.2, 67.1, 1.65, 3.15), "ECMP (BN)": (0.328, 86.8, 66.4, 4.62, 8.07),
        "Dropout": (0.0, 86.7, 65.9, 7.61, 14.0), "Vanilla": (0.0, 86.7, 66.1, 8.09, 14.2),
    },
)  # fmt: skip
_TABLE6 = Printed(
    "cifar100", "CIFAR-100, PyramidNet", ("overhead_percent", *_QUALITY),
    {
        "EMP": (1.10, 92.0, 74.0, 13.6, 28.9), "ECMP": (1.10, 91.9, 73.5, 8.73, 18.1),
        "Dropout": (0.0, 91.4, 72.0, 21.1, 52.3), "Vanilla": (0.0, 90.9, 72.6, 21.6, 54.6),
    },
)  # fmt: skip
# Tables 9 to 11: S = 1, 20, 100, 200 of ImageNet, then of CIFAR-100
_BY_SAMPLES = {
    9: (
        "EMP",
        ((86.4, 65.6, 7.03, 13.8), (87.1, 66.9, 4.08, 7.00), (87.2, 67.0, 3.88, 7.71), (87.2, 67.0, 3.91, 6.83)),
        ((90.9, 72.2, 21.2, 50.1), (91.6, 73.2, 14.2, 30.0), (91.7, 74.2, 13.6, 30.3), (92.0, 74.0, 13.6, 28.9)),
    ),
    10: (
        "ECMP",
        ((85.6, 64.1, 7.52, 14.5), (87.1, 66.9, 1.70, 4.18), (87.2, 67.1, 1.50, 3.05), (87.2, 67.1, 1.65, 3.15)),
        ((89.3, 69.3, 23.9, 53.0), (91.6, 72.9, 9.35, 21.4), (91.8, 72.7, 8.81, 18.2), (91.9, 73.5, 8.73, 18.1)),
    ),
    11: (
        "Dropout",
        ((86.3, 65.3, 8.99, 16.6), (86.6, 65.9, 7.64, 14.1), (86.7, 65.9, 7.64, 14.2), (86.7, 65.9, 7.61, 14.0)),
        ((91.0, 72.0, 21.8, 54.2), (91.4, 72.3, 21.0, 50.7), (91.1, 72.2, 21.0, 51.9), (91.4, 72.0, 21.1, 52.3)),
    ),
}  # fmt: skip


def _printed_by_samples(number: int) -> tuple[Printed, Printed]:
    """One table per data set: a row per number of samples, and the vanilla network."""
    _, imagenet, cifar = _BY_SAMPLES[number]
    labels = ("S = 1", "S = 20", "S = 100", "S = 200", "Vanilla")
    first = zip(labels, (*imagenet, _TABLE4.rows["Vanilla"][1:]), strict=True)
    second = zip(labels, (*cifar, _TABLE6.rows["Vanilla"][1:]), strict=True)
    return (
        Printed("imagenet", "ImageNet, ResNet-18", _QUALITY, dict(first)),
        Printed("cifar100", "CIFAR-100, PyramidNet", _QUALITY, dict(second)),
    )


def _by_samples(number: int) -> Experiment:
    method = _BY_SAMPLES[number][0]
    wanted = (f"{method} (BN+out)" if method != "Dropout" else method, method, "Vanilla")
    chosen = tuple(
        replace(
            setting,
            name=f"{setting.name}-{samples}",
            samples=samples,
            methods={label: text for label, text in setting.methods.items() if label in wanted},
        )
        for setting in (_IMAGENET, _CIFAR100)
        for samples in (1, 20, 100, 200)
    )
    return Experiment(
        f"emp/table{number}", f"Table {number}", f"Samples in evaluation: {method}",
        "More samples help dropout a little on ImageNet and hardly on CIFAR-100." if method == "Dropout" else
        f"Accuracy and calibration of {method} improve with the samples, hardly from 100 to 200.",
        chosen, _QUALITY, 1, _printed_by_samples(number), _ERRATA,
    )  # fmt: skip


def _calibration(number: int, setting: Setting, title: str, needs: str = "") -> Experiment:
    return Experiment(
        f"emp/figure{number}", f"Figure {number}", title,
        "The calibration curves of EMP and ECMP lie closest to the diagonal.",
        (setting,), ("ece_percent", "mce_percent"), errata=("The paper draws the curves.", *_ERRATA), needs=needs,
    )  # fmt: skip


def _robust(number: int, printed: Printed, metric: str, title: str, shows: str) -> Experiment:
    relative = (_RELATIVE, _AHEAD) if metric == "rmce" else ()
    settings = tuple(
        replace(setting, methods={k: v for k, v in setting.methods.items() if k in printed.rows})
        for setting in (_IMAGENET_C, _CIFAR10_C)
    )
    return Experiment(
        f"emp/table{number}", f"Table {number}", f"{title} (and CIFAR-10 with corruptions, ours)", shows,
        settings, (metric,), 1, (printed,), (_VANILLA, *relative, *_ERRATA),
    )  # fmt: skip


_START = "init_noise=0.1"  # how components start is not said in the paper
_NORMS = f"EMP(components=5, patch=('norm',), {_START})"
_STARTS = {
    f"{kind}, start {noise}": f"{kind}(components=5, patch=('norm', 'output'), init_noise={noise})"
    for kind in ("EMP", "ECMP")
    for noise in (0.0, 0.03)
}
_EXTRAS = replace(
    _CIFAR100, name="cifar100-extras",
    methods={
        "Vanilla": "Deterministic", "EMP": f"EMP(components=5, patch=('norm', 'output'), {_START})",
        "EMP, learned mixing": f"EMP(components=5, patch=('norm', 'output'), {_START}, learn_mixing=True)",
        "EMP, own statistics": f"EMP(components=5, patch=('norm', 'output'), {_START}, own_statistics=True)",
        "EMP on norms": _NORMS, "EMP on norms, Rank1 elsewhere": _NORMS, "EMP on norms, dropout elsewhere": _NORMS,
        "ECMP": f"ECMP(components=5, patch=('norm', 'output'), {_START})", **_STARTS,
    },
    inputs="Ours, not the paper's. 5,000 training examples are held out for the weights of stacking. Elsewhere: "
    "Rank1(components=1), or MCDropout(rate=0.005), on all other layers. Start: the standard deviation by which "
    f"components start apart, where it is not 0.1. {_CIFAR100.inputs}",
)  # fmt: skip
_FOUR_MAIN = replace(
    _IMAGENET, methods={k: v for k, v in _IMAGENET.methods.items() if not k.endswith("(BN)")}
)
ENTRIES: tuple[Experiment, ...] = (
    Experiment(
        "emp/figure1", "Figure 1", "Memory of graphics cards by year",
        "The memory of 1,599 cards doubles every 3.2 years: slower than networks grow.",
        printed=(
            Printed(
                "fit", "Years in which memory doubles, by model of the memory", ("years",),
                {"2^(α year + β) + γ": (3.2,), "2^(α year + β)": (2.8,)},
            ),
        ),
        errata=("The 1,599 cards were read from a public data base and not published with the paper.",),
    ),
    Experiment(
        "emp/table1", "Table 1", "Parameter overhead of variational methods",
        "Patching costs 17.9 % (ResNet-18) or 1.10 % (PyramidNet) where other variational methods double the network.",
        (_IMAGENET, _CIFAR100), ("parameters_m", "overhead_percent"), printed=(_TABLE1,),
        errata=("PBP and MNFG are not in slimbayes: their numbers per weight, times the weights of the network.",),
    ),
    Experiment(
        "emp/figure3", "Figure 3", "Functions drawn from priors with dropout and with EMP",
        "Functions of a one-layer network of sign units are rough under dropout and finer under EMP.",
        printed=(
            Printed(
                "prior", "The network and its prior", ("value",),
                {
                    "hidden units": (100,), "biases, N(0, ·)": (20,), "weights, N(0, ·)": (5,),
                    "probability of a drop": (0.5,), "components": (5,),
                },
            ),
        ),
        errata=("Whether 20 and 5 are variances or standard deviations is not said.",),
    ),
    Experiment(
        "emp/table3", "Table 3", "Ensemble size and parameters",
        "Patching L layers of width H reaches K^L (EMP) or K^(H² + LH) (ECMP) networks at little more memory than "
        "one; dropout has 2^(LH), DropConnect 2^(LH²), an explicit ensemble K.",
        tuple(
            replace(
                setting,
                methods={
                    **_PATCHED, "Dropout": "MCDropout(rate=0.005)", "DropConnect": "DropConnect(rate=0.005)",
                    "Explicit ensemble": "DeepEnsemble(members=5)",
                },
            )
            for setting in (_IMAGENET, _CIFAR100)
        ),
        ("parameters",), printed=(_TABLE3,),
        errata=(
            "The MLP's count has the norms' patches but not the norms: 99·(100² + 100) + 100² without norms or output "
            "bias, and 4·(99·200 + 100²) for the patches.",
            "DropConnect and the explicit ensemble are only counted; the paper does not train them on images.",
        ),
    ),
    Experiment(
        "emp/table4", "Table 4", "ImageNet",
        "EMP and ECMP are more accurate and better calibrated than dropout and the vanilla network.",
        (_IMAGENET,), ("overhead_percent", *_QUALITY), printed=(_TABLE4,), errata=_ERRATA,
    ),
    _calibration(4, _FOUR_MAIN, "Calibration curves on ImageNet"),
    _calibration(7, _IMAGENET, "Calibration curves on ImageNet, with norms alone patched too"),
    _robust(5, corruptions.TABLE5, "mce", "ImageNet-C: corruption error", _ROBUST),
    _robust(7, corruptions.TABLE7, "mce", "ImageNet-C: corruption error, all methods", _ROBUST),
    _robust(
        8, corruptions.TABLE8, "rmce", "ImageNet-C: relative corruption error",
        "Relative to its clean error EMP loses less under corruption than the vanilla network, ECMP more.",
    ),
    Experiment(
        "emp/table6", "Table 6", "CIFAR-100",
        "EMP and ECMP beat dropout and the vanilla network in accuracy; ECMP more than halves their ECE.",
        (_CIFAR100,), ("overhead_percent", *_QUALITY), printed=(_TABLE6,), errata=_ERRATA,
    ),
    _calibration(5, _CIFAR100, "Calibration curves on CIFAR-100"),
    Experiment(
        "emp/figure6", "Figure 6", "Calibration against the number of samples",
        "More samples in evaluation calibrate EMP and ECMP better; dropout gains little.",
        (_FOUR_MAIN, _CIFAR100), ("ece_percent",),
        printed=tuple(
            Printed(
                name, f"{title}: ECE in % by number of samples", ("1", "20", "100", "200"),
                {method: tuple(row[2] for row in cells[place]) for method, *cells in _BY_SAMPLES.values()},
            )
            for place, (name, title) in enumerate(
                (("imagenet", "ImageNet, ResNet-18"), ("cifar100", "CIFAR-100, PyramidNet"))
            )
        ),
        errata=("The figure draws what Tables 9 to 11 print; its numbers are theirs.", *_ERRATA),
    ),
    *(_by_samples(number) for number in (9, 10, 11)),
    *regressions.ENTRIES,
    Experiment(
        "emp/extras", "Beyond: extras", "What the paper leaves to future work",
        "Ours: learned mixing probabilities, weights of draws fitted on held-out data (sb.stack), BatchNorm statistics "
        "of every component, EMP on norms with other methods elsewhere, and other starts; which of them help.",
        (_EXTRAS,), ("overhead_percent", *_QUALITY, "nll"), errata=_ERRATA, beyond=True,
    ),
)  # fmt: skip
