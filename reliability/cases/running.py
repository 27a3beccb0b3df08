"""Run groups of generated cases, block by block, and count how they ended."""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import multiprocessing
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from reliability.cases.judging import EQUAL, REFUSED, Outcome

BLOCK = 250  # cases that a failure ends: the next block starts anew
Case = Callable[[Any], Outcome]


@dataclass
class Tally:
    """How the cases of a group ended, by method and by layer."""

    equal: int = 0
    refused: int = 0
    wrong: int = 0
    by_method: dict[str, collections.Counter[str]] = field(default_factory=dict)
    by_layer: dict[str, collections.Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        """All of them."""
        return self.equal + self.refused + self.wrong

    def add(self, outcome: Outcome) -> None:
        """One case more."""
        if outcome.verdict == EQUAL:
            self.equal += 1
        elif outcome.verdict == REFUSED:
            self.refused += 1
        for table, key in ((self.by_method, outcome.method), (self.by_layer, outcome.layer)):
            if key:
                table.setdefault(key, collections.Counter())[outcome.verdict] += 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "cases": self.cases, "equal": self.equal, "refused": self.refused, "wrong": self.wrong,
            "seconds": round(self.seconds, 1), "failures": self.failures,
        }  # fmt: skip


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warnings, and ours about layers left alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _block(case: Case, count: int, seed: int, shrink: bool) -> tuple[list[Outcome], str]:
    """The cases of one block, and the report of what went wrong in it, if anything did."""
    found: list[Outcome] = []
    failed: list[bool] = []

    def one(data: Any) -> None:
        try:
            outcome = case(data)
        except Exception:
            failed.append(True)  # what is run from here on shrinks it, or shows it once more
            raise
        if not failed:
            found.append(outcome)

    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    test = settings(
        max_examples=count, database=None, deadline=None, print_blob=True, phases=phases,
        suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )(hypothesis.seed(seed)(given(st.data())(one)))  # fmt: skip
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), quiet():
            test()
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", []))
        where = "".join(traceback.format_tb(error.__traceback__)[-2:])
        return found, f"{type(error).__name__}: {error}\n{where}{notes}\n{printed.getvalue()}"
    return found, ""


Job = tuple[str, int, int, bool]  # group, cases, seed, whether to shrink


def jobs_of(name: str, cases: int, seed: int, shrink: bool) -> list[Job]:
    """The blocks of a group."""
    starts = enumerate(range(0, cases, BLOCK))
    return [(name, min(BLOCK, cases - first), seed * 1_000_003 + block, shrink) for block, first in starts]


def run_jobs(jobs: list[Job], find: Callable[[str], Case], processes: int = 1) -> dict[str, Tally]:
    """All blocks, in so many processes; a failure is kept with what reproduces it, and ends its block alone."""
    tallies: dict[str, Tally] = {name: Tally() for name, *_ in jobs}
    done = 0
    if processes == 1:
        results: Any = (_job(find, job) for job in jobs)
        pool = None
    else:
        pool = multiprocessing.get_context("spawn").Pool(processes)
        results = pool.imap(functools.partial(_job, find), jobs)
    for (name, count, seed, _), (found, report, seconds) in zip(jobs, results, strict=True):
        tally = tallies[name]
        tally.seconds += seconds
        for outcome in found:
            tally.add(outcome)
        if report:
            tally.wrong += 1
            tally.failures.append(f"{name}, seed {seed}, {count} cases: {report}")
            print(f"\nWRONG {tally.failures[-1]}", file=sys.stderr, flush=True)
        done += count
        wrong = sum(each.wrong for each in tallies.values())
        print(f"\r{done} cases, {wrong} wrong, {name}   ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if pool is not None:
        pool.close()
        pool.join()
    return tallies


def _job(find: Callable[[str], Case], job: Job) -> tuple[list[Outcome], str, float]:
    name, count, seed, shrink = job
    torch.set_num_threads(1)
    start = time.perf_counter()
    found, report = _block(find(name), count, seed, shrink)
    return found, report, time.perf_counter() - start


def run_group(name: str, case: Case, cases: int, seed: int = 0, shrink: bool = False) -> Tally:
    """So many cases of one group, in this process."""
    return run_jobs(jobs_of(name, cases, seed, shrink), lambda _: case)[name]
