"""The ratios as a figure: a panel per network and phase, a row per method, a logarithmic axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimbayes.extras import need
from slimbayes.lab.bench.results import BenchError, Results
from slimbayes.lab.bench.settings import CONTENDERS, NETWORKS, PEERS, limit
from slimbayes.lab.bench.table import blocks, title

MARKS = {"eager": ("o", "#1f6fb4"), "compiled": ("D", "#c8511b"), "graphs": ("s", "#3a8a3a")}


def write_plot(results: Results, stem: Path, group: str = "own") -> list[Path]:
    """Write STEM.svg and STEM.png; a dot is a ratio to the deterministic network, a bar its standard error."""
    try:
        matplotlib = need("matplotlib", "the plot", "plots")
    except ImportError as error:
        raise BenchError(str(error)) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: dict[tuple[str, str], list[str]] = {}
    for block in blocks(results):
        if block[0] == group:
            panels.setdefault(block[1:3], []).append(block[3])
    if not panels:
        return []
    names = [*(PEERS if group == "peers" else {}), *CONTENDERS]
    names = [n for n in names if any(c["method"] == n and c["group"] == group for c in results.cells)]
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    # Words stay words in the SVG, and the same figures give the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "slimbayes", "font.size": 8}):
        figure, axes = pyplot.subplots(
            lines, columns, squeeze=False, sharey=True,
            figsize=(2.2 + 2.9 * columns, 0.9 + lines * (0.8 + 0.2 * len(names))),
        )  # fmt: skip
        for axis in axes.flat[len(panels) :]:
            axis.set_visible(False)
        for axis, ((network, phase), modes) in zip(axes.flat, panels.items(), strict=False):
            _panel(axis, results, group, network, phase, modes, names)
        handles = [
            pyplot.Line2D([], [], marker=mark, color=colour, linestyle="", label=mode)
            for mode, (mark, colour) in MARKS.items()
            if any(mode in modes for modes in panels.values())
        ]
        handles.append(pyplot.Line2D([], [], marker="|", color="black", linestyle="", label="target"))
        figure.legend(handles=handles, loc="upper right", ncols=len(handles), frameon=False)
        figure.tight_layout(rect=(0, 0, 1, 1 - 0.3 / figure.get_figheight()))
        paths = [stem.with_suffix(suffix) for suffix in (".svg", ".png")]
        stem.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(paths[0], metadata={"Date": None})
        figure.savefig(paths[1], dpi=150)
        pyplot.close(figure)
    return paths


def _panel(
    axis: Any, results: Results, group: str, network: str, phase: str, modes: list[str], names: list[str]
) -> None:
    for place, name in enumerate(names):
        for mode in modes:
            cell = results.find(group, network, phase, mode, name)
            if cell is None or "error" in cell:
                continue
            mark, colour = MARKS[mode]
            offset = place + (0.14 if mode != "eager" else -0.14)
            axis.errorbar(
                cell["ratio"],
                offset,
                xerr=cell.get("ratio_error") or 0.0,
                fmt=mark,
                color=colour,
                markersize=4,
            )
            bound = limit(results.device, network, phase, mode, name, "time")
            if bound is not None and group == "own":
                axis.plot([bound], [offset], marker="|", color="black", markersize=8)
    axis.axvline(1.0, color="0.6", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_yticks(range(len(names)), [title(name) for name in names])
    axis.set_ylim(len(names) - 0.5, -0.5)
    from matplotlib.ticker import FuncFormatter, NullLocator

    low, high = axis.get_xlim()
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 50) if low <= tick <= high] or [1]
    axis.set_xticks(ticks)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.grid(axis="x", color="0.9")
    axis.set_title(f"{NETWORKS[network].name}: {phase}", loc="left")
    axis.set_xlabel("time, deterministic = 1")
