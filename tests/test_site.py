"""The site is built without a warning and asks no other server for anything; its pictures are current."""

import doctest
import importlib.util
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import matplotlib
import pytest

import slimbayes as sb
from slimbayes.core.methods import METHODS

pytestmark = pytest.mark.uncounted

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"


def tool(name):
    """A module of docs/."""
    spec = importlib.util.spec_from_file_location(f"docs_{Path(name).parts[0]}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site in a folder of its own; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there_and_needs_no_other_server(site):
    pages = {
        path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")
    }
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").with_suffix(".html").as_posix() in pages
    for name, text in pages.items():
        fetched = re.findall(r'<(?:script|img|link|iframe)\b[^>]*?(?:src|href)="(?:https?:)?//[^"]+"', text)
        assert not fetched, f"{name} fetches {fetched[0]}"
    assert "<h1" in pages["index.html"] and "Table of contents" in pages["index.html"]
    assert "class GaussianNoiseRule" in re.sub("<[^>]+>", "", pages["examples/own_method.html"])
    assert json.loads((site / "search" / "search_index.json").read_text())["docs"]
    assert (
        site / "results" / "rank1" / "collapse.gpu.json"
    ).is_file()  # a page links it, from outside of docs/


def test_the_reference_has_every_public_name(site):
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html"))
    heads = set(re.findall(r'<h2 id="([\w.]+)"', text))
    for name in sb.__all__:
        found = getattr(sb, name)
        if isinstance(found, types.ModuleType):
            page = found.__name__.removeprefix("slimbayes.")
            assert (site / "reference" / f"{page}.html").is_file(), name
        else:
            assert f"{found.__module__}.{found.__qualname__}" in heads, name
    for room in (
        "core.methods",
        "core.priors",
        "core.likelihoods",
        "metrics",
        "analysis",
        "lab.data",
        "training",
        "lab.models",
        "lab.experiments",
    ):
        names = tool("hooks").exported(room)
        page = (site / "reference" / f"{room}.html").read_text(encoding="utf-8")
        shown = {head.split(".")[-1] for head in re.findall(r'<h2 id="([\w.]+)"', page)}
        assert names and set(names) <= shown, room
    assert (
        "&gt;&gt;&gt;" in text and "<blockquote>" not in text
    )  # doctests are code, not quotations of quotations


@pytest.mark.parametrize("name", ["hooks", "docstrings"])
def test_what_the_site_is_made_with(name):
    module = tool(name)
    assert doctest.testmod(module).attempted and not doctest.testmod(module).failed


def test_links_out_of_the_docs_lead_into_the_site():
    relinked = tool("hooks").relinked
    text = "[a](../examples/fit.py) [b](draws.md#noise) [c](https://x.org)\n```python\nf[0](../examples/fit.py)\n```\n"
    found = relinked(text, "docs/start.md")
    assert found == text.replace("[a](../examples/fit.py)", "[a](examples/fit.md)")
    assert relinked("[x](docs/draws.md) [y](LICENSE)", "README.md") == "[x](draws.md) [y](LICENSE.md)"
    assert (
        relinked("[x](../../CONTRIBUTING.md#style)", "docs/tutorials/shift.md")
        == "[x](../contributing.md#style)"
    )


def numbers_and_words(svg):
    """Numbers of a drawing, and what is between them; names that are made of numbers are left out."""
    svg = re.sub(r"[#\"][a-z][0-9a-f]{10}\b", "#", svg)
    parts = re.split(r"(?<![\w#+/])(-?\d+\.?\d*(?:e-?\d+)?)(?![\w/+])", svg)
    return [float(number) for number in parts[1::2]], parts[::2]


def test_pictures_are_those_that_the_script_draws(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PICTURES))  # as for python docs/pictures
    pictures = tool("pictures/__main__")
    assert {path.stem for path in PICTURES.glob("*.svg")} == {*pictures.PICTURES, *pictures.TRAINED}
    for name, picture in pictures.PICTURES.items():
        kept = (PICTURES / f"{name}.svg").read_text(encoding="utf-8")
        drawn = pictures.write(name, picture, tmp_path).read_text(encoding="utf-8")
        assert len(kept) < 60_000, f"{name} has {len(kept)} bytes"
        if f"matplotlib=={matplotlib.__version__}\n" not in (ROOT / "constraints.txt").read_text():
            continue  # another version draws another text
        (old, words), (new, others) = numbers_and_words(kept), numbers_and_words(drawn)
        assert words == others and len(old) == len(new), f"{name} is stale: run python docs/pictures {name}"
        assert all(abs(a - b) < 0.05 for a, b in zip(old, new, strict=True)), f"{name} is stale"


def test_every_picture_is_on_a_page_with_words_for_it():
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    shown = dict(re.findall(r"!\[([^\]]+)\]\((?:\.\./)?pictures/(\w+)\.svg\)", text))
    assert set(shown.values()) == {path.stem for path in PICTURES.glob("*.svg")}
    assert all(len(words) > 60 for words in shown)


def test_tables_written_into_pages_have_every_method(monkeypatch):
    generate = tool("generate")
    for part in (generate.costs(), generate.gains(), generate.by_draws(), generate.beside()):
        rows = [line.strip("|").split("|") for line in part.splitlines()]
        assert len(rows) > 4 and len({len(row) for row in rows}) == 1
    assert {name.split("(")[0] for name in generate.CONTENDERS} == set(METHODS)
    with pytest.raises(ValueError, match=r"faq\.md has no markers of 'costs'"):
        generate.filled("faq.md", {"costs": ""})
