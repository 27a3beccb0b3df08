"""README, CONTRIBUTING and docs: code blocks run, names and links exist, figures are computed."""

import doctest
import functools
import re
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

import slimbayes as sb
from slimbayes.core.methods import METHODS

ROOT = Path(__file__).parent.parent
DOCS = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "results"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
RUN = [page for page in PAGES if page.name not in ("CONTRIBUTING.md", "support.md")]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def names(pages):
    return [str(page.relative_to(ROOT)) for page in pages]


def blocks(page):
    """(language, first line, code) of every fenced block."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S):
        yield match[1], page.read_text()[: match.start(2)].count("\n"), match[2]


@functools.cache
def executed(page):
    """Run a page's blocks from top to bottom in one namespace, and return that."""
    module = types.ModuleType(f"page_{page.stem}")
    sys.modules[module.__name__] = module  # the compiler looks a function's module up
    space = vars(module)
    known = dict(METHODS)
    torch.manual_seed(0)
    for language, line, code in blocks(page):
        where = f"{page.relative_to(ROOT)}, line {line + 1}"
        if language == "python":
            exec(compile("\n" * line + code, str(page), "exec"), space)
        elif language == "pycon":
            test = doctest.DocTestParser().get_doctest(code, space, where, str(page), line)
            failures = []
            doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(
                test, out=failures.append, clear_globs=False
            )
            assert not failures, "".join(failures)
            space.update(test.globs)
        else:
            assert language in ("bash", "text"), (
                f"{where}: a block of {language or 'no language'} is not tested"
            )
    for name in METHODS.keys() - known.keys():  # a page's own method is that page's
        del METHODS[name]
    return space


@pytest.mark.uncounted
@pytest.mark.parametrize("page", RUN, ids=names(RUN))
def test_blocks_run(page):
    executed(page)


def test_the_readme_example_learns():
    _, code = (code for language, _, code in blocks(ROOT / "README.md") if language == "python")
    assert len([line for line in code.splitlines() if line.strip()]) == 10  # as the page says
    space = executed(ROOT / "README.md")
    assert space["model"] is space["net"]
    assert space["draws"].shape == (4, 500, 3)
    prediction, y = space["prediction"], space["y"]
    assert prediction.draws.shape == (32, 500, 3)
    assert torch.allclose(prediction.mean.sum(-1), torch.ones(500))
    assert (prediction.mean.argmax(-1) == y).float().mean() > 0.9


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_names_and_links_exist(page):
    text = page.read_text()
    for name in set(re.findall(r"\bsb\.([A-Za-z_]\w*)", text)) - {"GaussianDropout"}:
        assert hasattr(sb, name), f"sb.{name} does not exist"
    for target in re.findall(r"(?:`|^)make (\w+)(?:`| )", text, re.M):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), f"no target {target}"
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{link} does not exist"
        if anchor:
            heads = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            known = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            known |= set(re.findall(r'<a id="([^"]+)">', target.read_text()))
            assert anchor in known, f"no heading {link}"
    for file in re.findall(r"`((?:src|tests|examples|docs)/[\w/]+\.(?:py|md))`", text):
        assert (ROOT / file).exists(), f"{file} does not exist"


@pytest.mark.uncounted
def test_method_table_of_the_readme():
    """Each row's call has the defaults it shows, and its parameters on WRN-28-10 are those counted."""
    rows = re.findall(
        r"^\| `(\w+)\(([^)]*)\)` \|.*\| ([+\d.]+) % \|$", (ROOT / "README.md").read_text(), re.M
    )
    assert [name for name, _, _ in rows] and {name for name, _, _ in rows} == set(METHODS)
    for name, arguments, printed in rows:
        method = eval(f"sb.{name}({arguments})")
        assert method == METHODS[name](), f"{name}: {arguments} are not its defaults"
        with torch.device("meta"):  # counted, not allocated
            model = sb.bayesianize(sb.models.wrn28_10(10), method)
        assert f"{100 * sb.summary(model).overhead:+.2f}" == printed, name


def test_every_method_has_a_section_and_every_page_a_link():
    titles = " ".join(re.findall(r"^## (.+)$", (ROOT / "docs" / "methods.md").read_text(), re.M))
    assert set(re.findall(r"\w+", titles)) - {"and"} == set(METHODS)
    readme = (ROOT / "README.md").read_text()
    for name in names(DOCS):
        assert f"({name})" in readme, f"README does not link {name}"


def test_contributing_shows_the_examples_as_they_are():
    examples = [path.read_text() for path in sorted((ROOT / "examples").glob("own_*.py"))]
    shown = [code for language, _, code in blocks(ROOT / "CONTRIBUTING.md") if language == "python"]
    assert len(shown) == 10
    for code in shown:  # a method on its own stands without the indentation of its class
        assert any(code in example or textwrap.indent(code, "    ") in example for example in examples), code


def test_contributing_walks_through_what_there_is():
    """Every file of the ground floor's table, and every function of the walk in the file that it is said to be in."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rooms, walk = text.split("The rooms of the ground floor:")[1].split("## The walk of one batch")
    core = ROOT / "src" / "slimbayes" / "core"
    named = re.findall(r"`(\w+(?:\.py|/))`", "".join(re.findall(r"^\| (`.+?) \|", rooms, re.M)))
    found = {path.name if path.is_file() else f"{path.name}/" for path in core.iterdir()}
    assert set(named) - {"sequences/"} == found - {"__init__.py", "__pycache__/"}
    for file, function in re.findall(r"`([\w/]+\.py)`: `(\w+)`", walk.split("## Style")[0]):
        assert re.search(rf"^\s*def {function}\(", (core / file).read_text(), re.M), (
            f"{function} is not in {file}"
        )


def test_contributing_lists_every_floor():
    table = (ROOT / "CONTRIBUTING.md").read_text().split("| floor |")[1].split("![")[0]
    floors = re.findall(r"`(\w+)/`", "".join(re.findall(r"^\| (`.+?) \|", table, re.M)))
    package = ROOT / "src" / "slimbayes"
    assert sorted(floors) == sorted(path.parent.name for path in package.glob("*/__init__.py"))
    picture = (ROOT / "docs" / "house.svg").read_text()
    assert all(f">{floor}</text>" in picture for floor in floors)
