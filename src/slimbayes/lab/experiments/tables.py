"""Tables of results: ours beside the paper's, cell by cell, as markdown and as HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slimbayes.lab.experiments.entry import COLUMNS, Column, Printed
from slimbayes.lab.report.examples import text
from slimbayes.lab.report.panels import printable
from slimbayes.lab.report.results import number
from slimbayes.lab.report.statistics import Stat, stat

NONE = "–"
_ARROWS = {"lower": " ↓", "higher": " ↑"}


@dataclass(frozen=True)
class Cell:
    """Our numbers and the paper's for one row and column; ``examples`` is a standard error over test examples."""

    ours: Stat | None = None
    examples: float | None = None
    paper: float | None = None
    paper_error: float | None = None


@dataclass(frozen=True)
class Table:
    """A table of a result beside the one printed in the paper; either may be missing."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    ours: bool
    printed: bool
    error_of: str
    over: str = "seeds"  # what our means are over

    def cells(self) -> list[Cell]:
        """Every cell."""
        return [cell for _, row in self.rows for cell in row]


def join(table: Mapping[str, Any] | None, printed: Printed | None) -> Table:
    """Ours beside the paper's: the paper's rows and columns in its order, then those that only we have.

    >>> rows = [{"label": "1-tied", "values": {"nll": [0.5, 0.7]}}]
    >>> ours = {"name": "mnist", "title": "MNIST", "columns": ["nll"], "rows": rows}
    >>> print(markdown(join(ours, Printed("mnist", "MNIST", ("nll",), {"1-tied": (0.439,)}))))
    | | NLL ↓, ours | NLL ↓, paper |
    |---|---:|---:|
    | 1-tied | 0.600 ± 0.100 | 0.439 |
    """
    mine = {row["label"]: row for row in table["rows"]} if table else {}
    keys = list(dict.fromkeys((*(printed.columns if printed else ()), *(table["columns"] if table else ()))))
    labels = list(dict.fromkeys((*(printed.rows if printed else ()), *mine)))
    rows = tuple(
        (label, tuple(_cell(mine.get(label) or {}, printed, label, key) for key in keys)) for label in labels
    )
    source: Any = printed or table
    name, title = (
        (table["name"], table.get("title") or table["name"]) if table else (source.name, source.title)
    )
    columns = tuple(COLUMNS.get(key) or Column(str(key), "", -1) for key in keys)
    error_of = printed.error_of if printed and printed.errors else ""
    over = str((table or {}).get("over", "seeds"))
    return Table(name, title, columns, rows, bool(table), bool(printed), error_of, over)


def merged(tables: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Tables by name; those of one name are one, whose rows come from several settings.

    >>> one = {"name": "rmse", "columns": ["EMP"], "rows": [{"label": "Boston"}]}
    >>> [row["label"] for row in merged([one, {**one, "rows": [{"label": "Wine"}]}])["rmse"]["rows"]]
    ['Boston', 'Wine']
    """
    found: dict[str, Mapping[str, Any]] = {}
    for table in tables:
        before = found.get(table["name"])
        if before is not None:
            columns = dict.fromkeys((*before["columns"], *table["columns"]))
            table = {**before, "columns": list(columns), "rows": [*before["rows"], *table["rows"]]}
        found[table["name"]] = table
    return found


def _cell(row: Mapping[str, Any], printed: Printed | None, label: str, key: str) -> Cell:
    values = row.get("values", {}).get(key)
    return Cell(
        stat(number(value) for value in values) if values else None,
        number(row.get("errors", {}).get(key)),
        printed.value(label, key) if printed else None,
        printed.error(label, key) if printed else None,
    )


def figure(value: float, digits: int) -> str:
    """A number with so many decimals (−1: four significant digits), more where they would leave nothing of it.

    >>> figure(97.56, 1), figure(0.0004, 3), figure(1234567, 0), figure(-2.5, -1), figure(3.2e9, 2)
    ('97.6', '0.0004', '1,234,567', '−2.5', '3.2e+09')
    >>> figure(13779912, -1)
    '13,779,912'
    """
    if digits < 0 and 1e4 <= abs(value) < 1e15:  # counts, whose last digit may be what matters
        digits = 0
    plain = digits < 0 or (digits and abs(value) >= 1e7)
    shown = f"{value:.4g}" if plain else f"{value:,.{digits}f}"
    if value and not re.search("[1-9]", shown):
        shown = f"{value:.1g}"
    return shown.replace("-", "−", 1) if value < 0 else shown


def _decimals(value: float) -> int:
    rest = repr(value).partition(".")[2]
    return 0 if rest == "0" or "e" in repr(value) else len(rest)


def paper_text(cell: Cell, column: Column) -> str:
    """The paper's number, with every digit that the entry has.

    >>> paper_text(Cell(paper=0.1, paper_error=0.0125), Column("NLL"))
    '0.100 ± 0.0125'
    """
    if cell.paper is None:
        return NONE
    known = [value for value in (cell.paper, cell.paper_error) if value is not None]
    return " ± ".join(figure(value, max(column.digits, _decimals(value))) for value in known)


def our_parts(cell: Cell, column: Column, most: int) -> tuple[str, list[str]]:
    """Our number, and what stands after it: ± over seeds, the number of seeds where it is unusual, [± examples]."""
    if cell.ours is None:
        return NONE, []
    if cell.ours.mean is None:
        return "not finite", []
    after = []
    # a count is the same for every seed, and its ± 0 would say nothing
    if cell.ours.error is not None and (cell.ours.error or column.digits):
        after.append(f"± {figure(cell.ours.error, column.digits)}")
    if cell.ours.n != most:
        after.append(f"(n = {cell.ours.n})")
    if cell.examples is not None:
        after.append(f"[± {figure(cell.examples, column.digits)}]")
    return figure(cell.ours.mean, column.digits), after


def seeds(table: Table) -> int:
    """The most seeds that a cell has."""
    return max((cell.ours.n for cell in table.cells() if cell.ours), default=0)


def note(table: Table) -> str:
    """What the numbers of a table are, in sentences."""
    most, parts = seeds(table), []
    if not table.ours:
        parts.append("Not run at this scale: the paper's numbers alone.")
    elif most == 1:
        parts.append(f"Ours: one {table.over.removesuffix('s')}, so no standard error over {table.over}.")
    elif most:
        parts.append(f"Ours: mean ± standard error over {most} {table.over}.")
    if any(cell.examples is not None for cell in table.cells()):
        parts.append("[± ]: standard error over examples.")
    if any(cell.ours and cell.ours.mean is None for cell in table.cells()):
        parts.append("Not finite: at least one run gave no finite number.")
    if table.error_of:
        parts.append(f"The paper's ±: {table.error_of}.")
    if table.ours and not table.printed:
        parts.append("The paper prints no such table.")
    if any(column.better for column in table.columns):
        parts.append("↓ lower is better, ↑ higher is better.")
    return " ".join(parts)


def md(value: Any) -> str:
    """Any text, safe in a line of markdown and in a cell of its tables.

    >>> print(md("a|b <c> [d](e)"))
    a\\|b &lt;c&gt; \\[d\\](e)
    """
    plain = printable(str(value)).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~])", r"\\\1", plain)


def markdown(table: Table) -> str:
    """The table in markdown; without a printed one, ours alone."""
    most, sides = seeds(table), (", ours", ", paper") if table.printed else ("",)
    heads = [f"{md(c.title)}{_ARROWS.get(c.better, '')}{side}" for c in table.columns for side in sides]
    lines = ["| | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(heads)]
    for label, row in table.rows:
        texts = []
        for cell, column in zip(row, table.columns, strict=True):
            value, after = our_parts(cell, column, most)
            texts.append(" ".join((value, *after)))
            if table.printed:
                texts.append(paper_text(cell, column))
        lines.append(f"| {md(label)} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def html(table: Table) -> str:
    """The table for the page: it scrolls within its own box, and its first column stays in view."""
    most, span = seeds(table), 2 if table.printed else 1
    down = ' rowspan="2"' if table.printed else ""
    top = "".join(
        f'<th scope="{"colgroup" if span == 2 else "col"}" colspan="{span}" class="first">{text(c.title)}'
        f"{_arrow(c)}</th>"
        for c in table.columns
    )
    under = "<tr>{}</tr>".format(
        '<th scope="col" class="first">ours</th><th scope="col">paper</th>' * len(table.columns)
    )
    body = []
    for label, row in table.rows:
        cells = []
        for cell, column in zip(row, table.columns, strict=True):
            value, after = our_parts(cell, column, most)
            cells.append(f'<td class="first">{_value(value, after)}</td>')
            if table.printed:
                value, _, error = paper_text(cell, column).partition(" ± ")
                cells.append(f"<td>{_value(value, [f'± {error}'] if error else [])}</td>")
        body.append(f'<tr><th scope="row">{text(label)}</th>{"".join(cells)}</tr>')
    return (
        f'<div class="box"><h4>{text(table.title)}</h4><p class="note">{text(note(table))}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(table.title)}">'
        f'<table class="summary beside"><caption class="hidden">{text(table.title)}</caption>'
        f'<thead><tr><th scope="col"{down}><span class="hidden">Row</span></th>{top}</tr>'
        f"{under if table.printed else ''}</thead><tbody>{''.join(body)}</tbody></table></div></div>\n"
    )


def _value(value: str, after: list[str]) -> str:
    if value == NONE:
        return f'<span aria-label="none">{NONE}</span>'
    return text(value) + "".join(f'<span class="error">{text(part)}</span>' for part in after)


def _arrow(column: Column) -> str:
    if not column.better:
        return ""
    return (
        f'<span aria-hidden="true">{_ARROWS[column.better]}</span><span class="hidden">, '
        f"{column.better} is better</span>"
    )
