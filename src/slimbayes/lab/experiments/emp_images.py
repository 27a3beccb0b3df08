"""The EMP paper on images: CIFAR-100 (Tables 6, 9 to 11, Figures 5, 6), CIFAR-10 with corruptions (Tables 5, 7, 8)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from slimbayes.lab.experiments import emp_checks as checks
from slimbayes.lab.experiments.catalogue import find
from slimbayes.lab.experiments.emp_extras import STACKED, gains, stacked, words_of_stacking
from slimbayes.lab.experiments.emp_figures import FEWEST
from slimbayes.lab.experiments.emp_measures import by_samples, corruption_rates
from slimbayes.lab.experiments.emp_recipes import EXTRAS, SETTINGS, WAYS, jobs_of, prepare, size_of, train
from slimbayes.lab.experiments.emp_words import deviations, title
from slimbayes.lab.experiments.images import Job
from slimbayes.lab.experiments.outcome import Outcome, Table, curve, mean
from slimbayes.lab.experiments.runner import Paper, Runner
from slimbayes.lab.experiments.session import Session
from slimbayes.metrics import corruption_errors, relative_corruption_errors

QUALITY = ("top5", "accuracy", "ece_percent", "mce_percent")


def measure(session: Session, job: Job) -> float:
    """Train a network and measure what the reports will ask of it; returns the seconds of training."""
    found = train(session, job)
    if job.setting == "cifar10-c":
        corruption_rates(session, found, job)
    else:
        by_samples(session, found, job)
    if job.setting == EXTRAS:
        by_samples(session, found, job, "validation")
    if (job.setting, job.label) == (EXTRAS, "EMP"):
        stacked(session, found, job)
    return found.seconds


def facts(session: Session, setting: str, jobs: Sequence[Job]) -> dict[str, Any]:
    """What was run of a setting, as plain values."""
    ways = {job.label: WAYS[setting][job.label] for job in jobs}
    return {
        **dataclasses.asdict(size_of(setting, session.scale)),
        "seeds": sorted({job.seed for job in jobs}),
        "methods": {label: [way.method, *filter(None, [way.rest])] for label, way in ways.items()},
    }


def _order(job: Job) -> int:
    return SETTINGS.index(job.setting)


IMAGES = Paper(measure, facts, deviations, _order, SETTINGS)


def found_of(
    session: Session, setting: str, labels: Sequence[str], split: str = "test"
) -> dict[str, list[dict[str, Any]]]:
    """What was measured of the rows' networks, seed by seed: figures by number of draws."""
    found: dict[str, list[dict[str, Any]]] = {label: [] for label in labels}
    for job in jobs_of(session, setting):
        if job.label in found:
            found[job.label].append(by_samples(session, train(session, job), job, split))
    return found


def _largest(figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of the largest number of draws."""
    best: dict[str, Any] = figures[max(figures, key=int)]
    return best


def main_table(session: Session, setting: str) -> Table:
    """Table 6: every method with all its draws."""
    table = Table(setting, title(session, setting), ("overhead_percent", *QUALITY, "nll", "parameters"))
    size, data = size_of(setting, session.scale), prepare(session, setting).data
    base = checks.parameters_of(size.network, "Vanilla", data.shape, data.num_outputs, setting)
    for label, seeds in found_of(session, setting, list(WAYS[setting])).items():
        number = checks.parameters_of(size.network, label, data.shape, data.num_outputs, setting)
        for figures in map(_largest, seeds):
            counts = {"parameters": float(number), "overhead_percent": 100 * (number / base - 1)}
            table.add(label, {**figures, **counts}, figures["errors"])
    return table


def table6(session: Session, setting: str) -> Outcome:
    """Table 6."""
    outcome, size = Outcome(), size_of(setting, session.scale)
    table = main_table(session, setting)
    outcome.tables.append(table)
    if setting == "cifar100":  # PyramidNet on a shortened schedule has one seed, which tells no order
        outcome.checks += checks.parameter_checks() + checks.order_checks(table)
    outcome.checks += checks.accuracy_checks(table, size.samples[-1])
    return outcome


def figure5(session: Session, setting: str) -> Outcome:
    """Figure 5: accuracy against confidence, in bins that every seed fills."""
    outcome = Outcome()
    table = main_table(session, setting).select("ece_percent", "mce_percent")
    outcome.tables.append(table)
    lines: list[tuple[str, Sequence[float], Sequence[Sequence[float]]]] = [
        ("Perfectly calibrated", [0.0, 1.0], [[0.0, 1.0]])
    ]
    for label, seeds in found_of(session, setting, list(WAYS[setting])).items():
        bins = [_largest(figures)["bins"] for figures in seeds]
        places = [i for i in range(len(bins[0]["count"])) if all(one["count"][i] > FEWEST for one in bins)]
        xs = [mean([one["confidence"][i] for one in bins]) for i in places]
        lines.append((label, xs, [[one["accuracy"][i] for i in places] for one in bins]))
    words = f"{title(session, setting)}: calibration"
    outcome.curves.append(curve(setting, words, "confidence", "accuracy", lines))
    outcome.checks += checks.order_checks(table)
    return outcome


def figure6(session: Session, setting: str) -> Outcome:
    """Figure 6: the calibration error by number of draws."""
    outcome, counts = Outcome(), size_of(setting, session.scale).samples
    table = Table(setting, f"{title(session, setting)}: ECE in % by number of draws", tuple(map(str, counts)))
    lines = []
    for label, seeds in found_of(session, setting, list(WAYS[setting])).items():
        ece = [{count: one["ece_percent"] for count, one in figures.items()} for figures in seeds]
        for one in ece:
            table.add(label, one, {})
        drawn = [[one.get(str(count), one["1"]) for count in counts] for one in ece]
        lines.append((label, list(map(float, counts)), drawn))
    outcome.tables.append(table)
    words = f"{title(session, setting)}: calibration error by number of draws"
    outcome.curves.append(curve(setting, words, "draws", "ECE %", lines, log_x=True))
    return outcome


def by_draws(label: str, session: Session, setting: str) -> Outcome:
    """Tables 9 to 11: one method by number of draws, and the vanilla network."""
    outcome = Outcome()
    table = Table(setting, f"{title(session, setting)}, {label}", (*QUALITY, "nll"))
    found = found_of(session, setting, (label, "Vanilla"))
    for count in size_of(setting, session.scale).samples:
        for figures in found[label]:
            one = figures[str(count)]
            table.add(f"S = {count}", one, one["errors"])
    for figures in map(_largest, found["Vanilla"]):
        table.add("Vanilla", figures, figures["errors"])
    outcome.tables.append(table)
    if label != "Dropout":
        outcome.checks += checks.samples_checks(table, label)
    return outcome


def corrupted(metric: str, labels: Sequence[str], session: Session, setting: str) -> Outcome:
    """Tables 5, 7 and 8: errors by type of corruption, in percent of the vanilla network's of the same seed."""
    outcome = Outcome()
    rates: dict[int, dict[str, dict[str, Any]]] = {}
    for job in jobs_of(session, setting):
        if job.label in labels:
            found = dict(corruption_rates(session, train(session, job), job))
            rates.setdefault(job.seed, {})[job.label] = found
    types = [name for name in rates[0]["Vanilla"] if name != "clean"]
    what = "error above the clean error" if metric == "rmce" else "error"
    words = f"{title(session, setting)}: {what} by type of corruption, % of the vanilla network's"
    table = Table(setting, words, (metric, *types))
    for seed, rows in rates.items():
        usable = _usable(rows["Vanilla"], types, metric)
        if left := [name for name in types if name not in usable]:
            outcome.deviations.append(
                f"seed {seed}: no error relative to vanilla's on {', '.join(left)}, which do not raise it."
            )
        for label in labels:
            percent = _percent(rows[label], rows["Vanilla"], usable, metric)
            whole = {metric: mean(list(percent.values()))} if percent else {}
            table.add(label, {**whole, **percent}, {})
    outcome.tables.append(table)
    outcome.checks += checks.robust_checks(table, metric)
    return outcome


def _usable(vanilla: dict[str, Any], types: Sequence[str], metric: str) -> list[str]:
    """Types on which vanilla's error, or what corruption adds to it, is above 0."""
    least = vanilla["clean"] if metric == "rmce" else 0.0
    return [name for name in types if mean(vanilla[name]) > least]


def _percent(
    ours: dict[str, Any], vanilla: dict[str, Any], types: Sequence[str], metric: str
) -> dict[str, float]:
    if not types:
        return {}
    mine, base = ({name: rates[name] for name in types} for rates in (ours, vanilla))
    if metric == "rmce":
        return relative_corruption_errors(mine, ours["clean"], base, vanilla["clean"])
    return corruption_errors(mine, base)


def _jobs(setting: str, labels: Sequence[str], session: Session) -> Sequence[Job]:
    return [job for job in jobs_of(session, setting) if job.label in labels]


def _runner(report: Callable[..., Outcome], *settings: str, labels: Sequence[str] | None = None) -> Runner:
    plans = tuple(functools.partial(_jobs, s, tuple(WAYS[s] if labels is None else labels)) for s in settings)
    return Runner(IMAGES, report, plans)


def _corruptions(number: int, metric: str) -> Runner:
    printed = find(f"emp/table{number}").printed[0]
    labels = tuple(printed.rows)
    return _runner(functools.partial(corrupted, metric, labels), "cifar10-c", labels=labels)


def _by_draws(label: str) -> Runner:
    return _runner(functools.partial(by_draws, label), "cifar100", labels=(label, "Vanilla"))


def extras(session: Session, setting: str) -> Outcome:
    """What helps EMP: every row, and what it adds to the plain one of the same seed."""
    outcome = Outcome()
    table = main_table(session, setting)
    for job in jobs_of(session, setting):
        if job.label == "EMP":
            figures = stacked(session, train(session, job), job)
            shares = {name: table.mean("EMP", name) for name in ("parameters", "overhead_percent")}
            table.add(STACKED, {**figures, **shares}, figures["errors"])
    words = f"{title(session, setting)}: on held-out examples, by which a start is chosen"
    held = Table(f"{setting}-held-out", words, ("accuracy", "nll", "ece_percent"))
    for label, seeds in found_of(session, setting, list(WAYS[setting]), "validation").items():
        for figures in map(_largest, seeds):
            held.add(label, figures, figures["errors"])
    outcome.tables += [table, gains(table), held]
    outcome.deviations.append(words_of_stacking(session, setting))
    return outcome


RUNNERS: dict[str, Runner] = {
    "emp/table5": _corruptions(5, "mce"),
    "emp/table7": _corruptions(7, "mce"),
    "emp/table8": _corruptions(8, "rmce"),
    "emp/table6": _runner(table6, "cifar100", "cifar100-pyramidnet"),
    "emp/figure5": _runner(figure5, "cifar100"),
    "emp/figure6": _runner(figure6, "cifar100"),
    "emp/table9": _by_draws("EMP"),
    "emp/table10": _by_draws("ECMP"),
    "emp/table11": _by_draws("Dropout"),
    "emp/extras": _runner(extras, EXTRAS),
}
