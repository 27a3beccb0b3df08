"""What ``import slimbayes`` loads. Never timed: counted."""

import json
import pkgutil
import subprocess
import sys
from importlib import import_module

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes import aliases
from tools.walk import imported

MOST = 60  # modules of ours
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
        "accelerate",
        "integrations",
        "lab",
        "metrics",
        "networks",
        "sklearn",
        "training",
    }
    assert "verbs" not in rooms and {"core", "sequences"} <= rooms


def test_import_loads_few_modules(loaded):
    """The walk of ``tools/walk.py`` counts them likewise."""
    modules = imported(repeats=1)[2]
    assert modules == [name for name in loaded[0] if name.split(".")[0] == "slimbayes"]
    assert len(modules) <= MOST, modules


LATER = """
import copy, io, json, pickle, sys
import torch, slimbayes as sb
from torch import nn
from slimbayes.core import paths
def attached():
    return ["slimbayes.accelerate.registry" in sys.modules, len(paths.ASKED.noise) > 0]
seen = [attached()]
with sb.fast_paths(False), sb.fast_paths(noise=True):
    seen.append(attached())
layers = [name for name in sys.modules if name.startswith("slimbayes.sequences.")]
if len(sys.argv) > 1:  # unpickled, in a process that never converts
    torch.load(sys.argv[1], weights_only=False)
else:
    sb.bayesianize(nn.Linear(2, 2), sb.Rank1())
seen.append(attached())
print(json.dumps([seen, layers]))
"""


@pytest.mark.parametrize("how", ["converted", "unpickled"])
def test_fast_paths_are_attached_when_the_first_model_comes_to_be(how, tmp_path):
    torch.save(sb.bayesianize(nn.LSTM(2, 3), sb.Rank1()), tmp_path / "model.pt")
    more = [str(tmp_path / "model.pt")] if how == "unpickled" else []
    run = subprocess.run([sys.executable, "-c", LATER, *more], capture_output=True, text=True, check=True)
    seen, layers = json.loads(run.stdout)
    assert seen == [[False, False], [False, False], [True, True]]
    assert layers == ["slimbayes.sequences.kernels"]


def test_a_broken_fast_path_is_no_absent_one():
    script = """
import sys, types
sys.modules["slimbayes.accelerate.members"] = None
import slimbayes as sb
from torch import nn
sb.bayesianize(nn.Linear(2, 2), sb.Rank1())
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 1 and "slimbayes.accelerate.members" in run.stderr


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
