"""Pages of experiments: every number is backed, nothing is hidden, hostile text stays text."""

import copy
import importlib.util
import json
import math
import random
import re
import shutil
import sys
import types
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from experiments.helpers_results import ENTRIES, TABLE2, document, drawn
from helpers_cli import runner
from helpers_html import EVIL, Tree

from slimbayes import experiments
from slimbayes.lab.experiments import ResultError, read_result, result_path, write_result
from slimbayes.lab.experiments.entry import Column
from slimbayes.lab.experiments.pages import HTML, build, stale_pages, write_pages
from slimbayes.lab.experiments.plots import fingerprint, mark_of, plots
from slimbayes.lab.experiments.results import check_result
from slimbayes.lab.experiments.state import state, survey
from slimbayes.lab.experiments.tables import Cell, Printed, join, markdown, our_parts, paper_text
from slimbayes.lab.report.page import figure_html
from slimbayes.lab.report.statistics import Stat


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "repository" / "results"
    folder.mkdir(parents=True)
    write_result(document(), folder)
    return folder


@pytest.fixture
def out(results):
    return results.parent / "docs" / "results"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A repository with two results and their pages, written once: copy it to change it."""
    root = tmp_path_factory.mktemp("written") / "repository"
    write_result(document(), root / "results")
    write_result(drawn(), root / "results")
    out = root / "docs" / "results"
    changed = write_pages(root / "results", out, ENTRIES)
    return root, {path.relative_to(out).as_posix() for path in changed}


@pytest.fixture
def copied(written, tmp_path):
    root = Path(shutil.copytree(written[0], tmp_path / "repository"))
    return root / "results", root / "docs" / "results"


@pytest.fixture
def entries(monkeypatch):
    """The catalogue, with the entries of these tests."""
    made = types.ModuleType("slimbayes.lab.experiments.catalogue")
    made.ENTRIES = ENTRIES
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(experiments, "catalogue", made, raising=False)


def rows_of(page, title):
    """The cells of a markdown table under a heading, by the first of each row."""
    part = page.split(f"### {title}\n")[1].split("\n### ")[0]
    lines = [re.split(r"(?<!\\) ?\| ?", line)[1:-1] for line in part.splitlines() if line.startswith("|")]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines}


def test_ours_stand_beside_the_papers(results, out):
    write_pages(results, out, ENTRIES)
    page = (out / "ktied.md").read_text(encoding="utf-8")
    rows = rows_of(page, "MNIST, MLP")
    values = [0.441, 0.453, 0.462]
    error = np.std(values, ddof=1) / np.sqrt(3)
    mean = rows["Mean-field"]
    assert mean["NLL ↓, ours"] == f"{np.mean(values):.3f} ± {error:.3f} \\[± 0.008\\]".replace("\\", "")
    assert mean["NLL ↓, paper"] == "0.431 ± 0.0057"
    assert mean["Accuracy % ↑, paper"] == "97.613 ± 0.16"
    assert mean["Parameters ↓, ours"] == "956,800" and mean["Parameters ↓, paper"] == "957,000"
    assert mean["seconds to go, ours"] == mean["seconds to go, paper"] == "–"
    assert rows["Rank 2"]["NLL ↓, ours"] == "0.518 (n = 1)"
    assert rows["Rank 9"]["NLL ↓, ours"] == "–" and rows["Rank 9"]["Accuracy % ↑, paper"] == "91.25"
    assert rows["Ours alone"]["NLL ↓, ours"] == "not finite"
    assert rows["Ours alone"]["NLL ↓, paper"] == "–"
    assert list(rows) == ["", "---", "Mean-field", "Rank 2", "Rank 9", "Ours alone"]
    assert rows_of(page, "IMDB, LSTM")["Mean-field"] == {
        "": "Mean-field",
        "NLL ↓, ours": "–",
        "NLL ↓, paper": "0.478",
    }
    assert (
        "Not run at this scale" in page and "over 3 seeds" in page and "one run gave no finite number" in page
    )
    for words in (
        "**does not hold**: rank 2 within 5 % (value 1.147, bound 1.05)",
        "**holds**: rank 1 is worse (value 1.52, bound above 1.1)",
        "- 30 epochs instead of 300.",
        "- The caption says 100 samples; it is 1.",
        "- Command: `slimbayes reproduce ktied/table2 --scale gpu`",
        "- Commit: `0123456789ab`",
        "- Fingerprints of data: mnist: feedc0de",
        "- Time of this call: 1,234 s",
        "- Versions: torch: 2.11.0",
        "- Settings: epochs: 17",
        "- Result: [results/ktied/table2.gpu.json](../../results/ktied/table2.gpu.json)",
        "- Seeds: 3 (3 in the paper)",
    ):
        assert words in page, words
    assert (out / "../../results/ktied/table2.gpu.json").exists()
    assert "No experiment of this paper" in (out / "rank1.md").read_text(encoding="utf-8")


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def test_every_number_in_a_cell_is_backed(results, out):
    """Numbers in cells of both pages are means, errors or values of the JSON file, or the entry's."""
    write_pages(results, out, ENTRIES)
    known = [v for t in TABLE2.printed for c in (t.rows, t.errors) for row in c.values() for v in row if v]
    for row in document()["tables"][0]["rows"]:
        known += row.get("errors", {}).values()
        for values in row["values"].values():
            known += [
                np.mean(values),
                np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0,
                1,
            ]
    page = (out / "ktied.md").read_text(encoding="utf-8")
    cells = [c for t in ("MNIST, MLP", "IMDB, LSTM") for r in list(rows_of(page, t).values())[2:] for c in
             list(r.values())[1:]]  # fmt: skip
    html = (out / HTML).read_text(encoding="utf-8")
    cells += re.findall(r'<td(?: class="first")?>(.*?)</td>', html.split('<article id="ktied-table2"')[1])
    numbers = [n for cell in cells for n in NUMBER.findall(re.sub("<.*?>", " ", cell))]
    assert len(numbers) > 40
    for number in numbers:
        digits = len(number.partition(".")[2])
        assert any(f"{value:,.{digits}f}" == number for value in known), number


def test_a_changed_number_changes_the_pages_and_nothing_else_does(written, copied):
    results, out = copied
    names = {"index.md", "ktied.md", "rank1.md", HTML}
    figures = {f"figures/ktied-figure3-{name}.svg" for name in ("layer1", "elbo", "heat")}
    assert written[1] == names | figures
    before = {name: ((out / name).read_bytes(), (out / name).stat().st_mtime_ns) for name in written[1]}
    assert stale_pages(results, out, ENTRIES) == {} and write_pages(results, out, ENTRIES) == []
    after = {name: ((out / name).read_bytes(), (out / name).stat().st_mtime_ns) for name in written[1]}
    assert after == before
    again = out.parent / "again"  # at the same depth: links are the same
    write_pages(results, again, ENTRIES)
    for name, (content, _) in before.items():
        assert (again / name).read_bytes() == content, name

    path = result_path(results, "ktied/table2", "gpu")
    path.write_text(path.read_text().replace("0.441", "0.541"))
    assert stale_pages(results, out, ENTRIES) == {"ktied.md": "stale", HTML: "stale"}
    path = result_path(results, "ktied/figure3", "desk")
    path.write_text(path.read_text().replace("0.0625", "0.0626"))
    assert stale_pages(results, out, ENTRIES) == {
        "ktied.md": "stale", HTML: "stale", "figures/ktied-figure3-heat.svg": "stale"
    }  # fmt: skip
    write_pages(results, out, ENTRIES)
    assert stale_pages(results, out, ENTRIES) == {}
    assert "0.485 ± 0.028" in (out / "ktied.md").read_text(encoding="utf-8")


def test_what_is_superfluous_is_found_and_what_is_foreign_is_kept(copied):
    results, out = copied
    (out / "notes.md").write_text("by hand")
    result_path(results, "ktied/figure3", "desk").unlink()
    found = stale_pages(results, out, ENTRIES)
    gone = {name for name, what in found.items() if what == "superfluous"}
    assert len(gone) == 3 and all(name.startswith("figures/") for name in gone)
    assert found["notes.md"] == "foreign"
    write_pages(results, out, ENTRIES)
    assert stale_pages(results, out, ENTRIES) == {"notes.md": "foreign"}
    assert not list((out / "figures").iterdir()) and (out / "notes.md").read_text() == "by hand"


def test_another_matplotlib_makes_nothing_stale(copied):
    results, out = copied
    figure = out / "figures" / "ktied-figure3-heat.svg"
    for path in (figure, out / HTML):
        text = path.read_text(encoding="utf-8")
        assert "<rect " in text
        path.write_text(text.replace("<rect ", "<rect class='other' "), encoding="utf-8")
    assert stale_pages(results, out, ENTRIES) == {}
    figure.write_text(
        figure.read_text(encoding="utf-8").replace("<!-- numbers: ", "<!-- numbers: 0"), encoding="utf-8"
    )
    assert list(stale_pages(results, out, ENTRIES)) == ["figures/ktied-figure3-heat.svg"]


def test_figures(written):
    out = written[0] / "docs" / "results"
    made = {plot.name: plot for plot in plots(read_result(written[0] / "results/ktied/figure3.desk.json"))}
    assert [len(plot.panels) for plot in made.values()] == [2, 1, 2]
    spectra, elbo, heat = made.values()
    assert spectra.title == "Explained variance by index" and "means over 2 seeds" in spectra.caption
    assert spectra.rows[0] == ["Layer 1", "mean", 1.0, pytest.approx(8.4), pytest.approx(0.4)]
    assert elbo.title == "−ELBO on MNIST" and "One seed." in elbo.caption and "A gap" in elbo.caption
    assert elbo.legend[0] == spectra.legend[1]  # the same label looks the same
    assert "from 8.4 at 1 to 0.0084 at 1000" in spectra.panels[0].alt
    assert "784 × 400" in heat.panels[0].alt and "from -0.25 to 0.5" in heat.panels[0].alt
    page, html = ((out / name).read_text(encoding="utf-8") for name in ("ktied.md", HTML))
    for name, plot in made.items():
        svg = (out / "figures" / f"{name}.svg").read_text(encoding="utf-8")
        ET.fromstring(svg)
        assert mark_of(svg) == fingerprint(plot) and "dc:date" not in svg
        assert f"](figures/{name}.svg)" in page and f'id="figure-{name}"' in html
    twice = drawn()
    twice["maps"] *= 2
    assert len({plot.name for plot in plots(twice)}) == 4


def test_html_is_well_formed_and_fetches_nothing(written):
    out = written[0] / "docs" / "results"
    html = (out / HTML).read_text(encoding="utf-8")
    tree = Tree(html)
    assert [name for name, n in tree.ids.items() if n > 1] == []
    assert tree.levels[0] == 1 and tree.levels.count(1) == 1
    assert all(b <= a + 1 for a, b in zip(tree.levels, tree.levels[1:], strict=False)), tree.levels
    assert all("scope" in th for th in tree.named("th")) and html.count("<table") == html.count("<caption")
    links = [a["href"] for a in tree.named("a")]
    assert {"#ktied", "#ktied-table2", "#ktied-figure3"} <= set(links)
    assert {link[1:] for link in links if link.startswith("#")} <= set(tree.ids)
    for tag, attributes, _ in tree.tags:
        kept = ("#", "data:", "../../results/", "https://arxiv.org/") if tag == "a" else ("#", "data:")
        for name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
            assert attributes.get(name, "#").startswith(kept), (tag, attributes)
    assert "@import" not in html and not re.search(r"url\((?!#)", html) and "@@" not in html
    drawings = [a for tag, a, stack in tree.tags if tag == "svg" and "figure" in stack and "li" not in stack]
    assert len(drawings) == 5 and all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in drawings)
    assert "does not hold:</strong> rank 2 within 5 %" in html and "1.147" in html


def test_hostile_text_stays_text(results, out):
    evil = EVIL + "|`[x](javascript:1)\n# head"
    found = drawn()
    found["curves"][0] |= {"name": "../../" + evil, "title": evil, "y": evil}
    found["curves"][0]["lines"] = [{"label": evil, "x": [1], "y": [[2.0]]}]
    found["maps"][0] |= {"name": evil, "title": evil}
    found["maps"][0]["panels"][0]["label"] = evil
    found["checks"] = [{"what": evil, "holds": False, "value": evil, "bound": [evil, 1]}]
    found["deviations"] = [evil]
    found["settings"] = {evil: {evil: evil}}
    found["provenance"] = {"command": evil, "commit": "``" + evil, "created": evil, evil: evil}
    rows = [{"label": evil, "values": {evil: [1.0]}}]
    found["tables"] = [{"name": evil, "title": evil, "columns": [evil], "rows": rows}]
    write_result(found, results)
    write_pages(results, out, ENTRIES)
    html, page, index = ((out / n).read_text(encoding="utf-8") for n in (HTML, "ktied.md", "index.md"))
    tree = Tree(html)
    assert len(tree.named("script")) == 1 and "<script>alert" not in html
    assert not any("javascript" in a.get("href", "") for a in tree.named("a"))
    without_code = re.sub(r"(`+) .*? \1", "", page)
    for text in (without_code, index):
        assert "<script" not in text and not re.search(r"(?<!\\)\]\(javascript", text)
        assert "\n# head" not in text
    table = page.split("### &lt;script")[1]
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines() if line.startswith("|")}
    assert widths == {3}
    assert all(re.fullmatch(r"[a-z0-9-]+\.svg", path.name) for path in (out / "figures").iterdir())
    for path in (out / "figures").iterdir():
        ET.fromstring(path.read_text(encoding="utf-8"))
    assert stale_pages(results, out, ENTRIES) == {}


def test_one_seed_has_no_standard_error():
    row = {"label": "a", "values": {"nll": [0.25]}, "errors": {"nll": 0.0125}}
    table = join({"name": "t", "title": "T", "columns": ["nll"], "rows": [row]}, None)
    assert markdown(table).splitlines()[-1] == "| a | 0.250 [± 0.013] |"
    assert our_parts(Cell(Stat(5.0, None, 1)), Column("x", digits=0), 1) == ("5", [])
    assert our_parts(Cell(Stat(0.5, 0.0004, 3)), Column("x"), 3) == ("0.500", ["± 0.0004"])
    assert paper_text(Cell(paper=None), Column("x")) == "–"
    assert Printed("t", "T", ("a",), {"x": (1.0,)}).value("x", "a") == 1.0


def test_the_largest_scale_is_shown_and_smoke_never(results, out):
    quiet = [{"name": "mnist", "title": "MNIST, MLP", "columns": ["nll"],
              "rows": [{"label": "Mean-field", "values": {"nll": [0.9876]}}]}]  # fmt: skip
    write_result(document(scale="desk", tables=quiet), results)
    write_pages(results, out, ENTRIES)
    page, index = ((out / n).read_text(encoding="utf-8") for n in ("ktied.md", "index.md"))
    assert "- Scale: gpu" in page and "0.988" not in page
    assert "Other results, not shown: [desk](../../results/ktied/table2.desk.json)" in page
    assert (
        "| [Table 2: Post-hoc ranks](ktied.md#table2) | gpu, 3 seeds; also desk | 1 of 2 | 2026-03-04 | [gpu]"
        in index
    )
    assert "| Figure 9: Corruptions | not run; needs ImageNet-C | – |" in index
    assert "| Figure 3: Spectra | not run | – |" in index
    write_result(document("ktied/figure3", "smoke"), results)
    (results / "ktied" / "table2.smoke.json").write_text("{")
    assert stale_pages(results, out, ENTRIES) == {}
    found = state(results, ENTRIES)
    assert [r.scale for r in found["ktied/figure3"].results] == ["smoke"]
    assert [r.scale for r in found["ktied/table2"].results] == ["desk", "gpu"]
    assert [d.shown for d in found["ktied/table2"].damaged] == ["results/ktied/table2.smoke.json"]
    write_result(document(scale="paper", tables=quiet), results)
    assert "0.988" in build(results, out, ENTRIES).texts["ktied.md"]


def test_damaged_files_are_reported_and_stop_nothing(results, out):
    (results / "ktied" / "figure3.gpu.json").write_text('{"format": "slimb')
    (results / "other.json").write_text("[1, 2]")
    (results / ".cache").mkdir()
    (results / ".cache" / "run.json").write_text("[")
    write_result(document("ktied/unknown"), results)
    copied = results / "old" / "ktied" / "table2.gpu.json"
    copied.parent.mkdir(parents=True)
    copied.write_text((results / "ktied" / "table2.gpu.json").read_text())
    write_pages(results, out, ENTRIES)
    index, html = ((out / n).read_text(encoding="utf-8") for n in ("index.md", HTML))
    for words in (
        "| Figure 3: Spectra | damaged |",
        "- results/ktied/figure3.gpu.json: cannot be read",
        "- results/other.json: no result of slimbayes reproduce",
        "- results/ktied/unknown.gpu.json: there is no experiment 'ktied/unknown'",
        "- results/old/ktied/table2.gpu.json: results/ktied/table2.gpu.json holds",
    ):
        assert words in index, words
    assert str(results) not in index + html and ".cache" not in index and html.count("cannot be read") == 1
    found = survey(results, ENTRIES)
    assert [d.shown for d in found.states["ktied/figure3"].damaged] == ["results/ktied/figure3.gpu.json"]
    assert len(found.strays) == 2 and len(found.states["ktied/table2"].results) == 1


@pytest.mark.parametrize(
    ("part", "item", "what"),
    [
        (
            "curves",
            {"name": "a", "title": "b", "x": "c", "y": "d", "lines": [{"label": "e", "x": [1], "y": [1]}]},
            "one of 'curves' is damaged",
        ),
        (
            "curves",
            {
                "name": "a",
                "title": "b",
                "x": "c",
                "y": "d",
                "lines": [{"label": "e", "x": [1], "y": [[1, 2]]}],
            },
            "not one y",
        ),
        (
            "maps",
            {"name": "a", "title": "b", "panels": [{"label": "e", "shape": [2, 2], "values": [[1], []]}]},
            "matrix",
        ),
        ("checks", {"what": "x", "holds": "yes"}, "true or false"),
        ("checks", {"holds": True}, "what"),
        ("tables", {"name": "t", "columns": [], "rows": [{"label": [], "values": {}}]}, "no text"),
        ("tables", {"name": "t", "columns": [], "rows": [{"label": "a", "values": {}}] * 2}, "two rows 'a'"),
    ],
)
def test_results_that_no_page_can_show_are_refused(part, item, what):
    with pytest.raises(ResultError, match=what):
        check_result(document(**{part: [item]}), "a.json")


def nodes(node):
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, item in items:
        yield node, key
        yield from nodes(item)


def test_any_damage_gives_pages_or_is_reported(results, out):
    """Whatever stands in a file: it is shown, or listed with what is wrong."""
    rng, junk = (
        random.Random(0),
        (None, "x", -1, 1e300, math.nan, True, [], {}, [[]], [None], {"a": 1}, 10**400),
    )
    path, shown, listed = results / "ktied" / "figure3.gpu.json", 0, 0
    for make in [document, drawn] * 40:
        found = make()
        place, key = rng.choice(list(nodes(found)))
        place[key] = rng.choice(junk)
        path.write_text(json.dumps(found | {"experiment": "ktied/figure3"}))
        pages = build(results, out, ENTRIES)
        pages.html()
        here = pages.survey.states["ktied/figure3"]
        shown, listed = shown + len(here.results), listed + len(here.damaged)
    assert shown > 10 and listed > 10 and shown + listed == 80


@pytest.mark.usefixtures("entries")
def test_command(results, out, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(results.parent)
    slimbayes = runner(monkeypatch, capsys)
    (results / "bad.json").write_text("{")
    shown = slimbayes("report", "results").out
    assert "ktied/table2: gpu, 3 seeds; 1 of 2 checks hold" in shown and "Left out: results/bad.json" in shown
    assert (out / "index.md").exists() and stale_pages("results", out, ENTRIES) == {}
    slimbayes("report", "results/ktied/table2.gpu.json", "--out", "elsewhere")
    assert "results/ktied/table2.gpu.json" in (results.parent / "elsewhere" / "ktied.md").read_text(
        encoding="utf-8"
    )
    (tmp_path / "empty").mkdir()
    assert "no result of slimbayes reproduce" in slimbayes("report", tmp_path / "empty", code=1).err
    assert "one folder alone" in slimbayes("report", "results", "x.json", code=1).err
    (tmp_path / "other.json").write_text(json.dumps({"format": "slimbayes-results"}))
    mixed = slimbayes("report", "results/ktied/table2.gpu.json", tmp_path / "other.json", code=1).err
    assert "unlike the others" in mixed.replace("\n", " ")


@pytest.mark.usefixtures("entries")
def test_docs_are_checked_against_the_results(copied, monkeypatch, capsys):
    path = Path(__file__).parents[2] / "docs" / "generate.py"
    spec = importlib.util.spec_from_file_location("generate", path)
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    out = copied[1]
    monkeypatch.setattr(generate, "DOCS", out.parent)
    assert generate.results(check=True) == 0
    (out / "index.md").write_text("by hand")
    (out / "mine.txt").write_text("mine")
    (out / "figures" / "ktied-figure3-elbo.svg").unlink()
    assert generate.results(check=True) == 3
    said = capsys.readouterr().err
    assert "docs/results/index.md is stale: run python docs/generate.py" in said
    assert "docs/results/figures/ktied-figure3-elbo.svg is missing" in said
    assert "docs/results/mine.txt is foreign: remove it" in said
    assert generate.results(check=False) == 0
    assert "wrote docs/results/index.md" in capsys.readouterr().out
    assert generate.results(check=True) == 1 and (out / "mine.txt").exists()


def test_seeds_are_told_by_setting_where_they_differ(results, out):
    found = drawn()
    found["settings"] = {"mnist": {"seeds": [0, 1, 2]}, "cifar100": {"seeds": [0]}}
    found["experiment"] = "ktied/figure3"
    write_result(found, results)
    words = state(results, ENTRIES)["ktied/figure3"].results[-1].seeds
    assert words == "mnist 3, cifar100 1 seeds"
    index = build(results, out, ENTRIES).texts["index.md"]
    assert f"{found['scale']}, mnist 3, cifar100 1 seeds |" in index
    found["settings"]["cifar100"]["seeds"] = [0, 1, 2]
    write_result(found, results)
    assert state(results, ENTRIES)["ktied/figure3"].results[-1].seeds == "3 seeds"


def test_panels_with_different_seeds_say_so():
    one = {"x": "step", "y": "loss", "lines": [{"label": "a", "x": [1, 2], "y": [[1.0, 2.0]]}]}
    three = copy.deepcopy(one)
    three["lines"][0]["y"] *= 3
    base = {"experiment": "ktied/figure7", "maps": []}
    curves = [one | {"name": "m", "title": "MNIST: loss"}, three | {"name": "c", "title": "CIFAR: loss"}]
    (plot,) = plots(base | {"curves": curves})
    assert "means over seeds (MNIST: 1, CIFAR: 3)" in plot.caption
    assert "One seed." in plots(base | {"curves": curves[:1]})[0].caption


def test_wide_data_are_cut_to_a_few_rows():
    item = {
        "name": "m",
        "title": "M",
        "panels": [{"label": "p", "shape": [48, 48], "values": [[0.5] * 48] * 48}],
    }
    (plot,) = plots({"experiment": "ktied/figure4", "curves": [], "maps": [item]})
    assert len(plot.rows) == 48 and len(plot.header) == 50
    for panel in plot.panels:
        panel.svg = "<svg></svg>"
    html = figure_html(plot)
    assert "first 9 of 48 rows; the CSV has all" in html and html.count("<tr>") == 1 + 9


@pytest.mark.parametrize("levels", [40, 900])
def test_deep_nesting_is_damage(results, out, levels):
    deep = {}
    for _ in range(levels):
        deep = {"a": deep}
    found = document() | {"settings": {"mnist": deep}}
    with pytest.raises(ResultError, match="nested deeper than 30 levels"):
        check_result(found, "here")
    path = results / "ktied" / "figure3.gpu.json"
    path.write_text(json.dumps(found | {"experiment": "ktied/figure3"}))
    pages = build(results, out, ENTRIES)
    pages.html()
    assert len(pages.survey.states["ktied/figure3"].damaged) == 1
