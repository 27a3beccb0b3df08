"""Figures of regression: coverage of intervals, and fits with their bands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slimbayes.lab.report.panels import INK, MUTED, Panel, Plot, Style, axes, legend_of, shorten
from slimbayes.lab.report.results import Results, label, number
from slimbayes.lab.report.uncertainty import array


def coverage(results: Results, table: Mapping[str, Style]) -> Plot | None:
    """Coverage of predictive intervals against their level, on clean and on shifted data."""
    panels, rows = [], []
    for where in ("clean", "shifted"):
        lines = []
        for method in results.methods:
            curves: dict[float, list[float]] = {}
            for run in method["runs"]:
                t = ((run.get("reliability") or {}).get(where)) or {}
                for a, b in zip(t.get("level") or [], t.get("coverage") or [], strict=False):
                    if a is not None and b is not None:
                        curves.setdefault(float(a), []).append(float(b))
            points = [(a, sum(b) / len(b)) for a, b in sorted(curves.items())]
            if points:
                lines.append((method, points))
                rows += [[method["name"], where, a, b] for a, b in points]
        if lines:
            panels.append(_coverage_panel(lines, where, table))
    return Plot(
        "coverage",
        "Coverage of predictive intervals",
        "The share of test targets inside the central predictive interval, against the interval's level; mean over "
        "seeds. On the diagonal intervals keep their promise; below it they are too narrow.",
        panels,
        ["method", "data", "level", "coverage"],
        rows,
        legend_of(results, table),
        across=2,
    ) if panels else None  # fmt: skip


def _coverage_panel(lines: list[Any], where: str, table: Mapping[str, Style]) -> Panel:
    def draw(figure: Any) -> None:
        ax = axes(figure, f"Coverage, {where} data", "level of the interval", (0.125, 0.16, 0.83, 0.73))
        ax.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8)
        for method, points in lines:
            options = table[method["name"]].line(markevery=max(1, len(points) // 6))
            ax.plot([a for a, _ in points], [b for _, b in points], **options)
        ax.set_xlim(0, 1)
        ax.set_ylim(0, 1.02)

    ends = "; ".join(f"{label(m)} {p[-1][1]:.0%} at {p[-1][0]:.0%}" for m, p in lines)
    return Panel(draw, f"Coverage on {where} data: {ends}", 3.4, 2.7)


def fits(results: Results, table: Mapping[str, Style]) -> Plot | None:
    """The regression's fit with its band, or predictions against observations; one panel per method, first seed."""
    bands = ["x", "mean", "lower", "upper", "epistemic_lower", "epistemic_upper"]
    for kind, keys in (("fit", bands), ("scatter", ["target", "mean", "lower", "upper"])):
        found = []
        for method in results.methods:
            part = next((run[kind] for run in method["runs"] if run.get(kind)), None) or {}
            columns = {k: array(v) for k, v in part.items() if isinstance(v, list)}
            size = len(columns.get(keys[0], ()))
            if size and all(len(columns.get(k, ())) == size for k in keys[:4]):
                found.append((method, columns, number(part.get("level"))))
        if not found:
            continue
        limits = _limits([columns for _, columns, _ in found])
        make = _fit_panel if kind == "fit" else _scatter_panel
        panels = [make(m, columns, level, table[m["name"]], limits) for m, columns, level in found]
        rows = []
        for method, columns, _ in found:
            size = len(columns[keys[0]])
            whole = [columns[k] if len(columns.get(k, ())) == size else [None] * size for k in keys]
            rows += [[method["name"], *values] for values in zip(*map(list, whole), strict=True)]
        return _fit_plot(kind, panels, ["method", *keys], rows, results)
    return None


def _limits(every: list[dict[str, Any]]) -> tuple[float, float]:
    """One vertical range for all methods: the bands, but no further from the means and data than their own range.

    One method with a very wide band must not flatten the others.
    """
    inner = np.concatenate([c[k] for c in every for k in ("mean", "target", "truth", "train_y") if k in c])
    outer = np.concatenate([c[k] for c in every for k in ("lower", "upper")])
    inner, outer = inner[np.isfinite(inner)], outer[np.isfinite(outer)]
    if not len(inner):
        return -1.0, 1.0
    low, high = float(inner.min()), float(inner.max())
    room = 0.6 * (high - low) or 1.0
    if len(outer):
        low, high = max(min(low, outer.min()), low - room), min(max(high, outer.max()), high + room)
    return low - 0.03 * room, high + 0.03 * room


def _fit_plot(kind: str, panels: list[Panel], header: list[str], rows: list[Any], results: Results) -> Plot:
    unit = str((results.dataset.get("outputs") or ["target"])[0])
    if kind == "fit":
        caption = (
            "The mean prediction (line) of the first seed. The strong band is what the model does not know "
            "(epistemic), the faint band the total predictive interval. Dots are training data; the thin grey "
            "line is the truth, where known."
        )
        return Plot("fit", f"The fit of {unit} with its band", caption, panels, header, rows)
    caption = (
        "Each dot is a test example, its line the predictive interval, for the first seed. On the diagonal "
        "predictions are right; an interval that misses the diagonal misses its target. Misses are crosses."
    )
    return Plot("fit", f"Predicted and observed {unit}", caption, panels, header, rows)


def _fit_panel(
    method: Mapping[str, Any],
    c: Mapping[str, Any],
    level: float | None,
    style: Style,
    limits: tuple[float, float],
) -> Panel:
    def draw(figure: Any) -> None:
        ax = axes(figure, shorten(label(method)), "input")
        ax.fill_between(c["x"], c["lower"], c["upper"], color=style.colour, alpha=0.18, linewidth=0)
        if all(len(c.get(k, ())) == len(c["x"]) for k in ("epistemic_lower", "epistemic_upper")):
            inner = (c["epistemic_lower"], c["epistemic_upper"])
            ax.fill_between(c["x"], *inner, color=style.colour, alpha=0.35, linewidth=0)
        if len(c.get("truth", ())) == len(c["x"]):
            ax.plot(c["x"], c["truth"], color=MUTED, linewidth=0.9)
        ax.plot(c["x"], c["mean"], color=style.colour)
        if 0 < len(c.get("train_x", ())) == len(c.get("train_y", ())):
            step = -(-len(c["train_x"]) // 300)  # more dots than that hide the band
            ax.plot(
                c["train_x"][::step],
                c["train_y"][::step],
                linestyle="none",
                marker="o",
                markersize=2,
                color=INK,
            )
        ax.set_ylim(*limits)

    wide = np.nanmean(c["upper"] - c["lower"])
    return Panel(
        draw, f"Fit of {label(method)}; its {level or 0.9:.0%} interval is {wide:.3g} wide on average"
    )


def _scatter_panel(
    method: Mapping[str, Any],
    c: Mapping[str, Any],
    level: float | None,
    style: Style,
    limits: tuple[float, float],
) -> Panel:
    step = -(-len(c["target"]) // 250)
    y, mean, low, high = (c[k][::step] for k in ("target", "mean", "lower", "upper"))
    missed = (y < low) | (y > high)

    def draw(figure: Any) -> None:
        ax = axes(
            figure, shorten(label(method)), "observed (vertical: predicted)", (0.135, 0.16, 0.845, 0.73)
        )
        ends = [float(np.nanmin(c["target"])), float(np.nanmax(c["target"]))]
        ax.vlines(y, low, high, color=style.colour, alpha=0.3, linewidth=0.8)
        ax.plot(ends, ends, color=INK, linewidth=0.9)
        for chosen, marker in ((~missed, "o"), (missed, "x")):
            ax.plot(
                y[chosen], mean[chosen], linestyle="none", marker=marker, markersize=3, color=style.colour
            )
        ax.set_ylim(*limits)

    return Panel(
        draw, f"Predicted against observed, {label(method)}: {int(missed.sum())} of {len(y)} intervals miss"
    )
