"""Python 3.10 runs the package: its grammar, and no module, name or method of the standard library that came later."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path for folder in ("src", "examples", "docs", "tools", "tests") for path in (ROOT / folder).rglob("*.py")
)
# What 3.11, 3.12 and 3.13 added and what our code might use, by module; None: the whole module.
LATER = {
    "tomllib": None,
    "typing": {"Self", "Never", "LiteralString", "assert_never", "assert_type", "Required", "NotRequired",
               "Unpack", "TypeVarTuple", "dataclass_transform", "override", "TypeAliasType", "ReadOnly", "TypeIs"},
    "enum": {"StrEnum", "EnumCheck", "ReprEnum", "verify", "member", "nonmember", "global_enum"},
    "datetime": {"UTC"},
    "contextlib": {"chdir"},
    "asyncio": {"TaskGroup", "Runner", "timeout", "timeout_at", "Barrier"},
    "itertools": {"batched"},
    "math": {"cbrt", "exp2", "sumprod", "fma"},
    "operator": {"call"},
    "hashlib": {"file_digest"},
    "copy": {"replace"},
    "warnings": {"deprecated"},
    "inspect": {"getmembers_static", "markcoroutinefunction", "BufferFlags"},
    "logging": {"getLevelNamesMapping", "getHandlerByName"},
    "os": {"process_cpu_count", "listdrives"},
    "sys": {"exception", "monitoring"},
    "types": {"get_original_bases"},
    "random": {"binomialvariate"},
    "statistics": {"kde", "kde_random"},
    "pathlib": {"UnsupportedOperation"},
}  # fmt: skip
BUILTINS = {"ExceptionGroup", "BaseExceptionGroup", "PythonFinalizationError"}
# Methods whose names are telling: no other object has them.
METHODS = {"add_note", "enterContext"}


def too_new(path):
    """What of a file Python 3.10 does not have, one line each."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 10))
    names = {}  # what a module is called here
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
            found += [alias.name for alias in node.names if LATER.get(alias.name, ()) is None]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            later = LATER.get(node.module, ())
            found += [
                f"{node.module}.{alias.name}" for alias in node.names if later is None or alias.name in later
            ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            module = names.get(node.value.id) if isinstance(node.value, ast.Name) else None
            if node.attr in (LATER.get(module) or ()):
                found.append(f"{module}.{node.attr}")
            if node.attr in METHODS:
                found.append(f".{node.attr}()")
        elif isinstance(node, ast.Name) and node.id in BUILTINS:
            found.append(node.id)
    return found


def test_python_310_has_all_that_the_code_uses():
    assert len(FILES) > 300
    assert {str(path.relative_to(ROOT)): found for path in FILES if (found := too_new(path))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import tomllib",
        "from typing import Self",
        "import datetime as dt\nnow = dt.UTC",
        "error.add_note('more')",
        "raise ExceptionGroup('all', [])",
        "import itertools\nitertools.batched([1], 2)",
    ],
)
def test_what_is_newer_is_found(text, tmp_path):
    path = tmp_path / "code.py"
    path.write_text(text)
    assert too_new(path)


@pytest.mark.parametrize(
    "text", ["type Row = dict[str, int]", "def first[T](x: T) -> T: ...", "try: ...\nexcept* OSError: ..."]
)
def test_newer_grammar_is_found(text, tmp_path):
    path = tmp_path / "code.py"
    path.write_text(text)
    with pytest.raises(SyntaxError):
        too_new(path)


def test_what_is_promised():
    """The versions in pyproject.toml, in the README and in the constraints of the oldest environment agree."""
    project = (ROOT / "pyproject.toml").read_text()
    lowest = re.search(r'"torch>=([\d.]+)"', project)[1]
    assert f"torch=={lowest}.0\n" in (ROOT / "constraints-oldest.txt").read_text()
    assert f"PyTorch {lowest} or newer" in (ROOT / "README.md").read_text()
    assert 'requires-python = ">=3.10"' in project
