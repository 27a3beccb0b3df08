"""The tables of docs/trust.md, and the sentences that have figures in them, made of results/statistics.json."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "trust.md"
OPEN = "<!-- {}: written by python -m reliability.statistics --page, do not edit -->"
CLOSE = "<!-- end of {} -->"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _p(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else f"{value:.0e}"


def _range(values: Sequence[float], digits: int = 2) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def calibration(found: dict[str, Any]) -> str:
    """Ranks."""
    one = found["calibration"]
    rows = [
        [name, _p(row["chi_square"]), _p(row["kolmogorov"]), _range(row["sd_ratio"])]
        for kind in ("contained", "broken")
        for name, row in one[kind].items()
    ]
    return (
        f"{one['replications']:,} data sets, {one['draws']} draws of each posterior; the first "
        f"{len(one['contained'])} rows should be uniform, the last {len(one['broken'])} are wrong on purpose:\n\n"
        + _table(["posterior", "p of χ²", "p of KS", "its σ over the exact σ"], rows)
    )


def coverage(found: dict[str, Any]) -> str:
    """Intervals of right models."""
    kinds = found["coverage"]
    rows = [_levels(name, row) for name, row in kinds["right"].items()]
    rows += [_levels("MeanField, noise learned", row) for row in kinds["learned"].values()]
    first = next(iter(kinds["right"].values()))
    return f"{first['points']:,.0f} new points in each row:\n\n" + _table(
        ["model", "50 %", "90 %", "99 %", "width at 90 %"], rows
    )


def _levels(name: str, row: dict[str, float]) -> list[str]:
    shares = [f"{100 * row[key]:.1f}" for key in ("coverage_50", "coverage_90", "coverage_99")]
    return [name, *shares, f"{row['width_90']:.2f}"]


def correlation(found: dict[str, Any]) -> str:
    """Mean-field beside exact posteriors."""
    linear, logistic = found["linear"], found["logistic"]
    chains, methods = logistic["hmc"], logistic["methods"]
    conditional = [a / b for a, b in zip(linear["sd"], linear["conditional_sd"], strict=True)]
    marginal = [a / b for a, b in zip(linear["sd"], linear["marginal_sd"], strict=True)]
    rows = [
        [
            name, f"{row['mean_error']:.2f}", _range(row["sd_ratio"]), f"{row['probability_error']:.3f}",
            f"{row['probability_worst']:.3f}",
        ]
        for name, row in methods.items() if name != "HMC"
    ]  # fmt: skip
    return (
        f"Linear regression with neighbouring inputs correlated by 0.9: the standard deviations of `MeanField` are "
        f"{_range(conditional)} of 1/√Λ_ii, as theory says, and {_range(marginal)} of the true ones. Logistic "
        f"regression with the same inputs and 60 examples, beside {chains['draws']:,} draws of HMC (split R̂ "
        f"{chains['rhat']:.4f}, effective size {chains['ess']:,.0f}):\n\n"
        + _table(
            [
                "method",
                "error of the mean, in σ",
                "σ over the true σ, by weight",
                "error of p, mean",
                "worst",
            ],
            rows,
        )
    )


def gap(found: dict[str, Any]) -> str:
    """Between the data, and outside."""
    rows, exact = found["gap"], found["gap"]["HMC, the same network"]
    table = [
        [name, *(f"{row[key]:.3f}" for key in ("data", "gap", "outside")), f"{row['gap'] / exact['gap']:.2f}"]
        for name, row in rows.items()
    ]
    return (
        f"Standard deviation of f(x), mean over the region (HMC: split R̂ {exact['rhat']:.3f}, effective size "
        f"{exact['ess']:,.0f}, of the functions where the data are and between them):\n\n"
        + _table(["method", "at the data", "in the gap", "outside", "gap, over HMC's"], table)
    )


def far(found: dict[str, Any]) -> str:
    """Confidence far from the data."""
    keys = ("confidence_1", "confidence_10", "confidence_100", "information_auroc")
    rows = [[name, *(f"{row[key]:.3f}" for key in keys)] for name, row in found["shift"]["methods"].items()]
    for row in rows:
        if row[0] == "Deterministic":
            row[-1] = ""  # one draw has no mutual information
    return _table(["method", "x as it is", "10 x", "100 x", "AUROC of mutual information, x or 100 x"], rows)


def shift(found: dict[str, Any]) -> str:
    """Calibration where test data differ."""
    keys = ("accuracy_clean", "ece_clean", "accuracy_rotated", "ece_rotated", "ece_noisy")
    rows = [[name, *(f"{row[key]:.3f}" for key in keys)] for name, row in found["shift"]["methods"].items()]
    head = [
        "method",
        "accuracy",
        "ECE",
        "accuracy, turned by 45°",
        "ECE, turned",
        "ECE, 20 % of labels wrong",
    ]
    return _table(head, rows)


def wrong(found: dict[str, Any]) -> str:
    """Coverage of wrong models."""
    right = found["coverage"]["right"]["MeanField"]
    rows = [_levels("nothing wrong", right)]
    rows += [_levels(name, row) for name, row in found["coverage"]["wrong"].items()]
    return _table(["what is wrong", "50 %", "90 %", "99 %", "width at 90 %"], rows)


def draws(found: dict[str, Any]) -> str:
    """Monte-Carlo error."""
    rows = [
        [
            f"{row['draws']:.0f}", f"{row['formula']:.4f}", f"{row['measured']:.4f}", f"{row['bound']:.4f}",
            f"{row['information']:.2f}",
        ]
        for row in found["shift"]["draws"]
    ]  # fmt: skip
    head = [
        "draws S",
        "σ_d/√S",
        "measured",
        "bound 1/(2√S)",
        "mutual information, share of its value at 2,000",
    ]
    return _table(head, rows)


BLOCKS: dict[str, Callable[[dict[str, Any]], str]] = {
    "calibration": calibration,
    "coverage": coverage,
    "correlation": correlation,
    "gap": gap,
    "far": far,
    "shift": shift,
    "wrong": wrong,
    "draws": draws,
}


def filled(text: str, found: dict[str, Any]) -> str:
    """The page with every block as the details have it; a block that the page lacks is an error."""
    for name, make in BLOCKS.items():
        start, end = OPEN.format(name), CLOSE.format(name)
        pattern = re.escape(start) + r"\n.*?" + re.escape(end)
        block = f"{start}\n\n{make(found)}\n\n{end}"
        text, count = re.subn(pattern, lambda _, block=block: block, text, flags=re.S)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"docs/trust.md has {count} blocks of {name!r}: it needs one, {start} ... {end}")
    return text


def write_page(found: dict[str, Any], page: Path = PAGE) -> None:
    """Write the blocks into the page."""
    page.write_text(filled(page.read_text(), found))
