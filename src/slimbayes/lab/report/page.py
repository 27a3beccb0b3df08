"""One self-contained HTML page: words, tables, figures and examples, with nothing to fetch."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from slimbayes.lab.report.choice import ADVICE, choose
from slimbayes.lab.report.examples import examples_html, text
from slimbayes.lab.report.panels import VARIABLES, Plot, Style, styles, themed, tidy
from slimbayes.lab.report.provenance import provenance_html, terms_html
from slimbayes.lab.report.results import Results, number
from slimbayes.lab.report.statistics import Stat, findings
from slimbayes.lab.report.tables import (
    GROUPS,
    Column,
    best,
    columns,
    csv_summary,
    seeds_note,
    summary_rows,
    to_csv,
)
from slimbayes.lab.report.tables import markdown_summary as markdown

_ROWS, _CELLS = 80, 480  # of a figure's data in the page, at most

# id, heading, words under it, figures
_SECTIONS = (
    (
        "shift",
        "Under shift",
        "How predictions get worse as the test data are disturbed more.",
        ("severity", "shifts"),
    ),
    ("fit", "Fit", "What the models predict, and the band they put around it.", ("fit",)),
    ("calibration", "Calibration", "Can stated probabilities be believed?", ("reliability", "coverage")),
    (
        "unknown",
        "Known unknowns",
        "Do the models notice what they have not seen?",
        ("entropy", "disagreement"),
    ),
)


def page_html(results: Results, figures: Sequence[tuple[Plot, str]]) -> str:
    """The report's page; ``figures`` are rendered plots with their composed SVG."""
    by_name = {plot.name: figure_html(plot, svg) for plot, svg in figures}
    return shell(
        results.title,
        "methods compared",
        _facts(results),
        _body(results, by_name),
        f"Made by slimbayes{_when(results)}.",
    )


def shell(title: str, kind: str, facts: str, sections: Sequence[tuple[str, str, str]], made: str) -> str:
    """A page around sections (id, heading, content); ``facts``, the sections and ``made`` are HTML already."""
    html, script = _template()
    slots = {
        "title": text(title),
        "kind": text(kind),
        "style": _resource("page.css"),
        "script": script,
        "script-hash": "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "facts": facts,
        "nav": "".join(f'<li><a href="#{key}">{title}</a></li>' for key, title, _ in sections),
        "body": "\n".join(
            f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{title}</h2>\n{inner}</section>'
            for key, title, inner in sections
        ),
        "footer": f"{made} This page holds everything it shows; it fetches nothing.",
    }
    # one pass: what is put in is never searched for slots again
    return re.sub(r"@@([a-z-]+)@@", lambda match: slots[match[1]], html)


def _resource(name: str) -> str:
    return resources.files("slimbayes.lab.report").joinpath(name).read_text(encoding="utf-8")


def _template() -> tuple[str, str]:
    """The page and its script, which the template keeps in a comment at its end."""
    html, script = _resource("page.html").split("<!--script\n")
    return html, "\n" + script.split("script-->")[0]


def _body(results: Results, figures: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """(id, heading, content) of every section that has something in it."""
    parts = [("verdict", "In short", _answer(results, figures.get("difference", "")))]
    words = _differences(results)
    parts.append(("summary", "Summary", (_summary(results) if results.methods else "") + words))
    for key, title, words, names in _SECTIONS:
        inner = "\n".join(figures[name] for name in names if name in figures)
        if inner:
            parts.append((key, title, f'<p class="note">{words}</p>\n{inner}'))
    examples = examples_html(results)
    if examples:
        words = (
            "Test examples of the first seed. Bars are the largest probabilities; the true class is blue and a ✓ or ✗ "
            "says whether the prediction is right."
            if results.task == "classification"
            else "Test examples of the first seed: the interval (bar), the prediction (line) and the target (ring)."
        )
        parts.append(("examples", "Examples", f'<p class="note">{words}</p>\n{examples}'))
    if "training" in figures:
        parts.append(("training", "Training", figures["training"]))
    return [
        *parts,
        ("terms", "Terms", terms_html(results)),
        ("provenance", "Provenance", provenance_html(results)),
    ]


def _when(results: Results) -> str:
    created = results.data.get("created")
    return f" on {text(str(created).replace('T', ' '))}" if created else ""


def _facts(results: Results) -> str:
    data, seeds = results.dataset, len(results.seeds)
    shape = " × ".join(str(n) for n in data.get("shape") or [])
    sizes = [f"{data[key]:,} {word}" for key, word in (("num_train", "training"), ("num_test", "test"))
             if isinstance(data.get(key), int)]  # fmt: skip
    items = [
        data.get("name"),
        f"{' and '.join(sizes)} examples" if sizes else None,
        f"inputs {shape}" if shape else None,
        results.data.get("network"),
        f"{len(results.methods)} {'method' if len(results.methods) == 1 else 'methods'}",
        f"{seeds} {'seed' if seeds == 1 else 'seeds'}",
    ]
    return "".join(f"<span>{text(item)}</span>" for item in items if item)


_SIGNS = {
    "lower": "▼",
    "higher": "▲",
    "undecided": "≈",
    "single": "?",
    "missing": "–",
    "none": "–",
    "clean": "○",
    "sign": "!",
}


def _answer(results: Results, picture: str) -> str:
    """Which method to take, the picture that shows it, and the rule."""
    chosen = choose(results)
    notes = [*filter(None, [chosen.rule]), f"On other data: {ADVICE}"]
    below = "".join(f'<p class="note rule">{text(note)}</p>\n' for note in notes)
    return f'<div class="verdict"><p class="lead">{text(chosen.text)}</p></div>\n{picture}{below}'


def _differences(results: Results) -> str:
    found = findings(results)
    items = []
    for kind, sentence in found:
        if kind in _SIGNS:
            head, colon, tail = sentence.partition(": ")
            words = f"<strong>{text(head)}:</strong> {text(tail)}" if colon else text(sentence)
            items.append(
                f'<li><span class="sign {kind}" aria-hidden="true">{_SIGNS[kind]}</span><span>{words}</span></li>'
            )
    opening = " ".join(text(sentence) for kind, sentence in found if kind == "opening")
    caution = " ".join(text(sentence) for kind, sentence in found if kind == "caution")
    listed = f'<ul class="findings">{"".join(items)}</ul>' if items else ""
    return (
        f'<div class="verdict"><p>{opening}</p>{listed}'
        + (f'<p class="note">{caution}</p>' if caution else "")
        + "</div>\n"
    )


def _summary(results: Results) -> str:
    wanted, rows, table = columns(results), summary_rows(results), styles(results)
    groups = [(g, [c for c in wanted if c.group == g]) for g in GROUPS]
    first = {part[0].key for _, part in groups if part}
    top = "".join(
        f'<th scope="colgroup" colspan="{len(part)}" class="first">{GROUPS[g]}</th>'
        for g, part in groups
        if part
    )
    heads = "".join(_head(c, i + 1, c.key in first) for i, c in enumerate(wanted))
    marks = {c.key: best(rows, c) for c in wanted}
    body = []
    for i, row in enumerate(rows):
        cells = "".join(_cell(c, row[c.key], i in marks[c.key], c.key in first) for c in wanted)
        name = text(row["label"])
        body.append(
            f'<tr><th scope="row" data-value="{name}">{swatch(table[row["name"]])}{name}</th>{cells}</tr>'
        )
    note = f"{seeds_note(results)} ★ marks the best mean of a column, which alone is no evidence of a difference."
    return (
        f'<div class="box"><p class="note">{note} <span class="screen">Click a heading to sort. '
        '<span class="wide-hint">Scroll sideways for more columns.</span></span></p>'
        '<div class="scroll" tabindex="0" role="region" aria-label="Summary table">'
        '<table class="summary sortable"><caption class="hidden">Metrics and cost by method</caption>'
        f'<thead><tr><th rowspan="2" scope="col"><button type="button" data-column="0" data-kind="text" '
        f'data-name="method">Method</button></th>{top}</tr><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
        f'<p class="tools"><span>Download</span>{_link("summary.csv", "text/csv", csv_summary(results), "CSV")}'
        f"{_link('summary.md', 'text/markdown', markdown(results), 'Markdown')}</p></div>\n"
    )


def _head(column: Column, index: int, first: bool) -> str:
    name = f"{GROUPS[column.group]}: {column.title}"
    return (
        f'<th scope="col"{" class=first" if first else ""}><button type="button" data-column="{index}" '
        f'data-name="{text(name)}">{text(column.title)}</button></th>'
    )


def _cell(column: Column, entry: Stat, is_best: bool, first: bool) -> str:
    classes = " ".join(name for name, on in (("best", is_best), ("first", first)) if on)
    attribute = f' class="{classes}"' if classes else ""
    if entry.mean is None:
        return f'<td{attribute} data-value=""><span aria-label="none">–</span></td>'
    star = ' <span aria-hidden="true">★</span><span class="hidden">best</span>' if is_best else ""
    error = f'<span class="error">± {column.spread(entry.error)}</span>' if entry.error is not None else ""
    return f'<td{attribute} data-value="{entry.mean!r}">{column.text(entry.mean)}{star}{error}</td>'


_SHAPES = {
    "o": '<circle cx="17" cy="7" r="4"/>',
    "s": '<path d="M13 3h8v8h-8z"/>',
    "^": '<path d="M17 2.5l4.5 8.5h-9z"/>',
    "v": '<path d="M17 11.5l4.5-8.5h-9z"/>',
    "D": '<path d="M17 2l5 5-5 5-5-5z"/>',
    "P": '<path d="M15.5 2.5h3v3h3v3h-3v3h-3v-3h-3v-3h3z"/>',
    "X": '<path d="M14.5 2.5L17 5l2.5-2.5 2 2L19 7l2.5 2.5-2 2L17 9l-2.5 2.5-2-2L15 7l-2.5-2.5z"/>',
    "*": '<path d="M17 1.5l1.6 3.8 4.1.3-3.1 2.7 1 4-3.6-2.2-3.6 2.2 1-4-3.1-2.7 4.1-.3z"/>',
    "<": '<path d="M12 7l9-4.5v9z"/>',
    ">": '<path d="M22 7l-9-4.5v9z"/>',
}


def swatch(style: Style) -> str:
    """A method's line and marker, as in the figures; its name stands next to it."""
    colour = VARIABLES[style.colour]
    dashes = " ".join(f"{1.4 * d:g}" for d in style.dashes)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<svg viewBox="0 0 34 14" aria-hidden="true" style="color:{colour}"><path d="M0 7h34" stroke="currentColor" '
        f'stroke-width="2"{dashed}/><g fill="currentColor">{_SHAPES[style.marker]}</g></svg>'
    )


def _link(name: str, kind: str, content: str, words: str, mark: str = "") -> str:
    data = base64.b64encode(content.encode()).decode()
    return f'<a download="{name}"{mark} href="data:{kind};charset=utf-8;base64,{data}">{words}</a>'


def _tools(pictures: str, plot: Plot, csv: bool) -> str:
    data = _link(f"{plot.name}.csv", "text/csv", to_csv(plot.header, plot.rows), "CSV") if csv else ""
    links = pictures + data
    return f'<div class="tools"><span>Download</span>{links}</div>\n' if links else ""


def figure_html(plot: Plot, svg: str = "", level: int = 3, csv: bool = True) -> str:
    """A rendered plot with its words, its numbers and downloads: its composed ``svg``, if given, and a CSV.

    Without a ``csv`` the page says that the result has all numbers: it is for pages that link to it.
    """
    legend = "".join(f"<li>{swatch(style)}<span>{text(name)}</span></li>" for name, style in plot.legend)
    panels = "".join(
        f'<div class="panel">{themed(tidy(panel.svg, f"{plot.name}{i}"), panel.alt)}</div>'
        for i, panel in enumerate(plot.panels)
    )
    shown = plot.rows[: min(_ROWS, max(1, _CELLS // max(1, len(plot.header))))]
    part = (
        f" (first {len(shown)} of {len(plot.rows)} rows; the {'CSV' if csv else 'result'} has all)"
        if len(plot.rows) > len(shown)
        else ""
    )
    body = "".join("<tr>" + "".join(f"<td>{_plain(v)}</td>" for v in row) + "</tr>" for row in shown)
    heads = "".join(f'<th scope="col">{text(name)}</th>' for name in plot.header)
    kind = {1: " one", 2: " two"}.get(plot.across, "")
    single = ' class="single"' if plot.across == 1 else ""
    pictures = (
        f"{_link(f'{plot.name}.svg', 'image/svg+xml', svg, 'SVG', ' data-svg')}"
        f'<button type="button" data-png="{plot.name}" hidden>PNG</button>'
        if svg
        else ""
    )
    return (
        f'<figure id="figure-{plot.name}"{single} aria-labelledby="title-{plot.name}">'
        f'<h{level} id="title-{plot.name}">{text(plot.title)}</h{level}>\n'
        + (f'<ul class="legend" aria-label="Methods">{legend}</ul>\n' if legend else "")
        + f'<div class="panels{kind}">{panels}</div>\n<figcaption>{text(plot.caption)}</figcaption>\n'
        f"{_tools(pictures, plot, csv)}"
        f'<details class="data"><summary>Numbers</summary><div class="scroll" tabindex="0" role="region" '
        f'aria-label="Numbers of {text(plot.title)}"><table class="plain"><caption>{text(plot.title)}{part}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div></details></figure>\n"
    )


def _plain(value: Any) -> str:
    if value is None or (isinstance(value, float) and number(value) is None):
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else text(value)
