"""Measured cells as JSON, each with the run it is from; ratios and their errors."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimbayes.files import read_json, shortened, write_whole
from slimbayes.lab.bench.settings import REFERENCE

FORMAT, VERSION = "slimbayes-bench", 1
KEYS = ("group", "network", "phase", "mode", "method")
Cell = dict[str, Any]
Key = tuple[str, str, str, str, str]


class BenchError(ValueError):
    """A benchmark that was asked for wrongly, or a file that is none."""


@dataclass
class Results:
    """Cells of one kind of device; a new measurement of a cell takes the old one's place."""

    device: str
    hardware: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)

    def find(self, group: str, network: str, phase: str, mode: str, method: str) -> Cell | None:
        """The cell, or None.

        >>> Results("cpu").find("own", "mlp", "train", "eager", "rank1") is None
        True
        """
        for cell in self.cells:
            if key(cell) == (group, network, phase, mode, method):
                return cell
        return None

    def add(self, new: Iterable[Cell], run: dict[str, Any]) -> None:
        """Take cells in, with the run that measured them."""
        fresh = list(new)
        if run not in self.runs:
            self.runs.append(run)
        index = self.runs.index(run)
        taken = {key(cell) for cell in fresh}
        kept = [cell for cell in self.cells if key(cell) not in taken]
        self.cells = kept + [{**cell, "run": index} for cell in fresh]

    def write(self, path: Path) -> Path:
        """Write the file whole, without runs that no cell is left of."""
        used = sorted({cell["run"] for cell in self.cells})
        cells = [{**cell, "run": used.index(cell["run"])} for cell in self.cells]
        content = {
            "format": FORMAT, "version": VERSION, "device": self.device, "hardware": self.hardware,
            "runs": [self.runs[index] for index in used], "cells": cells,
        }  # fmt: skip
        return write_whole(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def key(cell: Cell) -> Key:
    """What names a cell.

    >>> key({"group": "own", "network": "mlp", "phase": "train", "mode": "eager", "method": "rank1", "ratio": 2.0})
    ('own', 'mlp', 'train', 'eager', 'rank1')
    """
    return cell["group"], cell["network"], cell["phase"], cell["mode"], cell["method"]


def read_results(path: Path) -> Results:
    """Results that ``write`` wrote."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise BenchError(
            f"{str(path)!r} is no JSON: {shortened(error)}; measure again: slimbayes bench"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BenchError(f"{str(path)!r} is no file of slimbayes bench (its format is not {FORMAT})")
    if content.get("version") != VERSION:
        raise BenchError(
            f"{str(path)!r} has version {content.get('version')!r}, and this version reads {VERSION}: update slimbayes"
        )
    try:
        return Results(content["device"], content["hardware"], content["runs"], content["cells"])
    except KeyError as error:
        raise BenchError(f"{str(path)!r} lacks {error}; measure again: slimbayes bench") from error


def median_error(values: Sequence[float]) -> float | None:
    """Standard error of a median from the median absolute deviation: 1.2533 · 1.4826 · MAD / √n.

    The factors are those of normal values: σ = 1.4826 MAD, and a median's variance is π/2 of a mean's.

    >>> round(median_error([1.0, 2.0, 3.0, 4.0, 100.0]), 3)
    0.831
    >>> median_error([1.0]) is None
    True
    """
    if len(values) < 2:
        return None
    centre = statistics.median(values)
    deviation = statistics.median(abs(value - centre) for value in values)
    return math.sqrt(math.pi / 2) * 1.4826 * deviation / math.sqrt(len(values))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """First and third quartile.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 4.0)
    """
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def timing(times: Sequence[float], units: int, reference: Sequence[float], reference_units: int) -> Cell:
    """Median, quartiles, and the ratio to the reference: the median over rounds of (t/units) / (t₀/units₀).

    Ratios are taken within rounds, so that what slows a whole round down cancels.

    >>> cell = timing([0.3, 0.2, 0.4], 100, [0.1, 0.1, 0.1], 100)
    >>> cell["milliseconds"], round(cell["ratio"], 6)
    (300.0, 3.0)
    >>> round(timing([0.3, 0.2, 0.4], 200, [0.1, 0.1, 0.1], 100)["ratio"], 6)  # twice the rows
    1.5
    """
    low, high = quartiles(times)
    ratios = [
        (mine / units) / (theirs / reference_units) for mine, theirs in zip(times, reference, strict=True)
    ]
    return {
        "milliseconds": 1e3 * statistics.median(times),
        "quartiles": [1e3 * low, 1e3 * high],
        "ratio": statistics.median(ratios),
        "ratio_error": median_error(ratios),
        "rounds": len(times),
    }


def with_ratios(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of one interleaved run, with memory, parameters and first step as ratios to the reference's.

    >>> rows = [{"method": "deterministic", "parameters": 10, "peak_bytes": 4, "first_seconds": 2.0},
    ...         {"method": "rank1", "parameters": 11, "peak_bytes": 5, "first_seconds": 3.0}]
    >>> with_ratios(rows)[1]["memory_ratio"], with_ratios(rows)[1]["first_ratio"]
    (1.25, 1.5)
    """
    references = [cell for cell in cells if cell["method"] == REFERENCE and "error" not in cell]
    if not references:
        return list(cells)
    names = {"parameters": "parameters_ratio", "peak_bytes": "memory_ratio", "first_seconds": "first_ratio"}
    done = []
    for cell in cells:
        extra = {
            ratio: cell[name] / references[0][name]
            for name, ratio in names.items()
            if cell.get(name) is not None and references[0].get(name)
        }
        done.append({**cell, **extra})
    return done
