"""The rank-1 paper's parameter counts: every row of Tables 1 to 3, from the networks and methods of our settings.

With S = Σ_layers (inputs + outputs), channels for convolutions, K components and C classes,

    BatchEnsemble: base + K S + (K − 1) C,   rank-1: base + 2 K S + (K − 1) C

since every component has a bias of the output layer of its own. Norms are counted without their running statistics.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
from torch import nn

from slimbayes.core.convert import bayesianize
from slimbayes.core.methods import BatchEnsemble, Rank1
from slimbayes.lab.experiments.catalogue import find
from slimbayes.lab.experiments.entry import Experiment, Printed, Setting
from slimbayes.lab.experiments.outcome import check
from slimbayes.lab.models.text import network_builder
from slimbayes.verbs.method_text import parse_stored

SHAPES = {
    "cifar10": ((3, 32, 32), 10), "cifar100": ((3, 32, 32), 100), "imagenet": ((3, 224, 224), 1000),
}  # fmt: skip
COUNTED = ("rank1/table1", "rank1/table2", "rank1/table3")
COLUMN = "parameters_m"
_QUOTED = re.compile(r"MCMC, (\d+) samples")  # rows of other papers: so many networks
_WHOLE = 50.0  # millions from which the paper prints no decimals; 146.7 and 230.4 are its exceptions


def network(setting: Setting) -> nn.Module:
    """The plain network of a setting on the meta device: shapes without numbers.

    >>> from slimbayes.lab.experiments.rank1_settings import gaussian_cifar
    >>> sum(p.numel() for p in network(gaussian_cifar(10)).parameters())
    36479194
    """
    if setting.data not in SHAPES:
        raise ValueError(
            f"{setting.name}: shapes of {setting.data!r} are not known, those of {', '.join(SHAPES)} are"
        )
    with torch.device("meta"):
        return network_builder(setting.network)(*SHAPES[setting.data])


def parameters_of(setting: Setting, label: str) -> int:
    """All trained numbers of a row: the setting's network, converted by the method that ``label`` names.

    The whole network is counted as the paper counts it: every component and member, means and spreads, norms without
    their running statistics. Nothing is allocated, and a count is made once.

    Args:
        setting: of Tables 1 to 3, as ``find("rank1/table2").settings`` or ``rank1_settings`` have it.
        label: a key of ``setting.methods``, which is the row's label in the printed table.

    >>> from slimbayes.lab.experiments.rank1_settings import cauchy_cifar, gaussian_cifar
    >>> parameters_of(gaussian_cifar(10), "Rank-1 Gaussian"), parameters_of(cauchy_cifar(100), "Rank-1 Cauchy")
    (36635872, 36694552)
    """
    if label not in setting.methods:
        raise ValueError(f"{setting.name} has no row {label!r}; it has {', '.join(setting.methods)}")
    return _count(setting.network, setting.data, setting.methods[label])


@functools.cache
def _count(text: str, data: str, method: str) -> int:
    plain = network(Setting("counted", text, data, {}, {}))
    with torch.device("meta"):
        return sum(p.numel() for p in bayesianize(plain, parse_stored(method)).parameters())


def counts(name: str) -> dict[str, int]:
    """Parameters of every row of Table 1, 2 or 3; the rows quoted from MCMC papers are so many whole networks.

    >>> counts("rank1/table1")["Rank-1 Gaussian"], counts("rank1/table1")["MCMC, 9 samples"]
    (25977144, 230013288)
    """
    entry, printed = _table(name)
    rows = {label: parameters_of(setting, label) for setting in entry.settings for label in setting.methods}
    for label in printed.rows:
        if quoted := _QUOTED.fullmatch(label):
            rows[label] = int(quoted[1]) * rows["Deterministic"]
    return {label: rows[label] for label in printed.rows}


def factors(setting: Setting) -> int:
    """S = Σ_layers (inputs + outputs) over convolutions, by channels, and dense layers.

    >>> from slimbayes.lab.experiments.rank1_settings import gaussian_cifar
    >>> factors(gaussian_cifar(10)), factors(gaussian_cifar(100))
    (19581, 19671)
    """
    weights = [m.weight for m in network(setting).modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return sum(weight.shape[0] + weight.shape[1] for weight in weights)


def closed_form(setting: Setting, label: str) -> int | None:
    """The count by the formula, base + (1 or 2) K S + (K − 1) C; None for methods that have no factors.

    >>> from slimbayes.lab.experiments.rank1_settings import imagenet
    >>> closed_form(imagenet()[2], "Rank-1 Gaussian"), closed_form(imagenet()[1], "BatchEnsemble")
    (25977144, 25768588)
    """
    method = parse_stored(setting.methods[label])
    if not isinstance(method, Rank1 | BatchEnsemble):
        return None
    base = sum(p.numel() for p in network(setting).parameters())
    spreads = 2 if isinstance(method, Rank1) else 1  # a location and a scale
    classes = SHAPES[setting.data][1]
    return base + spreads * method.components * factors(setting) + (method.components - 1) * classes


def overhead(setting: Setting, components: int, spreads: int = 2) -> float:
    """What K components of rank-1 factors add to a network, in % (``spreads`` = 1: BatchEnsemble's).

    >>> from slimbayes.lab.experiments.rank1_settings import imagenet
    >>> [round(overhead(imagenet()[2], k), 2) for k in (1, 4, 10)], round(overhead(imagenet()[2], 10, 1), 2)
    ([0.41, 1.64, 4.12], 2.08)
    """
    method = Rank1.paper(components=components) if spreads == 2 else BatchEnsemble(components=components)
    base = sum(p.numel() for p in network(setting).parameters())
    with torch.device("meta"):
        found = sum(p.numel() for p in bayesianize(network(setting), method).parameters())
    return 100 * (found / base - 1)


def precision(printed: float) -> float:
    """Half of the last digit of a count in millions as the paper prints it: 36.6M, 36.68M, 146M.

    >>> precision(36.6), precision(36.68), precision(146.0), precision(146.7)
    (0.05, 0.005, 0.5, 0.05)
    """
    decimals = len(repr(printed).partition(".")[2])
    return 0.5 if printed >= _WHOLE and printed.is_integer() else 0.5 * 10.0**-decimals


def stated(entry: Experiment, millions: float) -> str | None:
    """The erratum that has this count, to the digits that it gives; None where none has.

    >>> stated(find("rank1/table2"), 36.530536)
    'Four WRN-28-5 are printed with 36.68M parameters; they have 36.53M.'
    """
    for sentence in entry.errata:
        for number in re.findall(r"have (\d+\.\d+)M", sentence):
            if f"{millions:.{len(number.partition('.')[2])}f}" == number:
                return sentence
    return None


def parameter_checks(name: str) -> list[dict[str, Any]]:
    """Every row of Table 1, 2 or 3: the count as printed, or as the erratum of the entry has it, and by the formula."""
    entry, printed = _table(name)
    found = [_printed_check(entry, printed, label, number) for label, number in counts(name).items()]
    for setting in entry.settings:
        for label in setting.methods:
            if (wanted := closed_form(setting, label)) is not None:
                number = parameters_of(setting, label)
                words = f"{label}: parameters are base + {_multiple(setting, label)} Σ(inputs + outputs) + (K − 1) C"
                found.append(check(words, number == wanted, number, f"{wanted:,}"))
    return found


def _printed_check(entry: Experiment, printed: Printed, label: str, number: int) -> dict[str, Any]:
    value, wanted = number / 1e6, printed.value(label, COLUMN)
    assert wanted is not None
    if quoted := _QUOTED.fullmatch(
        label
    ):  # the other papers' networks, each rounded before they are multiplied
        samples, one = int(quoted[1]), printed.value("Deterministic", COLUMN)
        assert one is not None
        words = f"{label}: {samples} times the printed parameters of one network, in millions"
        return check(words, f"{samples * one:.1f}" == f"{wanted:.1f}", samples * one, f"{wanted:g}")
    if abs(value - wanted) <= precision(wanted):
        return check(f"{label}: parameters in millions as printed", True, value, f"{wanted:g}")
    words = f"{label}: parameters in millions as the erratum has them, not as printed"
    return check(words, stated(entry, value) is not None, value, f"{wanted:g} is printed")


def _multiple(setting: Setting, label: str) -> str:
    return "2 K" if isinstance(parse_stored(setting.methods[label]), Rank1) else "K"


def _table(name: str) -> tuple[Experiment, Printed]:
    """An entry, and the paper's own table in it."""
    if name not in COUNTED:
        raise ValueError(f"{name} has no column of parameters; {', '.join(COUNTED)} have one")
    entry = find(name)
    return entry, entry.printed[0]
