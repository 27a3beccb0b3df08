"""What was to hold of the EMP paper's image tables, and whether it does."""

from __future__ import annotations

import functools
import itertools
from typing import Any

from slimbayes.lab.experiments.catalogue import find
from slimbayes.lab.experiments.emp_recipes import WAYS
from slimbayes.lab.experiments.networks import Recipe
from slimbayes.lab.experiments.outcome import FEWEST, Table, check, mean, standard_error
from slimbayes.training import Training

ORDER = ("ECMP", "EMP", "Dropout", "Vanilla")  # of the calibration error, from the lowest


@functools.cache
def parameters_of(network: str, label: str, shape: tuple[int, ...], outputs: int, setting: str) -> int:
    """Parameters of a row's network, counted without its memory.

    >>> parameters_of("wrn(depth=10, width=1)", "EMP", (1, 8, 8), 10, "cifar100")
    82082
    """
    way = WAYS[setting][label]
    recipe = Recipe(setting, "counted", label, network, "", way.method, Training(), way.layers, way.rest)
    return recipe.parameters(shape, outputs)


def parameter_checks() -> list[dict[str, Any]]:
    """The paper's own network has the parameters that it prints, whatever was trained here."""
    counts, main = find("emp/table3").table("parameters"), find("emp/table6").table("cifar100")
    assert counts is not None and main is not None
    network = "pyramidnet(depth=110, alpha=270)"
    count = functools.partial(parameters_of, network, shape=(3, 32, 32), outputs=100, setting="cifar100")
    base, found = count("Vanilla"), []
    for label in ("EMP", "ECMP", "Dropout"):
        number, wanted = count(label), counts.value(label, "PyramidNet")
        words = f"PyramidNet on CIFAR-100, {label}: parameters equal the paper's"
        found.append(check(words, number == wanted, number, f"{wanted:,.0f}"))
        overhead, printed = 100 * (number / base - 1), main.value(label, "overhead_percent")
        words = f"PyramidNet on CIFAR-100, {label}: overhead in % as the paper prints it"
        found.append(check(words, f"{overhead:.2f}" == f"{printed:.2f}", overhead, f"{printed:.2f}"))
    return found


def order_checks(table: Table) -> list[dict[str, Any]]:
    """ECE: ECMP below EMP below dropout below vanilla, by more than one standard error over at least three seeds."""
    found = []
    for low, high in itertools.pairwise(ORDER):
        ours, theirs = (table.rows[label].values["ece_percent"] for label in (low, high))
        error = standard_error(ours, theirs)
        gap = mean(theirs) - mean(ours)
        words = f"{table.title}: ECE of {low} below that of {high} by more than one standard error"
        bound = f"> {error:.3f} points" if error is not None else f"{FEWEST} seeds or more"
        found.append(check(words, error is not None and gap > error, gap, bound))
    return found


def accuracy_checks(table: Table, samples: int) -> list[dict[str, Any]]:
    """Accuracy of EMP and ECMP with all draws not below the vanilla network's."""
    base = table.mean("Vanilla", "accuracy")
    gains = {label: table.mean(label, "accuracy") - base for label in ("EMP", "ECMP")}
    words = f"{table.title}: accuracy at S = {samples} of"
    return [
        check(f"{words} {label} not below the vanilla network's", gain >= 0, gain, "≥ 0 points")
        for label, gain in gains.items()
    ]


def samples_checks(table: Table, label: str) -> list[dict[str, Any]]:
    """More draws calibrate EMP and ECMP better."""
    rows = [row for row in table.rows if row.startswith("S = ")]
    first, last = (table.mean(row, "ece_percent") for row in (rows[0], rows[-1]))
    words = f"{table.title}: ECE of {label} at {rows[-1]} below that at {rows[0]}"
    return [check(words, last < first, first - last, "> 0 points")]


def robust_checks(table: Table, metric: str) -> list[dict[str, Any]]:
    """EMP and ECMP have a lower mean error under corruption than dropout and the vanilla network."""
    found = []
    for label in ("EMP (BN+out)", "ECMP (BN+out)"):
        for other in ("Dropout", "Vanilla"):
            if any(metric not in table.rows[row].values for row in (label, other)):
                continue
            gap = table.mean(other, metric) - table.mean(label, metric)
            words = f"{table.title}: {label} below {other} on average over the types"
            found.append(check(words, gap > 0, gap, "> 0 points"))
    return found
