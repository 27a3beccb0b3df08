"""Which cells are wanted, which are there already, and a worker process for each interleaved run."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import torch

from slimbayes.files import write_whole
from slimbayes.lab.bench.beside import measure_beside
from slimbayes.lab.bench.results import BenchError, Cell, Results, read_results
from slimbayes.lab.bench.settings import (
    CONTENDERS,
    HEADS,
    MANY,
    MODES,
    NETWORKS,
    PEERS,
    PHASES,
    BenchConfig,
    Network,
)
from slimbayes.lab.bench.worker import MARK, Job
from slimbayes.verbs.provenance import command, commit, hardware, now

GRACE = 60.0  # seconds past its budget after which a worker is ended
# Freed memory stays with the process, for all contenders alike: a page fault per fresh page would be timed otherwise.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}
Say = Callable[[Job, dict[str, Any]], None]


def check(config: BenchConfig) -> None:
    """Raise on names that there are not, and on numbers that make no sense."""
    for what, given, known in (
        ("network", config.networks, NETWORKS),
        ("method", config.methods, CONTENDERS),
        ("phase", config.phases, PHASES),
        ("mode", config.modes, MODES),
    ):
        for name in given:
            if name not in known:
                raise BenchError(f"unknown {what} {name!r}; there are {', '.join(known)}")
    if config.rounds < 1 or config.threads < 1 or config.seconds < 0:
        raise BenchError(f"rounds and threads must be at least 1, got {config.rounds} and {config.threads}")
    kind = torch.device(config.device).type
    if kind not in ("cpu", "cuda"):
        raise BenchError(f"--device {config.device!r} cannot be measured: use cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise BenchError("--device cuda: there is no GPU here; use --device cpu")
    if "graphs" in config.modes and kind == "cpu":
        raise BenchError("mode 'graphs' is for GPUs: use --modes eager,compiled")
    if config.peers is not None and not Path(config.peers).is_file():
        raise BenchError(
            f"--peers {config.peers!r} is no Python: make bench-peers sets up .venv-peers/bin/python"
        )


def jobs(config: BenchConfig, results: Results) -> Iterator[Job]:
    """An interleaved run for every network, phase and mode with cells still missing, then the peers'.

    >>> config = BenchConfig(networks=("mlp",), methods=("rank1", "emp"), phases=("train",))
    >>> [(job.mode, job.contenders) for job in jobs(config, Results("cpu"))]
    [('eager', ('rank1', 'emp')), ('compiled', ('rank1', 'emp'))]
    """
    kind = torch.device(config.device).type
    names = config.networks or tuple(name for name, n in NETWORKS.items() if kind in n.devices)
    for group in ("own", "peers") if config.peers else ("own",):
        for name in names:
            network = NETWORKS[name]
            for phase in network.phases:
                if config.phases and phase not in config.phases:
                    continue
                for mode in [mode for mode in config.modes if mode in network.modes]:
                    wanted = _contenders(config, group, phase, network)
                    missing = tuple(
                        method for method in wanted if results.find(group, name, phase, mode, method) is None
                    )
                    if missing:
                        # Counterparts stand beside the peers in their own run, old or new.
                        yield Job(
                            group, name, phase, mode, wanted if group == "peers" else missing,
                            config.device, config.threads, config.rounds, config.seconds,
                        )  # fmt: skip


def _contenders(config: BenchConfig, group: str, phase: str, network: Network) -> tuple[str, ...]:
    if group == "peers":
        if not network.peers or phase in ("head", "many"):
            return ()
        return (*PEERS, *dict.fromkeys(peer.counterpart for peer in PEERS.values()))
    chosen = [name for name in config.methods or CONTENDERS if name in network.methods]
    return tuple(name for name in chosen if name in {"head": HEADS, "many": MANY}.get(phase, CONTENDERS))


def run_bench(
    config: BenchConfig,
    output: Path,
    fresh: bool = False,
    say: Say = lambda job, event: None,
    python: str = sys.executable,
) -> Results:
    """Measure what is missing in the file, which is written anew after every interleaved run.

    Ends early, with what it has, when the budget is spent; called again, it goes on.
    """
    check(config)
    begun = time.monotonic()
    results = _start(config, output, fresh)
    for job in list(jobs(config, results)):
        left = None if config.budget is None else config.budget - (time.monotonic() - begun)
        if left is not None and left < 10:
            break
        chosen = config.peers if job.group == "peers" and config.peers else python
        if config.beside:
            cells, where = measure_beside(
                replace(job, budget=left), chosen, environment(job), functools.partial(say, job)
            )
        else:
            cells, where = _measured(job, left, chosen, say)
        if cells:
            run = {
                "created": now(), "command": command(), "commit": commit(), "threads": config.threads, **where,
                "seed": 0, "data": "random inputs of the seed", "config": _asked(config),
            }  # fmt: skip
            results.add(cells, run)
            results.write(output)
    return results


def _asked(config: BenchConfig) -> dict[str, Any]:
    """What was asked for, without what belongs to this machine or this call alone."""
    return {name: value for name, value in asdict(config).items() if name not in ("peers", "budget")}


def _start(config: BenchConfig, output: Path, fresh: bool) -> Results:
    """The results in the file, if they are of this device, or none."""
    kind = torch.device(config.device).type
    mine = machine(config.device)
    if fresh or not output.exists():
        return Results(kind, mine)
    found = read_results(output)
    if (found.device, found.hardware) != (kind, mine):
        raise BenchError(
            f"{str(output)!r} holds figures of {found.device} on {found.hardware}, not of {kind} on {mine}: use "
            f"another --output, or --fresh to begin anew"
        )
    return found


def machine(device: str) -> str:
    """The GPU's name, or the processor's where the system tells it, with its cores."""
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(device))
    words = hardware().partition(";")[0].replace(f", {torch.get_num_threads()} threads in use", "")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return words
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {words}" if names else words


def _measured(job: Job, left: float | None, python: str, say: Say) -> tuple[list[Cell], dict[str, Any]]:
    """The job's cells; where a worker dies, the contender it died of gets the reason and the others go on."""
    begun = time.monotonic()
    lost: list[Cell] = []
    remaining = list(job.contenders)
    while remaining:
        budget = None if left is None else left - (time.monotonic() - begun)
        if budget is not None and budget < 5:
            break
        trial = Job(**{**vars(job), "contenders": tuple(remaining), "budget": budget})
        content, last, reason = _worker(trial, python, say)
        if content is not None:
            return content["cells"] + lost, content["where"]
        if reason is None:  # ended for want of time: nothing is known
            break
        where = {"group": job.group, "network": job.network, "phase": job.phase, "mode": job.mode}
        fatal = [last] if last in remaining else remaining
        lost += [{**where, "method": name, "error": reason} for name in fatal]
        remaining = [name for name in remaining if name not in fatal]
    return lost, {}


def _worker(job: Job, python: str, say: Say) -> tuple[dict[str, Any] | None, str, str | None]:
    """What a worker wrote; or the contender it was building when it died, and why (None: for want of time)."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("job.json", "result.json", "log.txt")]
        write_whole(paths[0], job.to_json())
        begun = time.monotonic()
        with open(paths[2], "w") as log:
            code, last = _followed(
                job, [python, "-m", "slimbayes.lab.bench.worker", *map(str, paths[:2])], log, say
            )
        if code == 0 and paths[1].exists():
            return json.loads(paths[1].read_text()), last, None
        if job.budget is not None and time.monotonic() - begun >= job.budget + GRACE:
            return None, last, None
        tail = " ".join(paths[2].read_text(errors="replace").split())[-300:]
        return None, last, f"the worker ended with code {code}: {tail}".strip()


def _followed(job: Job, words: list[str], log: IO[str], say: Say) -> tuple[int, str]:
    """Run a worker to its end, or to the end of its budget; its exit code, and the last contender it named."""
    last = ""
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(job)
    ) as process:
        timer = threading.Timer(0.0 if job.budget is None else job.budget + GRACE, process.kill)
        if job.budget is not None:
            timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(MARK):
                    event = json.loads(line.removeprefix(MARK))
                    last = event.get("method", last)
                    say(job, event)
            return process.wait(), last
        finally:
            timer.cancel()
            process.kill()  # interrupted: nothing may go on measuring


def environment(job: Job) -> dict[str, str]:
    """The variables of a worker: threads, an allocator that keeps its pages, and slimbayes to import."""
    source = str(Path(__file__).resolve().parents[3])
    search = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    threads = str(job.threads)
    # Some virtual machines advertise AMX without letting processes use it.
    isa = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"} if "ONEDNN_MAX_CPU_ISA" not in os.environ else {}
    return {
        **os.environ, **(MALLOC if job.device == "cpu" else {}), **isa,
        "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "PYTHONPATH": search,
    }  # fmt: skip
