"""Timing in interleaved rounds, without those that other processes disturbed; peak memory of a step."""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slimbayes.lab.bench.cases import Case

FOREIGN_SHARE = 0.05  # of the cores' time in a round
FOREIGN_SLACK = 0.03  # seconds: /proc/stat counts in hundredths
LEAST_ROUNDS = 3


@dataclass
class Load:
    """Seconds that some cores spent on other processes, from /proc/stat and this process's own clock."""

    cores: Sequence[int]
    wall: float = 0.0
    busy: float = 0.0
    own: float = 0.0

    def start(self) -> None:
        """Begin a round."""
        self.wall, self.busy, self.own = time.monotonic(), self._busy(), self._own()

    def disturbed(self) -> bool:
        """Whether others took more than a share of the cores since ``start``."""
        foreign = (self._busy() - self.busy) - (self._own() - self.own)
        return foreign > FOREIGN_SLACK + FOREIGN_SHARE * (time.monotonic() - self.wall) * len(self.cores)

    def _own(self) -> float:
        spent = os.times()
        return spent.user + spent.system

    def _busy(self) -> float:
        try:
            lines = Path("/proc/stat").read_text().splitlines()
        except OSError:  # elsewhere than on Linux nothing is known, and no round is dropped
            return 0.0
        tick = os.sysconf("SC_CLK_TCK")
        total = 0
        for line in lines:
            name, *numbers = line.split()
            if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in self.cores:
                user, nice, system, _, _, irq, softirq, steal = (int(number) for number in numbers[:8])
                total += user + nice + system + irq + softirq + steal
        return total / tick


@dataclass
class Rounds:
    """Seconds per step of every case, by round, and how many rounds were dropped."""

    times: dict[str, list[float]] = field(default_factory=dict)
    dropped: int = 0
    forced: bool = False  # too many rounds were disturbed: all were kept
    failures: dict[str, str] = field(default_factory=dict)


def interleave(
    cases: Sequence[Case],
    rounds: int,
    seconds: float,
    device: torch.device,
    load: Load | None = None,
    time_left: Callable[[], float] = lambda: math.inf,
    progress: Callable[[int], None] = lambda done: None,
) -> Rounds:
    """Time all cases in turn, in a new order each round, until there are enough undisturbed rounds.

    One timing is as many steps as last ``seconds``. At most twice as many rounds are tried; if fewer than three
    stayed undisturbed, all count. Ends early when the time left is less than a round takes.
    """
    found = Rounds(times={case.name: [] for case in cases})
    every: dict[str, list[float]] = {case.name: [] for case in cases}
    steps = {case.name: steps_for(case, seconds, device) for case in cases}
    order, shuffle = list(cases), random.Random(0)
    longest = 0.0
    for attempt in range(2 * rounds):
        if time_left() < 1.5 * longest and attempt >= 1:
            break
        begun = time.monotonic()
        shuffle.shuffle(order)
        if load is not None:
            load.start()
        current = {}
        for case in list(order):
            try:
                current[case.name] = timed(case, steps[case.name], device)
            except Exception as error:
                found.failures[case.name] = describe(error)
                order.remove(case)
        disturbed = load is not None and load.disturbed()
        longest = max(longest, time.monotonic() - begun)
        for name, value in current.items():
            every[name].append(value)
            if not disturbed:
                found.times[name].append(value)
        found.dropped += disturbed
        progress(min(attempt + 1 - found.dropped, rounds))
        if attempt + 1 - found.dropped >= rounds:
            break
    if max(map(len, found.times.values()), default=0) < min(LEAST_ROUNDS, rounds):
        found.times, found.forced = every, True
    return found


def steps_for(case: Case, seconds: float, device: torch.device) -> int:
    """How many steps last so long, from the faster of two."""
    return max(1, math.ceil(seconds / max(min(timed(case, 1, device) for _ in range(2)), 1e-6)))


def timed(case: Case, steps: int, device: torch.device) -> float:
    """Seconds per step."""
    _wait(device)
    begun = time.perf_counter()
    for _ in range(steps):
        case.step()
    _wait(device)
    return (time.perf_counter() - begun) / steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    """Bytes that tensors take on a GPU; 0 on the CPU, where nobody counts."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return int(torch.cuda.memory_allocated(device))


def peak_bytes(case: Case, device: torch.device, before: int) -> int:
    """The most bytes that tensors take during one step: weights, gradients, optimizer state and inputs included.

    On a GPU ``max_memory_allocated`` less what was there before the case was built. On the CPU the allocator's own
    events, as torch's profiler records them (what compiled code allocates is among them, libraries' scratch memory
    is not), on top of what the case holds between steps.
    """
    case.clear()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        case.step()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    held = case.held_bytes()
    with _quiet(), torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:  # fmt: skip
        case.step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return held + peak


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the profiler's own lines on the process's stderr."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def describe(error: BaseException) -> str:
    """An error in one line.

    >>> describe(ValueError("a\\n b"))
    'ValueError: a b'
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 400 else f"{text[:397]}..."
