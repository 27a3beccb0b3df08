"""The floors of the house: imports point down, never up. By the syntax of every file, wherever in it they stand."""

import ast
import re
from pathlib import Path

import pytest

from slimbayes import aliases
from tools.house import imported, name_of, survey

PACKAGE = Path(__file__).parents[1] / "src" / "slimbayes"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {name_of(PACKAGE, file) for file in FILES}
OLD = {
    old + module.removeprefix(new)
    for old, new in aliases.ALIASES.items()
    for module in MODULES
    if f"{module}.".startswith(f"{new}.")
}
PACKAGES = {f"{name_of(PACKAGE, file)}.__init__" for file in FILES if file.name == "__init__.py"}
GROUND = {"core", "sequences"}
MIDDLE = {
    "verbs", "metrics", "decisions", "analysis", "training", "containers", "networks", "sklearn", "integrations",
}  # fmt: skip
TOP = {"__init__", "__main__", "aliases", "extras", "files"}  # files of no floor
# By what a floor may not import, from below to above.
ABOVE = {
    **{name: {"accelerate", *MIDDLE, "lab"} for name in GROUND},
    "accelerate": {*MIDDLE, "lab"},
    **{name: {"lab"} for name in MIDDLE},
    "lab": set(),
}


def floor(module):
    """The floor of "slimbayes.core.draws" is "core"; of "slimbayes" itself "__init__"."""
    return (module.split(".")[1:] or ["__init__"])[0]


def upward(text, module):
    """Modules that this file imports, or names in a string that is no documentation, from floors above its own."""
    tree = ast.parse(text)
    known = imported(tree, module, f"{module}.__init__" in PACKAGES, MODULES | OLD, checked=True)
    documents = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            known |= {name for name in re.findall(r"slimbayes(?:\.\w+)+", node.value) if floor(name) in ABOVE}
    return {name for name in known if floor(aliases.target(name) or name) in ABOVE.get(floor(module), set())}


def test_every_folder_is_a_floor_and_the_top_level_is_short():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(ABOVE)
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert files == TOP and len(files) <= 12


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_imports_point_down(file):
    assert not upward(file.read_text(), name_of(PACKAGE, file))


@pytest.mark.parametrize("file", ["extras", "files"])
def test_what_all_floors_use_imports_none_of_them(file):
    known = imported(
        ast.parse((PACKAGE / f"{file}.py").read_text()), f"slimbayes.{file}", False, MODULES, checked=True
    )
    assert {floor(name) for name in known} <= {"__init__", "extras"}


def test_the_test_sees_every_kind_of_import():
    for line in (
        "from slimbayes.accelerate import switches",
        "import slimbayes.accelerate.switches",
        "def f():\n    from slimbayes.verbs.checkpoint import save",
        "if TYPE_CHECKING:\n    from slimbayes.lab.data import images",
        "from slimbayes import accelerate",
        "from ..accelerate import switches",
        "from slimbayes.data import images",  # by its alias
        "import_module('slimbayes.accelerate.registry')",
    ):
        assert upward(line, "slimbayes.core.draws"), line
    assert not upward(
        '"""Doc of slimbayes.accelerate."""\nimport slimbayes.core.plan', "slimbayes.core.draws"
    )
    assert upward("from slimbayes.verbs import checkpoint", "slimbayes.accelerate.members")
    assert not upward("from slimbayes.core import plan", "slimbayes.accelerate.members")


def test_the_picture_counts_no_import_upwards_from_the_ground():
    floors = survey(PACKAGE)
    for name in GROUND:
        assert set(floors[name].imports) <= GROUND | {"(top)"}
