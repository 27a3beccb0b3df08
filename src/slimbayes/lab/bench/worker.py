"""The process that measures: contenders of one network, phase and mode, interleaved with the deterministic network.

Run as ``python -m slimbayes.lab.bench.worker JOB RESULT`` with nothing but torch and slimbayes (and peers) installed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slimbayes.files import write_whole
from slimbayes.lab.bench.cases import Case, build
from slimbayes.lab.bench.measuring import Load, allocated, describe, interleave, peak_bytes
from slimbayes.lab.bench.results import Cell, timing, with_ratios
from slimbayes.lab.bench.settings import NETWORKS, REFERENCE
from slimbayes.verbs.provenance import hardware, versions

MARK = "@bench "
Say = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Job:
    """One interleaved run."""

    group: str
    network: str
    phase: str
    mode: str
    contenders: tuple[str, ...]
    device: str = "cpu"
    threads: int = 2
    rounds: int = 15
    seconds: float = 0.05
    budget: float | None = None

    def to_json(self) -> str:
        """The job as the worker reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job that was written."""
        content = json.loads(text)
        return cls(**{**content, "contenders": tuple(content["contenders"])})


def measure(job: Job, say: Say = lambda event: None) -> list[Cell]:
    """Build the deterministic network and every contender that time allows, then time them in turn.

    A contender that fails leaves its message in its cell; one for which no time is left, no cell.

    >>> job = Job("own", "tiny", "train", "eager", ("rank1",), rounds=2, seconds=0.0)
    >>> [(cell["method"], cell["ratio"] > 0) for cell in measure(job)]
    [('deterministic', True), ('rank1', True)]
    """
    begun = time.monotonic()
    deadline = math.inf if job.budget is None else begun + job.budget
    device = torch.device(job.device)
    cases: list[Case] = []
    cells: dict[str, Cell] = {}
    needed = slowest = 0.0
    if job.mode != "eager":
        warm_compiler(device)
    for name in (REFERENCE, *job.contenders):
        if deadline - time.monotonic() < needed + 1.5 * slowest:
            break
        say({"event": "build", "method": name})
        start = time.monotonic()
        before = allocated(device)
        try:
            case, cell, step_seconds = make_ready(name, job, device, before)
        except Exception as error:
            cells[name] = {"error": describe(error)}
            _forget(device)
            if name == REFERENCE:
                words = f"the deterministic network failed: {cells[name]['error']}"
                cells |= {other: {"error": words} for other in job.contenders}
                break
            continue
        cases.append(case)
        cells[name] = cell
        slowest = max(slowest, time.monotonic() - start)
        needed += job.rounds * (step_seconds + max(job.seconds, step_seconds))
    say({"event": "rounds", "method": ""})
    load = (
        Load(sorted(os.sched_getaffinity(0)))
        if device.type == "cpu" and hasattr(os, "sched_getaffinity")
        else None
    )
    rounds = interleave(
        cases, job.rounds, job.seconds, device, load, lambda: deadline - time.monotonic(),
        lambda done: say({"event": "round", "done": done, "of": job.rounds}),
    )  # fmt: skip
    for case in cases:
        if case.name in rounds.failures:
            cells[case.name] = {"error": rounds.failures[case.name]}
            continue
        reference = cases[0]
        cells[case.name] |= {
            **timing(rounds.times[case.name], case.units, rounds.times[REFERENCE], reference.units),
            "discarded": rounds.dropped,
            "disturbed": rounds.forced,
        }
    where = {"group": job.group, "network": job.network, "phase": job.phase, "mode": job.mode}
    return with_ratios([{**where, "method": name, **cell} for name, cell in cells.items()])


def make_ready(name: str, job: Job, device: torch.device, before: int) -> tuple[Case, Cell, float]:
    """A case past its first steps, what is known of it, and how long a step takes."""
    with _fresh_cache(job.mode):
        start = time.perf_counter()
        case = build(name, NETWORKS[job.network], job.phase, job.mode, device)
        built = time.perf_counter()
        value = case.step()
        if not bool(value.isfinite().all()):
            raise RuntimeError("the first step gave a value that is not finite")
        first = time.perf_counter() - built
        case.step()  # what a second step compiles or allocates anew is no part of the rounds either
        allocated(device)
        begun = time.perf_counter()
        case.step()
        allocated(device)
        seconds = time.perf_counter() - begun
    # A CUDA graph's replay allocates nothing: its activations lie in a pool that the peak of one step leaves out.
    peak = None if job.mode == "graphs" else peak_bytes(case, device, before)
    cell: Cell = {
        "parameters": case.parameters,
        "rows": case.rows,
        "peak_bytes": peak,
        "build_seconds": built - start,
        "first_seconds": first if job.mode != "eager" else None,
    }
    return case, cell, seconds


@contextlib.contextmanager
def _fresh_cache(mode: str) -> Iterator[None]:
    """A compiler that remembers nothing, so that every contender's first step pays for all of its own kernels."""
    if mode == "eager":
        yield
        return
    utils: Any = torch._inductor.utils
    fresh = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
    with fresh():
        yield


def warm_compiler(device: torch.device) -> None:
    """Load the compiler, raise its limits, and let it compile something: no contender pays for that."""
    import torch._dynamo
    import torch._inductor.config
    import torch._inductor.utils

    for name in ("cache_size_limit", "recompile_limit", "accumulated_cache_size_limit"):
        if hasattr(torch._dynamo.config, name):
            setattr(torch._dynamo.config, name, 512)
    if device.type == "cpu":
        # The compiler's own normal generator is several times slower than torch's on a CPU.
        torch._inductor.config.fallback_random = True
    x = torch.randn(64, 64, device=device, requires_grad=True)
    with _fresh_cache("compiled"):
        torch.compile(lambda x: (x @ x).relu().sum())(x).backward()


def _forget(device: torch.device) -> None:
    """Give back what a failed contender had taken."""
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main(job_path: str, result_path: str) -> None:
    """Measure a job and write its cells."""
    job = Job.from_json(Path(job_path).read_text())
    settle(job)

    def say(event: dict[str, Any]) -> None:
        print(MARK + json.dumps(event), flush=True)

    cells = measure(job, say)
    where = {"versions": versions(), "hardware": hardware()}
    write_whole(result_path, json.dumps({"cells": cells, "where": where}))


def settle(job: Job) -> None:
    """Give this process its threads and cores."""
    if job.device == "cpu" and hasattr(os, "sched_setaffinity"):
        # Cores for the process, not one for each thread: threads that a contender starts would inherit one core.
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[: job.threads])
    torch.set_num_threads(job.threads)
    torch.backends.cudnn.benchmark = True


def warm_up(job: Job, device: torch.device) -> None:
    """Two eager steps of the deterministic network, in which libraries choose the algorithms of its layers."""
    case = build(REFERENCE, NETWORKS[job.network], job.phase, "eager", device)
    for _ in range(2):
        case.step()
    allocated(device)
    del case
    _forget(device)


def end_with_parent() -> None:  # pragma: no cover - in workers only
    """Leave when the process that asked for figures is gone: nobody would read them."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    with tempfile.TemporaryDirectory() as scratch:  # kernels that no later run may find
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", scratch)
        main(*sys.argv[1:])
