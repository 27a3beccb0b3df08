"""Hooks of the site: pages that are written elsewhere in the repository, and links to files outside of docs/.

On a repository's page a link such as ``../examples/regression.py`` shows the file. The site holds only docs/, so every
file that a page links is brought into it: Python files and other texts as a page of code, results as they are.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "slimbayes"
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^(```.*?^```$)", re.M | re.S)
# Pages that are not in docs/, by their place in the site.
ELSEWHERE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
AS_IS = (".json", ".svg", ".png", ".html", ".css")
# Rooms with a reference page, and what the page says of them. A room without __all__ is listed by its definitions,
# one that is not there is left out.
ROOMS = {
    "": "What `import slimbayes as sb` gives: the verbs, and what they return. What has a page of its own is there, "
    "too, by the same names: `sb.Rank1` is `slimbayes.core.methods.Rank1`.",
    "core.methods": "What `sb.bayesianize` takes: frozen dataclasses, and the protocol behind them.",
    "core.priors": "Priors, by value.",
    "core.likelihoods": "What the draws say about a target.",
    "metrics": "Pure functions of probabilities or draws and targets.",
    "analysis": "What posteriors look like.",
    "lab.data": "Data sets by name, batches, records, shifts.",
    "lab.data.corruptions": "Corrupted images, batched and on any device.",
    "training": "The training loop, and what goes into it.",
    "lab.models": "Plain torch networks, by class and by name.",
    "lab.experiments": "The papers' tables and figures as data.",
    "decisions": "From predictions to decisions.",
    "verbs.diagnosis": "What looks wrong with a model, in words.",
    "sklearn": "Estimators for scikit-learn.",
    "integrations.lightning": "For Lightning's Trainer.",
    "integrations.transformers": "For Hugging Face's Trainer.",
    "integrations.hub": "Models in a folder or on a hub.",
    "verbs.freezing": "Every draw a fixed function, in plain modules.",
    "verbs.exporting": "Frozen networks as torch.export programs and ONNX files.",
}


def in_site(path: str) -> str:
    """Where the site has a file of the repository: Markdown, code and texts as pages, the rest as it is.

    >>> in_site("docs/draws.md"), in_site("examples/fit.py"), in_site("results/emp/table1.desk.json")
    ('draws.md', 'examples/fit.md', 'results/emp/table1.desk.json')
    """
    for page, source in ELSEWHERE.items():
        if path == source:
            return page
    if path.startswith("docs/") and not path.endswith(".py"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{path}/all.md"  # not the index of a section of the nav
    return path if path.endswith(AS_IS) else f"{path.removesuffix('.py')}.md"


def linked(text: str, folder: str) -> list[str]:
    """Files of the repository that a page in this folder links."""
    found = []
    for part in FENCE.split(text)[::2]:  # what is not in fences
        for link, _ in LINK.findall(part):
            path = posixpath.normpath(posixpath.join(folder, link))
            if ":" not in link and not path.startswith("..") and (ROOT / path).exists():
                found.append(path)
    return found


def relinked(text: str, source: str) -> str:
    """The text of a page with links to where the site has their files."""
    folder, here = posixpath.dirname(source), posixpath.dirname(in_site(source))

    def replace(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[1]))
        if ":" in found[1] or path.startswith("..") or not (ROOT / path).exists():
            return found[0]  # mkdocs says so if it is broken
        return f"]({posixpath.relpath(in_site(path), here or '.')}{found[2] or ''})"

    parts = FENCE.split(text)
    return "".join(part if k % 2 else LINK.sub(replace, part) for k, part in enumerate(parts))


def exported(module: str) -> list[str]:
    """Names that a room exports, read without importing it; none where there is no such room."""
    place = PACKAGE.joinpath(*module.split(".")) if module else PACKAGE
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    if not path.is_file():
        return []
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    kinds = (ast.FunctionDef, ast.ClassDef)
    return [node.name for node in body if isinstance(node, kinds) and not node.name.startswith("_")]


def origins(module: str) -> dict[str, str]:
    """Where the names that a package imports are defined: a function may have the name of its own module."""
    found = {}
    path = PACKAGE.joinpath(*module.split(".")) / "__init__.py" if module else PACKAGE / "__init__.py"
    if path.is_file():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found.update(
                    {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                )
    return found


def reference() -> dict[str, str]:
    """The reference, one page per room: functions first, then classes and constants."""
    pages = {}
    for room, words in ROOMS.items():
        names, places = exported(room), origins(room)
        if not room:  # what comes from a room with a page is there
            rooms = {f"slimbayes.{other}" for other in ROOMS}
            names = [n for n in names if not {places[n], places[n].rpartition(".")[0]} & rooms]
        if not names:
            continue
        module = f"slimbayes.{room}" if room else "slimbayes"
        parts = [f"# {module}", words]
        for name in sorted(names, key=lambda name: (name[0].isupper(), name.isupper(), name.lower())):
            parts.append(f"::: {places.get(name, f'{module}.{name}')}")
            if (
                room == "core.methods" and name != "Method"
            ):  # what a method answers to the library is said there
                parts[-1] += "\n    options:\n      members: false"
        pages[f"reference/{room or 'index'}.md"] = "\n\n".join(parts) + "\n"
    return pages


def code_page(path: str) -> str:
    """A text of the repository as a page."""
    text = (ROOT / path).read_text(encoding="utf-8").rstrip("\n")
    language = "python" if path.endswith(".py") else "text"
    return f"# {path}\n\n````{language}\n{text}\n````\n"


def examples() -> dict[str, str]:
    """The examples as pages, and a list of them."""
    paths = sorted((ROOT / "examples").glob("*.py"))
    lines = []
    for path in paths:
        summary = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]
        lines.append(f"- [{path.name}]({path.stem}.md): {summary}")
    head = "# Examples\n\nEach is one file that runs, offline, and is run by the tests.\n\n"
    pages = {f"examples/{path.stem}.md": code_page(f"examples/{path.name}") for path in paths}
    return {"examples/all.md": head + "\n".join(lines) + "\n", **pages}


def on_config(config: Any) -> Any:
    """The nav with the pages of the reference."""
    for section in config.nav:
        if "Reference" in section:
            section["Reference"] = [*reference()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/, and whatever a page links outside of it."""
    pages = {**examples(), **reference()}
    wanted = {"LICENSE"}
    for place, source in ELSEWHERE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        pages[place] = relinked(text, source)
        wanted.update(linked(text, ""))
    for file in files.documentation_pages():
        folder = posixpath.join("docs", posixpath.dirname(file.src_uri))
        wanted.update(linked(file.content_string, folder))
    for path in sorted(wanted):
        place = in_site(path)
        if place in pages or files.get_file_from_path(place) or (ROOT / path).is_dir():
            continue
        if path.endswith(AS_IS):
            files.append(File.generated(config, place, abs_src_path=str(ROOT / path)))
        else:
            pages[place] = code_page(path)
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point the links of pages in docs/ to where the site has their files."""
    path = f"docs/{page.file.src_uri}"
    return relinked(markdown, path) if (ROOT / path).is_file() else markdown
