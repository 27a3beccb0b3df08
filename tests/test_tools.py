"""The scripts in ``tools/`` that measure the code itself."""

import importlib.util
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


def tool(name):
    spec = importlib.util.spec_from_file_location(f"tool_{name}", TOOLS / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def package(tmp_path):
    """Three floors; ``upper`` imports ``core`` in every way, and ``core`` imports ``upper`` once."""
    files = {
        "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house import upper\n",
        "top.py": "",
        "core/__init__.py": "",
        "core/a.py": "def later():\n    import house.upper.c\n",
        "core/b.py": "from . import a\nfrom ..top import something\n",
        "upper/__init__.py": "",
        "upper/c.py": "import house.core.a, torch\nfrom house.core import b, whatever\nfrom house import top\n",
    }
    for name, text in files.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "house"


def test_house_counts_files_lines_and_imports_between_floors(package):
    house = tool("house")
    floors = house.survey(package)
    assert {name: (f.files, f.lines, dict(f.imports)) for name, f in floors.items()} == {
        "(top)": (2, 3, {}),
        "core": (3, 4, {"(top)": 1, "upper": 1}),
        "upper": (2, 3, {"(top)": 1, "core": 3}),
    }
    assert [floor.name for floor in house.ordered(floors)] == ["(top)", "core", "upper"]


def test_house_is_drawn(package, tmp_path, capsys):
    target = tmp_path / "house.svg"
    assert tool("house").main([str(package), "--picture", str(target)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["together", "7", "10"]
    root = xml.etree.ElementTree.parse(target).getroot()
    texts = [node.text for node in root.iter() if node.tag.endswith("text")]
    assert {"core", "upper", "3 files, 4 lines"} <= set(texts)
    assert sum(node.get("stroke") == "#c0392b" for node in root.iter()) == 1  # core imports what stands on it


def test_walk_names_the_functions_that_a_step_enters(tmp_path):
    walk = tool("walk")
    (tmp_path / "ours.py").write_text(
        "def outer():\n    return [inner(i) for i in range(3)]\ndef inner(i):\n    return i\ndef idle(): pass\n"
    )
    spec = importlib.util.spec_from_file_location("ours", tmp_path / "ours.py")
    ours = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ours)
    found = walk.walked(ours.outer, tmp_path)
    assert list(found) == ["ours.py"]
    assert {name.split(":")[0] for name in found["ours.py"]} == {"outer", "inner"}


def test_walk_of_a_training_step():
    found = tool("walk").walk_of_step()
    names = {name.split(":")[0].split(".")[-1] for functions in found.values() for name in functions}
    assert {"draw", "elbo", "total_kl", "forward"} <= names
    assert tool("walk").walk_of_step(layers=2) == found  # another layer goes the same way


@pytest.mark.parametrize("name", ["walk", "house"])
def test_tools_say_what_they_do(name):
    run = subprocess.run([sys.executable, TOOLS / f"{name}.py", "--help"], capture_output=True, text=True)
    assert run.returncode == 0 and "usage" in run.stdout
