"""Statistical trust, measured: ``python -m reliability.statistics`` writes results/statistics.json and docs/trust.md.

``--only`` measures some of the parts again and keeps what the file has of the others; ``--page`` measures nothing and
writes the tables of docs/trust.md of what the file has.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from reliability import beside, covering, failing, simulated
from reliability.figures import RESULTS, Figure, read_figures, write_figures
from reliability.trustpage import PAGE, write_page

COMMAND = "python -m reliability.statistics"
REPLICATIONS = 1000


def calibration(replications: int = REPLICATIONS, steps: int = 600) -> dict[str, Any]:
    """Ranks of the truth where a family contains it, and where it does not on purpose."""
    found: dict[str, Any] = {"replications": replications, "draws": simulated.DRAWS}
    for kind, families in (("contained", simulated.CONTAINED), ("broken", simulated.BROKEN)):
        found[kind] = {}
        for family in families:
            one = simulated.calibrate(family, replications, steps=steps)
            found[kind][family.name] = {
                **one.p_values(),
                "parameters": one.ranks.shape[1],
                "mean_error": one.mean_error,
                "sd_ratio": [min(one.sd_ratio), max(one.sd_ratio)],
            }
            print(family.name, found[kind][family.name], flush=True)
    return found


def coverage(sets: int = REPLICATIONS, wrong_sets: int = 250, steps: int = 600) -> dict[str, Any]:
    """Coverage of predictive intervals, where the model is right and where it is wrong."""
    found: dict[str, Any] = {}
    for kind, worlds, count in (
        ("right", covering.RIGHT, sets),
        ("learned", (covering.LEARNED,), sets),
        ("wrong", covering.WRONG, wrong_sets),
    ):
        found[kind] = {}
        for world in worlds:
            found[kind][world.name] = covering.cover(world, count, steps=steps)
            print(world.name, found[kind][world.name], flush=True)
    return found


def shift() -> dict[str, Any]:
    """Two moons: far inputs, rotated inputs, noisy labels, and few draws."""
    trained = failing.classifiers()
    return {
        "methods": failing.shifted(trained),
        "draws": failing.few_draws(trained["MeanField"][0]),
    }


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "calibration": calibration,
    "coverage": coverage,
    "linear": beside.linear,
    "logistic": beside.logistic,
    "gap": failing.gap,
    "shift": shift,
}


def figures(found: dict[str, Any]) -> list[Figure]:
    """What was asked of the parts that were measured, and whether it holds."""
    rows: list[Figure] = []
    if "calibration" in found:
        rows += _calibration_figures(found["calibration"])
    if "coverage" in found:
        for name, one in found["coverage"]["right"].items():
            share, points = one["coverage_90"], f"{one['points']:,.0f} points"
            rows.append(
                Figure(
                    f"90 % intervals, {name}, {points}", f"{share:.1%}", "88 to 92 %", 0.88 <= share <= 0.92
                )
            )
        one = found["coverage"]["learned"][covering.LEARNED.name]
        rows.append(Figure("90 % intervals, noise learned", f"{one['coverage_90']:.1%}", "", None))
    if "linear" in found:
        rows += _linear_figures(found["linear"])
    if "logistic" in found:
        chains, methods = found["logistic"]["hmc"], found["logistic"]["methods"]
        rows.append(
            Figure(
                "logistic regression, HMC: split R̂", f"{chains['rhat']:.4f}", "< 1.01", chains["rhat"] < 1.01
            )
        )
        ratio = methods["MeanField"]["sd_ratio"]
        rows.append(
            Figure(
                "logistic regression: standard deviations of MeanField over HMC's",
                f"{min(ratio):.2f} to {max(ratio):.2f}",
                "",
                None,
            )
        )
    return rows


def _calibration_figures(found: dict[str, Any]) -> list[Figure]:
    rows = []
    count = found["replications"]
    for kind, bound in (("contained", "p > 0.01"), ("broken", "p < 1e-6")):
        for name, one in found[kind].items():
            p, q = one["chi_square"], one["kolmogorov"]
            holds = min(p, q) > 0.01 if kind == "contained" else p < 1e-6
            value = f"{_p(p)} (χ²), {_p(q)} (KS)"
            rows.append(Figure(f"ranks of {count:,} truths, {name}", value, bound, holds))
    return rows


def _linear_figures(found: dict[str, Any]) -> list[Figure]:
    conditional = [a / b for a, b in zip(found["sd"], found["conditional_sd"], strict=True)]
    marginal = [a / b for a, b in zip(found["sd"], found["marginal_sd"], strict=True)]
    return [
        Figure(
            "correlated linear regression: σ of MeanField over 1/√Λ_ii",
            f"{min(conditional):.3f} to {max(conditional):.3f}",
            "0.95 to 1.05",
            min(conditional) >= 0.95 and max(conditional) <= 1.05,
        ),
        Figure(
            "the same over the marginal √Σ_ii",
            f"{min(marginal):.2f} to {max(marginal):.2f}",
            "at most 1, to 3 % of sampling",
            max(marginal) <= 1.03,
        ),
    ]


def _p(value: float) -> str:
    return f"p = {value:.2f}" if value >= 0.01 else f"p = {value:.0e}"


def save(found: dict[str, Any], seconds: float, folder: Path = RESULTS) -> Path:
    """Write what was found into the file, beside what it has of other parts."""
    path = folder / "statistics.json"
    before = read_figures(path) if path.exists() else {"details": {}, "provenance": {"seconds": 0.0}}
    kept = {name: before["details"][name] for name in PARTS if name in before["details"]}
    times = {**before["details"].get("times", {}), **dict.fromkeys(found, round(seconds / len(found), 1))}
    everything = {**kept, **found}
    return write_figures(
        "statistics",
        COMMAND,
        figures(everything),
        sum(times.values()),
        [
            "p-values are the least over parameters times their number (Bonferroni), for χ² in 20 bins and for "
            "Kolmogorov and Smirnov's test.",
            "Families that are broken on purpose show that the ranks can fail.",
            "What the uncertainties mean, and where they fail, is on the page docs/trust.md.",
        ],
        folder,
        times=times,
        **everything,
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure, write the file and the page; 1 if something does not hold."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--page", action="store_true", help="measure nothing, write the page's tables")
    options = parser.parse_args(arguments)
    if not options.page:
        torch.set_num_threads(1)  # small tensors, and the same sums on every machine
        for part in options.only:
            start = time.monotonic()
            print(f"-- {part}", flush=True)
            found = PARTS[part]()
            save({part: found}, time.monotonic() - start)
    document = read_figures(RESULTS / "statistics.json")
    if set(PARTS) <= set(document["details"]):
        write_page(document["details"], PAGE)
    wrong = [figure for figure in document["figures"] if figure["holds"] is False]
    for figure in document["figures"]:
        print(f"{figure['what']}: {figure['value']} {figure['bound'] and '(' + figure['bound'] + ')'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
