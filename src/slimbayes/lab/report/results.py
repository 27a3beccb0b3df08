"""The results file: reading, checking, writing whole, and joining several."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slimbayes.files import LARGEST_JSON, read_text, shortened, write_whole
from slimbayes.lab.report.check import ReportError, check, fail


@dataclass(frozen=True, eq=False)
class Results:
    """Checked results: ``data`` is the document itself, free of NaN, with every run's parts of the right kind.

    >>> document = {"format": "slimbayes-results", "version": 1, "task": "classification",
    ...             "methods": [{"name": "Deterministic", "runs": [{"seed": 0, "clean": {"nll": 0.5}}]}]}
    >>> results = Results.of(document)
    >>> results.baseline["name"], results.seeds
    ('Deterministic', [0])
    """

    data: dict[str, Any]

    @staticmethod
    def of(document: Mapping[str, Any] | Results, origin: str = "the given results") -> Results:
        """Check a document; ``origin`` is how errors call it."""
        if isinstance(document, Results):
            return document
        data = plain(document)
        check(data, origin)
        return Results(data)

    @property
    def task(self) -> str:
        """The task, "classification" or "regression"."""
        return str(self.data["task"])

    @property
    def title(self) -> str:
        """The title given, or one made from the data set's name."""
        named = f"Methods compared on {self.dataset.get('name') or 'unnamed data'}"
        return str(self.data.get("title") or named)

    @property
    def methods(self) -> list[dict[str, Any]]:
        """The methods that have at least one run, in the file's order."""
        return [method for method in self.data["methods"] if method["runs"]]

    @property
    def dataset(self) -> dict[str, Any]:
        """What is known of the data; empty if nothing."""
        return self.data.get("dataset") or {}

    @property
    def provenance(self) -> dict[str, Any]:
        """What is known of the run; empty if nothing."""
        return self.data.get("provenance") or {}

    @property
    def baseline(self) -> dict[str, Any] | None:
        """The deterministic network that others are compared with, if it is there."""
        for method in self.methods:
            if str(method["name"]).lower() == "deterministic":
                return method
        return None

    @property
    def seeds(self) -> list[int]:
        """Every seed that some method was run with."""
        return sorted({run["seed"] for method in self.methods for run in method["runs"]})


def label(method: Mapping[str, Any]) -> str:
    """What a method is called in tables and figures.

    >>> label({"name": "Rank1", "label": "Rank-1, K = 4"}), label({"name": "Rank1"})
    ('Rank-1, K = 4', 'Rank1')
    """
    return str(method.get("label") or method["name"])


def number(value: Any) -> float | None:
    """A finite number as a float, anything else as None; so is what no mean of squares can hold.

    >>> number(3), number(float("nan")), number("3"), number(None), number(True)
    (3.0, None, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e100:
        return None
    return float(value)


def plain(value: Any) -> Any:
    """The same document in JSON's own types: arrays as lists, NaN and infinities as None, keys as text.

    >>> import numpy
    >>> plain({1: numpy.array([1.0, float("nan")])})
    {'1': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch, scalars too
        return plain(value.tolist())
    return str(value)  # a path, a torch.device


def rounded(value: Any, digits: int = 6) -> Any:
    """A plain document with its floats at so many significant digits.

    >>> rounded({"a": [1 / 3, 123456789.0, 7]})
    {'a': [0.333333, 123457000.0, 7]}
    """
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def write_results(results: Mapping[str, Any] | Results, path: str | Path) -> Path:
    """Write results as JSON, whole: floats at six significant digits, NaN as null.

    >>> import tempfile
    >>> document = {"format": "slimbayes-results", "version": 1, "task": "regression", "methods": []}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     read_results(write_results(document, folder + "/results.json")).task
    'regression'
    """
    data = rounded(Results.of(results).data)
    return write_whole(Path(path), json.dumps(data, ensure_ascii=False, allow_nan=False, indent=None) + "\n")


def read_results(path: str | Path) -> Results:
    """Read and check a results file; a damaged or foreign one raises ReportError."""
    path = Path(path)
    try:
        text = read_text(path, LARGEST_JSON)
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: not readable as text ({error}); give a results file") from error
    try:
        # RecursionError: brackets nested thousands deep are no results file either
        document = json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
        raise ReportError(f"{path}: not JSON, or cut short ({shortened(error)}); write it again") from error
    return Results.of(document, str(path)) if isinstance(document, dict) else fail(path, "no JSON object")


def merge_results(sources: Sequence[str | Path | Mapping[str, Any] | Results]) -> Results:
    """Join methods and runs of several results on the same data; other data raise ReportError.

    The first source gives title and provenance; runs of a method that several sources hold are joined by seed.
    """
    if not sources:
        raise ReportError("no results to join: give at least one results file")
    names = [str(s) if isinstance(s, str | Path) else f"results {i + 1}" for i, s in enumerate(sources)]
    parts = [
        read_results(source) if isinstance(source, str | Path) else Results.of(source, name)
        for source, name in zip(sources, names, strict=True)
    ]
    merged: dict[str, Any] = json.loads(json.dumps(parts[0].data))
    for name, part in zip(names[1:], parts[1:], strict=True):
        _same_data(merged, part.data, names[0], name)
        _join_methods(merged["methods"], json.loads(json.dumps(part.data["methods"])), name)
        known = {shift.get("name") for shift in merged.get("shifts") or []}
        extra = [shift for shift in part.data.get("shifts") or [] if shift.get("name") not in known]
        merged["shifts"] = [*(merged.get("shifts") or []), *extra]
        merged["ood"] = merged.get("ood") or part.data.get("ood")
    if len(parts) > 1:
        provenance = dict(merged.get("provenance") or {})
        provenance["joined_from"] = names
        provenance["seeds"] = Results(merged).seeds
        merged["provenance"] = provenance
    return Results.of(merged)


def _same_data(first: dict[str, Any], other: dict[str, Any], first_name: str, name: str) -> None:
    if first["task"] != other["task"]:
        raise ReportError(
            f"{first_name} is {first['task']}, {name} is {other['task']}: join the same task only"
        )
    marks = [(data.get("dataset") or {}).get("fingerprint") for data in (first, other)]
    if marks[0] != marks[1]:
        raise ReportError(
            f"{first_name} and {name} are on different data (fingerprints {marks[0]} and {marks[1]}): "
            "report them apart"
        )


def _join_methods(methods: list[dict[str, Any]], more: list[dict[str, Any]], name: str) -> None:
    """Add methods, and runs of known methods, in place."""
    known = {method["name"]: method for method in methods}
    for method in more:
        mine = known.get(method["name"])
        if mine is None:
            methods.append(method)
            continue
        if (mine.get("settings") or {}) != (method.get("settings") or {}):
            raise ReportError(f"{name}: {method['name']} has other settings here; rename it before joining")
        twice = {run["seed"] for run in mine["runs"]} & {run["seed"] for run in method["runs"]}
        if twice:
            raise ReportError(
                f"{name}: {method['name']} with seed {min(twice)} is there already; drop one of them"
            )
        mine["runs"].extend(method["runs"])
