"""All figures of a report, and their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimbayes.files import write_whole
from slimbayes.lab.report.curves import by_shift, difference, severities, training
from slimbayes.lab.report.panels import Plot, compose, render, styles
from slimbayes.lab.report.regression import coverage, fits
from slimbayes.lab.report.results import Results
from slimbayes.lab.report.tables import csv_summary, to_csv
from slimbayes.lab.report.uncertainty import disagreement, entropies, reliability

_BUILDERS = (difference, severities, by_shift, fits, coverage, reliability, entropies, disagreement, training)


def plots(results: Results | Mapping[str, Any]) -> list[Plot]:
    """Every figure that these results have numbers for, rendered, in the report's order."""
    results = Results.of(results)
    table = styles(results)
    found = [plot for build in _BUILDERS if (plot := build(results, table)) is not None]
    for plot in found:
        render(plot)
    return found


def write_figures(results: Results | Mapping[str, Any], folder: str | Path) -> list[tuple[Plot, str]]:
    """Write NAME.svg, NAME.png and NAME.csv per figure, and summary.csv; returns the plots with their SVG text."""
    results = Results.of(results)
    folder = Path(folder)
    written = []
    for plot in plots(results):
        svg, picture = compose(plot)
        write_whole(folder / f"{plot.name}.svg", svg)
        write_whole(folder / f"{plot.name}.png", picture)
        write_whole(folder / f"{plot.name}.csv", to_csv(plot.header, plot.rows))
        written.append((plot, svg))
    write_whole(folder / "summary.csv", csv_summary(results))
    return written
