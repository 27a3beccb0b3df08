"""``slimbayes reproduce --list``: every entry and its state."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show(console: Console, results: Path) -> None:
    """One table per paper: entry, item, title, and its state: at which scales it was run and where the results lie."""
    from slimbayes.lab.experiments.catalogue import ENTRIES
    from slimbayes.lab.experiments.entry import PAPERS
    from slimbayes.lab.experiments.running import RUNNERS
    from slimbayes.lab.experiments.state import state

    states = state(results, ENTRIES)
    for key, paper in PAPERS.items():
        title = Text(f"{paper.authors} {paper.year}: {paper.title}")
        table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
        table.add_column("entry", no_wrap=True)
        table.add_column("item", no_wrap=True)
        table.add_column("what", ratio=3)
        table.add_column("state", ratio=3)
        lines: list[str] = []
        for name, entry in ENTRIES.items():
            if name.startswith(f"{key}/"):
                found, damaged = states[name].results, states[name].damaged
                words = ", ".join([*(r.scale for r in found), *["damaged"] * bool(damaged)]) or "not run"
                lines += [f"  {r.path}: {r.holds} of {r.checks} checks hold" for r in found]
                lines += [f"  {d.path}: damaged, {d.why}" for d in damaged]
                if words == "not run" and name not in RUNNERS:
                    words = "no code yet"
                table.add_row(name, Text(entry.item), Text(entry.title), Text(words))
        console.print(table)
        for line in lines:
            console.print(Text(line), soft_wrap=True)
        console.print()
