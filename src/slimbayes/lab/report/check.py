"""Does a document follow the results format? Errors name the file and the key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

FORMAT, VERSION = "slimbayes-results", 1
TASKS = ("classification", "regression")
_DICTS = ("provenance", "dataset", "ood")  # parts that may be absent or null, but are dicts if they are there
_RUN_PARTS: dict[str, type] = {
    "clean": dict,
    "shifted": dict,
    "validation": dict,
    "ood": dict,
    "reliability": dict,
    "entropy": dict,
    "disagreement": list,
    "history": list,
    "findings": list,
    "examples": dict,
    "fit": dict,
    "scatter": dict,
}
_NUMBERS = {"reliability": ("clean", "shifted"), "entropy": (), "fit": (), "scatter": ()}  # lists of numbers


class ReportError(ValueError):
    """A results file that cannot be read, or results that cannot be joined; the message says which and why."""


def fail(origin: object, what: str) -> Any:
    """Raise the error of a file that is no results file, or a damaged one."""
    raise ReportError(f"{origin}: {what}; give a results file that slimbayes compare wrote")


def check(data: Any, origin: str) -> None:
    """Raise ReportError unless a document follows the format."""
    for key in ("format", "version", "task", "methods"):
        if key not in data:
            fail(origin, f"the key '{key}' is missing")
    if data["format"] != FORMAT:
        fail(origin, f"format is {data['format']!r}, not {FORMAT!r}")
    if data["version"] != VERSION:
        raise ReportError(
            f"{origin}: version {data['version']!r} of the format, this slimbayes reads {VERSION}: "
            "update slimbayes, or run the comparison again"
        )
    if data["task"] not in TASKS:
        fail(origin, f"task is {data['task']!r}, not one of {', '.join(TASKS)}")
    for key in _DICTS:
        if not isinstance(data.get(key) or {}, dict):
            fail(origin, f"'{key}' is no object")
    for key in ("classes", "features", "outputs", "shape"):
        if not isinstance((data.get("dataset") or {}).get(key) or [], list):
            fail(origin, f"'dataset.{key}' is no list")
    if not _objects(data.get("shifts") or []):
        fail(origin, "'shifts' is no list of objects")
    if not _objects(data["methods"]):
        fail(origin, "'methods' is no list of objects")
    for place, run in _runs(data["methods"], origin):
        _check_run(run, place, origin)


def _objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _runs(methods: list[dict[str, Any]], origin: str) -> Iterator[tuple[str, dict[str, Any]]]:
    names: set[str] = set()
    for i, method in enumerate(methods):
        for key in ("name", "runs"):
            if key not in method:
                fail(origin, f"the key 'methods[{i}].{key}' is missing")
        if not isinstance(method["name"], str) or method["name"] in names:
            fail(origin, f"'methods[{i}].name' is {method['name']!r}: a text of its own is needed")
        names.add(method["name"])
        if not _objects(method["runs"]):
            fail(origin, f"'methods[{i}].runs' is no list of objects")
        seeds = [run.get("seed") for run in method["runs"]]
        if len(set(map(str, seeds))) < len(seeds):
            fail(origin, f"'methods[{i}].runs' holds a seed twice ({seeds})")
        yield from ((f"methods[{i}].runs[{j}]", run) for j, run in enumerate(method["runs"]))


def _check_run(run: dict[str, Any], place: str, origin: str) -> None:
    for key in ("seed", "clean"):
        if run.get(key) is None:
            fail(origin, f"the key '{place}.{key}' is missing")
    if isinstance(run["seed"], bool) or not isinstance(run["seed"], int):
        fail(origin, f"'{place}.seed' is {run['seed']!r}, not an integer")
    for key, kind in _RUN_PARTS.items():
        if run.get(key) is not None and not isinstance(run[key], kind):
            fail(origin, f"'{place}.{key}' is no {'object' if kind is dict else 'list'}")
    _check_shifts(run, place, origin)
    held = run.get("validation") or {}
    if not all(isinstance(held.get(key) or {}, dict) for key in ("clean", "shifted")):
        fail(origin, f"'{place}.validation' has figures that are no objects")
    _check_shifts(held, f"{place}.validation", origin)
    for key in ("disagreement", "history"):
        if not _objects(run.get(key) or []):
            fail(origin, f"'{place}.{key}' is no list of objects")
    for kind, group in (run.get("examples") or {}).items():
        if not _objects(group or []):
            fail(origin, f"'{place}.examples.{kind}' is no list of objects")
    for key, inner in _NUMBERS.items():
        part = run.get(key) or {}
        for where, table in ((i, part.get(i) or {}) for i in inner) if inner else (("", part),):
            _check_table(table, f"{place}.{key}.{where}".rstrip("."), origin)


def _check_shifts(part: dict[str, Any], place: str, origin: str) -> None:
    for shift, levels in (part.get("shifted") or {}).items():
        if not isinstance(levels, dict) or not all(isinstance(m, dict) for m in levels.values()):
            fail(origin, f"'{place}.shifted.{shift}' is no object of metrics by severity")


def _check_table(table: Any, place: str, origin: str) -> None:
    """A table is an object of columns, and a column a list of numbers or nulls."""
    if not isinstance(table, dict):
        fail(origin, f"'{place}' is no object of lists")
    for name, column in table.items():
        if name == "level" and isinstance(column, int | float):
            continue  # the level of a fit's band
        if column is not None and not isinstance(column, list):
            fail(origin, f"'{place}.{name}' is no list of numbers")
        if any(isinstance(x, bool) or not isinstance(x, int | float | None) for x in column or []):
            fail(origin, f"'{place}.{name}' holds something that is no number")
