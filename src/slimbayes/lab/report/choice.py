"""Which method to take: one rule over paired differences to the plain network, and the sentence that says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from slimbayes.lab.report.results import Results, label, number
from slimbayes.lab.report.statistics import (
    Cell,
    Stat,
    cells,
    findings,
    joined,
    judge,
    margin,
    signed,
    stat,
    value,
)

Run = Mapping[str, Any]
Method = dict[str, Any]
Score = Callable[[Run], float | None]
_ENSEMBLE = "DeepEnsemble"
# Before anything is measured, by the figures of docs/defaults.md; README and docs/choosing.md have the same sentence.
ADVICE = (
    "Start with Rank1: on unlike data and networks its defaults had the lowest NLL of all that train one "
    "network, by the mean over classes and the median over real targets, and under shift only methods that "
    "are worse than the plain network on clean rows had less. A step computes every row four times: where "
    "that is too much, take KTied, which does so once, gains less and is seldom worse; where five networks "
    "are no obstacle, an ensemble of five; and compare with the plain network on rows that you have held "
    "out."
)


@dataclass(frozen=True)
class Choice:
    """The answer to "which should I take?": its sentence, the rule in words, and the method, if there is one."""

    text: str
    rule: str = ""
    method: str | None = None


class _Difference(NamedTuple):
    """A method against the plain network on the rows that it is chosen on: clean, and over all."""

    method: Method
    clean: Stat
    both: Stat


def verdict(results: Results | Mapping[str, Any]) -> list[str]:
    """Which method to take and why, what the numbers show, and what to take elsewhere, in sentences of plain text."""
    results = Results.of(results)
    chosen = choose(results)
    shown = (finding.text for finding in findings(results))
    return [chosen.text, *filter(None, [chosen.rule]), *shown, f"On other data: {ADVICE}"]


def choose(results: Results | Mapping[str, Any]) -> Choice:
    """The cheapest of the methods that no other one beats, if one is shown to beat the plain network.

    A method counts if its clean NLL is not shown to be higher than the plain network's, and the mean of its clean and
    shifted NLL is shown to be lower, both paired by seed and beyond two standard errors (``statistics.margin``).

    >>> def runs(nll):
    ...     return [{"seed": s, "clean": {"nll": nll + 0.01 * s * s}} for s in range(3)]
    >>> choose({"format": "slimbayes-results", "version": 1, "task": "classification", "methods": [
    ...     {"name": "Deterministic", "runs": runs(0.5)}, {"name": "Rank1", "runs": runs(0.4)}]}).text
    'Take Rank1: it lowers NLL by 0.100 ± 0.000 (clean test data; 3 seeds, paired with the plain network).'
    """
    results = Results.of(results)
    base = results.baseline
    if len(results.methods) == 1:
        return Choice(f"Nothing to choose from: {label(results.methods[0])} was run alone.")
    if base is None:
        return Choice(
            "Nothing is recommended: the plain network (Deterministic) was not run beside the others."
        )
    others = [method for method in results.methods if method is not base]
    common = cells(results)
    held = _held_out(results, common)
    found = [_difference(base, method, common, held) for method in others]
    known = [one for one in found if one.both.mean is not None]
    if not known:
        return Choice("Nothing is recommended: no method has a finite NLL beside the plain network's.")
    several = [one for one in known if one.both.n > 1]
    if not several:
        lowest = min(known, key=lambda one: one.both.mean or 0.0)
        return Choice(
            f"Nothing is recommended: one seed per method has no standard error (lowest: {_entry(lowest)}). Run more."
        )
    rule = _rule(common, held, _seeds(several))
    lower = [one for one in several if judge(one.both) == "lower"]
    better = [one for one in lower if judge(one.clean) != "higher"]
    if len(better) < len(lower):
        worse = joined([label(one.method) for one in lower if one not in better])
        rule += f" Left out for a higher clean NLL: {worse}."
    if not better:
        return Choice(_nothing(several), rule)
    chosen, beaten = _cheapest(base, better, _score(common, held))
    if beaten is not None:
        rule += f" {label(beaten.method)} is within error of {label(chosen.method)} and costs more."
    beside = _beside(base, chosen, better, others, _score(common, held))
    return Choice(_take(base, chosen, beside, common), rule, str(chosen.method["name"]))


def _held_out(results: Results, common: list[Cell]) -> bool:
    """Whether every run was measured on validation rows too, under the same shifts."""
    for run in (run for method in results.methods for run in method["runs"]):
        part = run.get("validation") or {}
        shifted = part.get("shifted") or {}
        if not part.get("clean") or any(level not in shifted.get(shift, {}) for shift, level in common):
            return False
    return True


def _score(common: list[Cell], held: bool) -> Score:
    """The mean of clean and shifted NLL of a run, or the clean NLL where nothing was shifted."""

    def score(run: Run) -> float | None:
        part = run["validation"] if held else run
        places = ("clean", "shifted") if common else ("clean",)
        return stat(value(part, "nll", where, common) for where in places).mean

    return score


def _paired(base: Method, method: Method, score: Score) -> Stat:
    """A method's scores minus another's, over the seeds that both have."""
    theirs = {run["seed"]: score(run) for run in base["runs"]}
    found = [(score(run), theirs[run["seed"]]) for run in method["runs"] if run["seed"] in theirs]
    return stat(None if a is None or b is None else a - b for a, b in found)


def _difference(base: Method, method: Method, common: list[Cell], held: bool) -> _Difference:
    return _Difference(
        method, _paired(base, method, _score([], held)), _paired(base, method, _score(common, held))
    )


def _cheapest(
    base: Method, better: list[_Difference], score: Score
) -> tuple[_Difference, _Difference | None]:
    """The cheapest of those that the lowest does not beat, and the lowest if that is another."""
    lowest = min(better, key=lambda one: one.both.mean or 0.0)
    level = [
        one
        for one in better
        if one is lowest or judge(_paired(lowest.method, one.method, score)) == "undecided"
    ]

    def cost(one: _Difference) -> float:
        training, prediction = _costs(base, one.method)
        return float("inf") if training is None or prediction is None else training * prediction

    chosen = min(level, key=lambda one: (cost(one), one is not lowest))  # the lowest where no cost is known
    return chosen, None if chosen is lowest else lowest


def _beside(
    base: Method, chosen: _Difference, better: list[_Difference], others: list[Method], score: Score
) -> list[tuple[str, Method]]:
    """What the sentence names too: beside one network the ensemble, beside the ensemble the best single network."""
    single = [one for one in better if one.method["name"] != _ENSEMBLE]
    if chosen not in single:
        return [("of single networks ", _cheapest(base, single, score)[0].method)] if single else []
    return [("", method) for method in others if method["name"] == _ENSEMBLE]


def _costs(base: Method, method: Method) -> tuple[float | None, float | None]:
    """Times of training and of prediction over the plain network's; medians, for a first run warms up."""

    def ratio(key: str) -> float | None:
        mine, plain = ([number(run.get(key)) or 0.0 for run in m["runs"]] for m in (method, base))
        return median(mine) / median(plain) if min(mine) > 0 and min(plain) > 0 else None

    return ratio("train_seconds"), ratio("predict_seconds")


def _take(base: Method, chosen: _Difference, beside: list[tuple[str, Method]], common: list[Cell]) -> str:
    """The sentence; its figures are of the test rows, whatever the choice was made on."""
    test = _difference(base, chosen.method, common, held=False)
    where = "clean test data"
    if common:
        shifted = _paired(base, chosen.method, lambda run: value(run, "nll", "shifted", common))
        where = f"mean of clean, {_signed(test.clean)}, and shifted, {_signed(shifted)}"
    text = (
        f"Take {label(chosen.method)}: it {_lowers(test.both)} "
        f"({where}; {_seeds([test])}, paired with the plain network){_price(base, chosen.method, ', costs ')}"
    )
    for what, one in beside:
        its = _difference(base, one, common, held=False).both
        if its.mean is not None:
            text += f"; {what}{label(one)} {_lowers(its, 'it')}{_price(base, one, ' at ')}"
    return text + "."


def _nothing(several: list[_Difference]) -> str:
    """What to say where no method is shown to be better; the closest has the lowest upper bound."""

    def bound(one: _Difference) -> float:
        return (one.both.mean or 0.0) + margin(one.both.n) * (one.both.error or 0.0)

    closest = min(several, key=bound)
    clean = ", with a higher clean NLL" if judge(closest.clean) == "higher" else ""
    return (
        f"Nothing beats the plain network here by two standard errors (closest: {_entry(closest)}{clean}; "
        f"{_seeds(several)})."
    )


def _entry(one: _Difference) -> str:
    assert one.both.mean is not None
    error = f" ± {one.both.error:.3f}" if one.both.error is not None else ""
    return f"{label(one.method)}, {signed(one.both.mean)}{error}"


def _signed(difference: Stat) -> str:
    return "unknown" if difference.mean is None else signed(difference.mean)


def _lowers(difference: Stat, what: str = "NLL") -> str:
    if difference.mean is None:
        return f"has no finite {what}"
    error = f" ± {difference.error:.3f}" if difference.error is not None else ""
    verb = "lowers" if difference.mean < 0 else "raises"
    return f"{verb} {what} by {abs(difference.mean):.3f}{error}"


def _price(base: Method, method: Method, before: str) -> str:
    """What a method costs in times of the plain network; nothing where that was not measured."""
    training, prediction = _costs(base, method)
    if training is None or prediction is None:
        return ""
    return f"{before}{_times(training)} the training and {_times(prediction)} the prediction"


def _times(ratio: float) -> str:
    return f"{ratio:.2g} times" if ratio < 10 else f"{ratio:.0f} times"


def _seeds(found: list[_Difference]) -> str:
    counts = sorted({one.both.n for one in found})
    many = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{many} seed{'s' if counts != [1] else ''}"


def _rule(common: list[Cell], held: bool, seeds: str) -> str:
    """How a method is chosen, and on which rows, in words."""
    least = int(seeds.split()[0])
    shifts = len({shift for shift, _ in common})
    what = f"the mean of clean and shifted NLL ({shifts} shift{'s' if shifts > 1 else ''}, all severities)"
    clean = ", with a clean NLL that is not shown to be higher" if common else ""
    rows = (
        "Chosen on validation rows, held out of the training data; the figures are of the test rows."
        if held
        else "Chosen on the same test rows that the figures are of, which flatters them a little; "
        "with --validation 0.2 it is chosen on held-out rows of the training data."
    )
    return (
        f"The rule: {what if common else 'clean NLL'} has to be lower than the plain network's with the same seed by "
        f"two standard errors ({margin(least):.1f} with {least} seeds, Student's t){clean}. The lowest is taken, or of "
        f"those within error of it the cheapest in training × prediction time. {rows}"
    )
