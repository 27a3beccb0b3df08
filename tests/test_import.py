"""What ``import slimbayes`` loads. Never timed: counted."""

import json
import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest

import slimbayes as sb
from slimbayes import aliases

SCRIPT = """
import json, sys
import torch
before, calls = set(sys.modules), []
registered = torch.library.custom_op
torch.library.custom_op = lambda name, *args, **options: (calls.append(name), registered(name, *args, **options))[1]
import slimbayes
print(json.dumps([sorted(set(sys.modules) - before), calls]))
"""


@pytest.fixture(scope="module")
def loaded():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_import_loads_nothing_but_the_core(loaded):
    modules, _ = loaded
    foreign = {name.split(".")[0] for name in modules} - {"slimbayes"} - sys.stdlib_module_names
    foreign = {name for name in foreign if not name.startswith("_sysconfigdata")}
    assert foreign <= {"numpy"}  # neither an extra, nor more of torch than torch itself loads
    rooms = {name.split(".")[1] for name in modules if name.startswith("slimbayes.")}
    assert not rooms & {
        "analysis",
        "decisions",
        "integrations",
        "lab",
        "metrics",
        "networks",
        "sklearn",
        "training",
    }
    late = {f"slimbayes.verbs.{name}" for name in ("checkpoint", "freezing", "exporting", "merging")}
    assert not late & set(modules)
    assert {"core", "sequences"} <= rooms


def test_import_registers_no_operation_the_slow_way(loaded):
    """``torch.library.custom_op`` takes 2 ms an operation; ours a tenth of it."""
    assert loaded[1] == []


def test_every_public_name_is_there():
    assert set(sb.__all__) <= set(dir(sb))
    assert all(getattr(sb, name) is not None for name in sb.__all__)
    assert sb.training.fit is sb.fit and sb.export is import_module("slimbayes.verbs.exporting")
    with pytest.raises(AttributeError, match="module 'slimbayes' has no attribute 'drow'"):
        sb.drow  # noqa: B018


def test_late_names_are_found_where_they_are_said_to_be():
    for room, names in sb._LATE.items():
        assert all(getattr(sb, name) is getattr(import_module(f"slimbayes.{room}"), name) for name in names)


def test_no_public_name_is_a_room():
    """Importing ``slimbayes.name`` would put the module in the name's place."""
    rooms = {module.name for module in pkgutil.iter_modules(sb.__path__)}
    assert not rooms & {name for names in sb._LATE.values() for name in names}
    assert not rooms & {name for name in sb.__all__ if callable(getattr(sb, name))}


@pytest.mark.parametrize("old", sorted(aliases.ALIASES))
def test_a_module_that_has_moved_is_one_module_under_both_names(old):
    module = import_module(old)
    assert module is import_module(aliases.ALIASES[old])
    assert module.__name__ == module.__spec__.name == aliases.ALIASES[old]
    assert aliases.target(old + ".inner") in (
        f"{aliases.ALIASES[old]}.inner",
        aliases.ALIASES.get(old + ".inner"),
    )


def test_submodules_of_what_has_moved_are_importable():
    from slimbayes.data.corruptions import tables

    from slimbayes.lab.data.corruptions import tables as moved

    assert tables is moved and import_module("slimbayes.data.corruptions.tables") is moved
    with pytest.raises(ModuleNotFoundError, match=r"slimbayes\.lab\.data\.nothing"):
        import_module("slimbayes.data.nothing")
