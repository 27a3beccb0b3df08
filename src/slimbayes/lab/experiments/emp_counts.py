"""The EMP paper's counts, Tables 1 and 3: parameters, overheads and ensemble sizes, counted on converted networks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.convert import bayesianize
from slimbayes.core.methods import ECMP, EMP, DeepEnsemble, DropConnect, MCDropout, MeanField, Method
from slimbayes.lab.experiments.catalogue import find
from slimbayes.lab.experiments.outcome import Outcome, Table, check
from slimbayes.lab.experiments.session import Session
from slimbayes.lab.models import DeepMLP, PyramidNet, resnet18
from slimbayes.verbs.summary import Summary, summary

COMPONENTS = 5
MLP, RESNET, PYRAMID = "MLP, L = H = 100", "ResNet-18", "PyramidNet"
_NORMED = "MLP, L = H = 100, with its norms"
_SHAPES = {MLP: (100,), _NORMED: (100,), RESNET: (3, 224, 224), PYRAMID: (3, 32, 32)}
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
# How many numbers a method that slimbayes does not have keeps for every weight.
PBP = 2  # a mean and a variance
MNFG = 300  # read off the paper's own overhead of 29,900 %: with which flows it was counted is not said


def network(name: str) -> nn.Module:
    """One of the paper's networks on the meta device: shapes without numbers.

    >>> sum(p.numel() for p in network("ResNet-18").parameters())
    11689512
    """
    with torch.device("meta"):
        if name == RESNET:
            return resnet18()
        return PyramidNet(110, 270, 100) if name == PYRAMID else DeepMLP(normalization=name == _NORMED)


def converted(name: str, method: Method, include: Any = None) -> Summary:
    """The summary of one of the paper's networks after a conversion.

    >>> converted("ResNet-18", EMP.paper(components=5, patch=("norm",))).overhead * 100  # doctest: +ELLIPSIS
    0.3285...
    """
    with torch.device("meta"):
        return summary(bayesianize(network(name), method, include=include))


def _everything(name: str, module: nn.Module) -> bool:
    return True


def methods(name: str) -> dict[str, tuple[Method, Any]]:
    """Rows of Table 3: the method, and which layers it takes where these are not its own choice.

    The residual networks drop the inputs of their norms, the MLP those of its dense layers.
    """
    dropped = None if name in (MLP, _NORMED) else _NORMS
    return {
        "EMP": (EMP.paper(components=COMPONENTS), None),
        "ECMP": (ECMP.paper(components=COMPONENTS), None),
        "Dropout": (MCDropout(0.005), dropped),
        "DropConnect": (DropConnect(0.005), None),
        "Explicit ensemble": (DeepEnsemble(COMPONENTS), None),
    }


@dataclass(frozen=True)
class Counted:
    """A row of Table 3 for one network: its parameters, and log2 of the networks that it can draw."""

    parameters: int
    log2_size: float


def count(name: str) -> dict[str, Counted]:
    """Every row of Table 3 for one of the networks.

    >>> count("MLP, L = H = 100")["EMP"]
    Counted(parameters=1129100, log2_size=232.19280948873623)
    """
    if name != MLP:
        return {
            label: _counted(name, label, converted(name, *chosen)) for label, chosen in methods(name).items()
        }
    plain, normed = methods(MLP), count(_NORMED)
    rows = {label: _counted(MLP, label, converted(MLP, *plain[label])) for label in list(plain)[2:]}
    # The paper's MLP is counted without its norms and patched with them: their own parameters are taken off again.
    own = sum(
        p.numel()
        for module in network(_NORMED).modules()
        if isinstance(module, _NORMS)
        for p in module.parameters()
    )
    for label in ("EMP", "ECMP"):
        rows[label] = Counted(normed[label].parameters - own, normed[label].log2_size)
    return {label: rows[label] for label in plain}


def _counted(name: str, label: str, found: Summary) -> Counted:
    layers = {row.name: row.base_parameters for row in found.rows}
    if label == "EMP":  # an index per layer
        size = len(layers) * math.log2(COMPONENTS)
    elif label == "ECMP":  # an index per element
        size = sum(layers.values()) * math.log2(COMPONENTS)
    elif label == "Dropout":
        size = float(inputs_of(name, layers))
    elif label == "DropConnect":  # weights; biases stay
        modules = dict(network(name).named_modules())
        size = float(sum(modules[layer].weight.numel() for layer in layers))
    else:
        size = math.log2(COMPONENTS)
    return Counted(found.parameters, size)


def inputs_of(name: str, layers: Mapping[str, Any]) -> int:
    """How many numbers enter these layers for one example: each is kept or dropped.

    >>> inputs_of("MLP, L = H = 100", {"hidden.0": 0, "output": 0})
    200
    """
    plain, total = network(name).eval(), 0

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal total
        total += inputs[0].numel()

    for layer, module in plain.named_modules():
        if layer in layers:
            module.register_forward_pre_hook(note)
    plain(torch.zeros(1, *_SHAPES[name], device="meta"))
    return total


def three_digits(value: float) -> float:
    """A number as Table 1 prints it.

    >>> three_digits(17.8827), three_digits(8553.39)
    (17.9, 8550.0)
    """
    return float(f"{value:.3g}")


def table1(session: Session, setting: str) -> Outcome:
    """Table 1: parameters in millions and overhead in percent, of ResNet-18 and PyramidNet."""
    outcome = Outcome()
    printed = find("emp/table1").table("overhead")
    assert printed is not None
    table = Table(printed.name, printed.title, printed.columns)
    for name in (RESNET, PYRAMID):
        base = sum(p.numel() for p in network(name).parameters())
        numbers = {
            "Mean-field Gaussian": converted(name, MeanField.paper(), _everything).parameters,
            "PBP": PBP * base,
            "MNFG": MNFG * base,
            "Dropout": converted(name, *methods(name)["Dropout"]).parameters,
            "EMP": converted(name, *methods(name)["EMP"]).parameters,
        }
        for label, number in numbers.items():
            cells = {name: number / 1e6, f"{name} overhead": 100 * (number / base - 1)}
            table.add(label, cells, {})
            for column, value in cells.items():
                if label in ("PBP", "MNFG"):
                    continue  # a factor times what is counted: nothing that could be wrong
                wanted = printed.value(label, column)
                words = f"{label}, {column}: the printed three digits"
                outcome.checks.append(check(words, three_digits(value) == wanted, value, f"{wanted:g}"))
    outcome.tables.append(table)
    outcome.checks.append(_norms_alone())
    outcome.deviations += [
        "Mean-field Gaussian takes every parameter, those of the norms too.",
        f"PBP and MNFG are not in slimbayes: {PBP} and {MNFG} numbers per weight of the counted network. The first is "
        "a mean and a variance, the second is read off the printed overhead. Neither is checked.",
    ]
    return outcome


def _norms_alone() -> dict[str, Any]:
    """Table 4 has the overhead of ResNet-18 whose norms alone are patched."""
    value = 100 * converted(RESNET, EMP.paper(components=COMPONENTS, patch=("norm",))).overhead
    words = "EMP with the norms alone patched, ResNet-18 overhead: the three digits of Table 4"
    return check(words, three_digits(value) == 0.328, value, "0.328")


def table3(session: Session, setting: str) -> Outcome:
    """Table 3: parameters to the last digit, and the sizes of the ensembles."""
    outcome = Outcome()
    printed = find("emp/table3").table("parameters")
    assert printed is not None
    table = Table(printed.name, printed.title, (*printed.columns, _NORMED))
    sizes = Table("sizes", "log2 of the number of networks that can be drawn, K = 5", (MLP, RESNET, PYRAMID))
    found = {name: count(name) for name in (MLP, RESNET, PYRAMID, _NORMED)}
    for label in printed.rows:
        table.add(label, {name: float(rows[label].parameters) for name, rows in found.items()}, {})
        sizes.add(label, {name: found[name][label].log2_size for name in sizes.columns}, {})
        for name in printed.columns:
            number, wanted = found[name][label].parameters, printed.value(label, name)
            words = f"{label}, {name}: parameters equal the paper's"
            outcome.checks.append(check(words, number == wanted, number, f"{wanted:,.0f}"))
    outcome.tables += [table, sizes]
    outcome.checks += _size_checks(found[MLP])
    outcome.deviations += [
        "EMP and ECMP of the MLP are counted as the paper counts: the patches of 99 norms and of the output, without "
        "the 99 norms themselves. The last column has the same MLP with them.",
        "Ensemble sizes are counted on the converted networks: an index per patched layer (EMP) or element (ECMP), a "
        "bit per dropped input or weight. Dropout stands before the norms of ResNet-18 and PyramidNet, DropConnect "
        "takes all convolutions and dense layers.",
    ]
    return outcome


def _size_checks(found: Mapping[str, Counted]) -> list[dict[str, Any]]:
    """The MLP's sizes against the formulas that the paper prints for L layers of width H."""
    layers = width = 100
    bits = math.log2(COMPONENTS)
    exact = {
        "EMP": ("K^L", layers * bits),
        "Dropout": ("2^(LH)", layers * width),
        "DropConnect": ("2^(LH²)", layers * width**2),
        "Explicit ensemble": ("K", bits),
    }
    checks = []
    for label, (formula, wanted) in exact.items():
        value = found[label].log2_size
        words = f"{label}, MLP: log2 of the ensemble's size is that of {formula}"
        checks.append(check(words, math.isclose(value, wanted), value, f"{wanted:.6g}"))
    ratio = found["ECMP"].log2_size / ((width**2 + layers * width) * bits)
    words = "ECMP, MLP: exponent as a multiple of H² + LH (a norm has a scale and a shift)"
    checks.append(check(words, 1 <= ratio <= 2, ratio, "1 to 2, as O(·) allows"))
    return checks
