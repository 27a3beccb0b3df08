"""Numerical health: every method against every extreme, and what the guard of training steps costs.

``python -m reliability.health`` counts cases that are right or raise the documented error; ``--only NAME`` and
``--methods NAME ...`` take a few. It takes about four minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn

import slimbayes as sb
from reliability.figures import Figure, write_figures
from reliability.health_cases import CASES, EVERY, NamedError
from reliability.health_runs import ALONE
from slimbayes.training.guard import Guard

MOST = 1.05  # times the step without a guard
NETWORKS = {
    "dense": (
        lambda: nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        ),
        (64,),
    ),
    "convolutional": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1),
            nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 256, 10),
        ),
        (3, 16, 16),
    ),
}  # fmt: skip


def count(only: Sequence[str] = (), methods: Sequence[str] = ()) -> tuple[Counter[str], list[str]]:
    """Cases that are "right", or raise a "documented" error, and those that are "wrong", in words."""
    found: Counter[str] = Counter()
    wrong: list[str] = []
    wanted = [(name, method) for name in CASES for method in EVERY if not only or name in only]
    runs = [
        (name, m, lambda n=name, m=m: CASES[n](EVERY[m])) for name, m in wanted if not methods or m in methods
    ]
    runs += [(name, "", function) for name, function in ALONE.items() if not only or name in only]
    for name, method, run in runs:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # torch's own, and of steps that are left out, which is what is tried
            try:
                run()
                found["right"] += 1
            except NamedError:
                found["documented"] += 1
            except Exception as error:  # whatever it is, it is not what was promised
                found["wrong"] += 1
                wrong.append(f"{name}, {method}: {type(error).__name__}: {error}"[:300])
    return found, wrong


def _unguarded(self: Guard, loss: Any, norm: Any, apply: Any) -> Any:
    apply()
    return torch.ones(())


def guard_ratio(network: str, rounds: int = 30, steps: int = 20) -> float:
    """Processor time of steps with the guard over that of those without, in turns: the median of the rounds' ratios."""
    make, shape = NETWORKS[network]
    torch.manual_seed(0)
    data = torch.randn(64 * steps, *shape), torch.randint(10, (64 * steps,))
    model = sb.bayesianize(make(), sb.Rank1(components=2))
    options: dict[str, Any] = {
        "batch_size": 64, "epochs": 1, "lr": 1e-4, "progress": False, "accelerator": "cpu", "log_every": 10_000,
    }  # fmt: skip

    def seconds(guarded: bool) -> float:
        plain = mock.patch.multiple(Guard, step=_unguarded, before=lambda self: None)
        start = time.process_time()  # not of the neighbours
        with nullcontext() if guarded else plain:
            sb.fit(model, data, **options)
        return time.process_time() - start

    seconds(True), seconds(False)
    ratios = []
    for i in range(rounds):
        order = (True, False) if i % 2 else (False, True)
        taken = {which: seconds(which) for which in order}
        ratios.append(taken[True] / taken[False])
    return statistics.median(ratios)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and, when everything was run, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], choices=[*CASES, *ALONE])
    parser.add_argument("--methods", nargs="*", default=[], choices=list(EVERY))
    parser.add_argument("--rounds", type=int, default=30, help="of the timing")
    options = parser.parse_args(arguments)
    clock = time.monotonic()
    torch.set_num_threads(1)
    found, wrong = count(options.only, options.methods)
    total, good = sum(found.values()), found["right"] + found["documented"]
    print(
        f"{good} of {total} cases: {found['right']} right, {found['documented']} documented errors",
        *wrong,
        sep="\n",
    )
    if options.only or options.methods:
        return int(bool(wrong))
    ratios = {name: guard_ratio(name, options.rounds) for name in NETWORKS}
    print(ratios)
    figures = [
        Figure(
            "methods × extremes: right, or the documented error", f"{good} of {total}", "all", good == total
        ),
        *(
            Figure(
                f"a guarded training step over a plain one, CPU, {name}",
                f"{ratio:.3f}",
                f"≤ {MOST}",
                ratio <= MOST,
            )
            for name, ratio in ratios.items()
        ),
    ]
    notes = [
        f"{found['right']} cases equal their float64 reference, {found['documented']} raise the documented error",
        f"{len(CASES)} cases for each of {len(EVERY)} methods, and {len(ALONE)} that no method changes",
    ]
    command = "python -m reliability.health"
    write_figures(
        "health", command, figures, time.monotonic() - clock, notes, cases=[*CASES, *ALONE], methods=list(EVERY),
        wrong=wrong, outcomes=dict(found), step_time_ratios={name: round(r, 4) for name, r in ratios.items()},
    )  # fmt: skip
    return int(not all(figure.holds for figure in figures))


if __name__ == "__main__":
    raise SystemExit(main())
