"""Every package that an extra installs has a licence that is known, and for use beside Apache-2.0."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytest.importorskip("packaging")


@pytest.fixture(scope="module")
def licences():
    path = ROOT / "tools" / "licences.py"
    if not path.exists():
        pytest.skip("an installed package has no tools")
    spec = importlib.util.spec_from_file_location("licences_tool", path)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["licences_tool"] = module
    spec.loader.exec_module(module)
    return module


def test_every_licence_is_known_and_none_is_strong_copyleft(licences):
    found, _ = licences.packages()
    assert len(found) > 5 and licences.problems(found) == []


def test_every_requirement_is_on_the_page(licences):
    page = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    named = {licences.key(line.split("|")[1].strip()) for line in page.splitlines() if line.startswith("| ")}
    for extra, requirements in licences.direct().items():
        for requirement in requirements:
            name = licences._needs(requirement)[0]
            assert name == "slimbayes" or name in named, f"{name} of {extra}: python tools/licences.py"


@pytest.mark.parametrize(
    ("licence", "kind"),
    [
        ("MIT", "permissive"), ("Apache-2.0 AND MIT", "permissive"), ("GNU General Public License v3", "copyleft"),
        ("GPL-3.0-only", "copyleft"), ("AGPL-3.0", "copyleft"), ("LGPL-2.1", "weak copyleft"),
        ("MPL-2.0", "weak copyleft"),
        ("MIT OR GPL-2.0", "permissive"), ("Proprietary", "unknown"), ("", "unknown"), ("Permitted", "unknown"),
    ],
)  # fmt: skip
def test_kinds_of_licences(licences, licence, kind):
    assert licences.kind_of(licence) == kind


def test_copyleft_is_a_problem(licences):
    strong = licences.Package("x", "1", "GPL-3.0", ("cli",))
    assert licences.problems([strong]) and not licences.problems(
        [licences.Package("x", "1", "GPL-3.0", ("dev",))]
    )
