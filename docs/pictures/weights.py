"""Pictures of what is random: the weights that draws see, and how a batch becomes draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from drawing import BLUE, GREEN, GREY, ORANGE, PALE, VERSIONS, bare, matrix, stored
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle
from torch import nn

import slimbayes as sb


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
    method = sb.Rank1.paper(components=2, random_sign_init=-0.45, dropout_rate=1e-3)
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
    return strips(
        {"MeanField": sb.MeanField.paper(stddev_init=0.25), "KTied": sb.KTied.paper(rank=2, stddev_init=0.25)}
    )


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
