"""Results as pages: markdown for readers of the repository, one HTML page, and figures as SVG files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slimbayes.files import write_whole
from slimbayes.lab.experiments.entry import PAPERS, Experiment, Paper
from slimbayes.lab.experiments.html import LEAD, page_html
from slimbayes.lab.experiments.plots import fingerprint, mark_of, marked, slug
from slimbayes.lab.experiments.sections import Section, damages, day, heading, link, sections, shown, status
from slimbayes.lab.experiments.state import Source, State, Survey, survey
from slimbayes.lab.experiments.tables import markdown, md, note
from slimbayes.lab.report.panels import Plot, compose, printable, render

NOTE = "<!-- Written by slimbayes report from the JSON files of results: do not edit. -->"
HTML = "results.html"


@dataclass(frozen=True)
class Pages:
    """All that the results folder of the documentation holds: texts by file name, figures by theirs, one HTML page."""

    texts: Mapping[str, str]
    figures: Mapping[str, Plot]
    survey: Survey
    sections: list[Section]
    out: Path

    def html(self) -> str:
        """The HTML page; its figures are empty until they are rendered."""
        return page_html(self.survey, self.sections, self.out)


def build(results: Source, out: str | Path, entries: Mapping[str, Experiment]) -> Pages:
    """Everything but the pictures: ``results`` is a folder, or files; ``out`` is where links start."""
    out, found = Path(out), survey(results, entries)
    parts = sections(found)
    papers = [paper for paper in PAPERS.values() if any(e.paper is paper for e in entries.values())]
    texts = {"index.md": _index(found, papers, out)}
    for paper in papers:
        texts[f"{paper.key}.md"] = _paper(paper, [part for part in parts if part.entry.paper is paper], out)
    figures = {f"figures/{plot.name}.svg": plot for part in parts for plot in part.plots}
    return Pages(texts, figures, found, parts, out)


def stale_pages(results: Source, out: str | Path, entries: Mapping[str, Experiment]) -> dict[str, str]:
    """What in ``out`` differs from the results, by file name with what is wrong.

    "missing", "stale", "superfluous" (a page or figure that nothing backs any more), "foreign" (not written here).
    """
    return _stale(build(results, out, entries))


def write_pages(results: Source, out: str | Path, entries: Mapping[str, Experiment]) -> list[Path]:
    """Write index.md, a page per paper, results.html and figures; returns the files that changed.

    A file that says what it should is left as it is; superfluous pages and figures are removed; what was not written
    here is not touched.

    >>> import tempfile
    >>> out, entry = Path(tempfile.mkdtemp()), Experiment("ktied/table9", "Table 9", "Title", "Shows")
    >>> [path.name for path in write_pages("no-such-folder", out, {entry.name: entry})]
    ['index.md', 'ktied.md', 'results.html']
    >>> stale_pages("no-such-folder", out, {entry.name: entry})
    {}
    """
    pages = build(results, out, entries)
    found = {name: what for name, what in _stale(pages).items() if what != "foreign"}
    for plot in pages.figures.values() if HTML in found else ():
        render(plot)  # the page holds every figure
    for name, what in found.items():
        path = pages.out / name
        if what == "superfluous":
            path.unlink()
        elif name in pages.figures:
            plot = pages.figures[name]
            if not plot.panels[0].svg:
                render(plot)
            write_whole(path, marked(compose(plot)[0], fingerprint(plot)))
        else:
            write_whole(path, pages.html() if name == HTML else pages.texts[name])
    return [pages.out / name for name in found]


def _stale(pages: Pages) -> dict[str, str]:
    wanted = {**pages.texts, HTML: pages.html(), **dict.fromkeys(pages.figures, "")}
    found = {}
    for name, content in wanted.items():
        path = pages.out / name
        if not path.is_file():
            found[name] = "missing"
            continue
        there = path.read_text(encoding="utf-8", errors="replace")
        # Another matplotlib draws the same numbers with other bytes, so pictures are compared by the fingerprint of
        # what they show, which each figure carries, and the words and numbers around them byte by byte.
        if name in pages.figures:
            same = mark_of(there) == fingerprint(pages.figures[name])
        else:
            same = _without_pictures(there) == _without_pictures(content)
        if not same:
            found[name] = "stale"
    inside = (path for path in sorted(pages.out.rglob("*")) if path.is_file())
    names = (path.relative_to(pages.out).as_posix() for path in inside)
    more = (name for name in names if name not in wanted)
    return found | {name: "superfluous" if _ours(pages.out / name) else "foreign" for name in more}


def _without_pictures(page: str) -> str:
    return re.sub(r'(<div class="panels[^"]*">).*?(</div>\n<figcaption>)', r"\1\2", page, flags=re.S)


def _ours(path: Path) -> bool:
    content = path.read_text(encoding="utf-8", errors="replace")
    return NOTE in content if path.suffix == ".md" else path.suffix == ".svg" and mark_of(content) is not None


def _index(found: Survey, papers: list[Paper], out: Path) -> str:
    parts = ["# Results", NOTE, f"{LEAD} Everything on one page, with light and dark: [{HTML}]({HTML})."]
    for paper in papers:
        rows = [_row(state, out) for state in found.states.values() if state.entry.paper is paper]
        head = "| Item | State | Checks that hold | Date | Result |\n|---|---|---|---|---|"
        parts += [f"## [{md(paper.title)}]({paper.key}.md)", "\n".join((head, *rows))]
    broken = [f"- {md(damage.shown)}: {md(damage.why)}" for damage in damages(found)]
    if broken:
        parts += ["## Files that are no results", "\n".join(broken)]
    return "\n\n".join(parts) + "\n"


def _row(state: State, out: Path) -> str:
    entry, results = state.entry, shown(state)
    if not results:
        return f"| {md(heading(entry))} | {md(status(state))} | – | – | – |"
    first = results[0]
    title = f"[{md(heading(entry))}]({entry.paper.key}.md#{_anchor(entry)})"
    files = ", ".join(f"[{result.scale}]({_target(link(result.path, out))})" for result in results)
    checks = f"{first.holds} of {first.checks}" if first.checks else "–"
    return f"| {title} | {md(status(state))} | {checks} | {md(day(first)) or '–'} | {files} |"


def _anchor(entry: Experiment) -> str:
    return slug(entry.name.partition("/")[2])


def _target(path: str) -> str:
    return path.replace(" ", "%20").replace("(", "%28").replace(")", "%29")


def _code(value: str) -> str:
    """A code span around any text: its fence is longer than every run of backticks inside."""
    plain = printable(value)
    fence = "`" * (max((len(run) for run in re.findall("`+", plain)), default=0) + 1)
    gap = " " if "`" in plain else ""
    return f"{fence}{gap}{plain}{gap}{fence}"


def _paper(paper: Paper, parts: list[Section], out: Path) -> str:
    head = f"{md(paper.authors)}, {paper.year}: [{paper.url}]({paper.url}). [All entries](index.md)."
    body = [_section(part, out) for part in parts] or ["No experiment of this paper has a result yet."]
    return "\n\n".join((f"# {md(paper.title)}", NOTE, head, *body)) + "\n"


def _section(part: Section, out: Path) -> str:
    blocks = [f'<a id="{_anchor(part.entry)}"></a>', f"## {md(part.heading)}", md(part.entry.shows)]
    facts = [f"- {name}: {md(value)}" for name, value in part.facts().items()]
    if part.others:
        named = (f"[{other.scale}]({_target(link(other.path, out))})" for other in part.others)
        facts.append(f"- Other results, not shown: {', '.join(named)}")
    blocks.append("\n".join(facts))
    for table in part.tables:
        blocks += [f"### {md(table.title)}", md(note(table)), markdown(table)]
    for plot in part.plots:
        alt = md("; ".join(panel.alt for panel in plot.panels))
        blocks += [f"### {md(plot.title)}", f"![{alt}](figures/{plot.name}.svg)", md(plot.caption)]
    checks = [f"- **{'holds' if holds else 'does not hold'}**: {md(words)}" for holds, words in part.checks()]
    blocks += ["### Checks", "\n".join(checks) or "No check is recorded."]
    deviations = [f"- {md(sentence)}" for sentence in part.deviations]
    blocks += ["### Deviations from the paper", "\n".join(deviations) or "None is recorded."]
    if part.entry.errata:
        blocks += ["### Errata of the paper", "\n".join(f"- {md(erratum)}" for erratum in part.entry.errata)]
    made = [f"- Result: [{md(part.result.shown)}]({_target(link(part.result.path, out))})"]
    for name, (value, code) in part.provenance().items():
        made.append(f"- {md(name)}: {_code(value) if code else md(value)}")
    return "\n\n".join((*blocks, "### Provenance", "\n".join(made)))
