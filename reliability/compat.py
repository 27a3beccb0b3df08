"""The tests on the oldest and on the pinned torch, and the files of earlier releases: reliability/results/compat.json.

    python -m reliability.compat              # runs both suites: about 20 minutes of two cores each
    python -m reliability.compat --reports .venv-oldest/report.xml report.xml   # counts runs that have been made

The oldest environment is ``make oldest OLDEST_PACKAGES=...`` with all extras (see ALL); the pinned one is ``./.venv``.
Each suite writes a JUnit report whose properties say which torch and Python it ran on (tests/conftest.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from reliability.figures import RESULTS, Figure, write_figures

ROOT = Path(__file__).parent.parent
FIXTURES = ROOT / "tests" / "fixtures"
# What the whole suite needs beyond OLDEST_PACKAGES of the Makefile.
ALL = (
    "torch numpy safetensors lightning PyYAML rich torchmetrics scikit-learn pytest pytest-timeout pytest-xdist "
    "setuptools hypothesis typer matplotlib pillow pyarrow pandas scipy tensorboard huggingface_hub transformers "
    "accelerate peft onnx onnxscript onnxruntime torchao selenium"
)
OLD_FILES = "test_a_released_file_gives_what_it_gave"


@dataclass(frozen=True)
class Report:
    """What a JUnit report says: on which versions, how many tests, and which of them failed."""

    torch: str
    python: str
    passed: int
    skipped: int
    failed: tuple[str, ...]
    files: int  # of earlier releases that were loaded and gave what they gave
    seconds: float


def read_report(path: Path) -> Report:
    """Count the cases of a report; a run that was cut short has no report, which is an error here."""
    root = ElementTree.parse(path).getroot()
    suites = [root] if root.tag == "testsuite" else list(root.iter("testsuite"))
    found = {one.get("name"): one.get("value") for one in root.iter("property")}
    if "torch" not in found:
        raise ValueError(
            f"{path} does not say which torch it ran on: write it with this checkout's tests/conftest.py"
        )
    passed = skipped = files = 0
    failed = []
    for case in root.iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
            files += (case.get("name") or "").startswith(OLD_FILES)
    seconds = sum(float(suite.get("time") or 0) for suite in suites)
    return Report(str(found["torch"]), str(found["python"]), passed, skipped, tuple(failed), files, seconds)


def recorded_files() -> dict[str, int]:
    """How many files every release left, by its version."""
    return {
        path.parent.name: len(json.loads(path.read_text())["files"])
        for path in sorted(FIXTURES.glob("*/manifest.json"))
    }


def figures(reports: Sequence[Report]) -> list[Figure]:
    """Nothing fails on either torch, and every file of every release loads on each."""
    files = sum(recorded_files().values())
    found = []
    for report in reports:
        where = f"torch {report.torch}, Python {report.python}"
        total = report.passed + len(report.failed)
        value, loaded = f"{report.passed} of {total}, {report.skipped} skipped", f"{report.files} of {files}"
        found.append(
            Figure(f"tests passed on {where}", value, "all", not report.failed and report.passed > 0)
        )
        found.append(
            Figure(
                f"files of earlier releases as they were, on {where}", loaded, "all", report.files == files
            )
        )
    return found


def run_suite(python: Path, report: Path, workers: int, extra: Sequence[str]) -> None:
    """Run the whole suite with one environment's Python; failures are counted from the report."""
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-n",
        str(workers),
        "--dist",
        "worksteal",
        f"--junitxml={report}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "src"}
    done = subprocess.run([*command, *extra], cwd=ROOT, env=environment)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: no whole run")


def main(words: Sequence[str] | None = None) -> int:
    """Run or read the suites, write the figures, and say which tests failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reports", nargs="+", type=Path, help="JUnit reports of runs that have been made")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options, extra = parser.parse_known_args(words)
    start = time.monotonic()
    paths = options.reports
    if not paths:
        subprocess.run(["make", "venv"], cwd=ROOT, check=True)
        subprocess.run(["make", "oldest", f"OLDEST_PACKAGES={ALL}"], cwd=ROOT, check=True)
        paths = [ROOT / venv / "report.xml" for venv in (".venv-oldest", ".venv")]
        for path in paths:
            run_suite(path.parent / "bin" / "python", path, options.workers, extra)
    reports = [read_report(path) for path in paths]
    seconds = sum(report.seconds for report in reports) if options.reports else time.monotonic() - start
    made = figures(reports)
    details = {
        "failed": {report.torch: list(report.failed) for report in reports},
        "files": recorded_files(),
    }
    notes = ["Skipped tests need a GPU, a browser, real data or an extra that the environment does not have."]
    command = "python -m reliability.compat"
    path = write_figures("compat", command, made, seconds, notes, options.out, **details)
    for figure in made:
        print(f"{figure.what}: {figure.value}")
    for report in reports:
        for name in report.failed:
            print(f"FAILED on torch {report.torch}: {name}")
    print(path)
    return any(figure.holds is False for figure in made)


if __name__ == "__main__":
    sys.exit(main())
