"""Results of experiments: JSON files, one per experiment and scale, checked when read and written whole.

    results/ktied/table2.gpu.json

A document holds, beside its ``experiment``, ``scale`` and ``settings``:

- ``tables``: ``{"name", "title", "columns": [keys], "rows": [{"label", "values": {key: [one number per seed]},
  "errors": {key: standard error over test examples, where there is one}}]}``. Names, labels and keys are those of
  the entry's printed tables where the paper has the same cell; further rows and columns are ours.
- ``curves``: ``{"name", "title", "x", "y", "log_x", "log_y", "lines": [{"label", "x": [...], "y": [[...]]}]}``;
  ``y`` has one list per seed, each as long as ``x``.
- ``maps``: ``{"name", "title", "panels": [{"label", "shape": [m, n], "values": [[...]]}]}``, block means of matrices.
- ``checks``: ``{"what", "holds", "value", "bound"}``: what was to hold, as text, and whether it does.
  Parts of an entry that has settings also name theirs, ``"setting"``: by it results of some settings are joined.
- ``deviations``: sentences: where the run differs from the paper's.
- ``runs``: every training run: setting, label, seed, training settings, steps, seconds.
- ``provenance``: command, commit, seeds, fingerprints of data, hardware, seconds, package versions;
  ``joined``: where the settings come from that this call did not run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slimbayes.files import read_json, shortened, write_whole

FORMAT = "slimbayes-experiment"
SCALES = ("smoke", "desk", "gpu", "paper")
_AGAIN = "run its experiment again"
_DEPTH = 30  # levels of nesting: ours have ten
_LISTS = ("tables", "curves", "maps", "checks", "deviations", "runs")


class ResultError(ValueError):
    """A file that is no result of an experiment, with what is wrong and what to do."""


def result_path(folder: str | Path, experiment: str, scale: str) -> Path:
    """Where the result of an experiment at a scale lies.

    >>> result_path("results", "ktied/table2", "gpu").as_posix()
    'results/ktied/table2.gpu.json'
    """
    return Path(folder) / f"{experiment}.{scale}.json"


def write_result(document: dict[str, Any], folder: str | Path) -> Path:
    """Check a result and write it, whole: floats at six significant digits, those that are not finite as null."""
    check_result(document, "the new result")
    path = result_path(folder, document["experiment"], document["scale"])
    text = json.dumps(_rounded(document), ensure_ascii=False, indent=1, allow_nan=False)
    return write_whole(path, text + "\n")


def read_result(path: str | Path) -> dict[str, Any]:
    """Read and check a result file."""
    path = Path(path)
    try:
        document = read_json(path)
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: cannot be read ({shortened(error)}); run its experiment again") from error
    return check_result(document, str(path))


def check_result(document: Any, origin: str) -> dict[str, Any]:
    """The document itself, if it has the parts of a result."""
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ResultError(f"{origin}: no result of slimbayes reproduce (its format is not {FORMAT!r})")
    if _deeper(document, _DEPTH):
        raise ResultError(f"{origin}: its values are nested deeper than {_DEPTH} levels; {_AGAIN}")
    if document.get("version") != 1:
        raise ResultError(
            f"{origin}: version {document.get('version')!r} is not known here: update slimbayes"
        )
    if document.get("scale") not in SCALES or not isinstance(document.get("experiment"), str):
        raise ResultError(f"{origin}: experiment or scale is missing; run its experiment again")
    for part in _LISTS:
        if not isinstance(document.get(part), list):
            raise ResultError(f"{origin}: {part!r} is missing; run its experiment again")
    for table in document["tables"]:
        _check_table(table, origin)
    _check_names(document["tables"], origin)
    for part, check in (("curves", _check_curve), ("maps", _check_map), ("checks", _check_check)):
        for item in document[part]:
            try:
                check(item)
            except (KeyError, TypeError, AttributeError, ValueError) as error:
                raise ResultError(f"{origin}: one of {part!r} is damaged ({error!r}); {_AGAIN}") from error
    if not isinstance(document.get("provenance"), dict):
        raise ResultError(f"{origin}: its provenance is missing; run its experiment again")
    return document


def _deeper(value: Any, levels: int) -> bool:
    """Whether a value is nested deeper than so many levels."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_deeper(one, levels - 1) for one in inner)


def _check_table(table: Any, origin: str) -> None:
    try:
        columns = set(table["columns"])
        _texts(table, "name")
        for row in table["rows"]:
            _texts(row, "label")
            row.get("errors", {}).items()  # a mapping, where there is one
        for row in table["rows"]:
            for key, values in row["values"].items():
                if key not in columns:
                    raise ResultError(f"{origin}: {table['name']!r} has no column {key!r}")
                if not values or not all(v is None or isinstance(v, int | float) for v in values):
                    raise ResultError(f"{origin}: {table['name']!r}, {row['label']!r}, {key!r}: {values!r}")
    except (KeyError, TypeError, AttributeError) as error:
        raise ResultError(f"{origin}: a table is damaged ({error!r}); run its experiment again") from error


def _check_names(tables: list[dict[str, Any]], origin: str) -> None:
    """Tables of several settings may have one name, and are shown as one: their rows must differ."""
    for name in dict.fromkeys(table["name"] for table in tables):
        mine = [table for table in tables if table["name"] == name]
        settings = [str(table.get("setting", "")) for table in mine]
        if len(set(settings)) < len(mine) or ("" in settings and len(mine) > 1):
            raise ResultError(
                f"{origin}: there are two tables {name!r}: give each a name or a setting of its own"
            )
        _check_unique((row["label"] for table in mine for row in table["rows"]), "row", f"{origin}: {name!r}")


def _check_unique(names: Iterable[str], what: str, origin: str) -> None:
    """Pages find rows by their names: of two with one name, the second would be hidden."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ResultError(f"{origin}: there are two {what}s {name!r}: give each a name of its own")
        seen.add(name)


def _check_curve(curve: Any) -> None:
    _texts(curve, "name", "title", "x", "y")
    for line in curve["lines"]:
        _texts(line, "label")
        if not line["y"] or any(len(values) != len(line["x"]) for values in line["y"]):
            raise ValueError(f"line {line['label']!r}: not one y per x and seed")


def _check_map(item: Any) -> None:
    _texts(item, "name", "title")
    for panel in item["panels"]:
        _texts(panel, "label")
        rows = {len(row) for row in panel["values"]}
        if len(panel["shape"]) != 2 or len(rows) != 1 or 0 in rows:
            raise ValueError(f"panel {panel['label']!r}: no matrix")


def _check_check(item: Any) -> None:
    _texts(item, "what")
    if not isinstance(item["holds"], bool):
        raise ValueError(f"holds is {item['holds']!r}: true or false")


def _texts(item: Any, *keys: str) -> None:
    for key in keys:
        if not isinstance(item[key], str):
            raise TypeError(f"{key!r} is {item[key]!r}, no text")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, float) and not value.is_integer():  # counts keep all their digits
        return float(f"{value:.6g}")
    return value
