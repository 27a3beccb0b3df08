"""Results to tables, figures and one self-contained page.

>>> import tempfile
>>> from slimbayes.lab.report import write_report
>>> runs = [{"seed": seed, "clean": {"nll": 0.4 + 0.01 * seed}} for seed in range(3)]
>>> results = {"format": "slimbayes-results", "version": 1, "task": "classification",
...            "methods": [{"name": "Deterministic", "runs": runs}]}
>>> with tempfile.TemporaryDirectory() as folder:
...     write_report(results, folder).name
'report.html'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slimbayes.files import write_whole
from slimbayes.lab.report.check import ReportError
from slimbayes.lab.report.choice import Choice, choose, verdict
from slimbayes.lab.report.figures import write_figures
from slimbayes.lab.report.page import page_html
from slimbayes.lab.report.results import Results, merge_results, read_results, write_results
from slimbayes.lab.report.statistics import Stat
from slimbayes.lab.report.tables import markdown_summary, print_summary, summary_rows

__all__ = [
    "write_report",
    "read_results",
    "write_results",
    "merge_results",
    "summary_rows",
    "print_summary",
    "markdown_summary",
    "choose",
    "verdict",
    "Choice",
    "Results",
    "Stat",
    "ReportError",
]

Source = str | Path | Mapping[str, Any] | Results


def write_report(results: Source | Sequence[Source], folder: str | Path) -> Path:
    """Write report.html and figures/NAME.{svg,png,csv} into a folder, and return the page's path.

    ``results`` are a results file, a dict of that form, or several of either, which are joined.
    """
    if isinstance(results, str | Path | Mapping | Results):
        results = [results]
    joined = merge_results(results)
    folder = Path(folder)
    figures = write_figures(joined, folder / "figures")
    return write_whole(folder / "report.html", page_html(joined, figures))
