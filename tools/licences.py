"""The licences of everything that slimbayes' extras install: ``python tools/licences.py`` writes docs/licences.md.

The list is the closure of the requirements in pyproject.toml over the metadata of what is installed here. ``--check``
changes nothing and fails where the page is out of date, a licence is unknown, or one is not for use beside Apache-2.0.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import re
import sys
from dataclasses import dataclass
from pathlib import Path

tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "pip._vendor.tomli")

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
# Words in licences, by what they ask for. The first that is found counts: weak before strong, since LGPL contains GPL.
PERMISSIVE = (
    "apache", "mit", "bsd", "isc", "psf", "python software foundation", "unlicense", "public domain", "zlib", "cc0",
    "hpnd", "cmu", "0bsd", "boost", "bsl", "blueoak",
)  # fmt: skip
WEAK = (
    "lgpl",
    "lesser general public",
    "mpl",
    "mozilla",
)  # of the file or the library: use from outside is free
STRONG = ("agpl", "gpl", "general public license", "cc-by-sa", "sspl", "eupl")
# Where the metadata say nothing, what the package's own licence file says.
KNOWN: dict[str, str] = {}


@dataclass(frozen=True)
class Package:
    """One installed distribution and its licence."""

    name: str
    version: str
    licence: str
    extras: tuple[str, ...]  # of slimbayes, that need it

    @property
    def kind(self) -> str:
        """permissive, weak copyleft, copyleft or unknown."""
        return kind_of(self.licence)


def kind_of(licence: str) -> str:
    """What a licence asks for.

    >>> kind_of("MIT License"), kind_of("MPL-2.0"), kind_of("GPLv3"), kind_of("LGPL"), kind_of("")
    ('permissive', 'weak copyleft', 'copyleft', 'weak copyleft', 'unknown')
    """
    text = licence.lower()
    choices = re.split(r"\bor\b", text) if " or " in text else [text]
    kinds = [_kind(choice) for choice in choices]
    order = ("permissive", "weak copyleft", "copyleft", "unknown")
    return min(kinds, key=order.index)  # one may choose


def _kind(text: str) -> str:
    words = [("weak copyleft", WEAK), ("copyleft", STRONG), ("permissive", PERMISSIVE)]
    found = [
        kind for kind, terms in words if any(re.search(rf"(?<![a-z]){re.escape(t)}", text) for t in terms)
    ]
    if "GPL".lower() in text and "with" in text and "exception" in text:
        return "weak copyleft"
    return found[0] if found else "unknown"


def licence_of(found: importlib.metadata.Distribution) -> str:
    """The licence by the metadata: the expression, the classifiers, or the first line of the text."""
    name = key(found.metadata["Name"])
    if name in KNOWN:
        return KNOWN[name]
    expression = found.metadata.get("License-Expression")
    if expression:
        return str(expression)
    classes = [
        c.split(" :: ")[-1] for c in found.metadata.get_all("Classifier") or () if c.startswith("License ::")
    ]
    classes = [c for c in classes if c != "OSI Approved"]
    if classes:
        return " or ".join(dict.fromkeys(classes)) if len(classes) > 1 else classes[0]
    text = (found.metadata.get("License") or "").strip()
    return text.splitlines()[0][:80] if text else _from_file(found)


def _from_file(found: importlib.metadata.Distribution) -> str:
    for file in found.files or ():
        if re.search(r"(?i)licen[cs]e", file.name) and "dist-info" in str(file):
            text = " ".join(file.locate().read_text(encoding="utf-8", errors="replace").split())[
                :2000
            ].lower()
            for words, licence in (("permission is hereby granted, free of charge", "MIT"),
                                   ("apache license", "Apache-2.0"),
                                   ("redistribution and use in source and binary forms", "BSD")):  # fmt: skip
                if words in text:
                    return licence
    return ""


def key(name: str) -> str:
    """A name as packages are compared.

    >>> key("Huggingface_Hub")
    'huggingface-hub'
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def _needs(requirement: str) -> tuple[str, set[str], str]:
    """Name, extras and marker of a requirement.

    >>> _needs("mkdocstrings[python]>=1; extra == 'a'")
    ('mkdocstrings', {'python'}, "extra == 'a'")
    """
    text, _, marker = requirement.partition(";")
    match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?", text)
    assert match is not None, requirement
    extras = {part.strip() for part in (match[2] or "").split(",") if part.strip()}
    return key(match[1]), extras, marker.strip()


def _applies(marker: str, extras: set[str]) -> bool:
    from packaging.markers import Marker

    return not marker or any(Marker(marker).evaluate({"extra": extra}) for extra in extras or {""})


def direct() -> dict[str, list[str]]:
    """The requirements of every extra in pyproject.toml; "" is what slimbayes always needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def closure(requirements: list[str], own: dict[str, list[str]]) -> tuple[set[str], set[str]]:
    """What these need, directly and through others; and what of it is not installed here."""
    todo = [_needs(requirement)[:2] for requirement in requirements]
    done: set[tuple[str, str]] = set()
    absent: set[str] = set()
    while todo:
        name, extras = todo.pop()
        fresh = {(name, extra) for extra in {"", *extras}} - done
        if not fresh:
            continue
        done |= fresh
        if name == "slimbayes":
            todo += [_needs(r)[:2] for extra in extras for r in own[extra]]
            continue
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            absent.add(name)
            continue
        for requirement in needed:
            other, more, marker = _needs(requirement)
            if _applies(marker, extras):
                todo.append((other, more))
    return {name for name, _ in done} - {"slimbayes"} - absent, absent


def packages() -> tuple[list[Package], dict[str, set[str]]]:
    """Everything that an extra installs, with the extras that do; and, by extra, what is not installed here."""
    own = direct()
    by_name: dict[str, list[str]] = {}
    missing: dict[str, set[str]] = {}
    for extra, requirements in own.items():
        found, absent = closure(requirements, own)
        for name in found:
            by_name.setdefault(name, []).append(extra or "always")
        if absent:
            missing[extra or "always"] = absent
    made = []
    for name, extras in sorted(by_name.items()):
        found_here = importlib.metadata.distribution(name)
        made.append(
            Package(found_here.metadata["Name"], found_here.version, licence_of(found_here), tuple(extras))
        )
    return made, missing


def page(found: list[Package]) -> str:
    """The page of all licences; versions are left out, so that it changes with the packages only."""
    runtime = [p for p in found if set(p.extras) - {"dev", "docs"}]
    rest = [p for p in found if not set(p.extras) - {"dev", "docs"}]
    flagged = [p for p in found if p.kind != "permissive"]
    lines = [
        "# Licences",
        "",
        "slimbayes is under the Apache License 2.0. It contains no code of the packages below: they are installed",
        "beside it, each under its own licence. This list is made by `python tools/licences.py` of the metadata of",
        "the packages that every extra of `pyproject.toml` installs, with all that those need.",
        "",
        "Built for CUDA, torch also installs libraries of NVIDIA, under NVIDIA's own licence.",
        "",
        f"{len(found)} packages, of which {len(found) - len(flagged)} are under a permissive licence: MIT, BSD, Apache",
        "or the like.",
        "",
    ]
    if flagged:
        lines += [
            "Others, which may be used beside slimbayes but ask for more when they are changed or passed on:",
            "",
        ]
        lines += [
            f"- {p.name}: {p.licence or 'not stated'} ({p.kind}; needed by {_extras(p)})" for p in flagged
        ]
        lines += [""]
    for title, part in (
        ("What slimbayes and its extras install", runtime),
        ("For its tests and pages only", rest),
    ):
        lines += [f"## {title}", "", "| Package | Licence | Extras |", "|---|---|---|"]
        lines += [
            f"| {p.name} | {p.licence.replace('|', '/') or 'not stated'} | {_extras(p)} |" for p in part
        ]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def _extras(package: Package) -> str:
    kept = [extra for extra in package.extras if extra not in ("all", "dev")] or list(package.extras)
    return "always" if "always" in kept else ", ".join(sorted(kept))


def problems(found: list[Package]) -> list[str]:
    """Licences that are unknown, and strong copyleft among what users install."""
    wrong = [f"{p.name}: no licence is stated" for p in found if p.kind == "unknown"]
    wrong += [
        f"{p.name}: {p.licence}" for p in found if p.kind == "copyleft" and set(p.extras) - {"dev", "docs"}
    ]
    return wrong


def main() -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    found, missing = packages()
    for extra, names in missing.items():
        print(f"not installed here, of {extra}: {', '.join(sorted(names))}")
    for problem in problems(found):
        print(problem)
    if not given.check:
        PAGE.write_text(page(found), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page(found):
        print(f"{PAGE} is out of date: python tools/licences.py")
        return 1
    return int(bool(problems(found)))


if __name__ == "__main__":
    sys.exit(main())
