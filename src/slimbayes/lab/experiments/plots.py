"""Curves and maps of results as figures: the same numbers give the same figure, named by a hash of them."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from slimbayes.lab.report.panels import Panel, Plot, Style, axes, palette, printable, shorten
from slimbayes.lab.report.results import number
from slimbayes.lab.report.statistics import Stat, stat

DRAWING = 3  # raise it when figures are drawn differently: then every file counts as stale
_MARKS = 9  # markers on a line with many points
_SIZE, _ALONE = (3.4, 2.5), (5.4, 3.0)  # inches: a panel among others, and one by itself
_MARK = re.compile(r"<!-- numbers: ([0-9a-f]{64}) -->")
Line = tuple[str, list[tuple[float, Stat]]]


def plots(document: Mapping[str, Any]) -> list[Plot]:
    """The figures of a result, not yet rendered: its curves, then its maps."""
    curves = [curve for curve in document["curves"] if any(_points(line) for line in curve["lines"])]
    # Neighbours with the same axes and lines are panels of one figure, as papers print them.
    groups = [list(group) for _, group in groupby(curves, _kind)]
    names = [line["label"] for curve in curves for line in curve["lines"]]
    styles = palette(list(dict.fromkeys(names)))  # a label looks the same in every figure of the result
    made = [_curves(group, styles) for group in groups]
    made += [plot for item in document["maps"] if (plot := _maps(item)) is not None]
    used: set[str] = set()
    for plot in made:
        base = f"{slug(document['experiment'])}-{slug(plot.name)}"
        free = (base, *(f"{base}-{i}" for i in range(2, len(made) + 2)))
        plot.name = next(name for name in free if name not in used)
        used.add(plot.name)
    return made


def slug(name: str) -> str:
    """A name as part of a file's name and of an id.

    >>> slug("ktied/table2"), slug("../σ & µ")
    ('ktied-table2', 'x')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "x"


def apart(titles: Sequence[str]) -> list[str]:
    """What tells titles apart: without the words that all of them begin and end with.

    >>> apart(["MNIST: σ of the layers", "MNIST: μ of the layers"]), apart(["a b", "a b"])
    (['σ', 'μ'], ['a b', 'a b'])
    """
    words = [title.split() for title in titles]
    columns = list(zip(*words, strict=False))
    start = next((i for i, column in enumerate(columns) if len(set(column)) > 1), len(columns))
    ends = list(zip(*(list(reversed(one[start:])) for one in words), strict=False))
    stop = next((i for i, column in enumerate(ends) if len(set(column)) > 1), len(ends))
    found = [" ".join(one[start : len(one) - stop]).rstrip(":,") for one in words]
    return found if all(found) else list(titles)


def fingerprint(plot: Plot) -> str:
    """SHA-256 of all that a figure shows: words, legend, numbers."""
    panels = [[panel.alt, panel.width, panel.height] for panel in plot.panels]
    legend = [[name, vars(style)] for name, style in plot.legend]
    shown = [DRAWING, plot.title, plot.caption, panels, legend, plot.across, plot.header, plot.rows]
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()


def marked(svg: str, mark: str) -> str:
    """An SVG file that holds the fingerprint of its numbers.

    >>> mark_of(marked("<svg><g/></svg>", "0" * 64)) == "0" * 64
    True
    """
    return re.sub(r"(<svg[^>]*>)", rf"\1<!-- numbers: {mark} -->", svg, count=1)


def mark_of(svg: str) -> str | None:
    """The fingerprint that a file holds, None if it is none of ours."""
    found = _MARK.search(svg)
    return found[1] if found else None


def _kind(curve: Mapping[str, Any]) -> tuple[Any, ...]:
    logs = bool(curve.get("log_x")), bool(curve.get("log_y"))
    return curve["x"], curve["y"], logs, tuple(line["label"] for line in curve["lines"])


def _points(line: Mapping[str, Any]) -> list[tuple[float, Stat]]:
    xs = [number(x) for x in line["x"]]
    ys = [stat(number(values[i]) for values in line["y"]) for i in range(len(xs))]
    return [(x, y) for x, y in zip(xs, ys, strict=True) if x is not None]


def _curves(group: Sequence[Mapping[str, Any]], styles: Mapping[str, Style]) -> Plot:
    first, alone = group[0], len(group) == 1
    labels = list(dict.fromkeys(line["label"] for line in first["lines"]))
    panels, rows = [], []
    titles = [first["y"]] if alone else apart([curve["title"] for curve in group])
    for curve, title in zip(group, titles, strict=True):
        lines = [(line["label"], _points(line)) for line in curve["lines"]]
        panels.append(
            Panel(
                _draw_curve(curve, lines, title, styles),
                _ends(curve["title"], lines),
                *(_ALONE if alone else _SIZE),
            )
        )
        rows += [[curve["title"], label, x, y.mean, y.error] for label, points in lines for x, y in points]
    words = _seeds(titles, [max(len(line["y"]) for line in curve["lines"]) for curve in group])
    y = first["y"][:1].upper() + first["y"][1:]
    subjects = {curve["title"].split(": ")[0] for curve in group if ": " in curve["title"]}
    subject = f"{subjects.pop()}: " if len(subjects) == 1 else ""
    gaps = any(row[3] is None for row in rows)
    return Plot(
        first["name"],
        first["title"] if alone else f"{subject}{first['y'] if subject else y} by {first['x']}",
        f"{y} against {first['x']}. {words}"
        + (" A gap: at least one run gave no finite number." if gaps else ""),
        panels,
        ["curve", "line", first["x"], "mean", "standard error"],
        rows,
        [(label, styles[label]) for label in labels],
        across=min(3, len(group)),
    )


def _seeds(titles: Sequence[str], counts: Sequence[int]) -> str:
    """What the lines of a figure's panels are."""
    if set(counts) == {1}:
        return "One seed."
    if len(set(counts)) == 1:
        return f"Lines are means over {counts[0]} seeds, bands ± one standard error."
    each = ", ".join(f"{title}: {n}" for title, n in zip(titles, counts, strict=True))
    return f"Lines are means over seeds ({each}), bands ± one standard error where there are several."


def _ends(title: str, lines: Sequence[Line]) -> str:
    """What a curve shows, for those who do not see it: where each line starts and ends."""
    words = []
    for label, points in lines:
        known = [(x, y.mean) for x, y in points if y.mean is not None]
        if known:
            (x0, y0), (x1, y1) = known[0], known[-1]
            words.append(f"{label} from {y0:.3g} at {x0:g} to {y1:.3g} at {x1:g}")
    return f"{title}: {'; '.join(words)}"


def _draw_curve(
    curve: Mapping[str, Any], lines: Sequence[Line], title: str, styles: Mapping[str, Style]
) -> Callable[[Any], None]:
    def draw(figure: Any) -> None:
        ax = axes(figure, shorten(title, 44), shorten(curve["x"], 44), (0.17, 0.16, 0.81, 0.73))
        for label, points in lines:
            xs = [x for x, _ in points]
            ys = [math.nan if y.mean is None else y.mean for _, y in points]
            # a float spaces the markers evenly along the line as it is drawn, on logarithmic axes too
            every = 1 if len(xs) <= _MARKS else 1 / _MARKS
            ax.plot(xs, ys, **styles[label].line(markevery=every))
            errors = [y.error or 0.0 for _, y in points]
            if any(errors):
                low = [y - e for y, e in zip(ys, errors, strict=True)]
                high = [y + e for y, e in zip(ys, errors, strict=True)]
                ax.fill_between(xs, low, high, color=styles[label].colour, alpha=0.2, linewidth=0)
        for axis, on, values in (
            ("x", curve.get("log_x"), [x for _, points in lines for x, _ in points]),
            ("y", curve.get("log_y"), [y.mean for _, points in lines for _, y in points]),
        ):
            _scale(ax, axis, [v for v in values if v is not None and v > 0] if on else [])

    return draw


def _scale(ax: Any, axis: str, values: Sequence[float]) -> None:
    """A logarithmic axis with plain numbers at its ticks, where there are positive values."""
    if not values:
        return
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    getattr(ax, f"set_{axis}scale")("log", nonpositive="mask")
    where = getattr(ax, f"{axis}axis")
    if max(values) < 100 * min(values):  # one power of ten or none would be no scale
        where.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    where.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    where.set_minor_formatter(NullFormatter())


def _maps(item: Mapping[str, Any]) -> Plot | None:
    panels, rows = [], []
    size = _ALONE if len(item["panels"]) == 1 else _SIZE
    for panel in item["panels"]:
        values = [[number(value) for value in row] for row in panel["values"]]
        known = [value for row in values for value in row if value is not None]
        if not known:
            continue
        low, high = min(known), max(known)
        m, n = panel["shape"]
        alt = f"{item['title']}, {panel['label']}: {m} × {n} matrix, block means from {low:.3g} to {high:.3g}"
        panels.append(Panel(_draw_map(panel["label"], values, low, high), alt, *size))
        rows += [[panel["label"], i, *row] for i, row in enumerate(values)]
    if not panels:
        return None
    shapes = {f"{label}: {m} × {n}" for label, (m, n) in ((p["label"], p["shape"]) for p in item["panels"])}
    return Plot(
        item["name"],
        item["title"],
        f"Means of blocks of matrices ({', '.join(sorted(shapes))}), rows downwards. Every panel has its own scale; "
        "blue to red where there are both signs, with white at zero.",
        panels,
        ["matrix", "row", *(f"column {j}" for j in range(max(map(len, rows)) - 2))],
        [[*row, *[None] * (max(map(len, rows)) - len(row))] for row in rows],
        across=min(3, len(panels)),
    )


def _draw_map(label: str, values: list[list[float | None]], low: float, high: float) -> Callable[[Any], None]:
    signed = low < 0 < high
    most = max(-low, high)
    ends = (-most, most) if signed else (low, high if high > low else low + 1.0)
    look = {"cmap": "RdBu_r" if signed else "cividis", "vmin": ends[0], "vmax": ends[1]}
    look |= {"aspect": "auto", "interpolation": "nearest"}

    def draw(figure: Any) -> None:
        ax = axes(figure, shorten(printable(label), 44), "", (0.04, 0.05, 0.72, 0.82))
        ax.imshow([[math.nan if v is None else v for v in row] for row in values], **look)
        bar = axes(figure, "", "", (0.79, 0.05, 0.04, 0.82))
        steps = [[ends[0] + (ends[1] - ends[0]) * i / 63] for i in range(64)]
        bar.imshow(steps, origin="lower", extent=(0.0, 1.0, *ends), **look)
        for part in (ax, bar):
            part.grid(visible=False)
            part.set_xticks([])
        ax.set_yticks([])
        bar.yaxis.tick_right()

    return draw
