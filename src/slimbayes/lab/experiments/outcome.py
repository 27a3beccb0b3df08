"""What a runner brings: tables over seeds, curves, maps and checks, and the document they make."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FEWEST = 3  # seeds that a standard error needs


@dataclass
class Row:
    """A row of a table: per column one number per seed, and errors over test examples."""

    values: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class Table:
    """Rows by label.

    >>> table = Table("mnist", "MNIST", ("nll",))
    >>> for nll in (0.1, 0.3): table.add("Mean-field", {"nll": nll}, {"nll": 0.01})
    >>> table.mean("Mean-field", "nll"), table.document()["rows"][0]["values"]
    (0.2, {'nll': [0.1, 0.3]})
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: dict[str, Row] = field(default_factory=dict)
    over: str = "seeds"  # what the numbers of a row are over

    def add(self, label: str, values: Mapping[str, float], errors: Mapping[str, float]) -> None:
        """Add one seed's numbers."""
        row = self.rows.setdefault(label, Row())
        for name in self.columns:
            if name in values:
                row.values.setdefault(name, []).append(float(values[name]))
            if name in errors:
                row.errors.setdefault(name, []).append(float(errors[name]))

    def take(self, label: str, row: Row) -> None:
        """A row of another table."""
        self.rows[label] = row

    def derive(self, column: str, function: Callable[[dict[str, float]], float]) -> None:
        """A further column, from the others of the same seed."""
        self.columns = (*self.columns, column)
        for row in self.rows.values():
            count = len(next(iter(row.values.values())))
            row.values[column] = [function({k: v[i] for k, v in row.values.items()}) for i in range(count)]

    def select(self, *columns: str) -> Table:
        """The same rows with some of the columns."""
        rows = {
            label: Row(
                {c: row.values[c] for c in columns if c in row.values},
                {c: row.errors[c] for c in columns if c in row.errors},
            )
            for label, row in self.rows.items()
        }
        return Table(self.name, self.title, columns, rows, self.over)

    def mean(self, label: str, column: str) -> float:
        """Over seeds."""
        return mean(self.rows[label].values[column])

    def document(self) -> dict[str, Any]:
        """As results hold it."""
        rows = [
            {"label": label, "values": row.values, "errors": {c: mean(e) for c, e in row.errors.items()}}
            for label, row in self.rows.items()
        ]
        found = {"name": self.name, "title": self.title, "columns": list(self.columns), "rows": rows}
        return found if self.over == "seeds" else {**found, "over": self.over}


@dataclass
class Outcome:
    """The parts of a result that the runner knows, of one setting."""

    tables: list[Table] = field(default_factory=list)
    curves: list[dict[str, Any]] = field(default_factory=list)
    maps: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    deviations: list[str] = field(default_factory=list)


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean.

    >>> mean([1.0, 3.0])
    2.0
    """
    return sum(values) / len(values)


def standard_error(*groups: Sequence[float]) -> float | None:
    """Of a difference of means over independent seeds, √Σ sd²/n; None with fewer than three.

    >>> standard_error([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]), standard_error([1.0], [2.0])
    (0.5773502691896257, None)
    """
    if min(map(len, groups)) < FEWEST:
        return None
    return math.sqrt(sum(statistics.variance(group) / len(group) for group in groups))


def check(what: str, holds: bool, value: float, bound: str) -> dict[str, Any]:
    """Something that was to hold, and whether it does."""
    return {"what": what, "holds": bool(holds), "value": float(value), "bound": bound}


def curve(
    name: str, title: str, x: str, y: str, lines: Sequence[tuple[str, Sequence[float], Sequence[Sequence[float]]]],
    log_x: bool = False, log_y: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Lines over one axis: (label, x, [y of each seed])."""
    drawn = [{"label": label, "x": list(xs), "y": [list(one) for one in ys]} for label, xs, ys in lines]
    return {"name": name, "title": title, "x": x, "y": y, "log_x": log_x, "log_y": log_y, "lines": drawn}
