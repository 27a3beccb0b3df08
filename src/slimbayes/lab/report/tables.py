"""The summary table: its columns, and its rows for the terminal, markdown and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slimbayes.extras import need
from slimbayes.files import formula_safe
from slimbayes.lab.report.choice import verdict
from slimbayes.lab.report.results import Results, label, number
from slimbayes.lab.report.statistics import Stat, cells, over_seeds, paired, stat

if TYPE_CHECKING:
    from rich.console import Console

# The first columns are those that a phone shows.
GROUPS = {"shifted": "Shifted", "clean": "Clean", "ood": "Out of distribution", "cost": "Cost"}


@dataclass(frozen=True)
class Column:
    """One column of the summary: where its value is from, how it is printed, and which way is better.

    ``better`` is "lower", "higher", a number to be close to, or None where no direction is better.
    """

    key: str
    group: str
    title: str
    metric: str
    better: str | float | None = None
    digits: int = 3
    scale: float = 1.0
    sign: bool = False

    def text(self, x: float) -> str:
        """A value as printed.

        >>> Column("overhead", "cost", "Overhead %", "overhead", scale=100.0, digits=1, sign=True).text(0.004)
        '+0.4'
        """
        x = x * self.scale
        if self.digits and x and abs(x) >= 1e5:
            return f"{x:.3g}"
        return f"{x:{'+' if self.sign else ''},.{self.digits}f}".replace("-", "−")

    def spread(self, error: float) -> str:
        """A standard error as printed: as many digits as the value."""
        return (
            f"{error * self.scale:,.{self.digits}f}"
            if error * self.scale < 1e5
            else f"{error * self.scale:.3g}"
        )


def _quality(task: str, where: str) -> list[Column]:
    if task == "classification":
        return [
            Column(f"{where}_nll", where, "NLL", "nll", "lower"),
            Column(f"{where}_accuracy", where, "Accuracy %", "accuracy", "higher", 1, 100.0),
            Column(f"{where}_ece", where, "ECE %", "ece", "lower", 1, 100.0),
        ]
    return [
        Column(f"{where}_nll", where, "NLL", "nll", "lower"),
        Column(f"{where}_rmse", where, "RMSE", "rmse", "lower"),
        Column(f"{where}_coverage_90", where, "Coverage 90, %", "coverage_90", 0.9, 1, 100.0),
        Column(f"{where}_width_90", where, "Width 90", "width_90", None, 2),
    ]


DIFFERENCE = Column("difference", "shifted", "Δ NLL to det.", "nll", "lower", sign=True)
_COST = [
    Column("parameters", "cost", "Parameters", "parameters", None, 0),
    Column("overhead", "cost", "Overhead %", "overhead", None, 1, 100.0, sign=True),
    Column("train_seconds", "cost", "Train s", "train_seconds", None, 1),
    Column("predict_ms", "cost", "Predict ms", "predict_seconds", None, 3),
]
_OOD = [
    Column("ood_auroc_entropy", "ood", "AUROC, entropy", "auroc_entropy", "higher"),
    Column("ood_auroc_mutual_information", "ood", "AUROC, MI", "auroc_mutual_information", "higher"),
]


def columns(results: Results) -> list[Column]:
    """The columns that have something to show, in the table's order."""
    common = cells(results)
    wanted = _quality(results.task, "clean")
    if common:
        wanted = wanted + _quality(results.task, "shifted")
    if results.baseline is not None and len(results.methods) > 1:
        where = "shifted" if common else "clean"
        wanted = [*wanted, Column(**{**vars(DIFFERENCE), "group": where})]
    rows = _rows(results, [*wanted, *_OOD, *_COST])
    kept = [c for c in [*wanted, *_OOD, *_COST] if any(row[c.key].mean is not None for row in rows)]
    # the difference stands before its group's own columns
    return sorted(kept, key=lambda column: (list(GROUPS).index(column.group), column.key != "difference"))


def summary_rows(results: Results | Mapping[str, Any]) -> list[dict[str, Any]]:
    """One dict per method: "name", "label", "seeds", and a Stat (mean, error, n) per column key.

    >>> runs = [{"seed": s, "clean": {"nll": 0.4 + 0.1 * s}} for s in range(3)]
    >>> rows = summary_rows({"format": "slimbayes-results", "version": 1, "task": "classification",
    ...                      "methods": [{"name": "Rank1", "runs": runs}]})
    >>> rows[0]["label"], rows[0]["clean_nll"]
    ('Rank1', Stat(mean=0.5, error=0.0577, n=3))
    """
    results = Results.of(results)
    return _rows(results, columns(results))


def _rows(results: Results, wanted: Sequence[Column]) -> list[dict[str, Any]]:
    common = cells(results)
    rows = []
    for method in results.methods:
        row: dict[str, Any] = {"name": method["name"], "label": label(method), "seeds": len(method["runs"])}
        for column in wanted:
            row[column.key] = _value(results, method, column, common)
        rows.append(row)
    return rows


def _value(results: Results, method: dict[str, Any], column: Column, common: list[tuple[str, str]]) -> Stat:
    if column.key == "difference":
        if method is results.baseline:
            return Stat(None, None, 0)
        where = "shifted" if common else "clean"
        return stat(paired(results, method, column.metric, where, common).values())
    if column.key in ("parameters", "overhead"):
        return Stat(number(method.get(column.metric)), None, 1)
    where = "run" if column.group == "cost" else column.group
    return over_seeds(method, column.metric, where, common)


def best(rows: Sequence[Mapping[str, Any]], column: Column) -> set[int]:
    """Which rows print the best mean of a column; none where no direction is better or only one row has it.

    >>> rows = [{"a": Stat(0.5, None, 1)}, {"a": Stat(0.4, None, 1)}, {"a": Stat(None, None, 1)}]
    >>> best(rows, Column("a", "clean", "A", "a", "lower"))
    {1}
    """
    known = {i: row[column.key].mean for i, row in enumerate(rows) if row[column.key].mean is not None}
    if column.better is None or len(known) < 2:
        return set()
    if isinstance(column.better, float):
        rank = {i: abs(mean - column.better) for i, mean in known.items()}
    else:
        rank = {i: mean if column.better == "lower" else -mean for i, mean in known.items()}
    first = min(rank, key=lambda i: rank[i])
    if column.key == "difference" and known[first] >= 0:
        return set()  # the deterministic network itself is the best
    winners = {i for i in known if column.text(known[i]) == column.text(known[first])}
    return set() if len(winners) == len(known) else winners


def cell_text(column: Column, entry: Stat) -> str:
    """A cell of plain text: mean ± standard error, or a dash.

    >>> cell_text(Column("nll", "clean", "NLL", "nll"), Stat(0.5, 0.01, 3))
    '0.500 ± 0.010'
    """
    if entry.mean is None:
        return "–"
    return column.text(entry.mean) + (f" ± {column.spread(entry.error)}" if entry.error is not None else "")


def seeds_note(results: Results) -> str:
    """What the ± in the table means for these results."""
    counts = sorted({len(method["runs"]) for method in results.methods})
    if counts == [1]:
        return "One seed per method: there is no standard error, and differences may be chance."
    some = " Methods with one seed have none." if counts and counts[0] == 1 else ""
    seeds = (
        f"{counts[0]} seeds"
        if len(counts) == 1
        else f"{counts[0]} to {counts[-1]} seeds"
        if counts
        else "no runs"
    )
    return f"Mean ± standard error over {seeds}.{some}"


def print_summary(results: Results | Mapping[str, Any], console: Console | None = None) -> None:
    """Print which method to take, the summary table and the verdict on the terminal; best means carry a star."""
    need("rich", "the terminal's table", "cli")
    from rich import box
    from rich.console import Console as RichConsole
    from rich.table import Table
    from rich.text import Text

    results = Results.of(results)
    console = console or RichConsole()
    first, *rest = verdict(results)
    console.print(Text(first, style="bold"))
    console.print()
    rows, wanted = summary_rows(results), columns(results)
    # what a method costs goes into a table of its own when the terminal is narrow
    parts = [wanted]
    if console.width < 30 + 16 * len(wanted):
        parts = [[c for c in wanted if c.group == group] for group in GROUPS]
    for part in [part for part in parts if part]:
        heading = results.title if part is wanted else f"{results.title} · {GROUPS[part[0].group].lower()}"
        table = Table(title=Text(heading), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("Method", overflow="fold")
        for column in part:
            group = f"{GROUPS[column.group]} " if part is wanted and column.group != "cost" else ""
            table.add_column(Text(group + column.title), justify="right", overflow="fold")
        marks = {column.key: best(rows, column) for column in part}
        for i, row in enumerate(rows):
            texts = [cell_text(c, row[c.key]) + (" ★" if i in marks[c.key] else "  ") for c in part]
            table.add_row(Text(row["label"]), *map(Text, texts))
        console.print(table)
    console.print(Text(f"{seeds_note(results)} ★ best mean of its column."))
    console.print(Text(" ".join(rest)))


def markdown_summary(results: Results | Mapping[str, Any]) -> str:
    """The summary as a markdown table, best means in bold."""
    results = Results.of(results)
    rows, wanted = summary_rows(results), columns(results)
    titles = [("" if c.group == "cost" else f"{GROUPS[c.group]} ") + c.title for c in wanted]
    lines = ["| Method | " + " | ".join(titles) + " |", "|---|" + "---:|" * len(wanted)]
    marks = {column.key: best(rows, column) for column in wanted}
    for i, row in enumerate(rows):
        texts = [cell_text(c, row[c.key]) for c in wanted]
        texts = [f"**{t}**" if i in marks[c.key] else t for t, c in zip(texts, wanted, strict=True)]
        name = row["label"].replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def csv_summary(results: Results | Mapping[str, Any]) -> str:
    """The summary as CSV: every column's mean and standard error, unscaled."""
    results = Results.of(results)
    wanted = columns(results)
    header = ["method", "label", "seeds", *(f"{c.key}{end}" for c in wanted for end in ("", "_error"))]
    body = [
        [
            row["name"],
            row["label"],
            row["seeds"],
            *(x for c in wanted for x in (row[c.key].mean, row[c.key].error)),
        ]
        for row in summary_rows(results)
    ]
    return to_csv(header, body)


def to_csv(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows as CSV text: floats at six significant digits, missing values empty.

    >>> print(to_csv(["a", "b"], [[1 / 3, None], ["x,y", 2]]), end="")
    a,b
    0.333333,
    "x,y",2
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([formula_safe(h) for h in header])
    writer.writerows([_field(x) for x in row] for row in rows)
    return out.getvalue()


def _field(x: Any) -> Any:
    if isinstance(x, float):
        return f"{x:.6g}" if math.isfinite(x) else ""
    return formula_safe(x)
