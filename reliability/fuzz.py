"""Fuzz a reader: ``python -m reliability.fuzz TARGET --seconds 600`` (checkpoint, config, csv, npz or all).

With atheris installed libFuzzer chooses the inputs by coverage of slimbayes, PyYAML and zipfile; without it, or with
``--plain``, they are mutations of the valid files by a seeded generator. A hang is more than 10 s for one input, a
blow-up more than 2 GB of memory.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

HANG = 10  # s
MEMORY = 2048  # MB
NAMES = ("checkpoint", "config", "csv", "npz")
RESULTS = Path(__file__).parent / "results"
INSTRUMENTED = [
    *(f"slimbayes.{name}" for name in ("adapting", "checkpoint", "claims", "config", "convert", "data", "files",
                                       "methods", "priors", "record", "selection", "specs", "training.settings")),
    "yaml", "zipfile", "numpy.lib._format_impl", "numpy.lib._npyio_impl",
]  # fmt: skip


class Findings:
    """Exceptions that no documentation promises, each once by where it was raised, with an input that does it."""

    def __init__(self, errors: tuple[type[Exception], ...]) -> None:
        self.errors = errors
        self.executions = 0
        self.accepted = 0
        self.found: dict[str, dict[str, Any]] = {}

    def call(self, read: Callable[[bytes, Path], object], data: bytes, folder: Path) -> None:
        """One input."""
        self.executions += 1
        try:
            self.accepted += read(data, folder) is not None
        except self.errors as error:
            self.check(error, data)
        except Exception as error:
            self.add(error, data)

    def check(self, error: Exception, data: bytes) -> None:
        """A documented error is one or a few sentences that a person can read."""
        text = str(error)
        if not text or len(text) > 5000:
            self.add(AssertionError(f"a message of {len(text)} characters"), data)

    def add(self, error: BaseException, data: bytes) -> None:
        """Remember an input, unless one like it is known."""
        frames = traceback.extract_tb(error.__traceback__)
        place = next(
            (f"{Path(f.filename).name}:{f.name}" for f in reversed(frames) if "slimbayes" in f.filename), "-"
        )
        key = f"{type(error).__name__} in {place}"
        if key not in self.found:
            name = hashlib.sha256(data).hexdigest()[:12]
            self.found[key] = {"error": repr(error)[:300], "input": name, "bytes": data.hex()[:20000]}


def plain(name: str, executions: int | None = None, seconds: float | None = None, seed: int = 0) -> Findings:
    """Mutations of the valid files, in an order that the seed fixes."""
    from reliability.mutations import Mutator
    from reliability.targets import TARGETS

    target = TARGETS[name]
    seeds = target.seeds()
    findings, mutator = Findings(target.errors), Mutator(seeds, target.words, seed)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for data in seeds:
            findings.call(target.read, data, Path(folder))
        while (executions is None or findings.executions < executions) and (
            seconds is None or time.monotonic() - start < seconds
        ):
            findings.call(target.read, mutator.next(), Path(folder))
    return findings


def child(name: str, seconds: float, folder: Path, seed: int) -> None:
    """What libFuzzer runs in: its own process, which it ends itself."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from reliability.targets import TARGETS

    target = TARGETS[name]
    findings = Findings(target.errors)
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, data in enumerate(target.seeds()):
        (corpus / f"seed{number}").write_bytes(data)
    words = [word.encode("utf-8") for word in target.words]
    (folder / "words").write_text(
        "".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in words if len(word) <= 64)
    )
    scratch = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    last = [0.0]

    def one(data: bytes) -> None:
        findings.call(target.read, data, scratch)
        if time.monotonic() - last[0] > 2:
            last[0] = time.monotonic()
            report = {
                "executions": findings.executions,
                "accepted": findings.accepted,
                "findings": findings.found,
            }
            (folder / "report.tmp").write_text(json.dumps(report))
            os.replace(folder / "report.tmp", folder / "report.json")

    flags = [
        f"-max_total_time={int(seconds)}", f"-timeout={HANG}", f"-rss_limit_mb={MEMORY}", f"-seed={seed + 1}",
        f"-dict={folder / 'words'}", f"-artifact_prefix={folder}/", "-max_len=65536", "-print_final_stats=1",
        "-verbosity=1", str(corpus),
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *flags], one, internal_libfuzzer=True)
    atheris.Fuzz()


def guided(name: str, seconds: float, seed: int) -> dict[str, Any]:
    """Fuzz by coverage in another process; what it did, and what went wrong."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        words = [
            sys.executable,
            "-m",
            "reliability.fuzz",
            name,
            "--seconds",
            str(seconds),
            "--seed",
            str(seed),
        ]
        start = time.monotonic()
        done = subprocess.run(
            [*words, "--child", place], capture_output=True, text=True, errors="replace", check=False
        )
        took = time.monotonic() - start
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        log = done.stderr
        report = json.loads((folder / "report.json").read_text()) if (folder / "report.json").exists() else {}
        findings = dict(report.get("findings", {}))
        for kind in ("crash", "timeout", "oom", "slow-unit"):
            for path in folder.glob(f"{kind}-*"):
                if kind != "slow-unit":
                    findings[kind] = {
                        "error": log[-1500:],
                        "input": path.name,
                        "bytes": path.read_bytes().hex()[:20000],
                    }
        if done.returncode and not findings:
            findings["exit"] = {
                "error": f"exit status {done.returncode}: {log[-1500:]}",
                "input": "",
                "bytes": "",
            }
    features = re.findall(r"cov: (\d+) ft: (\d+)", log)
    stats = dict(re.findall(r"stat::(\w+):\s+(\d+)", log))
    return {
        "engine": "atheris", "executions": int(stats.get("number_of_executed_units", report.get("executions", 0))),
        "accepted": report.get("accepted", 0), "seconds": round(took, 1),
        "processor_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_rss_mb": int(stats.get("peak_rss_mb", 0)),
        "coverage": int(features[-1][0]) if features else 0, "features": int(features[-1][1]) if features else 0,
        "slowest_s": int(stats.get("slowest_unit_time_sec", 0)), "findings": findings,
    }  # fmt: skip


def record(results: dict[str, dict[str, Any]], folder: Path = RESULTS) -> Path:
    """The figures of these targets and of those that the file has already."""
    from reliability.figures import (
        Figure,
        write_figures,
    )  # not before: what is imported already is not instrumented

    path = folder / "fuzz.json"
    known = json.loads(path.read_text())["details"]["targets"] if path.exists() else {}
    targets = {name: {**known, **results}[name] for name in NAMES if name in {**known, **results}}
    figures = []
    for name, found in targets.items():
        value = f"{len(found['findings'])} in {found['executions']:,} inputs, {found['seconds'] / 60:.0f} min"
        holds = not found["findings"] and found["seconds"] >= 590
        figures.append(
            Figure(
                f"fuzzing the {name} reader: crashes, hangs, blow-ups, other errors",
                value,
                "0 in 10 min",
                holds,
            )
        )
    notes = [
        "Fuzzed by coverage (atheris); a hang is more than 10 s for one input, a blow-up more than 2 GB of memory.",
        "Checkpoints and archives are fuzzed whole, and by their headers with checksums that fit them.",
    ]
    seconds = sum(found["seconds"] for found in targets.values())
    command = "python -m reliability.fuzz all --seconds 600"
    return write_figures("fuzz", command, figures, seconds, notes, folder, targets=targets)


def main() -> int:
    """Fuzz what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=[*NAMES, "all"])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="without atheris")
    parser.add_argument("--no-record", action="store_true", help="print, and leave the results as they are")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is not None:
        child(given.target, given.seconds, given.child, given.seed)
        return 0
    results = {}
    for name in NAMES if given.target == "all" else (given.target,):
        if given.plain or importlib.util.find_spec("atheris") is None:
            found = plain(name, seconds=given.seconds, seed=given.seed)
            results[name] = {
                "engine": "mutations", "executions": found.executions, "accepted": found.accepted,
                "seconds": given.seconds, "findings": found.found,
            }  # fmt: skip
        else:
            results[name] = guided(name, given.seconds, given.seed)
        print(json.dumps({name: results[name]}, indent=1), flush=True)
    if not given.no_record:
        record(results)
    return int(any(found["findings"] for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
