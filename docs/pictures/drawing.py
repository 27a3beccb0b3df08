"""What the pictures share: colours, style, stored results, matrices as maps of colours, and how one is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PLACE = Path(__file__).parent
ROOT = PLACE.parent.parent
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


def write(name: str, picture: Callable[[], Figure], folder: Path) -> Path:
    """Draw one picture into a folder."""
    path = folder / f"{name}.svg"
    with matplotlib.rc_context(STYLE):
        picture().savefig(path, metadata={"Date": None, "Creator": None, "Title": name})
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
