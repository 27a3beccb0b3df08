"""Figures of numbers over severities, seeds and training steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slimbayes.lab.report.panels import INK, MUTED, Panel, Plot, Style, axes, legend_of, printable, shorten
from slimbayes.lab.report.results import Results, label, number
from slimbayes.lab.report.statistics import (
    Cell,
    Stat,
    cells,
    margin,
    over_cells,
    paired,
    severity,
    signed,
    stat,
)

TITLES = {
    "nll": "NLL (lower is better)",
    "accuracy": "Accuracy (higher is better)",
    "ece": "ECE (lower is better)",
    "rmse": "RMSE (lower is better)",
    "coverage_90": "Coverage of the 90 % interval",
    "width_90": "Width of the 90 % interval",
}
BY_TASK = {"classification": ("nll", "accuracy", "ece"), "regression": ("nll", "rmse", "coverage_90")}
Point = tuple[float, Stat]


def difference(results: Results, table: Mapping[str, Style]) -> Plot | None:
    """Paired NLL differences to the deterministic network, shifted and clean: seeds, means and their margins."""
    common = cells(results)
    places = ("shifted", "clean") if common else ("clean",)
    found = []
    for method in results.methods:
        if method is not results.baseline:
            by_place = {where: paired(results, method, "nll", where, common) for where in places}
            entries = {where: stat(by_seed.values()) for where, by_seed in by_place.items()}
            if any(entry.mean is not None for entry in entries.values()):
                found.append((method, by_place, entries))
    if not found:
        return None

    def draw(figure: Any) -> None:
        # a row's height is constant, so the margins in parts of the figure shrink as rows are added
        top, bottom = 0.24 / height, 0.42 / height
        ax = axes(figure, "", "difference in NLL", (0.31, bottom, 0.66, 1 - top - bottom))
        ax.axvline(0.0, color=INK, linewidth=1.0)
        for i, (method, by_place, entries) in enumerate(found):
            for where in places:
                y = i if len(places) == 1 else i + (0.2 if where == "clean" else -0.12)
                _difference_row(ax, y, by_place[where].values(), entries[where], table[method["name"]],
                                where != places[0])  # fmt: skip
        ax.set_yticks(range(len(found)))
        names = [shorten(printable(label(method)), 22) for method, _, _ in found]
        ax.set_yticklabels(names, parse_math=False, color=INK)
        ax.set_ylim(len(found) - 0.5, -0.5)
        ax.grid(axis="y", visible=False)
        # which side is better must not need the caption
        low, high = ax.get_xlim()
        ax.set_xlim(min(low, -0.25 * high), max(high, -0.25 * low))
        for words, shift, side in (("← better", -5, "right"), ("worse →", 5, "left")):
            ax.annotate(words, (0.0, 1.0), (shift, 3), ax.get_xaxis_transform(), textcoords="offset points", ha=side,
                        va="bottom", color=MUTED, size=7.5)  # fmt: skip

    height = 0.66 + (0.25 if len(places) == 1 else 0.36) * len(found)
    words = "; ".join(
        f"{label(method)} "
        + ", ".join(f"{where} {signed(e.mean)}" for where, e in entries.items() if e.mean is not None)
        for method, _, entries in found
    )
    rows = [
        [method["name"], where, seed, v]
        for method, by_place, _ in found
        for where, by_seed in by_place.items()
        for seed, v in by_seed.items()
    ]
    return Plot(
        "difference",
        "Difference to the plain network",
        _difference_words(places, [entry.n for *_, entries in found for entry in entries.values()]),
        [Panel(draw, f"Paired NLL differences: {words}", 3.4, height)],
        ["method", "data", "seed", "difference"],
        rows,
        across=1,
    )


def _difference_row(
    ax: Any, y: float, seeds: Iterable[float | None], entry: Stat, style: Style, hollow: bool
) -> None:
    """A tick for each seed, and the mean with its margin; nothing where a seed has no finite value."""
    if entry.mean is None:
        return
    ax.plot(
        [v for v in seeds if v is not None], [y] * entry.n, "|", color=style.colour, markersize=7, alpha=0.7
    )
    wide = margin(entry.n) * entry.error if entry.error is not None else None
    ax.errorbar(entry.mean, y, xerr=wide, color=style.colour, marker=style.marker, capsize=3,
                markersize=5 if hollow else 6, elinewidth=0.9 if hollow else 1.8,
                **({"markerfacecolor": "none"} if hollow else {}))  # fmt: skip


def _difference_words(places: Sequence[str], counts: list[int]) -> str:
    which = "Filled: mean over shifted test data; open: clean." if len(places) > 1 else "On clean test data."
    least = min((n for n in counts if n > 1), default=1)
    bars = (
        f"Bars: two standard errors ({margin(least):.1f} with {least} seeds, Student's t); ticks: seeds. "
        "A bar that reaches zero shows no difference."
        if least > 1
        else "One seed: there is no bar."
    )
    return f"NLL minus the plain network's with the same seed; left of zero is better. {which} {bars}"


def _by_severity(method: Mapping[str, Any], metric: str, where: Sequence[Cell]) -> list[Point]:
    """(severity, mean over shifts with its error over seeds), clean data as severity 0."""
    points = [(0.0, stat(number(run["clean"].get(metric)) for run in method["runs"]))]
    for level in sorted({severity(key) for _, key in where}):
        chosen = [cell for cell in where if severity(cell[1]) == level]
        points.append((level, stat(over_cells(run, metric, chosen) for run in method["runs"])))
    return [(x, entry) for x, entry in points if entry.mean is not None]


def _severity_panel(
    results: Results, table: Mapping[str, Style], metric: str, where: Sequence[Cell], title: str
) -> tuple[Panel, list[list[Any]]]:
    lines = [(m, _by_severity(m, metric, where)) for m in results.methods]

    def draw(figure: Any) -> None:
        ax = axes(figure, shorten(title, 44), "severity (0 = clean)")
        if metric == "coverage_90":
            ax.axhline(0.9, color=INK, linewidth=0.8)
        for method, points in lines:
            xs, ys = [x for x, _ in points], [entry.mean for _, entry in points]
            errors = [entry.error or 0.0 for _, entry in points]
            ax.errorbar(xs, ys, yerr=errors, elinewidth=0.8, **table[method["name"]].line())
        ax.set_xticks(sorted({x for _, points in lines for x, _ in points}))

    rows = [[m["name"], metric, x, entry.mean, entry.error] for m, points in lines for x, entry in points]
    ends = [f"{label(m)} {p[0][1].mean:.3g} to {p[-1][1].mean:.3g}" for m, p in lines if p]
    return Panel(draw, f"{title}, from clean to the strongest shift: {'; '.join(ends)}"), rows


def severities(results: Results, table: Mapping[str, Style]) -> Plot | None:
    """The main metrics against severity, averaged over shifts."""
    common = cells(results)
    if not common:
        return None
    panels, rows = [], []
    for metric in BY_TASK[results.task]:
        panel, more = _severity_panel(results, table, metric, common, TITLES[metric])
        if more:
            panels.append(panel)
            rows += more
    return Plot(
        "severity",
        "Metrics by severity",
        "Mean over all shifts at each severity; bars are ± 1 standard error over seeds.",
        panels,
        ["method", "metric", "severity", "mean", "error"],
        rows,
        legend_of(results, table),
    ) if panels else None  # fmt: skip


def by_shift(results: Results, table: Mapping[str, Style]) -> Plot | None:
    """NLL against severity, one panel per shift."""
    common = cells(results)
    texts = {str(s.get("name")): str(s.get("description") or "") for s in results.data.get("shifts") or []}
    panels, rows = [], []
    for name in dict.fromkeys(shift for shift, _ in common):
        where = [cell for cell in common if cell[0] == name]
        panel, more = _severity_panel(results, table, "nll", where, name.replace("_", " "))
        panels.append(panel)
        for metric in BY_TASK[results.task]:
            extra = more if metric == "nll" else _severity_panel(results, table, metric, where, "")[1]
            rows += [[name, *row] for row in extra]
    if not panels:
        return None
    named = "; ".join(f"{n.replace('_', ' ')}: {t.rstrip('.')}" for n, t in texts.items() if t)
    return Plot(
        "shifts",
        "NLL by shift",
        "NLL against severity for each shift, each panel with an axis of its own; bars are ± 1 standard error "
        "over seeds." + (f" The shifts are {named}." if named else ""),
        panels,
        ["shift", "method", "metric", "severity", "mean", "error"],
        rows,
        legend_of(results, table),
    )


_CURVES = {
    "loss": "Training loss",
    "nll": "Training NLL",
    "kl": "KL divergence",
    "validation_nll": "Validation NLL",
}


def thin(points: list[tuple[float, float]], most: int = 120) -> list[tuple[float, float]]:
    """At most so many points of a curve: means over equal runs of neighbours, the last point kept.

    >>> thin([(float(i), float(i)) for i in range(6)], 3)
    [(0.5, 0.5), (2.5, 2.5), (5.0, 5.0)]
    """
    if len(points) <= most:
        return points
    size = -(-len(points) // most)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    means = [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
    return [*means[:-1], points[-1]]


def _curve(method: Mapping[str, Any], key: str) -> list[tuple[float, float]]:
    """A training quantity by step, averaged over the seeds that reached the step."""
    by_step: dict[float, list[float]] = {}
    for run in method["runs"]:
        for entry in run.get("history") or []:
            step, y = number(entry.get("step")), number(entry.get(key))
            if step is not None and y is not None:
                by_step.setdefault(step, []).append(y)
    return thin([(step, sum(ys) / len(ys)) for step, ys in sorted(by_step.items())])


def training(results: Results, table: Mapping[str, Style]) -> Plot | None:
    """Loss, NLL, KL and validation NLL by training step."""
    panels, rows = [], []
    for key, title in _CURVES.items():
        lines = [(m, _curve(m, key)) for m in results.methods]
        lines = [(m, points) for m, points in lines if points and (key != "kl" or any(y for _, y in points))]
        if not lines:
            continue
        panels.append(_training_panel(lines, title, table))
        rows += [[m["name"], key, x, y] for m, points in lines for x, y in points]
    if not panels:
        return None
    return Plot(
        "training",
        "Training curves",
        "Mean over seeds by training step. The loss is NLL plus the weighted KL divergence per example; methods "
        "without a KL term are left out of its panel. Long curves are thinned to means of neighbouring steps.",
        panels,
        ["method", "quantity", "step", "value"],
        rows,
        legend_of(results, table),
        across=2,
    )


def _training_panel(lines: list[Any], title: str, table: Mapping[str, Style]) -> Panel:
    values = [y for _, points in lines for _, y in points]
    logarithmic = min(values) > 0 and max(values) > 20 * min(values)

    def draw(figure: Any) -> None:
        ax = axes(figure, title + (" (log scale)" if logarithmic else ""), "step", (0.135, 0.16, 0.845, 0.73))
        for method, points in lines:
            every = max(1, len(points) // 6)
            options = table[method["name"]].line(markevery=every, markersize=3.5)
            ax.plot([x for x, _ in points], [y for _, y in points], **options)
        if logarithmic:
            ax.set_yscale("log")
            ax.minorticks_off()
            ax.yaxis.set_major_formatter("{x:g}")  # 100, not mathematics

    ends = "; ".join(f"{label(m)} ends at {points[-1][1]:.3g}" for m, points in lines)
    return Panel(draw, f"{title} by step: {ends}")
