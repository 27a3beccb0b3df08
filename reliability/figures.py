"""Figures of one part, as a file that docs/reliability.md is made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slimbayes.files import write_whole
from slimbayes.verbs.provenance import provenance

RESULTS = Path(__file__).parent / "results"
FORMAT = "slimbayes-reliability"


@dataclass(frozen=True)
class Figure:
    """Something that was to hold: what it is, what was measured, what was asked of it."""

    what: str
    value: str  # as it is printed: "200 of 200"
    bound: str  # as it is printed: "all", "p > 0.01"; empty: reported, nothing asked
    holds: bool | None  # None where nothing was asked


def write_figures(
    part: str,
    command: str,
    figures: Sequence[Figure],
    seconds: float,
    notes: Sequence[str] = (),
    folder: Path = RESULTS,
    **details: Any,
) -> Path:
    """Write a part's figures; ``command`` is what measures them again, ``notes`` are sentences for the page."""
    document = {
        "format": FORMAT,
        "version": 1,
        "part": part,
        "figures": [asdict(figure) for figure in figures],
        "notes": list(notes),
        "details": details,
        "provenance": provenance(command=command, seconds=round(seconds, 1)),
    }
    return write_whole(folder / f"{part}.json", json.dumps(document, indent=1) + "\n")


def read_figures(path: Path) -> dict[str, Any]:
    """A part's document; a file of another format is an error."""
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("format") != FORMAT or document.get("version") != 1:
        raise ValueError(f"{path} is no file of {FORMAT}, version 1")
    return document


def figures_text(documents: Sequence[dict[str, Any]]) -> str:
    """The tables of docs/reliability.md: a section for each part, with the command that measures it again."""
    sections = [_summary(documents)]
    for document in documents:
        made = document["provenance"]
        lines = ["| what | measured | asked | holds |", "|---|---|---|---|"]
        lines += [
            f"| {f['what']} | {f['value']} | {f['bound'] or '–'} | {_word(f['holds'])} |"
            for f in document["figures"]
        ]
        notes = "\n".join(f"- {note}" for note in document["notes"])
        origin = (
            f"`{made['command']}`: {made['seconds']:,.0f} s; {made['created'][:10]}, commit `{made['commit']}`, "
            f"Python {made['versions']['python']}, torch {made['versions']['torch']}, {made['hardware']}."
        )
        parts = [f"## {document['part'].capitalize()}", "\n".join(lines), notes, origin]
        sections.append("\n\n".join(part for part in parts if part))
    return "\n\n".join(sections)


def _summary(documents: Sequence[dict[str, Any]]) -> str:
    asked = [f["holds"] for document in documents for f in document["figures"] if f["holds"] is not None]
    failed = [f"{d['part']}: {f['what']}" for d in documents for f in d["figures"] if f["holds"] is False]
    said = f"{len(asked)} figures were asked for, {sum(asked)} hold."
    return said + (f" Not: {'; '.join(failed)}." if failed else "")


def _word(holds: bool | None) -> str:
    return "–" if holds is None else "yes" if holds else "**no**"
