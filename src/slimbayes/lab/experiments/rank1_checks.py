"""What was to hold of the rank-1 paper's image networks, and whether it does."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import Any

from slimbayes.lab.experiments.entry import COLUMNS
from slimbayes.lab.experiments.networks import Recipe
from slimbayes.lab.experiments.outcome import FEWEST, Table, check, mean, standard_error
from slimbayes.lab.experiments.rank1_recipes import BATCH_ENSEMBLE, CAUCHY, DETERMINISTIC, GAUSSIAN, rows_of
from slimbayes.training import Training

_NEAR = (0.85, 1.15)  # times what is predicted; chosen when the first run had been seen


@functools.cache
def parameters_of(setting: str, label: str, network: str, shape: tuple[int, ...], outputs: int) -> int:
    """Parameters of a row's network, counted without its memory.

    >>> parameters_of("cifar10", "Rank-1 Gaussian", "wrn(depth=16, width=4)", (3, 32, 32), 10)
    2783200
    """
    row = rows_of(setting)[label]
    recipe = Recipe(setting, "counted", label, network, "", row.method, Training(), row.layers)
    return recipe.parameters(shape, outputs)


def ahead(
    what: str, better: Sequence[float], worse: Sequence[float], lower: bool = True, paired: bool = False
) -> dict[str, Any]:
    """Whether one mean over seeds is better than another by more than one standard error.

    ``paired``: the two are of the same networks, seed by seed. ``lower``: smaller is better.

    >>> ahead("x", [1.0, 1.1, 0.9], [2.0, 2.1, 1.9])["holds"], ahead("x", [1.0], [2.0])["bound"]
    (True, '3 seeds or more')
    """
    gaps = [(b - a) * (1 if lower else -1) for a, b in zip(better, worse, strict=False)]
    if min(len(better), len(worse)) < FEWEST:
        return check(what, False, mean(gaps), f"{FEWEST} seeds or more")
    own = statistics.stdev(gaps) / len(gaps) ** 0.5
    error = own if paired else standard_error(better, worse) or 0.0
    gap = (mean(worse) - mean(better)) * (1 if lower else -1)
    return check(f"{what} by more than one standard error", gap > error, gap, f"> {error:.4g}")


def order_checks(table: Table) -> list[dict[str, Any]]:
    """Rank-1 networks below BatchEnsemble below the deterministic network in NLL and ECE, clean and corrupted."""
    found = []
    names = {"nll": "NLL", "ece": "ECE", "c_nll": "NLL under corruption", "c_ece": "ECE under corruption"}
    pairs = ((GAUSSIAN, BATCH_ENSEMBLE), (CAUCHY, BATCH_ENSEMBLE), (BATCH_ENSEMBLE, DETERMINISTIC))
    for column, name in names.items():
        for low, high in pairs:
            if low in table.rows and high in table.rows:
                ours, theirs = (table.rows[label].values[column] for label in (low, high))
                found.append(ahead(f"{table.title}: {name} of {low} below that of {high}", ours, theirs))
    return found


def absolute_checks(table: Table) -> list[dict[str, Any]]:
    """The rank-1 Gaussian WRN-28-10 on CIFAR-10 after a shortened schedule: NLL, accuracy and ECE."""
    bounds = {"nll": ("NLL", 0.15), "accuracy": ("accuracy", 95.5), "ece": ("ECE", 0.012)}
    found = []
    for label in [label for label in table.rows if label.startswith(GAUSSIAN)]:
        for column, (name, bound) in bounds.items():
            value = table.mean(label, column)
            holds, sign = (value >= bound, "≥") if column == "accuracy" else (value <= bound, "≤")
            found.append(check(f"{table.title}, {label}: {name}", holds, value, f"{sign} {bound:g}"))
    return found


def row_checks(
    table: Table,
    best: str,
    others: Sequence[str],
    columns: dict[str, str],
    paired: bool = False,
) -> list[dict[str, Any]]:
    """One row ahead of others in some columns: below them where lower is better, else above."""
    found = []
    for column, name in columns.items():
        lower = COLUMNS[column].better == "lower"
        for other in others:
            if best in table.rows and other in table.rows:
                words = f"{table.title}: {name} of {best!r} {'below' if lower else 'above'} that of {other!r}"
                ours, theirs = (table.rows[label].values[column] for label in (best, other))
                found.append(ahead(words, ours, theirs, lower, paired))
    return found


def collapse_checks(table: Table) -> list[dict[str, Any]]:
    """Ways that keep components apart do, and are better calibrated; the spread is that of the KL alone.

    What the likelihood does to the spread is read off BatchEnsemble, which has no KL.
    """
    better = {"spread": "spread", "ece": "ECE", "c_ece": "ECE under corruption"}
    found = []
    for label in ("KL averaged", "KL of the mixture", "KL from 40 %"):
        found += row_checks(table, label, ("KL summed",), better)
    share = table.mean(BATCH_ENSEMBLE, "spread") / table.mean(BATCH_ENSEMBLE, "predicted")
    for label, row in table.rows.items():
        if "predicted" in row.values and label != BATCH_ENSEMBLE:
            ratio = table.mean(label, "spread") / (share * table.mean(label, "predicted"))
            words = f"{table.title}, {label}: spread over that by the KL alone, times {BATCH_ENSEMBLE}'s"
            found.append(check(words, _NEAR[0] <= ratio <= _NEAR[1], ratio, f"{_NEAR[0]:g} to {_NEAR[1]:g}"))
    return found


def imagenet_checks(table: Table) -> list[dict[str, Any]]:
    """Rank-1 networks ahead of BatchEnsemble and of the deterministic network in everything that Table 1 has."""
    columns = {
        "nll": "NLL",
        "ece": "ECE",
        "c_nll": "NLL under corruption",
        "c_ece": "ECE under corruption",
        "mce": "mCE",
        "accuracy": "accuracy",
        "c_accuracy": "accuracy under corruption",
    }
    others = (BATCH_ENSEMBLE, DETERMINISTIC)
    return [found for best in (GAUSSIAN, CAUCHY) for found in row_checks(table, best, others, columns)]


def disagreement_checks(table: Table) -> list[dict[str, Any]]:
    """Members of rank-1 networks disagree more than BatchEnsemble's, at equal or better accuracy."""
    ours, theirs = (table.rows[label].values for label in (GAUSSIAN, BATCH_ENSEMBLE))
    words = f"{table.title}: disagreement of {GAUSSIAN} above that of {BATCH_ENSEMBLE}"
    more = ahead(words, ours["disagreement"], theirs["disagreement"], lower=False)
    error = standard_error(ours["accuracy"], theirs["accuracy"])
    gap = mean(ours["accuracy"]) - mean(theirs["accuracy"])
    words = f"{table.title}: accuracy of {GAUSSIAN} not below that of {BATCH_ENSEMBLE} by a standard error"
    bound = f"{FEWEST} seeds or more" if error is None else f"≥ −{error:.3g} points"
    return [more, check(words, error is not None and gap >= -error, gap, bound)]
