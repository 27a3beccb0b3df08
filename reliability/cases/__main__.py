"""``python -m reliability.cases --cases 20000``: all groups, and their figures in reliability/results/cases.json."""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from reliability.cases.groups import GROUPS, case_of, counts
from reliability.cases.running import Tally, jobs_of, run_jobs
from reliability.figures import Figure, write_figures

SHARE = 0.6  # of all cases that are to run to a comparison


def run(
    cases: int, seed: int = 0, only: Sequence[str] = (), shrink: bool = False, processes: int = 1
) -> dict[str, Tally]:
    """All groups, or some, with about so many cases together."""
    chosen = {name: count for name, count in counts(cases).items() if not only or name in only}
    jobs = [job for name, count in chosen.items() for job in jobs_of(name, count, seed, shrink)]
    return run_jobs(jobs, case_of, processes)


def table(tallies: dict[str, Tally], which: str) -> dict[str, dict[str, int]]:
    """Cases and comparisons by method, or by layer, over the groups that convert networks."""
    total: dict[str, collections.Counter[str]] = {}
    for name, tally in tallies.items():
        if name.split(".")[0] not in ("options", "scores", "predictions") and name != "verbs.unconverted":
            for key, counter in getattr(tally, which).items():
                total.setdefault(key, collections.Counter()).update(counter)
    return {
        key: {"cases": sum(total[key].values()), "compared": total[key]["equal"]} for key in sorted(total)
    }


def figures(tallies: dict[str, Tally], asked: int) -> list[Figure]:
    """What docs/reliability.md shows."""
    cases = sum(tally.cases for tally in tallies.values())
    equal = sum(tally.equal for tally in tallies.values())
    refused = sum(tally.refused for tally in tallies.values())
    wrong = sum(tally.wrong for tally in tallies.values())
    share = equal / max(1, cases)
    return [
        Figure("generated cases", f"{cases:,}", f"at least {asked:,}", cases >= asked),
        Figure("equal to a reference", f"{equal:,} ({100 * share:.0f} %)", f"above {100 * SHARE:.0f} %", share > SHARE),
        Figure("refused in documented words", f"{refused:,}", "", None),
        Figure("wrong", f"{wrong:,}", "none", wrong == 0),
    ]  # fmt: skip


def _words(name: str) -> str:
    return (GROUPS[name][0].__doc__ or "").splitlines()[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(prog="python -m reliability.cases", description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="another one gives other cases")
    parser.add_argument("--only", nargs="*", default=(), help=f"of {', '.join(GROUPS)}")
    parser.add_argument(
        "--shrink", action="store_true", help="look for the smallest case of a failure; takes minutes"
    )
    parser.add_argument("--processes", type=int, default=1, help="the cases are the same with any number")
    parser.add_argument("--no-results", action="store_true", help="write no file")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start = time.perf_counter()
    tallies = run(given.cases, given.seed, given.only, given.shrink, given.processes)
    found = figures(tallies, given.cases)
    for figure in found:
        print(f"{figure.what}: {figure.value}")
    details: dict[str, Any] = {
        "groups": {name: {"what": _words(name), **tally.as_dict()} for name, tally in tallies.items()},
        "by_method": table(tallies, "by_method"), "by_layer": table(tallies, "by_layer"),
    }  # fmt: skip
    if not given.no_results and not given.only:
        command = f"python -m reliability.cases --cases {given.cases}" + (
            f" --seed {given.seed}" if given.seed else ""
        )
        notes = [
            "A case is a network, a method with its options, inputs and a call, all generated. Seeded draws are held "
            "against a replay of every example of every draw in torch's own layers, in float64.",
            "A refusal is a ValueError or TypeError raised by slimbayes in words that name the input, or what torch's "
            "own network says to the same input.",
        ]
        write_figures("cases", command, found, time.perf_counter() - start, notes, **details)
    return 0 if all(figure.holds is not False for figure in found if figure.what == "wrong") else 1


if __name__ == "__main__":
    sys.exit(main())
