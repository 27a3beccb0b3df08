"""Figures of what classifiers know of their own errors: reliability, entropy, disagreement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from slimbayes.lab.report.panels import MUTED, Panel, Plot, Style, axes, legend_of, shorten
from slimbayes.lab.report.results import Results, label, number
from slimbayes.lab.report.statistics import stat


def array(values: Any) -> Any:
    """A column of the file as floats, null as NaN."""
    return np.array([np.nan if v is None else float(v) for v in values or []], dtype=float)


def pooled(runs: list[dict[str, Any]], where: str) -> dict[str, Any] | None:
    """Reliability bins of several runs joined: counts add up, confidence and accuracy are weighted by them."""
    tables = [((run.get("reliability") or {}).get(where)) or {} for run in runs]
    tables = [t for t in tables if t.get("edges") and t.get("count")]
    tables = [t for t in tables if t["edges"] == tables[0]["edges"]]
    if not tables:
        return None
    bins = len(tables[0]["edges"]) - 1
    count = np.zeros(bins)
    sums = {"confidence": np.zeros(bins), "accuracy": np.zeros(bins)}
    for t in tables:
        columns = {key: array(t.get(key)) for key in ("count", "confidence", "accuracy")}
        if any(len(column) != bins for column in columns.values()):
            continue  # a damaged table of one run does not take the figure with it
        n = np.nan_to_num(columns["count"])
        count += n
        for key, total in sums.items():
            total += np.where(n > 0, n * np.nan_to_num(columns[key]), 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = {key: np.where(count > 0, total / count, np.nan) for key, total in sums.items()}
    return {"edges": array(tables[0]["edges"]), "count": count, **means} if count.sum() else None


def reliability(results: Results, table: Mapping[str, Style]) -> Plot | None:
    """Accuracy against confidence, clean and shifted, over the counts of their bins; one panel per method."""
    panels, rows = [], []
    for method in results.methods:
        found = {w: pooled(method["runs"], w) for w in ("clean", "shifted")}
        known = {w: t for w, t in found.items() if t is not None}
        if not known:
            continue
        panels.append(_reliability_panel(method, known, table[method["name"]]))
        for where, t in known.items():
            for i, n in enumerate(t["count"]):
                cells = [float(t[k][i]) if n else None for k in ("confidence", "accuracy")]
                rows.append(
                    [method["name"], where, float(t["edges"][i]), float(t["edges"][i + 1]), int(n), *cells]
                )
    if not panels:
        return None
    return Plot(
        "reliability",
        "Reliability",
        "Accuracy of the predictions made with a given confidence: solid with filled symbols on clean data, dashed "
        "with open symbols on shifted data. On the diagonal, confidence is honest; below it, the model is too sure. "
        "The strip below shows where the predictions lie: filled bars clean, outline shifted. Bins of all seeds "
        "and shifts are pooled, and so is the ECE written here.",
        panels,
        ["method", "data", "from", "to", "count", "confidence", "accuracy"],
        rows,
    )


def _reliability_panel(method: Mapping[str, Any], known: Mapping[str, Any], style: Style) -> Panel:
    def draw(figure: Any) -> None:
        ax = axes(figure, shorten(label(method)), "", (0.125, 0.365, 0.855, 0.54))
        low = figure.add_axes([0.125, 0.14, 0.855, 0.17])
        ax.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8)
        for where, t in known.items():
            seen = t["count"] > 0
            line = {"linestyle": "-"} if where == "clean" else {"dashes": (4, 1.5), "markerfacecolor": "none"}
            ax.plot(
                t["confidence"][seen], t["accuracy"][seen], color=style.colour, marker=style.marker, **line
            )
            fill = {"alpha": 0.45} if where == "clean" else {"fill": False, "linewidth": 1.0}
            low.stairs(
                t["count"] / t["count"].sum(), t["edges"], color=style.colour, **({"fill": True} | fill)
            )
        for each in (ax, low):
            each.set_xlim(-0.02, 1.02)
            each.set_xticks([0, 0.25, 0.5, 0.75, 1])
        ax.set_xticklabels([])
        ax.set_ylim(-0.04, 1.04)
        ax.set_yticks([0, 0.5, 1])
        low.set_xlabel("confidence", labelpad=2)
        low.set_yticks([])
        counts = ", ".join(f"{where} n = {int(t['count'].sum()):,}" for where, t in known.items())
        low.text(0.02, 0.92, counts, transform=low.transAxes, va="top", size=7, color=MUTED)
        for i, (where, t) in enumerate(known.items()):
            gap = np.nansum(t["count"] * np.abs(t["accuracy"] - t["confidence"])) / t["count"].sum()
            ax.text(
                0.03, 0.96 - 0.11 * i, f"ECE {where} {gap:.1%}", transform=ax.transAxes, va="top", size=7.5
            )

    parts = []
    for where, t in known.items():
        gap = np.nansum(t["count"] * (t["confidence"] - t["accuracy"])) / t["count"].sum()
        parts.append(f"on {where} data confidence exceeds accuracy by {gap:.1%}".replace("by -", "by −"))
    return Panel(draw, f"Reliability of {label(method)}: {', '.join(parts)}", 3.4, 2.9)


def entropies(results: Results, table: Mapping[str, Style]) -> Plot | None:
    """Histograms of predictive entropy on clean, shifted and out-of-distribution data; one panel per method."""
    panels, rows = [], []
    every = [(method, found) for method in results.methods if (found := _entropy(method["runs"])) is not None]
    top = max((float(share.max()) for _, (_, shares) in every for share in shares.values()), default=1.0)
    for method, (edges, shares) in every:
        panels.append(_entropy_panel(method, edges, shares, table[method["name"]], top))
        for where, share in shares.items():
            rows += [
                [method["name"], where, float(a), float(b), float(s)]
                for a, b, s in zip(edges[:-1], edges[1:], share, strict=True)
            ]
    if not panels:
        return None
    ood = results.data.get("ood") or {}
    outside = f" (out of distribution: {ood.get('description') or ood.get('name')})" if ood else ""
    return Plot(
        "entropy",
        "Entropy in and out of distribution",
        "How unsure the predictions are: grey area clean test data, dashed line shifted data, solid line data from "
        f"elsewhere{outside}. A model that knows what it does not know is to the left on clean data and to the right "
        "on the others.",
        panels,
        ["method", "data", "from", "to", "share"],
        rows,
    )


def _entropy(runs: list[dict[str, Any]]) -> tuple[Any, dict[str, Any]] | None:
    tables = [run.get("entropy") or {} for run in runs]
    tables = [t for t in tables if t.get("edges")]
    if not tables:
        return None
    edges = array(tables[0]["edges"])
    shares = {}
    for where in ("clean", "shifted", "ood"):
        columns = [array(t[where]) for t in tables if t.get(where) and t["edges"] == tables[0]["edges"]]
        total = sum((np.nan_to_num(c) for c in columns if len(c) == len(edges) - 1), np.zeros(len(edges) - 1))
        if total.sum() > 0:
            shares[where] = total / total.sum()
    return (edges, shares) if shares else None


def _entropy_panel(
    method: Mapping[str, Any], edges: Any, shares: Mapping[str, Any], style: Style, top: float
) -> Panel:
    def draw(figure: Any) -> None:
        ax = axes(figure, shorten(label(method)), "entropy in nats (vertical: share of examples)")
        if "clean" in shares:
            ax.stairs(shares["clean"], edges, fill=True, color=MUTED, alpha=0.35)
        if "shifted" in shares:
            ax.stairs(shares["shifted"], edges, color=style.colour, linewidth=1.2, linestyle=(0, (3, 1.5)))
        if "ood" in shares:
            ax.stairs(shares["ood"], edges, color=style.colour, linewidth=1.8)
        ax.set_ylim(0.0, 1.05 * top)

    middle = (edges[1:] + edges[:-1]) / 2
    means = ", ".join(f"{where} {float((share * middle).sum()):.2f}" for where, share in shares.items())
    return Panel(draw, f"Entropy of {label(method)}, mean in nats: {means}", 3.4, 2.3)


def disagreement(results: Results, table: Mapping[str, Style]) -> Plot | None:
    """Members' normalised disagreement against accuracy: one point per shift and severity."""
    points: dict[str, list[tuple[str, float, float, float]]] = {}
    for method in results.methods:
        spots: dict[tuple[str, float], list[tuple[float, float]]] = {}
        for run in method["runs"]:
            for spot in run.get("disagreement") or []:
                x, y = number(spot.get("accuracy")), number(spot.get("disagreement"))
                if x is not None and y is not None:
                    spots.setdefault(
                        (str(spot.get("shift")), number(spot.get("severity")) or 0.0), []
                    ).append((x, y))
        found = [
            (s, v, stat(x for x, _ in xy).mean, stat(y for _, y in xy).mean) for (s, v), xy in spots.items()
        ]
        if found:
            points[method["name"]] = [(s, v, x or 0.0, y or 0.0) for s, v, x, y in found]
    if not points:
        return None

    def draw(figure: Any) -> None:
        ax = axes(figure, "Disagreement / (1 − accuracy)", "accuracy", (0.085, 0.14, 0.895, 0.76))
        for name, found in points.items():
            style = table[name]
            ax.plot([x for _, _, x, _ in found], [y for *_, y in found], linestyle="none", marker=style.marker,
                    color=style.colour, alpha=0.75, markersize=4.5, markeredgewidth=0)  # fmt: skip

    means = {name: sum(y for *_, y in found) / len(found) for name, found in points.items()}
    names = {m["name"]: label(m) for m in results.methods}
    words = "; ".join(f"{names[name]} {mean:.2f} on average" for name, mean in means.items())
    return Plot(
        "disagreement",
        "Disagreement against accuracy",
        "How often two members of a model predict different classes, divided by the model's error rate. One point per "
        "shift and severity, mean over seeds. Higher means members that differ more than their errors alone ask for.",
        [Panel(draw, f"Normalised disagreement: {words}", 4.6, 3.0)],
        ["method", "shift", "severity", "accuracy", "disagreement"],
        [[name, *spot] for name, found in points.items() for spot in found],
        legend_of(results, table, list(points)),
        across=1,
    )
