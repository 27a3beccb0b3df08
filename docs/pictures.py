"""Draw the pictures of the documentation into docs/pictures, as SVG.

What they show comes from the library itself (weights that draws see), from results/, and from
docs/pictures/measured.json: what two tutorials found. ``--measure`` runs those again and writes that file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from torch import nn

import slimbayes as sb

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "docs" / "pictures"
MEASURED = PLACE / "measured.json"
INK, GREY, PALE = "#1f2430", "#8a8f99", "#e4e6ea"
BLUE, ORANGE, GREEN, PINK, SKY, GOLD = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"
VERSIONS = (BLUE, ORANGE, GREEN, PINK, GOLD)
STYLE = {
    "svg.hashsalt": "slimbayes",  # the same names of parts every time
    "figure.facecolor": "white",  # a light page of its own, so that it reads on dark pages too
    "font.size": 9.0,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlesize": 9.5,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def stored(name: str) -> dict[str, Any]:
    """A result in results/."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))


def means(document: dict[str, Any], column: str) -> dict[str, tuple[float, float]]:
    """Mean and standard error over seeds of a column of its first table, by row."""
    found = {}
    for row in document["tables"][0]["rows"]:
        values = np.array(row["values"].get(column, []), dtype=float)
        if len(values):
            error = values.std(ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0.0
            found[row["label"]] = (float(values.mean()), float(error))
    return found


def matrix(axes: Axes, values: Any, title: str = "", centre: float = 0.0, limit: float = 1.0) -> None:
    """A matrix as a map of colours: white is the centre."""
    axes.imshow(
        np.asarray(values), cmap="RdBu_r", vmin=centre - limit, vmax=centre + limit, interpolation="nearest"
    )
    bare(axes)
    axes.set_title(title, pad=5)


def bare(axes: Axes) -> None:
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_color(PALE)


def layer() -> nn.Linear:
    """A Linear layer with a smooth weight, so that what happens to it is easy to see."""
    linear = nn.Linear(12, 8, bias=False)
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(12.0), indexing="ij")
    with torch.no_grad():
        linear.weight.copy_(0.55 * torch.sin(0.9 * rows) * torch.cos(0.6 * columns) + 0.12)
    return linear


def seen(method: Any, samples: int = 3) -> tuple[Any, Any]:
    """The converted layer, and the weights [draws, out, in] that its draws see: its outputs for unit vectors.

    Scales start alike. They are moved here as training would move them, each parameter by itself.
    """
    torch.manual_seed(4)
    model = sb.bayesianize(layer(), method)
    if method.traits.components > 1:
        samples = 1
    with torch.no_grad():
        if isinstance(method, sb.MeanField | sb.KTied):
            for parameter in model.bayes.parameters():
                parameter += 0.6 * torch.randn_like(parameter)
        draws = sb.draw(model, torch.eye(12), samples=samples, noise="shared", seed=3)
    return model, draws.transpose(1, 2)


def rank1() -> Figure:
    """W ∘ r sᵀ for two components."""
    method = sb.Rank1(components=2, random_sign_init=-0.45, dropout_rate=1e-3)
    model, weights = seen(method)
    rule = model.bayes
    figure = Figure(figsize=(7.2, 3.6))
    grid = figure.add_gridspec(
        5, 6, width_ratios=[12, 3.4, 1, 12, 2.6, 12], height_ratios=[1, 8, 2.4, 1, 8],
        left=0.02, right=0.98, top=0.92, bottom=0.02, wspace=0.07, hspace=0.08,
    )  # fmt: skip
    axes = figure.add_subplot(grid[:, 0])
    matrix(axes, model.weight.detach(), "W, shared")
    for k in range(2):
        r, s = (factor().loc[k].detach() for factor in (rule.r, rule.s))
        top, row = (0, 1) if k == 0 else (3, 4)
        matrix(figure.add_subplot(grid[row, 2]), r[:, None], "", 1.0, 1.2)
        matrix(figure.add_subplot(grid[top, 3]), s[None, :], "", 1.0, 1.2)
        matrix(figure.add_subplot(grid[row, 3]), torch.outer(r, s), "", 1.0, 1.2)
        matrix(figure.add_subplot(grid[row, 5]), weights[k], "")
        figure.text(0.315, 0.71 - 0.493 * k, "∘", fontsize=20, ha="center", va="center")
        figure.text(0.70, 0.71 - 0.493 * k, "=", fontsize=18, ha="center", va="center")
        figure.text(0.352, 0.71 - 0.493 * k, f"r{'₁₂'[k]}", ha="right", va="center")
        figure.text(0.525, 0.955 - 0.493 * k, f"s{'₁₂'[k]}", ha="center", va="center")
        figure.text(0.86, 0.905 - 0.493 * k, f"what component {k + 1} sees", ha="center", va="center")
    return figure


def ktied() -> Figure:
    """σ = U Vᵀ, and σ of a mean-field network that nothing tied."""
    rng = np.random.default_rng(5)
    u, v = np.exp(rng.normal(0, 0.5, (8, 2))), np.exp(rng.normal(0, 0.5, (12, 2)))
    panels = {p["label"]: p for p in stored("ktied/figure4.desk")["maps"][0]["panels"]}
    figure = Figure(figsize=(7.2, 2.9))
    grid = figure.add_gridspec(
        2, 7, width_ratios=[2, 0.8, 12, 4.5, 13, 1.2, 13], height_ratios=[2, 8],
        left=0.05, right=0.985, top=0.86, bottom=0.13, wspace=0.1, hspace=0.12,
    )  # fmt: skip
    for place, values, words in (
        ((1, 0), u, "U"), ((0, 2), v.T, "Vᵀ"), ((1, 2), u @ v.T, ""),
    ):  # fmt: skip
        axes = figure.add_subplot(grid[place])
        axes.imshow(values, cmap="viridis", vmin=0, interpolation="nearest", aspect="auto")
        bare(axes)
        axes.set_title(words, pad=4)
        if place == (1, 2):
            axes.set_xlabel("σ = U Vᵀ")
    first, last = ("no approximation", next(k for k in panels if "2" in k))
    high = float(np.quantile(panels[first]["values"], 0.99))
    low = float(np.quantile(panels[first]["values"], 0.01))
    for column, key, words in ((4, first, "σ of a trained mean-field layer"), (6, last, "its rank-2 part")):
        axes = figure.add_subplot(grid[:, column])
        axes.imshow(panels[key]["values"], cmap="viridis", vmin=low, vmax=high, aspect="auto")
        bare(axes)
        axes.set_xlabel(words)
    figure.text(0.755, 0.92, "MNIST, first layer, 784 × 400", ha="center", fontsize=9.5)
    return figure


def patches() -> Figure:
    """Which of K versions every scalar takes, in four draws: one choice per layer, or one per scalar."""
    rng = np.random.default_rng(11)
    figure = Figure(figsize=(7.2, 2.7))
    blocks = ((0, 8, "norm 1"), (11, 8, "norm 2"), (22, 10, "output layer"))
    for column, (title, single) in enumerate(
        (("EMP: one choice per layer", True), ("ECMP: one choice per scalar", False))
    ):
        axes = figure.add_axes((0.075 + 0.47 * column, 0.13, 0.44, 0.7))
        for draw in range(4):
            for start, size, _ in blocks:
                chosen = np.full(size, rng.integers(5)) if single else rng.integers(5, size=size)
                for k, version in enumerate(chosen):
                    axes.add_patch(
                        Rectangle(
                            (start + k, 3 - draw + 0.12),
                            0.94,
                            0.76,
                            color=VERSIONS[version],
                            lw=0,
                            clip_on=False,
                        )
                    )
            for start in (8, 19):  # what lies between is not patched
                axes.add_patch(Rectangle((start + 0.25, 3 - draw + 0.12), 2.4, 0.76, color=PALE, lw=0))
            if column == 0:
                axes.text(-0.6, 3.5 - draw, f"draw {draw + 1}", ha="right", va="center", fontsize=8)
        for start, size, words in blocks:
            axes.text(start + size / 2, -0.1, words, ha="center", va="top", fontsize=8.5)
        axes.set(xlim=(-0.2, 32.2), ylim=(-0.2, 4.1))
        axes.axis("off")
        axes.set_title(title, pad=2)
    for k, colour in enumerate(VERSIONS):
        figure.patches.append(
            Rectangle(
                (0.335 + 0.038 * k, 0.935), 0.012, 0.032, transform=figure.transFigure, color=colour, lw=0
            )
        )
        figure.text(0.35 + 0.038 * k, 0.951, str(k + 1), va="center", fontsize=8)
    figure.text(0.325, 0.951, "version", ha="right", va="center", fontsize=8)
    figure.patches.append(
        Rectangle((0.56, 0.935), 0.012, 0.032, transform=figure.transFigure, color=PALE, lw=0)
    )
    figure.text(0.577, 0.951, "shared weights", va="center", fontsize=8)
    return figure


def strips(rows: dict[str, Any], names: tuple[str, ...] = ("draw 1", "draw 2", "draw 3")) -> Figure:
    """W, the weights of three draws, and their standard deviation over many, a row per method."""
    height = 0.35 + 0.92 * len(rows)
    figure = Figure(figsize=(7.2, height))
    grid = figure.add_gridspec(
        len(rows), 5, left=0.16, right=0.985, bottom=0.03, top=1 - 0.3 / height, wspace=0.08, hspace=0.1,
    )  # fmt: skip
    for k, (label, method) in enumerate(rows.items()):
        weights = seen(method)[1]
        spread = seen(method, samples=2000)[1].std(0)  # of methods with components, of these
        maps = [(layer().weight.detach(), "W as given"), *zip(weights[:3], names, strict=True)]
        for column, (values, title) in enumerate(maps):
            axes = figure.add_subplot(grid[k, column])
            matrix(axes, values, title if k == 0 else "")
            if column == 0:
                axes.set_ylabel(label, rotation=0, ha="right", va="center", labelpad=6)
        axes = figure.add_subplot(grid[k, 4])
        axes.imshow(spread.numpy(), cmap="viridis", vmin=0, interpolation="nearest")
        bare(axes)
        axes.set_title("their deviation" if k == 0 else "", pad=5)
    return figure


def meanfield() -> Figure:
    return strips({"MeanField": sb.MeanField(stddev_init=0.25), "KTied": sb.KTied(rank=2, stddev_init=0.25)})


def dropped() -> Figure:
    return strips({"MCDropout": sb.MCDropout(rate=0.3), "DropConnect": sb.DropConnect(rate=0.3)})


def ensembles() -> Figure:
    return strips(
        {
            "BatchEnsemble": sb.BatchEnsemble(components=3, random_sign_init=-0.5),
            "DeepEnsemble": sb.DeepEnsemble(members=3),
        },
        ("member 1", "member 2", "member 3"),
    )


def draws() -> Figure:
    """How a batch becomes rows and rows become draws."""
    figure = Figure(figsize=(7.2, 2.9))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 72), ylim=(0, 29))
    axes.axis("off")
    colours = (BLUE, ORANGE, GREEN)

    def cell(x: float, y: float, colour: str, width: float = 3.2, height: float = 1.55) -> None:
        axes.add_patch(FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.3", color=colour, lw=0,
        ))  # fmt: skip

    def arrow(x: float, to: float, words: str) -> None:
        axes.add_patch(
            FancyArrowPatch((x, 13.5), (to, 13.5), arrowstyle="-|>", mutation_scale=11, color=GREY)
        )
        axes.text((x + to) / 2, 14.6, words, ha="center", va="bottom", fontsize=8.5)

    for k, colour in enumerate(colours):
        cell(4, 15 - 2 * k, colour)
    axes.text(5.6, 9.4, "batch\n[B, ...]", ha="center", va="top")
    arrow(9, 16, "repeat")
    for row in range(12):
        cell(25, 24.2 - 2 * row, colours[row % 3])
        if row % 3 == 1:
            component, sample = divmod(row // 3, 2)
            axes.text(24.2, 25 - 2 * row, f"component {component + 1}, sample {sample + 1}",
                      ha="right", va="center", fontsize=7.5)  # fmt: skip
    axes.text(26.6, 26.6, "rows [K · S · B, ...]", ha="center", va="bottom")
    arrow(29.5, 35, "")
    axes.add_patch(FancyBboxPatch(
        (35.3, 8), 10, 11, boxstyle="round,pad=0,rounding_size=0.8", facecolor=PALE, edgecolor=GREY,
    ))  # fmt: skip
    axes.text(40.3, 13.5, "your network,\none pass", ha="center", va="center")
    arrow(45.6, 51, "")
    for row in range(4):
        for k, colour in enumerate(colours):
            cell(52 + 4 * k, 17.5 - 2.6 * row, colour, 3.4, 1.9)
        axes.text(64.6, 18.4 - 2.6 * row, f"draw {row + 1}", va="center", fontsize=7.5)
    axes.text(57.8, 20.6, "outputs [K · S, B, ...]", ha="center", va="bottom")
    return figure


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
            sb.Rank1(posterior="cauchy"),
            GREEN,
            (-8, 1),
        ),
        "Rank1, Normal": ("Rank-1 Gaussian, l2 = 0.0005, KL averaged, p = 0.01", sb.Rank1(), BLUE, (-8, 0)),
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


PICTURES: dict[str, Callable[[], Figure]] = {
    "rank1": rank1,
    "ktied": ktied,
    "patches": patches,
    "meanfield": meanfield,
    "dropped": dropped,
    "ensembles": ensembles,
    "draws": draws,
    "collapse": collapse,
    "cost": cost,
    "shift": shift,
    "error_bars": error_bars,
}


def draw(name: str, folder: Path) -> Path:
    """Draw one picture."""
    path = folder / f"{name}.svg"
    with matplotlib.rc_context(STYLE):
        PICTURES[name]().savefig(path, metadata={"Date": None, "Creator": None, "Title": name})
    text = path.read_text(encoding="utf-8")
    # Hundredths of a point are enough, and half the size.
    text = re.sub(
        r'\b(d|x|y|points)="[^"]*"',
        lambda found: re.sub(
            r"-?\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}".rstrip("0").rstrip("."), found[0]
        ),
        text,
    )
    text = re.sub(r'(?<= )d="[^"]*"', lambda found: " ".join(found[0].split()).replace(' "', '"'), text)
    path.write_text(re.sub(r"^[ \t]+|[ \t]+$", "", text, flags=re.M), encoding="utf-8")
    return path


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


def main(arguments: list[str] | None = None) -> int:
    """Draw all pictures, or those named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], help="all of them by default")
    parser.add_argument("--measure", action="store_true", help="run the tutorials first")
    options = parser.parse_args(arguments)
    if options.measure:
        measure()
    for name in options.names or PICTURES:
        print(draw(name, PLACE).relative_to(ROOT).as_posix())
    return 0


if __name__ == "__main__":
    sys.exit(main())
