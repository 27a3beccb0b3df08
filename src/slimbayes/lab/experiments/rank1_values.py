"""The rank-1 paper's hyper-parameters, Tables 5 to 7: those of our settings, in the rows of the printed tables.

    base learning rate = lr · 128 / B (CIFAR) or lr · 256 / B (ImageNet),   decay at milestone · epochs,
    batch size per core = B K / cores: the printed one counts every image K times

Each is compared with the printed value; where an erratum of the entry says that another was run, with that one.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from slimbayes import metrics
from slimbayes.core.methods import Rank1
from slimbayes.lab.experiments import rank1_tables
from slimbayes.lab.experiments.catalogue import find
from slimbayes.lab.experiments.entry import Experiment, Printed, Setting
from slimbayes.lab.experiments.outcome import Outcome, Table, check
from slimbayes.lab.experiments.session import Session
from slimbayes.verbs.method_text import parse_stored

Values = dict[str, float]
ORDINALS = ("first", "second", "third")
BASE = {"cifar10": 128, "cifar100": 128, "imagenet": 256}  # images per step of the base learning rate
CORES = "cores"
_ROUNDING = 1e-12  # of what is multiplied to come back to the printed value
_RUN_FOR = 200  # the epochs of which the printed 80, 160 and 180 are drops


def rank1_of(setting: Setting) -> Rank1:
    """The one method of a setting."""
    (text,) = setting.methods.values()
    method = parse_stored(text)
    assert isinstance(method, Rank1)
    return method


def factor_values(method: Rank1) -> Values:
    """What the three tables have of the factors: components, prior and start.

    >>> from slimbayes.lab.experiments.rank1_settings import gaussian
    >>> list(factor_values(parse_stored(gaussian())).values())
    [4.0, 1.0, 0.1, 0.001, -0.5]
    """
    prior: Any = method.prior
    start: Any = method.random_sign_init  # a number: the paper names it
    return {
        "components": float(method.components), "prior mean": float(prior.loc),
        "prior standard deviation": float(prior.scale),
        "dropout rate at the start": method.first_rate, "random sign init": start,
    }  # fmt: skip


def image_values(setting: Setting, cores: float) -> Values:
    """The rows of Tables 5 and 6 for a setting; ``cores`` share the B K rows of a step.

    >>> from slimbayes.lab.experiments.rank1_settings import gaussian_cifar
    >>> found = image_values(gaussian_cifar(10), cores=8)
    >>> found["base learning rate"], found["batch size per core"], found["first decay, epoch"]
    (0.1, 64.0, 100.0)
    """
    training, method = setting.training, rank1_of(setting)
    size, epochs = training["batch_size"], training["epochs"]
    drops = zip(ORDINALS, training["milestones"], strict=True)
    return {
        **factor_values(method),
        "base learning rate": training["lr"] * BASE[setting.data] / size,
        "batch size per core": size * method.components / cores,
        "learning rate decay": training["decay"],
        "epochs": float(epochs),
        **{f"{which} decay, epoch": part * epochs for which, part in drops},
        "KL annealing, epochs": training["kl_annealing"] * epochs,
        "l2": training["l2"],
    }


def record_values(setting: Setting) -> Values:
    """The rows of Table 7 for a setting: an LSTM on medical records.

    >>> from slimbayes.lab.experiments.rank1_settings import mimic
    >>> found = record_values(mimic()[1])
    >>> found["embedding size"], found["KL annealing, steps"], found["ECE bins"]
    (16.0, 694216.0, 15.0)
    """
    training, options = setting.training, network_options(setting.network)
    found = {
        "LSTM units": options["hidden"], "hidden units": options["dense_hidden"], "l2": training["l2"],
        "time bags, s": training["time bags, s"],
        "ECE bins": inspect.signature(metrics.ece).parameters["bins"].default,
        "embedding size": options["dense"], "embedding multiplier": options["multiplier"],
        "batch size": training["batch_size"], "learning rate": training["lr"],
        "factor learning rate multiplier": training["factor_lr_multiplier"],
        "KL annealing, steps": training["kl_annealing_steps"], "steps": training["steps"],
        "aggregate older than, s": training["aggregate older than, s"], "clip norm": training["clip_norm"],
    }  # fmt: skip
    return factor_values(rank1_of(setting)) | {name: float(value) for name, value in found.items()}


def network_options(text: str) -> dict[str, Any]:
    """The options of a network's text.

    >>> network_options("records(dense=32, hidden=512)")
    {'dense': 32, 'hidden': 512}
    """
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


def column_of(setting: Setting, columns: tuple[str, ...]) -> str:
    """The column of a printed table that a setting fills.

    >>> from slimbayes.lab.experiments.rank1_settings import cauchy_cifar
    >>> column_of(cauchy_cifar(100), ("CIFAR-10, Normal", "CIFAR-100, Cauchy"))
    'CIFAR-100, Cauchy'
    """
    family = rank1_of(setting).posterior.capitalize()
    data = setting.data.upper().replace("CIFAR", "CIFAR-")
    return next(name for name in columns if name in (family, f"{data}, {family}"))


def compared(
    entry: Experiment, printed: Printed, ours: Mapping[str, Values], errata: Mapping[str, str]
) -> list[dict[str, Any]]:
    """A check of each printed row that we have: equal in every column, or as an erratum of the entry says.

    ``errata`` names rows whose printed value belongs to fewer epochs, with the sentence that says so: they are to be
    the printed ones times epochs / 200.
    """
    found = []
    for row in printed.rows:
        pairs = [
            (values[row], printed.value(row, column), values)
            for column, values in ours.items()
            if row in values
        ]
        if not pairs:
            continue
        stretched = row in errata
        factors = [values["epochs"] / _RUN_FOR if stretched else 1.0 for _, _, values in pairs]
        wanted = [factor * float(value or 0.0) for factor, (_, value, _) in zip(factors, pairs, strict=True)]
        gaps = [abs(value - want) for (value, _, _), want in zip(pairs, wanted, strict=True)]
        close = all(gap <= _ROUNDING * abs(want) for gap, want in zip(gaps, wanted, strict=True))
        if stretched:
            words = f"{row}: the printed one times epochs / {_RUN_FOR}, as the errata say; largest difference"
            found.append(
                check(words, close and errata[row] in entry.errata, max(gaps), f"0 at {wanted[0]:g}")
            )
        else:
            words = f"{row}: as printed in every column; largest difference"
            found.append(check(words, close, max(gaps), "0"))
    return found


def _report(
    name: str, values: Callable[[Setting, Printed], Values], errata: Mapping[str, str], deviations: list[str]
) -> Outcome:
    entry = find(name)
    (printed,) = entry.printed
    ours = {column_of(setting, printed.columns): values(setting, printed) for setting in entry.settings}
    table = Table(printed.name, printed.title, printed.columns)
    for row in printed.rows:
        cells = {column: ours[column][row] for column in printed.columns if row in ours[column]}
        if cells:
            table.add(row, cells, {})
    return Outcome([table], checks=compared(entry, printed, ours, errata), deviations=deviations)


def _on_images(setting: Setting, printed: Printed) -> Values:
    cores = printed.value(CORES, column_of(setting, printed.columns))
    assert cores is not None
    return image_values(setting, cores)


_CORES = (
    "The paper's cores are not ours: its number of them divides the B · K rows of our step, each image counted once "
    "for each component."
)


def table5(session: Session, setting: str) -> Outcome:
    """Table 5: rank-1 WRN-28-10 on CIFAR."""
    stretched = dict.fromkeys((f"{which} decay, epoch" for which in ORDINALS), rank1_tables.STEPS)
    words = "Decays are at the epochs at which the reference code has them, 250 / 200 times the printed ones."
    return _report("rank1/table5", _on_images, stretched, [_CORES, words])


def table6(session: Session, setting: str) -> Outcome:
    """Table 6: rank-1 ResNet-50 on ImageNet."""
    return _report("rank1/table6", _on_images, {}, [_CORES])


def table7(session: Session, setting: str) -> Outcome:
    """Table 7: rank-1 LSTMs on MIMIC-III, whose settings are known and whose networks are not run."""
    words = "The networks themselves are not run: MIMIC-III is open to credentialed readers only."
    share = math.nan
    for one in find("rank1/table7").settings:
        if rank1_of(one).posterior == "cauchy":
            share = 100 * one.training["steps"] / one.training["kl_annealing_steps"]
    outcome = _report("rank1/table7", lambda one, _: record_values(one), {}, [words])
    what = "Cauchy: the weight of the KL when training stops, in %: Table 4's erratum has it below 1.8"
    outcome.checks.append(check(what, share < 1.8, share, "< 1.8"))
    return outcome
