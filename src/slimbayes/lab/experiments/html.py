"""The HTML page of all results: self-contained, with the style of the other reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slimbayes.lab.experiments.entry import PAPERS, Paper
from slimbayes.lab.experiments.plots import fingerprint, slug
from slimbayes.lab.experiments.sections import Section, damages, day, heading, link, shown, status
from slimbayes.lab.experiments.state import State, Survey
from slimbayes.lab.experiments.tables import html as table_html
from slimbayes.lab.report.examples import text
from slimbayes.lab.report.page import figure_html, shell
from slimbayes.lab.report.panels import Plot
from slimbayes.lab.report.provenance import pairs

_BLANK = '<svg viewBox="0 0 1 1"></svg>'
LEAD = (
    "Every table and figure of the papers, and what came out here. Ours stand beside the paper's numbers; each number "
    "is read from the JSON file that the section names. Scales: desk is a small run on a CPU, gpu a run on one "
    "GPU, shortened where its deviations say so, paper the full one."
)


def page_html(survey: Survey, sections: Sequence[Section], out: Path) -> str:
    """The page: all entries with their states, then a section per paper with its results."""
    papers = [paper for paper in PAPERS.values() if any(part.entry.paper is paper for part in sections)]
    files = sum(1 + len(part.others) for part in sections)
    facts = (
        f"{len(survey.states)} entries",
        f"{len(sections)} with results",
        f"{files} result {'file' if files == 1 else 'files'}",
    )
    parts = [("entries", "All entries", _entries(survey, out))]
    for paper in papers:
        inner = "".join(_article(part, out) for part in sections if part.entry.paper is paper)
        parts.append((paper.key, _short(paper), _head(paper) + inner))
    return shell(
        "The papers' results, and ours",
        "experiments",
        "".join(f"<span>{text(fact)}</span>" for fact in facts),
        parts,
        "Made by slimbayes report.",
    )


def _short(paper: Paper) -> str:
    return text(f"{paper.authors}, {paper.year}")


def _head(paper: Paper) -> str:
    return f'<p class="note"><a href="{text(paper.url)}">{text(paper.title)}</a></p>\n'


def _entries(survey: Survey, out: Path) -> str:
    rows = "".join(_row(state, out) for state in survey.states.values())
    heads = "".join(
        f'<th scope="col">{name}</th>'
        for name in ("Item", "Paper", "State", "Checks that hold", "Date", "Result")
    )
    broken = "".join(
        f"<li><code>{text(damage.shown)}</code>: {text(damage.why)}</li>" for damage in damages(survey)
    )
    return (
        f'<p class="note">{LEAD}</p>\n<div class="box"><div class="scroll" tabindex="0" role="region" '
        'aria-label="All entries"><table class="plain entries"><caption class="hidden">Entries and their state'
        "</caption>"
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></div>\n"
        + (f'<div class="box"><h3>Files that are no results</h3><ul>{broken}</ul></div>\n' if broken else "")
    )


def _row(state: State, out: Path) -> str:
    entry, results = state.entry, shown(state)
    title, cells = text(heading(entry)), ["–", "–", "–"]
    if results:
        first = results[0]
        title = f'<a href="#{slug(entry.name)}">{title}</a>'
        checks = f"{first.holds} of {first.checks}" if first.checks else "–"
        cells = [checks, text(day(first)) or "–", ", ".join(_file(r.scale, r.path, out) for r in results)]
    values = "".join(f"<td>{cell}</td>" for cell in (_short(entry.paper), text(status(state)), *cells))
    return f'<tr><th scope="row">{title}</th>{values}</tr>'


def _file(words: str, path: Path, out: Path) -> str:
    return f'<a href="{text(link(path, out))}">{text(words)}</a>'


def _article(part: Section, out: Path) -> str:
    key = slug(part.entry.name)
    facts = {name: text(value) for name, value in part.facts().items()}
    if part.others:
        facts["Other results, not shown"] = ", ".join(_file(o.scale, o.path, out) for o in part.others)
    made = {"Result": _file(part.result.shown, part.result.path, out)}
    for name, (value, code) in part.provenance().items():
        made[name] = f"<code>{text(value)}</code>" if code else text(value)
    return (
        f'<article id="{key}" aria-labelledby="{key}-title"><h3 id="{key}-title">{text(part.heading)}</h3>\n'
        f"<p>{text(part.entry.shows)}</p>\n{pairs(facts)}"
        + "".join(map(table_html, part.tables))
        + "".join(map(_figure, part.plots))
        + f"<h4>Checks</h4>{_checks(part)}\n"
        + f"<h4>Deviations from the paper</h4>{_list(part.deviations) or '<p>None is recorded.</p>'}\n"
        + (f"<h4>Errata of the paper</h4>{_list(part.entry.errata)}\n" if part.entry.errata else "")
        + f"<h4>Provenance</h4>{pairs(made)}</article>\n"
    )


def _figure(plot: Plot) -> str:
    panels = [replace(panel, svg=panel.svg or _BLANK) for panel in plot.panels]
    return f"<!-- numbers: {fingerprint(plot)} -->{figure_html(replace(plot, panels=panels), level=4, csv=False)}"


def _checks(part: Section) -> str:
    items = "".join(
        f'<li><span class="sign {"yes" if holds else "no"}" aria-hidden="true">{"✓" if holds else "✗"}</span>'
        f"<span><strong>{'holds' if holds else 'does not hold'}:</strong> {text(words)}</span></li>"
        for holds, words in part.checks()
    )
    return f'<ul class="findings">{items}</ul>' if items else "<p>No check is recorded.</p>"


def _list(sentences: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{text(sentence)}</li>' for sentence in sentences)}</ul>" if sentences else ""
