"""The EMP paper's tables and figures on ImageNet and ImageNet-C, from its networks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from slimbayes.lab.data.corruptions import CORRUPTIONS
from slimbayes.lab.experiments import emp_imagenet as emp
from slimbayes.lab.experiments import imagenet
from slimbayes.lab.experiments.catalogue import find
from slimbayes.lab.experiments.emp_figures import BINS, FEWEST
from slimbayes.lab.experiments.emp_recipes import INIT_NOISE
from slimbayes.lab.experiments.emp_words import start_of
from slimbayes.lab.experiments.imagenet_data import SIZES, check_scale
from slimbayes.lab.experiments.outcome import Outcome, Table, check, curve
from slimbayes.lab.experiments.runner import Paper, Runner
from slimbayes.lab.experiments.session import Session

TITLE = "ImageNet, ResNet-18"
ALL = ("EMP (BN+out)", "EMP (BN)", "ECMP (BN+out)", "ECMP (BN)", "Dropout", "Vanilla")
MAIN = ("EMP (BN+out)", "ECMP (BN+out)", "Dropout", "Vanilla")
_QUALITY = ("top5", "accuracy", "ece_percent", "mce_percent")
Found = list[tuple[emp.Job, dict[str, Any]]]


def facts(session: Session, setting: str, jobs: Sequence[emp.Job]) -> dict[str, Any]:
    """What was run, as plain values."""
    labels = dict.fromkeys(job.label for job in jobs)
    return {
        **dataclasses.asdict(emp.RUNS[session.scale]),
        **dataclasses.asdict(SIZES[session.scale]),
        "methods": {label: emp.methods()[label] for label in labels},
        "seeds": sorted({job.seed for job in jobs}),
        "processes": session.processes.number,
    }


def deviations(session: Session, setting: str, jobs: Sequence[emp.Job]) -> list[str]:
    """Where a run at this scale differs from the paper's, in words."""
    said = [
        *imagenet.words(session, emp.RUNS[session.scale].network),
        "an assignment is drawn for each batch and process; running statistics of norms are shared by the components; "
        "probabilities are averaged; images are tested at their centre.",
        start_of(INIT_NOISE),
    ]
    return [f"{setting}: {text}" for text in said]


def _found(session: Session, labels: Sequence[str], what: Callable[..., dict[str, Any]]) -> Found:
    """What was measured of every network of these rows."""
    check_scale(session)
    return [(job, what(session, emp.train(session, job))) for job in emp.jobs(session, labels)]


def table4(session: Session, setting: str) -> Outcome:
    """Table 4: overhead, accuracy and calibration of all methods."""
    outcome = Outcome()
    table = Table("imagenet", TITLE, ("overhead_percent", *_QUALITY, "nll"))
    for job, found in _found(session, ALL, emp.by_samples):
        last = found[str(emp.RUNS[session.scale].samples[-1])]
        overhead = 100 * emp.overhead(session, job.label)
        table.add(job.label, {**last, "overhead_percent": overhead}, last["errors"])
    outcome.tables.append(table)
    if session.scale != "smoke":
        outcome.checks += _overhead_checks(table)
    outcome.checks += _quality_checks(table)
    return outcome


def _overhead_checks(table: Table) -> list[dict[str, Any]]:
    """To the printed three digits."""
    printed = find("emp/table4").table("imagenet")
    assert printed is not None
    checks = []
    for label in ALL:
        value, wanted = table.mean(label, "overhead_percent"), printed.value(label, "overhead_percent")
        words = f"{label}: overhead in % as printed"
        checks.append(check(words, float(f"{value:.3g}") == wanted, value, f"{wanted:g}"))
    return checks


def _quality_checks(table: Table) -> list[dict[str, Any]]:
    """What the paper says of the table."""
    checks = []
    for label in ("EMP (BN+out)", "ECMP (BN+out)"):
        for other in ("Dropout", "Vanilla"):
            gap = table.mean(label, "ece_percent") - table.mean(other, "ece_percent")
            checks.append(check(f"{TITLE}: ECE of {label} below that of {other}", gap < 0, gap, "< 0"))
            gain = table.mean(label, "accuracy") - table.mean(other, "accuracy")
            checks.append(check(f"{TITLE}: {label} more accurate than {other}", gain > 0, gain, "> 0"))
    return checks


def calibration(labels: Sequence[str]) -> Callable[[Session, str], Outcome]:
    """Figures 4 and 7: accuracy against confidence, of bins with more than five images."""
    return functools.partial(_calibration, labels)


def _calibration(labels: Sequence[str], session: Session, setting: str) -> Outcome:
    outcome = Outcome()
    lines = []
    table = Table("imagenet", TITLE, ("ece_percent", "mce_percent"))
    for job, found in _found(session, labels, emp.by_samples):
        last = found[str(emp.RUNS[session.scale].samples[-1])]
        table.add(job.label, last, {})
        bins = last["bins"]
        rows = zip(bins["confidence"], bins["accuracy"], bins["count"], strict=True)
        points = [(sure, right) for sure, right, count in rows if count > FEWEST]
        seed = f", seed {job.seed}" if (session.seeds or 1) > 1 else ""
        lines.append((f"{job.label}{seed}", [x for x, _ in points], [[y for _, y in points]]))
    lines.append(("as sure as right", [0.0, 1.0], [[0.0, 1.0]]))
    outcome.tables.append(table)
    title = f"{TITLE}: accuracy against confidence, {BINS} bins"
    outcome.curves.append(curve("imagenet-calibration", title, "confidence", "accuracy", lines))
    return outcome


def corruption(number: int, labels: Sequence[str]) -> Callable[[Session, str], Outcome]:
    """Tables 5, 7 and 8: errors on corrupted images against the vanilla network's of the same seed."""
    return functools.partial(_corruption, number, labels)


def _corruption(number: int, labels: Sequence[str], session: Session, setting: str) -> Outcome:
    relative = number == 8
    printed = find(f"emp/table{number}").table("imagenet-c")
    assert printed is not None
    mean = "rmce" if relative else "mce"
    table = Table(printed.name, printed.title, (mean, *CORRUPTIONS))
    found = _found(session, labels, emp.corruption_rates)
    vanilla = {job.seed: rates for job, rates in found if job.label == "Vanilla"}
    undefined: set[str] = set()
    for job, rates in found:
        cells = errors_against(rates, vanilla[job.seed], relative)
        missing = set(SIZES[session.scale].types) - set(cells)
        undefined |= missing
        if cells and not missing:
            cells[mean] = sum(cells.values()) / len(cells)
        if cells:
            table.add(job.label, cells, {})
    outcome = Outcome(tables=[table], deviations=[imagenet.CORRUPTED])
    if undefined:
        outcome.deviations.append(
            f"Not defined, for corruption adds nothing to the vanilla network's error: {', '.join(sorted(undefined))}."
        )
    elif session.scale != "smoke":
        best = table.mean("EMP (BN+out)", mean)
        others = {label: table.mean(label, mean) - best for label in labels if label != "EMP (BN+out)"}
        closest = min(others.values())
        words = f"{printed.title}: the mean of EMP (BN+out) is the lowest; distance to the next"
        outcome.checks.append(check(words, closest > 0, closest, "> 0"))
    return outcome


def errors_against(rates: dict[str, Any], vanilla: dict[str, Any], relative: bool) -> dict[str, float]:
    """CE_c = 100 Σ_s E_cs / Σ_s B_cs, or with ``relative`` 100 (Σ_s E_cs − S E) / (Σ_s B_cs − S B), by type c.

    Types where the divisor is not positive have none.

    >>> errors_against({"clean": 0.1, "fog": [0.2, 0.4]}, {"clean": 0.2, "fog": [0.4, 0.4]}, relative=True)
    {'fog': 100.0}
    """
    found = {}
    for name, ours in rates.items():
        if name == "clean":
            continue
        theirs, count = vanilla[name], len(ours)
        above = sum(ours) - count * rates["clean"] * relative
        base = sum(theirs) - count * vanilla["clean"] * relative
        if base > 1e-9:
            found[name] = round(100 * above / base, 9)
    return found


def figure6(session: Session, setting: str) -> Outcome:
    """Figure 6: ECE against the number of samples."""
    found, outcome = _found(session, MAIN[:3], emp.by_samples), Outcome()
    samples = emp.RUNS[session.scale].samples
    columns = tuple(map(str, samples))
    table = Table("imagenet", f"{TITLE}: ECE in % by number of samples", columns)
    for job, by in found:
        label = job.label.removesuffix(" (BN+out)")
        table.add(label, {count: by[count]["ece_percent"] for count in columns}, {})
    outcome.tables.append(table)
    lines = [(label, list(samples), [[table.mean(label, c) for c in columns]]) for label in table.rows]
    outcome.curves.append(curve("imagenet-samples", table.title, "samples", "ECE %", lines, log_x=True))
    return outcome


def samples_table(label: str) -> Callable[[Session, str], Outcome]:
    """Tables 9 to 11: accuracy and calibration of one method by the number of samples, and the vanilla network."""
    return functools.partial(_samples_table, label)


def _samples_table(label: str, session: Session, setting: str) -> Outcome:
    table = Table("imagenet", TITLE, _QUALITY)
    for job, by in _found(session, (label, "Vanilla"), emp.by_samples):
        for count, values in by.items():
            row = "Vanilla" if job.label == "Vanilla" else f"S = {count}"
            if row != "Vanilla" or count == "1":
                table.add(row, values, values["errors"])
    return Outcome(tables=[table])


def _order(job: emp.Job) -> int:
    return -1  # before everything else


PAPER = Paper(emp.measure, facts, deviations, _order, (imagenet.SETTING,))


def _runner(
    report: Callable[[Session, str], Outcome], labels: Sequence[str], corrupted: bool = False
) -> Runner:
    plan = functools.partial(emp.jobs, labels=labels, corrupted=corrupted)
    return Runner(PAPER, report, (plan,), several=(imagenet.SETTING,))


RUNNERS: dict[str, Runner] = {
    "emp/table4": _runner(table4, ALL),
    "emp/figure4": _runner(calibration(MAIN), MAIN),
    "emp/figure7": _runner(calibration(ALL), ALL),
    "emp/table5": _runner(corruption(5, MAIN), MAIN, corrupted=True),
    "emp/table7": _runner(corruption(7, ALL), ALL, corrupted=True),
    "emp/table8": _runner(corruption(8, ALL), ALL, corrupted=True),
    # Entries that have a setting of CIFAR-100 too:
    "emp/figure6": _runner(figure6, MAIN[:3]),
    "emp/table9": _runner(samples_table("EMP (BN+out)"), ("EMP (BN+out)", "Vanilla")),
    "emp/table10": _runner(samples_table("ECMP (BN+out)"), ("ECMP (BN+out)", "Vanilla")),
    "emp/table11": _runner(samples_table("Dropout"), ("Dropout", "Vanilla")),
}
