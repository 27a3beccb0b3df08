"""Means, standard errors and paired differences over seeds, and the words that follow from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from slimbayes.lab.report.results import Results, label, number

Cell = tuple[str, str]  # a shift's name and a severity, as the file's keys
_Z = 1.959964  # of the normal distribution: 2.5 % lie beyond it


class Stat(NamedTuple):
    """A mean over seeds, its standard error (None with one seed), and the number of seeds."""

    mean: float | None
    error: float | None
    n: int


def stat(values: Iterable[float | None]) -> Stat:
    """Mean and standard error sd / √n with sd over n − 1; one missing value makes the mean missing.

    A run that gave NaN must not drop out of its method's mean: that would flatter the method.

    >>> stat([1.0, 2.0, 3.0])
    Stat(mean=2.0, error=0.577, n=3)
    >>> stat([4.0])
    Stat(mean=4.0, error=None, n=1)
    >>> stat([2.8132] * 3)
    Stat(mean=2.8132, error=0.0, n=3)
    >>> stat([1.0, None])
    Stat(mean=None, error=None, n=2)
    """
    items = list(values)
    known = [value for value in items if value is not None]
    n = len(items)
    if not known or len(known) < n:
        return Stat(None, None, n)
    same = min(known) == max(known)  # then a mean by division may be off by a rounding
    mean = known[0] if same else math.fsum(known) / n
    if n == 1:
        return Stat(mean, None, 1)
    variance = math.fsum((value - mean) ** 2 for value in known) / (n - 1)
    return Stat(mean, math.sqrt(variance / n), n)


def cells(results: Results) -> list[Cell]:
    """The shift and severity pairs that every run with shifts was evaluated on: means over shifts use these alone."""
    common: set[Cell] | None = None
    for here in _evaluated(results):
        common = here if common is None else common & here
    order = [str(shift.get("name")) for shift in results.data.get("shifts") or []]
    known = {name: i for i, name in enumerate(order)}
    return sorted(
        common or set(), key=lambda cell: (known.get(cell[0], len(known)), cell[0], severity(cell[1]))
    )


def _evaluated(results: Results) -> list[set[Cell]]:
    """Per run that has any: its shift and severity pairs."""
    runs = [run.get("shifted") or {} for method in results.methods for run in method["runs"]]
    found = [{(name, level) for name, levels in run.items() for level in levels} for run in runs]
    return [pairs for pairs in found if pairs]


def severity(key: str) -> float:
    """A severity's key as a number; keys that are none come last."""
    try:
        return float(key)
    except ValueError:
        return math.inf


def over_cells(run: Mapping[str, Any], metric: str, where: Iterable[Cell]) -> float | None:
    """One run's metric averaged over shift cells; None if a cell lacks it, or the run has no shifts."""
    found = run.get("shifted") or {}
    return stat(number(found[shift][level].get(metric)) for shift, level in where).mean if found else None


def value(run: Mapping[str, Any], metric: str, where: str, common: list[Cell]) -> float | None:
    """One run's metric on "clean", "shifted" (mean over the common cells), "ood", or of the run itself."""
    if where == "shifted":
        return over_cells(run, metric, common) if common else None
    if where == "run":
        return number(run.get(metric))
    return number((run.get(where) or {}).get(metric))


def over_seeds(method: Mapping[str, Any], metric: str, where: str, common: list[Cell]) -> Stat:
    """A method's metric, averaged over its seeds."""
    return stat(value(run, metric, where, common) for run in method["runs"])


def paired(
    results: Results, method: Mapping[str, Any], metric: str, where: str, common: list[Cell]
) -> dict[int, float | None]:
    """Per seed that both have: the method's metric minus the deterministic network's."""
    if results.baseline is None:
        return {}
    base = {run["seed"]: value(run, metric, where, common) for run in results.baseline["runs"]}
    mine = {run["seed"]: value(run, metric, where, common) for run in method["runs"]}
    differences: dict[int, float | None] = {}
    for seed in sorted(base.keys() & mine.keys()):
        a, b = mine[seed], base[seed]
        differences[seed] = None if a is None or b is None else a - b
    return differences


def margin(n: int) -> float:
    """How many standard errors are two with n seeds: Student's t at 97.5 % with n − 1 degrees of freedom, at least 2.

    Cornish and Fisher's expansion, where there is no closed form: right to 1 %.

    >>> [round(margin(n), 1) for n in (2, 3, 5, 10, 100)]
    [12.7, 4.3, 2.8, 2.3, 2.0]
    """
    free, z = n - 1, _Z
    if free < 3:
        return 4.3027 if free == 2 else 12.7062
    t = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return max(2.0, sum(term / float(free) ** power for power, term in enumerate(t)))


def judge(difference: Stat) -> str:
    """What a paired difference shows: "lower", "higher", "undecided" (within the margin, or one seed), "missing".

    >>> judge(Stat(-0.3, 0.05, 3)), judge(Stat(-0.3, 0.1, 3)), judge(Stat(-0.3, None, 1))
    ('lower', 'undecided', 'undecided')
    """
    if difference.mean is None:
        return "missing"
    if difference.error is None:
        return "undecided"
    # 1e-9: equal runs whose means differ in the last bit have a standard error of about nothing
    if abs(difference.mean) <= max(1e-9, margin(difference.n) * difference.error):
        return "undecided"
    return "lower" if difference.mean < 0 else "higher"


def signed(x: float, digits: int = 3) -> str:
    """A difference with its sign, a true minus.

    >>> signed(-0.1234), signed(0.5, 1)
    ('−0.123', '+0.5')
    """
    return f"{x:+.{digits}f}".replace("-", "−")


def joined(names: list[str]) -> str:
    """Names in a sentence.

    >>> joined(["a", "b", "c"])
    'a, b and c'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


class Finding(NamedTuple):
    """A sentence of the verdict: its kind, and its text."""

    kind: str  # "opening", "lower", "higher", "undecided", "single", "missing", "none", "clean", "sign", "caution"
    text: str


def findings(results: Results) -> list[Finding]:
    """The sentences of the differences, method by method, with their kinds."""
    common = cells(results)
    where = "shifted" if common else "clean"
    if not results.methods:
        return [Finding("opening", "There are no runs in these results, so there is nothing to compare.")]
    opening = _opening(results, where, common)
    others = [method for method in results.methods if method is not results.baseline]
    if results.baseline is None:
        words = "The deterministic network was not run, so nothing is said about gains over it."
        return [opening, Finding("none", words)]
    if not others:
        return [opening, Finding("none", "No other method was run, so there is nothing to compare it with.")]
    found = [opening, *_compare(results, others, where, common)]
    if not common and _evaluated(results):
        found.append(
            Finding("none", "The runs share no shift and severity, so shifted data are not compared.")
        )
    if where == "shifted":
        found += _clean_words(results, others, common)
    return found + _signs(results) + _cautions(results, others)


def _data(where: str) -> str:
    return "shifted test data" if where == "shifted" else "clean test data"


def _opening(results: Results, where: str, common: list[Cell]) -> Finding:
    base = results.baseline
    method = base or results.methods[0]
    level = over_seeds(method, "nll", where, common)
    if level.mean is None:
        return Finding(
            "opening", f"{label(method)} has no finite negative log-likelihood (NLL) on {_data(where)}."
        )
    spread = f" ± {level.error:.3f}" if level.error is not None else ""
    seeds = f"over {level.n} seeds" if level.n > 1 else "with one seed"
    shifts = len({shift for shift, _ in common})
    words = "1 shift and its severities" if shifts == 1 else f"{shifts} shifts and their severities"
    over = f" (mean over {words})" if common else ""
    name = "the deterministic network" if base else label(method)
    return Finding(
        "opening",
        f"On {_data(where)}{over} the negative log-likelihood (NLL, lower is better) of {name} is "
        f"{level.mean:.3f}{spread} {seeds}.",
    )


def _entry(method: Mapping[str, Any], difference: Stat) -> str:
    assert difference.mean is not None
    if difference.error is None:
        return f"{label(method)} ({signed(difference.mean)})"
    # seeds that all gave the same difference have no meaningful number of standard errors
    ratio = (
        abs(difference.mean) / difference.error if difference.error > 1e-9 * abs(difference.mean) else None
    )
    steps = f", {ratio:.1f} s.e." if ratio is not None else ""
    return f"{label(method)} ({signed(difference.mean)} ± {difference.error:.3f}{steps})"


def _compare(results: Results, others: list[dict[str, Any]], where: str, common: list[Cell]) -> list[Finding]:
    groups: dict[str, list[str]] = {"lower": [], "higher": [], "undecided": [], "missing": [], "single": []}
    for method in others:
        difference = stat(paired(results, method, "nll", where, common).values())
        kind = judge(difference)
        if kind == "missing":
            groups[kind].append(label(method))
        else:
            groups["single" if difference.n == 1 else kind].append(_entry(method, difference))
    texts = {
        "lower": "Shown to be lower: {}.",
        "higher": "Shown to be higher: {}.",
        "undecided": "Not shown to differ: {}.",
        "single": "One seed only, so there is no standard error and no claim is made: {}.",
        "missing": "Without a finite paired value: {}.",
    }
    return [Finding(kind, text.format(joined(groups[kind]))) for kind, text in texts.items() if groups[kind]]


def _clean_words(results: Results, others: list[dict[str, Any]], common: list[Cell]) -> list[Finding]:
    kinds: dict[str, list[str]] = {"lower": [], "higher": []}
    for method in others:
        difference = stat(paired(results, method, "nll", "clean", common).values())
        kinds.setdefault(judge(difference), []).append(label(method))
    parts = [f"{kind} for {joined(kinds[kind])}" for kind in ("lower", "higher") if kinds[kind]]
    rest = len(kinds.get("undecided", []))
    if not parts:
        words = "On clean test data no method's NLL is shown to differ."
        return [Finding("clean", words)] if rest else []
    tail = (
        f", and undecided for the other {rest}"
        if rest > 1
        else ", and undecided for the other"
        if rest
        else ""
    )
    return [Finding("clean", f"On clean test data, by the same rule, NLL is {' and '.join(parts)}{tail}.")]


def _signs(results: Results) -> list[Finding]:
    """What ``sb.fit`` found of the runs, by method."""
    entries = []
    for method in results.methods:
        kinds = Counter(str(kind) for run in method["runs"] for kind in run.get("findings") or [])
        runs = len(method["runs"])
        words = [
            kind + (f" in {count} of {runs} runs" if count < runs else "") for kind, count in kinds.items()
        ]
        if words:
            entries.append(f"{label(method)} ({', '.join(words)})")
    return (
        [Finding("sign", f"May be worse than they could be, sb.fit says: {joined(entries)}.")]
        if entries
        else []
    )


def _cautions(results: Results, others: list[dict[str, Any]]) -> list[Finding]:
    n = min(len(method["runs"]) for method in [*others, *([results.baseline] if results.baseline else [])])
    if n < 2:
        return [Finding("caution", "Run more seeds to get standard errors.")]
    many = f" {len(others)} methods are compared at once, without a correction." if len(others) > 1 else ""
    shown = f"Shown: beyond two standard errors of the paired difference, {margin(n):.1f} with {n} seeds (Student's t)."
    return [Finding("caution", shown + many)]
