"""Panels: small matplotlib figures, rendered once to SVG and PNG, and laid out side by side in files and pages."""

from __future__ import annotations

import io
import math
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from slimbayes.extras import need
from slimbayes.lab.report.results import Results, label

INK, MUTED, GRID = "#1c2330", "#5b6472", "#d5dae1"
# Okabe and Ito's colours without black (the baseline's ink) and without yellow, which white paper swallows
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("s", "^", "D", "v", "P", "X", "*", "<", ">")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.5), (3, 1, 1, 1), (1.5, 1), (7, 1.5, 1.5, 1.5))
DPI = 144
# what the page calls these colours, which differ between its light and its dark scheme
VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)"}
VARIABLES |= {colour: f"var(--m{i})" for i, colour in enumerate(COLOURS)}

_SETTINGS = {
    "svg.fonttype": "none",  # text stays text: small files, searchable, in the reader's own font
    "svg.hashsalt": "slimbayes",  # the same results give the same bytes
    "font.family": ["sans-serif"],
    "font.size": 8.0,
    "text.color": INK,
    "axes.facecolor": "none",
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.0,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.unicode_minus": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.0,
    "hatch.linewidth": 0.6,
}


@dataclass(frozen=True)
class Style:
    """A method's colour, marker and dashes: the same in every figure."""

    colour: str
    marker: str
    dashes: tuple[float, ...]

    def line(self, **more: Any) -> dict[str, Any]:
        """Keyword arguments for a line in this style."""
        options: dict[str, Any] = {"color": self.colour, "marker": self.marker}
        return options | ({"dashes": self.dashes} if self.dashes else {}) | more


def palette(names: Sequence[str]) -> dict[str, Style]:
    """One style per name, in their order.

    >>> palette(["Mean-field", "1-tied"])["1-tied"].colour == COLOURS[1]
    True
    """
    table: dict[str, Style] = {}
    for i, name in enumerate(names):
        dashes = DASHES[(i + i // len(COLOURS)) % len(DASHES)]  # a colour's second use gets other dashes
        table[name] = Style(COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], dashes)
    return table


def styles(results: Results) -> dict[str, Style]:
    """One style per method, by name: the deterministic network in ink, the others in the file's order."""
    table = palette([method["name"] for method in results.methods if method is not results.baseline])
    if results.baseline is not None:
        table[results.baseline["name"]] = Style(INK, "o", (2, 1.2))
    return table


@dataclass
class Panel:
    """One plot: a function that draws on a matplotlib Figure, its size in inches, and what it shows in words."""

    draw: Callable[[Any], None]
    alt: str
    width: float = 3.4
    height: float = 2.5
    svg: str = ""
    pixels: Any = None


@dataclass
class Plot:
    """A figure of the report: panels, words, a legend of methods, and the numbers behind it."""

    name: str
    title: str
    caption: str
    panels: list[Panel]
    header: list[str]
    rows: list[list[Any]]
    legend: list[tuple[str, Style]] = field(default_factory=list)
    across: int = 3


def legend_of(results: Results, table: Mapping[str, Style], names: Sequence[str] | None = None) -> list[Any]:
    """Legend entries of the given methods (all by default), in the file's order."""
    wanted = None if names is None else set(names)
    return [(label(m), table[m["name"]]) for m in results.methods if wanted is None or m["name"] in wanted]


def axes(figure: Any, title: str, xlabel: str, box: Sequence[float] = (0.125, 0.16, 0.855, 0.73)) -> Any:
    """Axes with the quantity as title, flush left; no rotated label to tilt one's head for."""
    ax = figure.add_axes(list(box))
    ax.set_title(printable(title), parse_math=False, x=-0.01, pad=6)
    ax.set_xlabel(printable(xlabel), parse_math=False, labelpad=2)
    return ax


def printable(text: str) -> str:
    """Text without the control characters that no SVG may hold.

    >>> printable("a\\x00b\\nc")
    'a b c'
    """
    return re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", " ", str(text))


def shorten(text: str, most: int = 34) -> str:
    """A long name cut to fit over a panel.

    >>> shorten("a" * 50, 6)
    'aaaaa…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def render(plot: Plot) -> None:
    """Draw every panel of a plot once, to SVG and to pixels."""
    for panel in plot.panels:
        panel.svg, panel.pixels = _render(panel)


def _render(panel: Panel) -> tuple[str, Any]:
    need("matplotlib", "a figure of the report", "plots")
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a glyph that the PNG's font lacks: the SVG has it as text
        figure = Figure(figsize=(panel.width, panel.height), dpi=DPI, facecolor="none")
        canvas = FigureCanvasAgg(figure)
        panel.draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None}, facecolor="none")
        figure.set_facecolor("white")
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    return out.getvalue(), pixels


_GEOMETRY = re.compile(r' (d|x|y|width|height|transform|style|viewBox|points)="([^"]*)"')


def tidy(svg: str, prefix: str) -> str:
    """An SVG to be put into another document: no header, ids its own, and two decimals are enough."""
    svg = svg[svg.index("<svg") :]
    for pattern in (r"<metadata>.*?</metadata>", r"<!--.*?-->", r"<defs>\s*<style.*?</style>\s*</defs>"):
        svg = re.sub(pattern, "", svg, flags=re.S)

    def short(match: re.Match[str]) -> str:
        numbers = re.sub(r"-?\d+\.\d{3,}", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), match[2])
        return f' {match[1]}="{" ".join(numbers.split())}"'

    svg = _GEOMETRY.sub(short, svg)
    used = set(re.findall(r'(?:url\(#|href="#)([\w-]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(url\(#|href="#)([\w-]+)', rf"\g<1>{prefix}-\g<2>", svg)
    svg = svg.replace("xlink:href", "href")
    return re.sub(r">\s+<", "><", svg).strip()


def themed(svg: str, alt: str) -> str:
    """A tidy SVG for the page: the page's own colours and font, and a description for those who do not see it."""
    for colour, variable in VARIABLES.items():
        svg = svg.replace(f": {colour}", f": {variable}")
    svg = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 var(--sans)", svg)
    head = f'<svg role="img" aria-label="{escape(printable(alt))}" viewBox'
    svg = re.sub(r"<svg [^>]*?viewBox", lambda m: head, svg, count=1)
    return re.sub(r'(<svg [^>]*?viewBox="[^"]*")[^>]*>', r'\1 focusable="false">', svg, count=1)


def _legend_panel(plot: Plot, width: float) -> Panel:
    """Title and legend as a strip over the panels of a file."""
    per_row = max(1, int(width / 1.7))
    lines = math.ceil(len(plot.legend) / per_row)
    height = 0.34 + 0.2 * lines

    def draw(figure: Any) -> None:
        from matplotlib.lines import Line2D

        title = shorten(printable(plot.title), int(width * 14))
        figure.text(
            0.1 / width, 1 - 0.2 / height, title, weight="bold", size=9.5, va="center", parse_math=False
        )
        for i, (name, style) in enumerate(plot.legend):
            x, y = (0.1 + 1.7 * (i % per_row)) / width, 1 - (0.42 + 0.2 * (i // per_row)) / height
            figure.add_artist(
                Line2D([x, x + 0.15 / width, x + 0.3 / width], [y, y, y], **style.line(markevery=[1]))
            )
            figure.text(x + 0.38 / width, y, shorten(printable(name), 22), va="center", parse_math=False)

    return Panel(draw, "", width, height)


def compose(plot: Plot) -> tuple[str, bytes]:
    """All panels of a rendered plot in one SVG and one PNG, under a strip with its title and legend."""
    across = min(plot.across, len(plot.panels))
    width, height = plot.panels[0].width, plot.panels[0].height
    strip = _legend_panel(plot, width * across)
    strip.svg, strip.pixels = _render(strip)
    down = math.ceil(len(plot.panels) / across)
    total_w, total_h = width * across, strip.height + height * down
    pieces = [(strip, 0.0, 0.0)]
    for i, panel in enumerate(plot.panels):
        pieces.append((panel, width * (i % across), strip.height + height * (i // across)))
    inner = "\n".join(
        re.sub(r"<svg [^>]*?viewBox", f'<svg x="{x * 72:.1f}" y="{y * 72:.1f}" width="{p.width * 72:.1f}" '
               f'height="{p.height * 72:.1f}" viewBox', tidy(p.svg, f"p{i}"), count=1)
        for i, (p, x, y) in enumerate(pieces)
    )  # fmt: skip
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_w * 72:.1f}pt" height="{total_h * 72:.1f}pt" '
        f'viewBox="0 0 {total_w * 72:.1f} {total_h * 72:.1f}"><title>{escape(printable(plot.title))}</title>\n'
        "<style>*{stroke-linejoin:round;stroke-linecap:butt}</style>\n"
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n{inner}\n</svg>\n'
    )
    page = np.full((round(total_h * DPI) + 1, round(total_w * DPI) + 1, 3), 255, dtype=np.uint8)
    for panel, x, y in pieces:
        h, w = panel.pixels.shape[:2]
        top, left = round(y * DPI), round(x * DPI)
        page[top : top + h, left : left + w] = panel.pixels[: page.shape[0] - top, : page.shape[1] - left]
    return svg, png(page)


def png(pixels: Any) -> bytes:
    """A PNG file of uint8 pixels [H, W] (grey) or [H, W, 3].

    >>> png(np.zeros((2, 2), dtype=np.uint8))[:8]
    b'\\x89PNG\\r\\n\\x1a\\n'
    """
    pixels = np.ascontiguousarray(pixels, dtype=np.uint8)
    height, width = pixels.shape[:2]
    rows = pixels.reshape(height, -1)  # [H, W · channels]
    raw = np.concatenate(
        [np.zeros((height, 1), np.uint8), rows], axis=1
    ).tobytes()  # filter 0 before every row

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2 if pixels.ndim == 3 else 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 6)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
