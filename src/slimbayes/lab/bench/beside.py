"""Contenders in processes of their own: they compile side by side, and then are timed in turn, one at a time.

A process that waits takes no GPU time, so the rounds are interleaved as those of one process are. What a first step
takes is not recorded: the others compile on the same cores.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch

from slimbayes.files import write_whole
from slimbayes.lab.bench.measuring import allocated, describe, steps_for, timed
from slimbayes.lab.bench.results import Cell, timing, with_ratios
from slimbayes.lab.bench.settings import REFERENCE
from slimbayes.lab.bench.worker import MARK, Job, end_with_parent, make_ready, settle, warm_compiler, warm_up
from slimbayes.verbs.provenance import hardware, versions

Say = Callable[[dict[str, Any]], None]


class Process:
    """One contender's process, which does one thing at a time and says when it is done."""

    def __init__(self, name: str, job: Job, python: str, env: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self.error: str | None = None
        self.log = folder / f"{name}.txt"
        path = folder / f"{name}.json"
        write_whole(path, replace(job, contenders=(name,)).to_json())
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [python, "-m", "slimbayes.lab.bench.beside", str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, env={**env, "TORCHINDUCTOR_CACHE_DIR": str(folder / name)},
            )  # fmt: skip

    def ask(self, **order: Any) -> None:
        """Send an order."""
        if self.error is None:
            assert self.process.stdin is not None
            with contextlib.suppress(OSError):  # it is gone; the answer will say so
                self.process.stdin.write(json.dumps(order) + "\n")
                self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What it says to the last order; an empty answer once it has failed, with the reason in ``error``."""
        if self.error is not None:
            return {}
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                content: dict[str, Any] = json.loads(line.removeprefix(MARK))
                self.error = content.get("error")
                return {} if self.error is not None else content
        tail = " ".join(self.log.read_text(errors="replace").split())[-300:]
        self.error = f"the process ended with code {self.process.wait()}: {tail}".strip()
        return {}

    def end(self) -> None:
        """Let it go."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # an order that nobody read
                    pipe.close()


def measure_beside(
    job: Job, python: str, env: Mapping[str, str], say: Say = lambda event: None
) -> tuple[list[Cell], dict[str, Any]]:
    """The cells of a job and where they were measured; a contender that fails leaves its message in its cell."""
    with tempfile.TemporaryDirectory() as folder:
        made = [Process(name, job, python, env, Path(folder)) for name in (REFERENCE, *job.contenders)]
        deadline = math.inf if job.budget is None else time.monotonic() + job.budget
        ended = threading.Event()

        def end_all() -> None:
            ended.set()
            for each in made:
                each.process.kill()

        timer = threading.Timer(job.budget or 0.0, end_all)
        if job.budget is not None:
            timer.start()
        try:
            cells, where = _in_turn(made, job, deadline, say)
        finally:
            timer.cancel()
            for each in made:
                each.end()
        # Ended for want of time: nothing is known of those.
        return [cell for cell in cells if "error" not in cell] if ended.is_set() else cells, where


def _in_turn(made: list[Process], job: Job, deadline: float, say: Say) -> tuple[list[Cell], dict[str, Any]]:
    for each in made:  # one at a time: libraries choose their algorithms by timing them
        say({"event": "build", "method": each.name})
        each.ask(order="warm")
        each.answer()
        each.ask(order="build")
    cells = {each.name: each.answer() for each in made}
    where = cells[REFERENCE].pop("where", {})
    for cell in cells.values():
        cell.pop("where", None)
    times: dict[str, list[float]] = {each.name: [] for each in made}
    steps: dict[str, int] = {}
    say({"event": "rounds", "method": ""})
    for each in made:
        each.ask(order="steps", seconds=job.seconds)
        steps[each.name] = int(each.answer().get("steps", 1))
    order, shuffle = list(made), random.Random(0)
    longest = 0.0
    for done in range(job.rounds):
        begun = time.monotonic()
        if done and deadline - begun < 2 * longest:
            break
        shuffle.shuffle(order)
        for each in order:
            each.ask(order="time", steps=steps[each.name])
            spent = each.answer()
            if spent:
                times[each.name].append(float(spent["seconds"]))
        longest = max(longest, time.monotonic() - begun)
        say({"event": "round", "done": done + 1, "of": job.rounds})
    return _cells(made, cells, times, job), where


def _cells(
    made: list[Process], cells: dict[str, Cell], times: dict[str, list[float]], job: Job
) -> list[Cell]:
    """What is known of every contender, with its ratio to the reference."""
    place = {"group": job.group, "network": job.network, "phase": job.phase, "mode": job.mode}
    reference = made[0]
    found: list[Cell] = []
    for each in made:
        error = each.error
        if error is None and reference.error is not None:
            error = f"the deterministic network failed: {reference.error}"
        if error is not None:
            found.append({**place, "method": each.name, "error": error})
            continue
        known = {name: value for name, value in cells[each.name].items() if name != "units"}
        pair = cells[each.name]["units"], cells[REFERENCE]["units"]
        found.append(
            {
                **place, "method": each.name, **known,
                **timing(times[each.name], pair[0], times[REFERENCE], pair[1]),
                "discarded": 0, "disturbed": False,
            }
        )  # fmt: skip
    return with_ratios(found)


def serve(job: Job, orders: IO[str], say: Say) -> None:
    """Follow the orders of ``measure_beside`` for the job's only contender, until there are none."""
    device = torch.device(job.device)
    (name,) = job.contenders
    case = None
    for line in orders:
        order = json.loads(line)
        try:
            if order["order"] == "warm":
                warm_up(job, device)
                say({})
            elif order["order"] == "build":
                if job.mode != "eager":
                    warm_compiler(device)
                case, cell, _ = make_ready(name, job, device, allocated(device))
                where = {"versions": versions(), "hardware": hardware()}
                say({**cell, "first_seconds": None, "units": case.units, "where": where})
            elif order["order"] == "steps":
                assert case is not None
                say({"steps": steps_for(case, order["seconds"], device)})
            else:
                assert case is not None
                say({"seconds": timed(case, order["steps"], device)})
        except Exception as error:
            say({"error": describe(error)})
            return


def main(path: str) -> None:
    """Serve one contender over stdin and stdout."""
    job = Job.from_json(Path(path).read_text())
    settle(job)
    serve(job, sys.stdin, lambda content: print(MARK + json.dumps(content), flush=True))


if __name__ == "__main__":
    end_with_parent()
    main(*sys.argv[1:])
