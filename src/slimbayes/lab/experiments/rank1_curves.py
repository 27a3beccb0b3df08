"""What the rank-1 paper's tables and figures on CIFAR and ImageNet have in common: columns, averages, severities."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from slimbayes.lab.experiments.entry import Printed
from slimbayes.lab.experiments.outcome import Outcome, Table, curve, mean

CLEAN = ("nll", "accuracy", "ece")
BOTH = (*CLEAN, "c_nll", "c_accuracy", "c_ece")
Corrupted = dict[str, list[dict[str, float]]]  # figures by type of corruption, a list over severities


def averaged(found: Corrupted) -> dict[str, float]:
    """Figures under corruption: the mean over types within a severity, then over severities.

    >>> found = {"fog": [{"nll": 1.0}, {"nll": 2.0}], "frost": [{"nll": 3.0}, {"nll": 4.0}]}
    >>> averaged(found)
    {'c_nll': 2.5}
    """
    names = next(iter(found.values()))[0]
    return {f"c_{name}": mean([mean([one[name] for one in by]) for by in found.values()]) for name in names}


def by_severity(
    name: str,
    title: str,
    statistic: str,
    found: Mapping[str, Sequence[Corrupted]],
    levels: Sequence[int] = (),
) -> Outcome:
    """Every metric of each row's seeds by severity (1, 2, … or ``levels``), the mean or the median over types.

    >>> fog, frost = ([dict.fromkeys(CLEAN, value)] for value in (1.0, 3.0))
    >>> outcome = by_severity("x", "X", "median", {"row": [{"fog": fog, "frost": frost, "snow": frost}]})
    >>> outcome.tables[0].rows["row"].values, outcome.curves[0]["title"]
    ({'1': [3.0]}, 'X: nll by severity, median over types')
    """
    outcome = Outcome()
    over = statistics.median if statistic == "median" else mean
    number = len(next(iter(next(iter(found.values()))[0].values())))
    severities = list(levels) or list(range(1, number + 1))
    for metric in CLEAN:
        words = f"{title}: {metric} by severity, {statistic} over types"
        table = Table(f"{name}-{metric}", words, tuple(map(str, severities)))
        lines = []
        for label, seeds in found.items():
            ys = [[over([by[i][metric] for by in one.values()]) for i in range(number)] for one in seeds]
            for y in ys:
                table.add(label, dict(zip(table.columns, y, strict=True)), {})
            lines.append((label, list(map(float, severities)), ys))
        outcome.tables.append(table)
        outcome.curves.append(curve(f"{name}-{metric}", words, "severity", metric, lines))
    return outcome


def beside(table: Table, others: Sequence[Printed]) -> list[Table]:
    """The same rows once more for every other printed table, with the columns that it has."""
    found = []
    for other in others:
        copy = table.select(*[name for name in other.columns if name in table.columns])
        copy.name, copy.title = other.name, f"{table.title}: beside {other.title}"
        found.append(copy)
    return found
