"""Pictures of what was measured: by experiments, whose results are stored, and by two of the tutorials."""

from __future__ import annotations

import json
import re
from typing import Any

import matplotlib
import numpy as np
import torch
from drawing import BLUE, GOLD, GREEN, GREY, INK, ORANGE, PALE, PINK, PLACE, ROOT, SKY, means, stored
from matplotlib.figure import Figure

import slimbayes as sb

MEASURED = PLACE / "measured.json"


def collapse() -> Figure:
    """The spread of rank-1 components while they train, from rank1/collapse."""
    document = stored("rank1/collapse.gpu")
    lines = {line["label"]: line for line in document["curves"][0]["lines"]}
    figure = Figure(figsize=(7.2, 3.5))
    axes = figure.add_axes((0.09, 0.14, 0.62, 0.77))
    shown = {
        "BatchEnsemble": (GREY, "BatchEnsemble: no KL"),
        "Rank-1 Cauchy": (GREEN, "Cauchy"),
        "KL averaged": (BLUE, 'Normal, kl_reduction="mean"'),
        "KL from 40 %": (SKY, "Normal, KL from 40 % on"),
        "KL summed": (ORANGE, "Normal, as the paper trains it"),
        "KL by 40 %": (GOLD, "Normal, full KL by 40 %"),
        "KL at once": (PINK, "Normal, full KL at once"),
    }
    # Ends that are too close for two labels.
    heights = {"BatchEnsemble": 0.4, "Rank-1 Cauchy": 0.285, "KL averaged": 0.205, "KL from 40 %": 0.147}
    for name, (colour, words) in shown.items():
        y = np.array(lines[name]["y"]).mean(0)
        epochs = np.array(lines[name]["x"]) / lines[name]["x"][0]
        axes.plot(epochs, y, color=colour, lw=1.8)
        axes.text(20.4, heights.get(name, y[-1]), words, color=colour, va="center", fontsize=8.5)
    axes.axhspan(1e-4, 0.01, color=PALE, alpha=0.6, lw=0)
    axes.text(1.3, 0.0014, "copies of one network: sb.fit warns", va="bottom", fontsize=8.5, color=INK)
    axes.set(
        yscale="log", xlim=(1, 20), ylim=(0.0012, 0.6), xlabel="epoch", ylabel="spread of the components"
    )
    axes.set_xticks([1, 5, 10, 15, 20])
    axes.set_title("WRN-16-2 on CIFAR-10, K = 4, mean of three seeds", loc="left")
    return figure


def cost() -> Figure:
    """What more parameters and more draws buy, from rank1/tuning and emp/figure6."""
    figure = Figure(figsize=(7.2, 3.2))
    left, right = (figure.add_axes((x, 0.16, 0.35, 0.72)) for x in (0.11, 0.56))
    nll = {name: value for name, (value, _) in means(stored("rank1/tuning.gpu"), "nll").items()}
    rows = {
        "plain": ("Deterministic, l2 = 0.0005", sb.Deterministic(), GREY, (8, 0)),
        "BatchEnsemble": ("BatchEnsemble, l2 = 0.0005", sb.BatchEnsemble(components=4), ORANGE, (8, 4)),
        "Rank1, Cauchy": (
            "Rank-1 Cauchy, l2 = 0.0005, p = 1e-10",
            sb.Rank1.paper(posterior="cauchy"),
            GREEN,
            (-8, 1),
        ),
        "Rank1, Normal": (
            "Rank-1 Gaussian, l2 = 0.0005, KL averaged, p = 0.01",
            sb.Rank1.paper(),
            BLUE,
            (-8, 0),
        ),
    }
    for label, (row, method, colour, offset) in rows.items():
        with torch.device("meta"):  # counted, not allocated
            network = sb.bayesianize(sb.models.WideResNet(16, 2, 10), method)
        extra = 100 * sb.summary(network).overhead
        left.plot(extra, nll[row], "o", color=colour, ms=7)
        left.annotate(
            label, (extra, nll[row]), offset, textcoords="offset points", color=colour, va="center",
            ha="left" if offset[0] > 0 else "right", fontsize=8.5,
        )  # fmt: skip
    left.set(
        xlabel="more parameters, %", ylabel="NLL on held-out images", xlim=(-0.25, 4.2), ylim=(0.255, 0.281)
    )
    left.set_title("CIFAR-10, WRN-16-2, K = 4, one seed", loc="left")
    colours = {"Vanilla": GREY, "Dropout": ORANGE, "EMP": BLUE, "ECMP": GREEN}
    for line in stored("emp/figure6.gpu")["curves"][0]["lines"]:
        y = np.array(line["y"])
        mean, error = y.mean(0), y.std(0, ddof=1) / len(y) ** 0.5
        colour = colours[line["label"]]
        right.errorbar(line["x"], mean, error, color=colour, marker="o", ms=4.5, lw=1.6, capsize=2)
        words = "plain" if line["label"] == "Vanilla" else line["label"]
        right.text(line["x"][-1] * 1.18, mean[-1], words, color=colour, va="center", fontsize=8.5)
    right.set(xscale="log", xlabel="draws in a prediction", ylabel="ECE, %", xlim=(0.8, 260), ylim=(6.5, 14))
    right.set_xticks([1, 20, 100, 200], ["1", "20", "100", "200"])
    right.minorticks_off()
    right.set_title("CIFAR-100, WRN-28-4, three seeds", loc="left")
    return figure


def shift() -> Figure:
    """Reliability diagrams of the tutorial on shift."""
    data = json.loads(MEASURED.read_text(encoding="utf-8"))["shift"]
    figure = Figure(figsize=(7.2, 3.6))
    for column, (severity, title) in enumerate(
        (("0", "upright digits"), ("3", "turned by up to 30 degrees"))
    ):
        axes = figure.add_axes((0.085 + 0.485 * column, 0.15, 0.4, 0.74))
        axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (4, 3)))
        for name, colour, marker in (("plain", ORANGE, "s"), ("rank-1", BLUE, "o")):
            diagram = data[f"{name}, {severity}"]
            full = [k for k, count in enumerate(diagram["count"]) if count >= 10]
            x, y = ([diagram[key][k] for k in full] for key in ("confidence", "accuracy"))
            label = f"{name}: ECE {diagram['ece']:.3f}"
            axes.plot(x, y, color=colour, marker=marker, ms=5, lw=1.6, label=label)
        axes.set(
            xlim=(0.2, 1.01),
            ylim=(0, 1.03),
            xlabel="how sure",
            ylabel="how often right" if not column else "",
        )
        axes.set_title(title, loc="left")
        axes.legend(loc="upper left", fontsize=8.5)
    return figure


def error_bars() -> Figure:
    """The band of the tutorial on regression."""
    data = json.loads(MEASURED.read_text(encoding="utf-8"))["error_bars"]
    grid, mean, lower, upper = (np.array(data[key]) for key in ("grid", "mean", "lower", "upper"))
    figure = Figure(figsize=(7.2, 3.4))
    axes = figure.add_axes((0.075, 0.14, 0.9, 0.82))
    axes.fill_between(grid, lower, upper, color=SKY, alpha=0.4, lw=0, label="90 % interval")
    noise = 1.645 * data["noise"]
    axes.fill_between(grid, mean - noise, mean + noise, color=BLUE, alpha=0.3, lw=0, label="noise alone")
    axes.plot(grid, np.sin(2.5 * grid), color=INK, lw=1, ls=(0, (4, 3)), label="truth")
    axes.plot(grid, mean, color=BLUE, lw=1.8, label="mean")
    points = np.array(
        [(x + side, y) for x, y in zip(data["x"], data["y"], strict=True) for side in (0, 1e-3, np.nan)]
    )
    with matplotlib.rc_context({"path.simplify": False}):  # one path of dots is a tenth of as many markers
        axes.plot(*points.T, color=ORANGE, lw=2.2, solid_capstyle="round", label="measurements")
    axes.set(xlim=(-4, 4), ylim=(-6.3, 5.2), xlabel="x", ylabel="y")
    axes.legend(loc="lower center", ncols=5, fontsize=8.5)
    return figure


def run(page: str) -> dict[str, Any]:
    """The names that a tutorial leaves when its blocks have run."""
    text = (ROOT / "docs" / "tutorials" / page).read_text(encoding="utf-8")
    space: dict[str, Any] = {}
    torch.manual_seed(0)
    for code in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
        exec(compile(code, page, "exec"), space)
    return space


def numbers(values: Any, digits: int = 4) -> list[float]:
    return [round(float(value), digits) for value in torch.as_tensor(values).flatten()]


def measure() -> None:
    """Run the tutorials and keep what the pictures show."""
    shifted, bars = run("shift.md"), run("error_bars.md")
    diagrams = {
        f"{name}, {severity}": {
            "confidence": numbers(diagram.confidence),
            "accuracy": numbers(diagram.accuracy),
            "count": [int(count) for count in diagram.count],
            "ece": round(shifted["found"][name, severity]["ece"], 4),
        }
        for (name, severity), diagram in shifted["diagrams"].items()
        if severity in (0, 3)
    }
    names = {"grid": bars["grid"], "mean": bars["prediction"].mean, "lower": bars["lower"], "upper": bars["upper"],
             "x": bars["x"], "y": bars["y"]}  # fmt: skip
    content = {
        "shift": diagrams,
        "error_bars": {**{k: numbers(v) for k, v in names.items()}, "noise": bars["noise"]},
    }
    MEASURED.write_text(json.dumps(content) + "\n", encoding="utf-8")
