"""Names that are markup, code, links and formulas stay text on every page: nothing is injected."""

import re
import xml.etree.ElementTree as ET

import pytest
from experiments.helpers_results import ENTRIES, drawn
from helpers_html import Tree
from report.helpers_results import METHODS, classification

from slimbayes.lab.experiments import write_result
from slimbayes.lab.experiments.pages import HTML, write_pages
from slimbayes.lab.report import write_report

pytest.importorskip("PIL.Image")
MARK = "zzinjected"
ATTACKS = (
    f"<script>{MARK}()</script>",
    f'"><img src=x onerror={MARK}()>',
    f"' onmouseover='{MARK}()' x='",
    f"javascript:{MARK}()",
    f"]({MARK})[x](javascript:{MARK}())",
    f"</title></style></script><svg onload={MARK}()>",
    f"--><iframe src=//{MARK}></iframe><!--",
    f"]]><{MARK}/><![CDATA[",
    f"&#60;{MARK}&#62;&lt;{MARK}&gt;",
    f"{{{{{MARK}}}}}${{{MARK}}}<%= {MARK} %>@@{MARK}@@",
    f"`</code><marquee>{MARK}</marquee>`|\n# {MARK}\n",
)
EVIL = " ".join(ATTACKS)


def changed(
    document, keep=("format", "task", "seed", "created", "fingerprint", "experiment", "scale", "kind")
):
    """Every text of a document, with all attacks behind it."""
    if isinstance(document, dict):
        return {k: v if k in keep else changed(v, keep) for k, v in document.items()}
    if isinstance(document, list):
        return [changed(item, keep) for item in document]
    return f"{document[:8]}{EVIL}" if isinstance(document, str) else document


def check_page(html, scripts=1):
    """The page's own script and style, and no tag, attribute or link that a name brought."""
    tree = Tree(html)
    assert MARK in html  # it is there, as text
    assert len(tree.named("script")) == scripts
    for tag, attributes, _ in tree.tags:
        assert tag not in ("iframe", "object", "embed", "base", "form", "marquee", MARK), tag
        for name, value in attributes.items():
            assert not name.startswith("on") and re.fullmatch(r"[a-z:-]+[0-9]?", name), (tag, name)
            if name in ("href", "src", "xlink:href", "action", "formaction", "srcset", "data", "poster"):
                inside = r"#|data:(text/csv|text/markdown|image/(png|jpeg|svg\+xml))[;,]|[.\w/-]+$|https://"
                assert re.match(inside, value) and MARK not in value, (tag, name, value[:80])
            if name in ("style", "id", "class"):
                assert MARK not in (value or ""), (tag, name, value)
    for kind in ("script", "style"):
        for text in re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.S):
            assert MARK not in text


def check_svg(path):
    """A picture that is XML, with the elements of a drawing only."""
    root = ET.fromstring(path.read_text(encoding="utf-8"))
    for element in root.iter():
        name = str(element.tag).rpartition("}")[2]
        assert name not in ("script", "foreignObject", "iframe", "a", MARK), name
        assert not [key for key in element.attrib if key.lower().startswith("on")]
        links = [value for key, value in element.attrib.items() if key.endswith("href")]
        assert all(value.startswith(("#", "data:image/png;base64,")) for value in links)


@pytest.mark.uncounted
def test_a_report_of_hostile_names(tmp_path):
    document = changed(classification(seeds=1, methods=METHODS[1:2], shifts=["noise"]))
    document["title"] = EVIL
    for method in document["methods"]:
        for run in method["runs"]:
            run["shifted"] = {f"noise{EVIL}": run["shifted"]["noise"]}
    document["shifts"][0]["name"] = f"noise{EVIL}"
    document["provenance"]["config"] = {EVIL: {EVIL: EVIL}}
    check_page(write_report(document, tmp_path).read_text(encoding="utf-8"))
    pictures = list(tmp_path.rglob("*.svg"))
    assert pictures
    for path in pictures:
        check_svg(path)
    for path in tmp_path.rglob("*.csv"):
        for cell in re.split(r"[,\n]", path.read_text(encoding="utf-8")):
            assert not re.match(r"\"?[=@]", cell), cell


def test_pages_of_experiments_with_hostile_names(tmp_path):
    found = drawn()
    found["curves"][0] |= {"title": EVIL, "y": EVIL, "lines": [{"label": EVIL, "x": [1], "y": [[2.0]]}]}
    found["maps"][0] |= {"title": EVIL}
    found["maps"][0]["panels"][0]["label"] = EVIL
    found["checks"] = [{"what": EVIL, "holds": False, "value": EVIL, "bound": [EVIL, 1]}]
    found["deviations"] = [EVIL, *ATTACKS]
    found["settings"] = {EVIL: {EVIL: EVIL}}
    found["provenance"] = {"command": EVIL, "commit": EVIL, "created": EVIL}
    rows = [{"label": EVIL, "values": {EVIL: [1.0]}}]
    found["tables"] = [{"name": EVIL, "title": EVIL, "columns": [EVIL], "rows": rows}]
    write_result(found, tmp_path / "results")
    write_pages(tmp_path / "results", tmp_path / "out", ENTRIES)
    check_page((tmp_path / "out" / HTML).read_text(encoding="utf-8"))
    for path in (tmp_path / "out").rglob("*.svg"):
        check_svg(path)
    for path in (tmp_path / "out").rglob("*.md"):
        text = re.sub(r"(`+) .*? \1", "", path.read_text(encoding="utf-8"))  # code is shown as it is
        assert not re.search(rf"<(script|img|svg|iframe|marquee|{MARK})\b", text), path
        assert not re.search(r"(?<!\\)\]\(\s*javascript", text) and f"\n# {MARK}" not in text


def test_the_check_sees_an_injection():
    check_page(f"<p>{MARK}</p>", scripts=0)
    for bad in (f"<p>{MARK}<img src=x:y></p>", f'<p onclick="{MARK}">a</p>', f"<p>{MARK}</p><script>x</script>",
                f'<a href="javascript:{MARK}">a</a>', f"<marquee>{MARK}</marquee>",
                f'<p id="{MARK}">a</p>'):  # fmt: skip
        with pytest.raises(AssertionError):
            check_page(bad, scripts=0)
