"""What ``import slimbayes`` loads. Never timed: counted."""

import json
import pkgutil
import subprocess
import sys

import pytest

import slimbayes as sb

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
    late = {"checkpoint", "compiling", "data", "metrics", "models", "training"}
    assert not rooms & (late | {"bench", "cli", "compare", "config", "fusing", "report", "runs"})
    assert {"apply", "convert", "draws", "objective", "predict"} <= rooms


def test_import_registers_no_operation_the_slow_way(loaded):
    """``torch.library.custom_op`` takes 2 ms an operation; ``slimbayes.ops.operation`` a tenth of it."""
    assert loaded[1] == []


def test_every_public_name_is_there():
    assert set(sb.__all__) <= set(dir(sb))
    assert all(getattr(sb, name) is not None for name in sb.__all__)
    assert sb.training.fit is sb.fit and sb.checkpoint.load is sb.load and sb.compiling.compile is sb.compile
    with pytest.raises(AttributeError, match="module 'slimbayes' has no attribute 'drow'"):
        sb.drow  # noqa: B018


def test_no_late_name_is_a_room():
    """Importing ``slimbayes.name`` would put the module in the name's place."""
    rooms = {module.name for module in pkgutil.iter_modules(sb.__path__)}
    assert sb._LATE.keys() <= rooms
    assert not rooms & {name for names in sb._LATE.values() for name in names}


@pytest.mark.parametrize(
    "first", ["slimbayes.predict", "slimbayes.kl", "slimbayes.evaluate", "slimbayes.summary"]
)
def test_a_function_keeps_its_name_from_its_module(first):
    __import__(first)
    assert callable(getattr(sb, first.split(".")[1]))
