"""The page of the suite, made of its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from slimbayes.lab.report.statistics import Stat, stat
from slimbayes.lab.suite.contenders import OURS, PLAIN, RIVALS
from slimbayes.lab.suite.pairs import PAIRS
from slimbayes.lab.suite.scores import LEVEL
from slimbayes.verbs.diagnosis.limits import COVERAGE

Row = dict[str, Any]
_THEIRS, _OURS, _FIT = "scikit-learn's MLP", "slimbayes.sklearn", "sb.fit"
_PART = 0.01  # of the plain network's NLL: less is no difference that anybody would act on


class Difference(NamedTuple):
    """A figure of a contender, the NLL, less the plain network's on one pair, over the same seeds."""

    pair: str
    clean: Stat
    shifted: Stat
    plain: float  # the plain network's, clean

    @property
    def worse(self) -> bool:
        """By more than two standard errors and by more than 1 %."""
        assert self.clean.mean is not None
        return self.clean.mean > max(2 * (self.clean.error or 0.0), _PART * abs(self.plain))


def differences(
    rows: Sequence[Row], contender: str, against: str = PLAIN, figure: str = "nll"
) -> list[Difference]:
    """One for every pair that both were measured on and have this figure of, in the suite's order."""
    found = {(row["pair"], row["contender"], row["seed"]): row for row in rows}
    result = []
    for pair in PAIRS:
        seeds = [
            s for p, c, s in found
            if p == pair and c == contender and (pair, against, s) in found and figure in found[p, c, s]["clean"]
        ]  # fmt: skip
        if not seeds:
            continue
        both = [(found[pair, contender, seed], found[pair, against, seed]) for seed in sorted(seeds)]

        def over(where: str, both: list[tuple[Row, Row]] = both) -> Stat:
            return stat(mine[where][figure] - other[where][figure] for mine, other in both)

        plain = fmean(other["clean"][figure] for _, other in both)
        result.append(Difference(pair, over("clean"), over("shifted"), plain))
    return result


def _mean(rows: Sequence[Row], pairs: Sequence[str], contender: str, where: str, figure: str) -> float | None:
    values = [
        fmean(found)
        for pair in pairs
        if (found := [
            row[where][figure] for row in rows
            if row["pair"] == pair and row["contender"] == contender and figure in row[where]
        ])
    ]  # fmt: skip
    return fmean(values) if values else None


def _number(value: float | None, digits: int = 3, sign: bool = False) -> str:
    return "–" if value is None else f"{value:{'+' if sign else ''}.{digits}f}".replace("-", "−")


def summary(rows: Sequence[Row], half: str | None = None) -> list[str]:
    """A line for every contender: its means over the pairs of a half, or of both, and the pairs where it is worse."""
    pairs = [name for name, pair in PAIRS.items() if half in (None, pair.half)]
    lines = [
        "| contender | NLL, classes | shifted | NLL, regression | shifted | ECE | shifted | coverage of 90 % "
        "| worse than plain on |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name in (PLAIN, *OURS, *RIVALS):
        own = [one for one in differences(rows, name) if one.pair in pairs]
        if not own:
            continue
        gains = [
            _shown(gain(rows, name, regression, where, half), regression)
            for regression in (False, True)
            for where in ("clean", "shifted")
        ]
        calibration = [_number(_mean(rows, pairs, name, where, "ece")) for where in ("clean", "shifted")]
        coverage = _number(_mean(rows, pairs, name, "clean", "coverage"))
        worse = ", ".join(one.pair for one in own if one.worse) or "none"
        cells = ["–"] * 4 if name == PLAIN else gains
        lines.append(
            f"| {' | '.join([name, *cells, *calibration, coverage])} | {'–' if name == PLAIN else worse} |"
        )
    return lines


def gain(
    rows: Sequence[Row], contender: str, regression: bool, where: str, half: str | None = None
) -> float | None:
    """Of classes the mean over pairs in parts of the plain network's NLL, of regressions the median in nats."""
    some = [
        one
        for one in differences(rows, contender)
        if half in (None, PAIRS[one.pair].half) and _is_regression(rows, one.pair) == regression
    ]
    if not some:
        return None
    if regression:
        return float(median(getattr(one, where).mean for one in some))
    plain = [_mean(rows, [one.pair], PLAIN, where, "nll") or 1.0 for one in some]
    return fmean(getattr(one, where).mean / base for one, base in zip(some, plain, strict=True))


def _shown(gained: float | None, regression: bool) -> str:
    if gained is None or regression:
        return _number(gained, sign=True)
    return f"{_number(100 * gained, 1, sign=True)} %"


def _is_regression(rows: Sequence[Row], pair: str) -> bool:
    return "coverage" in _first(rows, pair)["clean"]


def _first(rows: Sequence[Row], pair: str) -> Row:
    return next(row for row in rows if row["pair"] == pair)


def details(rows: Sequence[Row], half: str) -> list[str]:
    """NLL of the plain network and the difference of every other, pair by pair, with standard errors."""
    pairs = [
        name for name, pair in PAIRS.items() if pair.half == half and any(row["pair"] == name for row in rows)
    ]
    lines = []
    for where in ("clean", "shifted"):
        lines += [
            "",
            f"NLL less the plain network's, {where} test rows (± one standard error over seeds):",
            "",
        ]
        lines += ["| contender | " + " | ".join(pairs) + " |", "|---|" + "---:|" * len(pairs)]
        plain = [_number(_mean(rows, [pair], PLAIN, where, "nll")) for pair in pairs]
        lines.append(f"| plain | {' | '.join(plain)} |")
        for name in (*OURS, *RIVALS):
            own = {one.pair: one for one in differences(rows, name)}
            if own:
                lines.append(
                    f"| {name} | " + " | ".join(_cell(own.get(pair), where) for pair in pairs) + " |"
                )
    return lines


def _cell(one: Difference | None, where: str) -> str:
    if one is None:
        return "–"
    value: Stat = getattr(one, where)
    text = _with_error(value)
    return f"**{text}**" if where == "clean" and one.worse else text


def _with_error(value: Stat) -> str:
    return f"{_number(value.mean, sign=True)} ± {_number(value.error)}"


def worse(rows: Sequence[Row]) -> list[str]:
    """A line for each of our methods: the pairs where its default is worse than the plain network, and by how much."""
    lines = ["| method | pairs | worse on |", "|---|---:|---|"]
    for name in OURS:
        own = differences(rows, name)
        found = ", ".join(f"{one.pair} ({_with_error(one.clean)})" for one in own if one.worse)
        if own:
            lines.append(f"| {name} | {len(own)} | {found or 'none'} |")
    return lines


def estimators(rows: Sequence[Row]) -> list[str]:
    """Our estimators beside scikit-learn's on every table: NLL, and ECE or coverage."""
    lines = [
        "| table | NLL, scikit-learn's MLP | ours less that | shifted | ECE or coverage, scikit-learn's | ours |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for one in differences(rows, _OURS, _THEIRS):
        figure = "coverage" if _is_regression(rows, one.pair) else "ece"
        theirs = [
            row["clean"][figure] for row in rows if (row["pair"], row["contender"]) == (one.pair, _THEIRS)
        ]
        own = stat(
            row["clean"][figure] for row in rows if (row["pair"], row["contender"]) == (one.pair, _OURS)
        )
        better = f"{_number(own.mean)} ± {_number(own.error)}"
        cells = [
            _number(one.plain),
            _cell(one, "clean"),
            _cell(one, "shifted"),
            _number(fmean(theirs)),
            better,
        ]
        lines.append(f"| {one.pair.removesuffix('-mlp')} | {' | '.join(cells)} |")
    return lines if len(lines) > 2 else []


def intervals(rows: Sequence[Row]) -> list[str]:
    """What 90 % intervals cover on every regression: by own loop, by the estimators and by ``sb.fit``."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if "coverage" in row["clean"]:
            found.setdefault((row["contender"], row["pair"]), []).append(100 * row["clean"]["coverage"])
    pairs = [name for name in PAIRS if (PLAIN, name) in found]
    if not pairs:
        return []
    lines = [f"| way | {' | '.join(pairs)} |", "|---|" + "---:|" * len(pairs)]
    for name in (PLAIN, *OURS, _OURS, _FIT, _THEIRS):
        cells = [_covered(pair, found.get((name, pair), [])) for pair in pairs]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _covered(pair: str, values: Sequence[float]) -> str:
    """The mean in per cent, in bold where it is out of bounds by more than two standard errors of the estimate."""
    if not values:
        return "–"
    share = stat(values)
    assert share.mean is not None
    test_rows = PAIRS[pair].data.arguments[2]
    chance = 100 * math.sqrt(LEVEL * (1 - LEVEL) / test_rows)  # all seeds have the same test rows
    off = 2 * math.hypot(chance, share.error or 0.0)
    inside = 100 * COVERAGE[0] - off <= share.mean <= 100 * COVERAGE[1] + off
    return f"{share.mean:.1f}" if inside else f"**{share.mean:.1f}**"


def study(rows: Sequence[Row], name: str | None = None) -> list[str]:
    """A line for every setting that was tried, by pair: NLL less the plain network's, clean / shifted (seeds)."""
    rows = [row for row in rows if row.get("study") == name]
    tried = {row["pair"] for row in rows}
    pairs = [pair for pair in PAIRS if pair in tried]
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        found.setdefault(row["variant"], {}).setdefault(row["pair"], []).append(row)
    lines = [f"| setting | {' | '.join(pairs)} |", "|---|" + "---:|" * len(pairs)]
    for variant, own in found.items():
        cells = []
        for pair in pairs:
            some = own.get(pair, [])
            parts = [
                _number(fmean(row[where] for row in some), sign=True)
                for where in ("clean", "shifted")
                if some
            ]
            cells.append(f"{' / '.join(parts)} ({len(some)})" if some else "–")
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return lines


def tables(rows: Sequence[Row]) -> str:
    """All tables of the page."""
    parts = ["## All pairs", "", *summary(rows), "", *worse(rows), ""]
    for half, title in (
        ("choosing", "The pairs that defaults were chosen on"),
        ("judging", "The pairs looked at once, at the end"),
    ):
        if any(PAIRS[row["pair"]].half == half for row in rows):
            parts += [f"## {title}", "", *summary(rows, half), *details(rows, half), ""]
    if own := intervals(rows):
        parts += ["## Intervals", "", *own, ""]
    if own := estimators(rows):
        parts += ["## Estimators", "", *own, ""]
    return "\n".join(parts)
