"""Figures of posteriors: heat maps of standard deviations, spectra."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.analysis.spectra import matrices, spectrum
from slimbayes.core.selection import Selection
from slimbayes.extras import need

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 3
_PIXELS = 400  # a side of a heat map at most: larger matrices are averaged over blocks
VALUES = ("stddev", "mean", "signal_to_noise")


def plot_stddevs(model: nn.Module, include: Selection | None = None, values: str = "stddev") -> Figure:
    """Heat maps of log₁₀ σ, one for every layer of MeanField or KTied, inputs down and outputs across.

    ``values``: "stddev", "mean" (μ itself, zero in the middle of the colours) or "signal_to_noise" (log₁₀ |μ|/σ). The
    figure is matplotlib's: ``plot_stddevs(model).savefig("stddevs.png")``. Needs matplotlib.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), sb.MeanField())
    >>> [axes.get_title() for axes in sb.analysis.plot_stddevs(net).axes[:2]]
    ['0: σ', '1: σ']
    """
    if values not in VALUES:
        raise ValueError(f"values={values!r} is unknown; use one of {', '.join(map(repr, VALUES))}")
    found = matrices(model, include)
    figure, panels = _grid(len(found), 3.0)
    symbol = {"stddev": "σ", "mean": "μ", "signal_to_noise": "|μ|/σ"}[values]
    for panel, (name, weights) in zip(panels, found.items(), strict=True):
        options: dict[str, Any] = {"cmap": "viridis"}
        if values == "mean":
            shown = _shrunk(weights.mean.double())
            edge = float(shown.abs().max()) or 1.0
            options = {"cmap": "RdBu_r", "vmin": -edge, "vmax": edge}
        else:
            signal = weights.mean.double().abs() / weights.stddev.double()
            logs = (weights.stddev.double() if values == "stddev" else signal.clamp_min(1e-12)).log10()
            shown = _shrunk(logs)
        image = panel.imshow(shown.cpu().numpy(), aspect="auto", interpolation="nearest", **options)
        panel.set_title(f"{name or '(root)'}: {symbol}", fontsize=9)
        panel.set_xlabel(f"{weights.mean.shape[1]} outputs", fontsize=8)
        panel.set_ylabel(f"{weights.mean.shape[0]} inputs", fontsize=8)
        panel.set_xticks([])
        panel.set_yticks([])
        bar = figure.colorbar(image, ax=panel, fraction=0.046)
        bar.ax.tick_params(labelsize=7)
        bar.set_label(symbol if values == "mean" else f"log₁₀ {symbol}", fontsize=8)
    return figure


def plot_spectra(model: nn.Module, include: Selection | None = None, ranks: int = 20) -> Figure:
    """The share of variance that the leading singular values of μ and of σ explain, one panel for every layer.

    The k-tied paper's Figure 1: σ of trained mean-field layers is nearly of low rank, μ is not. Needs matplotlib.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(6, 4), sb.KTied(rank=1))
    >>> [line.get_label() for line in sb.analysis.plot_spectra(net).axes[0].lines]
    ['mean μ', 'standard deviation σ']
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks={ranks!r}: pass how many singular values to show, at least 1")
    found = spectrum(model, include)
    figure, panels = _grid(len(found), 2.5)
    for panel, (name, shares) in zip(panels, found.items(), strict=True):
        for which, label in (("mean", "mean μ"), ("stddev", "standard deviation σ")):
            values = shares[which][:ranks].tolist()
            panel.plot(range(1, len(values) + 1), values, marker=".", label=label)
        panel.set_ylim(-0.03, 1.03)
        panel.set_title(name or "(root)", fontsize=9)
        panel.set_xlabel("singular value", fontsize=8)
        panel.set_ylabel("explained variance", fontsize=8)
        panel.tick_params(labelsize=7)
    panels[0].legend(fontsize=7)
    return figure


def _grid(count: int, height: float) -> tuple[Figure, list[Any]]:
    drawn = need("matplotlib.figure", "a figure", "plots")
    across = min(_COLUMNS, count)
    down = math.ceil(count / across)
    figure = drawn.Figure(figsize=(3.6 * across, height * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten().tolist()
    for panel in axes[count:]:
        panel.set_axis_off()
    return figure, axes[:count]


def _shrunk(matrix: Tensor) -> Tensor:
    """Means over blocks where a matrix has more rows or columns than a picture shows."""
    rows, across = (min(side, _PIXELS) for side in matrix.shape)
    if matrix.shape == (rows, across):
        return matrix
    return F.adaptive_avg_pool2d(matrix.unsqueeze(0), (rows, across)).squeeze(0)
