"""The page and its figures: self-contained, escaped, well-formed, and true to the numbers."""

import base64
import csv
import io
import random
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from html import escape

import numpy as np
import pytest
from helpers_html import EVIL, Tree
from report.helpers_results import ALL, METHODS, SHIFTS, classification, picture, regression

from slimbayes.lab.report import ReportError, choose, summary_rows, write_report, write_results
from slimbayes.lab.report.examples import picture as picture_png
from slimbayes.lab.report.panels import png, themed, tidy
from slimbayes.lab.report.uncertainty import pooled

PIL = pytest.importorskip("PIL.Image")
FEW = [METHODS[0], METHODS[1], METHODS[3]]


@pytest.fixture(scope="module", params=ALL)
def report(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    document = ALL[request.param](seeds=2, methods=FEW, shifts=["contrast", "noise"])
    path = write_report(document, folder)
    return request.param, document, path, path.read_text(encoding="utf-8")


def test_page_is_well_formed(report):
    kind, _, _, html = report
    tree = Tree(html)
    assert html.startswith("<!DOCTYPE html>") and tree.named("html")[0]["lang"] == "en"
    assert [i for i, n in tree.ids.items() if n > 1] == []
    assert tree.levels[0] == 1 and tree.levels.count(1) == 1
    assert all(b <= a + 1 for a, b in zip(tree.levels, tree.levels[1:], strict=False)), tree.levels
    assert all("scope" in th for th in tree.named("th"))
    assert html.count("<table") == html.count("<caption") and html.count("<figure") == html.count(
        "<figcaption"
    )
    assert all(img["alt"] and img["src"].startswith("data:image/png;base64,") for img in tree.named("img"))
    targets = {a["href"][1:] for a in tree.named("a") if a["href"].startswith("#")}
    assert targets <= set(tree.ids) and {"verdict", "summary", "terms", "provenance"} <= targets
    references = set(re.findall(r'(?:url\(#|href="#)([\w-]+)', html))
    assert references <= set(tree.ids)  # clip paths and markers of every SVG are there
    drawn = [a for tag, a, stack in tree.tags if tag == "svg" and "figure" in stack and "li" not in stack]
    assert drawn and all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in drawn)
    assert html.count('class="single"') == (2 if kind in ("images", "table") else 1)


def test_the_answer_comes_first_then_the_picture_then_the_tables(report):
    """The order of the page is also the order on a phone; the rule and its rows are said."""
    _, document, _, html = report
    found = choose(document)
    main = html[html.index("<main") :]
    answer, rule = (
        f'<p class="{kind}">{escape(words)}</p>'
        for kind, words in (("lead", found.text), ("note rule", found.rule))
    )
    places = [
        main.index(part)
        for part in (answer, 'id="figure-difference"', rule, '<table class="summary', 'class="findings"')
    ]
    assert places == sorted(places) and main.index("<p") == places[0]
    heads = [re.sub("<.*?>", "", head) for head in re.findall(r'<th scope="colgroup".*?</th>', main)]
    assert heads[:2] == ["Shifted", "Clean"]
    assert 'data-column="1" data-name="Shifted: Δ NLL to det."' in main


def test_the_picture_has_clean_and_shifted_differences(report):
    _, document, path, html = report
    rows = list(csv.DictReader((path.parent / "figures" / "difference.csv").open(encoding="utf-8")))
    assert len(rows) == 2 * 2 * 2  # methods, clean and shifted, seeds
    plain, mine = (document["methods"][i]["runs"][1] for i in (0, 2))
    by_hand = {
        "clean": mine["clean"]["nll"] - plain["clean"]["nll"],
        "shifted": np.mean(
            [mine["shifted"][s][v]["nll"] - plain["shifted"][s][v]["nll"] for s in plain["shifted"] for v in "12345"]
        ),
    }  # fmt: skip
    for row in rows:
        if (row["method"], row["seed"]) == (document["methods"][2]["name"], "1"):
            assert float(row["difference"]) == pytest.approx(by_hand.pop(row["data"]), rel=1e-4)
    assert by_hand == {} and "12.7 with 2 seeds" in html


def test_page_fetches_nothing(report):
    _, _, path, html = report
    tree = Tree(html)
    for _, attributes, _ in tree.tags:
        for name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
            assert attributes.get(name, "#").startswith(("#", "data:")), attributes
    assert "@import" not in html and not re.search(r"url\((?!#)", html)
    outside = [url for url in re.findall(r"https?://[^\s\"'<>)]+", html) if "www.w3.org" not in url]
    assert outside == []
    policy = next(
        m["content"] for m in tree.named("meta") if m.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert path.stat().st_size < 3_000_000


def test_files_of_every_figure(report):
    kind, _, path, html = report
    names = {p.stem for p in (path.parent / "figures").glob("*.svg")}
    common = {"difference", "severity", "shifts", "training"}
    want = {"reliability", "entropy", "disagreement"} if kind in ("images", "table") else {"fit", "coverage"}
    assert names == common | want
    for name in names:
        base = path.parent / "figures" / name
        ET.fromstring(base.with_suffix(".svg").read_text(encoding="utf-8"))
        with PIL.open(base.with_suffix(".png")) as image:
            image.load()
            assert image.width > 450 and len(np.unique(np.asarray(image.convert("L")))) > 3
        rows = list(csv.reader(io.StringIO(base.with_suffix(".csv").read_text(encoding="utf-8"))))
        assert len(rows) > 2 and len({len(row) for row in rows}) == 1
        for suffix in (".svg", ".csv"):  # what the page offers is what lies next to it
            link = re.search(rf'download="{name}{suffix}"[^>]*href="data:[^,]*;base64,([^"]+)"', html)
            assert base64.b64decode(link[1]) == base.with_suffix(suffix).read_bytes()
    assert (path.parent / "figures" / "summary.csv").exists()
    assert not list(path.parent.rglob(".*"))  # no temporary file is left


def test_numbers_in_page_and_figures(report):
    kind, document, path, html = report
    row = summary_rows(document)[1]
    assert f"{row['shifted_nll'].mean:.3f}" in html and f"± {row['shifted_nll'].error:.3f}" in html
    rows = list(csv.DictReader((path.parent / "figures" / "severity.csv").open(encoding="utf-8")))
    at = {r["method"]: float(r["mean"]) for r in rows if r["metric"] == "nll" and float(r["severity"]) == 3}
    for method in document["methods"]:
        by_hand = [run["shifted"][shift]["3"]["nll"] for run in method["runs"] for shift in run["shifted"]]
        assert at[method["name"]] == pytest.approx(np.mean(by_hand), rel=1e-5)
    clean = {
        r["method"]: float(r["error"]) for r in rows if r["metric"] == "nll" and float(r["severity"]) == 0
    }
    values = [run["clean"]["nll"] for run in document["methods"][0]["runs"]]
    assert clean["Deterministic"] == pytest.approx(np.std(values, ddof=1) / np.sqrt(2), rel=1e-4)
    pictures = html.count("<img")
    assert pictures == (len(FEW) * 18 if kind == "images" else 0)


def test_pooled_bins_are_weighted_by_counts():
    a = {"edges": [0, 0.5, 1], "count": [0, 3], "confidence": [None, 0.8], "accuracy": [None, 1.0]}
    b = {"edges": [0, 0.5, 1], "count": [2, 1], "confidence": [0.4, 0.6], "accuracy": [0.5, 0.0]}
    got = pooled([{"reliability": {"clean": a}}, {"reliability": {"clean": b}}, {}], "clean")
    assert got["count"].tolist() == [2, 4]
    assert got["confidence"].tolist() == pytest.approx([0.4, (3 * 0.8 + 0.6) / 4])
    assert got["accuracy"].tolist() == pytest.approx([0.5, 0.75])


def evil(document):
    """Every text of the document becomes a script."""
    if isinstance(document, dict):
        keep = ("format", "task", "seed", "created", "fingerprint")
        return {k: v if k in keep else evil(v) for k, v in document.items()}
    if isinstance(document, list):
        return [evil(item) for item in document]
    return EVIL + document if isinstance(document, str) else document


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("kind", ALL)
def test_every_string_is_escaped(kind, tmp_path):
    document = evil(ALL[kind](seeds=1, methods=FEW[1:2], shifts=["noise"]))
    name = f"noise{EVIL}\x00"
    for method in document["methods"]:
        for run in method["runs"]:
            run["shifted"] = {name: run["shifted"]["noise"]}
            for group in (run["examples"] or {}).values():
                for example in group:
                    example["features"] = {EVIL: EVIL}
    document["shifts"][0]["name"] = name
    document["provenance"]["config"] = {EVIL: {EVIL: EVIL}}
    document["provenance"]["versions"] = {EVIL: EVIL}
    path = write_report(document, tmp_path)
    html = path.read_text(encoding="utf-8")
    tree = Tree(html)
    assert len(tree.named("script")) == 1  # the page's own
    assert "<script>alert" not in html and "&lt;script&gt;alert" in html
    for svg in (tmp_path / "figures").glob("*.svg"):
        text = svg.read_text(encoding="utf-8")
        assert "<script" not in text
        ET.fromstring(text)


def test_slots_in_names_are_not_filled(tmp_path):
    document = lean(seeds=1)
    document["title"] = "@@style@@ @@nothing@@"
    html = write_report(document, tmp_path).read_text(encoding="utf-8")
    assert "<h1>@@style@@ @@nothing@@</h1>" in html


def test_one_seed_and_no_shifts(tmp_path):
    document = classification(seeds=1, methods=FEW[:2], shifts=[])
    html = write_report(document, tmp_path).read_text(encoding="utf-8")
    body = html[html.index("<main") : html.index('id="terms"')]
    assert "±" not in re.sub(r"<figcaption>.*?</figcaption>", "", body)
    assert "One seed per method: there is no standard error" in html
    assert "no claim is made" in html and 'id="shift"' not in html


def test_bare_results_give_a_page(tmp_path):
    runs = [{"seed": 0, "clean": {"nll": None}}]
    bare = {
        "format": "slimbayes-results",
        "version": 1,
        "task": "regression",
        "methods": [{"name": "A", "runs": runs}],
    }
    Tree(write_report(bare, tmp_path).read_text(encoding="utf-8"))
    Tree(write_report(bare | {"methods": []}, tmp_path).read_text(encoding="utf-8"))


def paths(node, path=()):
    items = node.items() if isinstance(node, dict) else enumerate(node[:3]) if isinstance(node, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from paths(item, (*path, key))


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("seed", range(8))
def test_damage_gives_a_page_or_a_report_error(seed, tmp_path):
    rng = random.Random(seed)
    make = rng.choice([classification, regression])
    document = make(seeds=2, methods=FEW[1:2], shifts=["noise"])
    for path in rng.sample(list(paths(document)), 3):
        node = document
        try:
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = rng.choice([None, float("nan"), 0, -1, [], {}, 1e300, [None]])
        except (KeyError, IndexError, TypeError):
            continue  # an earlier blow took it
    try:
        Tree(write_report(document, tmp_path).read_text(encoding="utf-8"))
    except ReportError as error:
        assert "the given results" in str(error) or "results 1" in str(error)


def lean(**options):
    """Results without what takes long to draw."""
    document = classification(methods=FEW[:2], shifts=[], **options)
    for run in (run for method in document["methods"] for run in method["runs"]):
        run.update(reliability=None, history=None, disagreement=None)
    return document


def test_report_of_files_joins_them(tmp_path):
    document = lean(seeds=2)
    parts = []
    for i, method in enumerate(document["methods"]):
        parts.append(write_results(document | {"methods": [method]}, tmp_path / f"{i}.json"))
    html = write_report(parts, tmp_path / "joined").read_text(encoding="utf-8")
    assert "MC dropout" in html and "Joined from" in html
    one = write_report(parts[0], tmp_path / "one").read_text(encoding="utf-8")
    assert "No other method was run" in one


def test_the_same_results_give_the_same_files(tmp_path):
    document = lean(seeds=1)
    first, second = (write_report(document, tmp_path / name) for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_figures_leave_matplotlib_alone(tmp_path):
    """No pyplot, no figure kept open, no setting changed, and slimbayes itself imports no matplotlib."""
    code = """
import sys
import slimbayes.lab.report
assert "matplotlib" not in sys.modules
import matplotlib
settings = lambda: {k: matplotlib.rcParams[k] for k in matplotlib.rcParams if k != "backend"}
before = settings()
from report.helpers_results import classification, METHODS
slimbayes.lab.report.write_report(classification(seeds=1, methods=METHODS[:1], shifts=[]), sys.argv[1])
assert "matplotlib.pyplot" not in sys.modules
assert settings() == before
"""
    subprocess.run([sys.executable, "-W", "error::DeprecationWarning:matplotlib", "-c", code, str(tmp_path)],
                   check=True, env=environment(), timeout=120)  # fmt: skip


def environment():
    import os

    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def test_png_equals_pillow():
    rng = np.random.default_rng(0)
    for shape in ((5, 7), (4, 6, 3)):
        pixels = rng.integers(0, 256, shape, dtype=np.uint8)
        assert np.array_equal(np.asarray(PIL.open(io.BytesIO(png(pixels)))), pixels)


def test_pictures_of_examples():
    rng = np.random.default_rng(0)
    grey = picture(3, rng)
    assert np.array_equal(np.asarray(PIL.open(io.BytesIO(picture_png(grey)))), np.array(grey)[0])
    colour = rng.integers(0, 256, (3, 9, 8))
    assert np.array_equal(
        np.asarray(PIL.open(io.BytesIO(picture_png(colour.tolist())))), colour.transpose(1, 2, 0)
    )
    large = np.kron(
        rng.integers(0, 256, (1, 32, 32)), np.ones((1, 4, 4), dtype=int)
    )  # 128 px: means of 2×2 blocks
    assert np.array_equal(np.asarray(PIL.open(io.BytesIO(picture_png(large)))), large[0, ::2, ::2])
    assert all(picture_png(bad) is None for bad in ([[1]], "x", [[[None]]], [[[1]]] * 2, [[[1, 2], [3]]], []))


def test_tidy_keeps_what_is_referenced():
    svg = '<?xml?><svg viewBox="0 0 1.23456 2"><defs><clipPath id="a1"><path d="M 1.23456 2.000001"/></clipPath></defs>'
    svg += '<g id="b"><text x="1.5">0.12345</text><use href="#a1" clip-path="url(#a1)"/></g></svg>'
    got = tidy(svg, "p")
    assert 'id="p-a1"' in got and 'href="#p-a1"' in got and "url(#p-a1)" in got and 'id="b"' not in got
    assert 'd="M 1.23 2"' in got and ">0.12345<" in got  # geometry is rounded, words are not
    assert themed('<svg viewBox="0 0 1 1"><path style="fill: #0072b2"/></svg>', "a<b").startswith(
        '<svg role="img" aria-label="a&lt;b"'
    )


@pytest.mark.uncounted
@pytest.mark.slow
def test_a_full_report_is_quick(tmp_path):
    """Seven methods, three seeds, five shifts: nothing is asserted of the time, which is printed with -s."""
    start = time.perf_counter()
    path = write_report(classification(seeds=3, shifts=SHIFTS), tmp_path)
    print(f"\n{time.perf_counter() - start:.1f} s, {path.stat().st_size / 1e6:.2f} MB")
    assert path.stat().st_size < 3_000_000
