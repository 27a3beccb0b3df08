"""The rank-1 paper on CIFAR: Tables 2, 3 and 8, the ablations, severity curves, and the collapse of components."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slimbayes.core.methods import Rank1
from slimbayes.lab.experiments import rank1_checks as checks
from slimbayes.lab.experiments.catalogue import find
from slimbayes.lab.experiments.finished import Unfinished
from slimbayes.lab.experiments.images import Job
from slimbayes.lab.experiments.networks import Trained
from slimbayes.lab.experiments.outcome import Outcome, Table, curve
from slimbayes.lab.experiments.rank1_counts import parameter_checks
from slimbayes.lab.experiments.rank1_curves import BOTH, CLEAN, Corrupted, averaged, beside, by_severity
from slimbayes.lab.experiments.rank1_measures import (
    by_samples,
    clean,
    foreign,
    foreign_images,
    held_out,
    measure,
    on_corrupted,
)
from slimbayes.lab.experiments.rank1_recipes import (
    ABLATIONS,
    BATCH_ENSEMBLE,
    CAUCHY,
    DETERMINISTIC,
    EQUAL,
    GAUSSIAN,
    HEAVY,
    MAIN,
    MORE,
    SETTINGS,
    SHARED,
    SHORT,
    TUNING,
    WIDE,
    epochs_of,
    jobs_of,
    network_of,
    prepare,
    recipe,
    size_of,
    train,
)
from slimbayes.lab.experiments.rank1_settings import NOISY
from slimbayes.lab.experiments.rank1_words import deviations, title
from slimbayes.lab.experiments.runner import Paper, Runner
from slimbayes.lab.experiments.session import Session
from slimbayes.training import predicted_spread
from slimbayes.verbs.method_text import parse_stored

_CORRUPTED = {"c_nll": "NLL under corruption", "c_ece": "ECE under corruption"}
LAST = 0.2  # of the run: the looks from which Figure 5 is drawn


def facts(session: Session, setting: str, jobs: Sequence[Job]) -> dict[str, Any]:
    """What was run of a setting, as plain values."""
    labels = dict.fromkeys(job.label for job in jobs)
    return {
        **dataclasses.asdict(size_of(setting, session.scale)),
        "seeds": sorted({job.seed for job in jobs}),
        "methods": {label: [recipe(session, setting, label).method] for label in labels},
        "epochs": {label: epochs_of(setting, session.scale, label) for label in labels},
    }


def _order(job: Job) -> int:
    """Networks of several components take longest."""
    slow = not job.label.startswith((DETERMINISTIC, "MC dropout"))
    return 2 * SETTINGS.index(job.setting) + (not slow)


CIFAR = Paper(measure, facts, deviations, _order, SETTINGS)


def rows(session: Session, setting: str, labels: Sequence[str], columns: tuple[str, ...]) -> Table:
    """A table of networks with the columns that are wanted; rows that are another's under a new name share it."""
    table = Table(setting, title(session, setting), columns)
    data = prepare(session, setting).data
    for label in labels:
        for job in jobs_of(session, setting, (label,)):
            found = train(session, job)
            figures = clean(session, found, job)
            network = network_of(setting, session.scale, job.label)
            number = checks.parameters_of(setting, job.label, network, data.shape, data.num_outputs)
            values = {**figures, "parameters_m": number / 1e6, "hours": _seconds(found) / 3600}
            if any(name.startswith("c_") for name in columns):
                values |= averaged(on_corrupted(session, found, job))
            if any(name.startswith("auroc") for name in columns):
                values |= foreign(session, found, job)
            values |= _last(found.probes, "spread", "scale")
            if "predicted" in columns and "spread" in values:
                values["predicted"] = _predicted(session, job)
            table.add(label, values, figures["errors"])
    return table


def _seconds(trained: Trained) -> float:
    """Of training, without the looks at the network in between."""
    last = max(trained.probes, key=int, default=None)
    if last is None:
        return trained.seconds
    return float(trained.probes[last]["seconds"]) * trained.steps / int(last)


def _predicted(session: Session, job: Job) -> float:
    """The spread of a job's components at the end of training, as the KL alone would have it."""
    made, prepared = recipe(session, job.setting, job.label), prepare(session, job.setting)
    model = made.build(prepared.data.shape, prepared.data.num_outputs, job.seed)
    return predicted_spread(model, made.training, prepared.num_train)[-1]


def _last(probes: Mapping[str, Mapping[str, float]], *names: str) -> dict[str, float]:
    last = probes[max(probes, key=int)] if probes else {}
    return {name: last[name] for name in names if name in last}


def main_table(entry: str, session: Session, setting: str) -> Outcome:
    """Tables 2 and 3: every method, clean and corrupted, beside the paper's and the reference README's numbers."""
    printed = find(entry).printed
    labels = [job.label for job in jobs_of(session, setting) if job.seed == 0]
    table = rows(session, setting, labels, (*BOTH, "spread", "scale", "parameters_m", "hours"))
    if setting in (EQUAL, WIDE):  # what else is printed stands beside the main setting
        more = _more_samples(session, setting, table)
        found = checks.absolute_checks(more) if setting == WIDE else checks.order_checks(table)
        return Outcome([table.select(*BOTH, "spread", "scale", "parameters_m"), more], checks=found)
    main = table.select(*BOTH, "parameters_m")
    outcome = Outcome([main], checks=[*parameter_checks(entry), *checks.order_checks(table)])
    outcome.tables += beside(table, printed[1:])
    if any(other.name == "hours" for other in printed):
        outcome.deviations.append("hours are those of networks of which several may have shared the GPU.")
    return outcome


def _more_samples(session: Session, setting: str, once: Table) -> Table:
    """The rank-1 Gaussian's figures on clean images with one sample per component, and with more."""
    table = Table(f"{setting}-samples", f"{once.title}, samples per component in evaluation", CLEAN)
    for job in jobs_of(session, setting, (GAUSSIAN,)):
        found = train(session, job)
        for count in by_samples(session):
            figures = clean(session, found, job, count)
            table.add(f"{GAUSSIAN}, S = {count}", figures, figures["errors"])
    return table


def table8(session: Session, setting: str) -> Outcome:
    """Table 8: the rank-1 Gaussian by samples in evaluation, and the ensembles."""
    table = Table(setting, f"{title(session, setting)}, samples per component in evaluation", BOTH)
    labels = ("1 sample", "4 samples", "25 samples")
    gaps: list[str] = []
    for job in jobs_of(session, setting, (GAUSSIAN,)):
        found = train(session, job)
        for label, count in zip(labels, by_samples(session), strict=True):
            try:
                figures = clean(session, found, job, count)
                values = {**figures, **averaged(on_corrupted(session, found, job, count))}
            except Unfinished as error:  # of a row of samples nothing else depends
                gaps.append(f"{error}.")
            else:
                table.add(label, values, figures["errors"])
    ensembles = [label for label in find("rank1/table8").printed[0].rows if label.startswith("Ensemble")]
    for label, row in rows(session, setting, ensembles, BOTH).rows.items():
        table.take(label, row)
    outcome = Outcome([table], deviations=gaps)
    for more in labels[1:]:
        outcome.checks += checks.row_checks(table, more, labels[:1], _CORRUPTED, paired=True)
    return outcome


def ablation(
    labels: Sequence[str], columns: tuple[str, ...], best: Mapping[str, Sequence[str]], ahead: dict[str, str],
    session: Session, setting: str,
) -> Outcome:  # fmt: skip
    """Rows of an ablation, and which of them were to be ahead of which others."""
    table = rows(session, setting, labels, columns)
    found = Outcome([table])
    for row, others in best.items():
        found.checks += checks.row_checks(table, row, others, ahead)
    return found


def figure2(session: Session, setting: str) -> Outcome:
    """Figure 2: distributions over one factor or both, with how far components are apart."""
    ones, both = ("r (outputs)", "s (inputs)"), "both"
    columns = (*BOTH, "spread")
    outcome = ablation((*ones, both), columns, {both: ones}, _CORRUPTED, session, setting)
    table = outcome.tables[0]
    apart, near = min(table.mean(label, "spread") for label in ones), table.mean(both, "spread")
    if near < apart / 2:
        outcome.deviations.append(
            f"the components of {both!r} have come together (spread {near:.2g}), as those of no other row have "
            f"({apart:.2g} or more), where a point factor has no KL: on this schedule the rows differ in that, too. "
            f"rank1/collapse has ways to keep them apart."
        )
    return outcome


_NOISY = tuple(f"p = {rate:g}" for rate in NOISY)


def first_scales(session: Session, setting: str) -> Outcome:
    """Figure 5 of arXiv v1: rates at which the factors' noise begins, the setting's own and larger ones."""
    own = parse_stored(recipe(session, setting, GAUSSIAN).method)
    assert isinstance(own, Rank1)
    first = f"p = {own.dropout_rate:g}"
    ahead = {"nll": "NLL", "accuracy": "accuracy"}
    return ablation((first, *_NOISY), CLEAN, {first: _NOISY}, ahead, session, setting)


def severities(statistic: str, session: Session, setting: str) -> Outcome:
    """Figures 7, 10 and 11: every metric by severity, the mean or the median over types."""
    found: dict[str, list[Corrupted]] = {}
    for job in jobs_of(session, setting):
        found.setdefault(job.label, []).append(on_corrupted(session, train(session, job), job))
    return by_severity(setting, title(session, setting), statistic, found)


def figure4(session: Session, setting: str) -> Outcome:
    """Figure 4: the mixture's NLL and its members', while they train on one likelihood or the other."""
    labels = ("Average", "Mixture")
    outcome = ablation(labels, CLEAN, {"Average": ("Mixture",)}, {"nll": "NLL"}, session, setting)
    lines = []
    for label in labels:
        for what, name in (("nll", "mixture"), ("member_nll", "members")):
            lines.append(_line(session, setting, label, what, f"{label}, {name}"))
    words = f"{title(session, setting)}: NLL on test images while training"
    outcome.curves.append(curve(setting, words, "step", "NLL", lines, log_y=True))
    return outcome


Line = tuple[str, Sequence[float], Sequence[Sequence[float]]]


def _line(session: Session, setting: str, label: str, what: str, name: str) -> Line:
    """Something that was seen of a row's networks while they trained, by step."""
    steps: list[float] = []
    ys = []
    for job in jobs_of(session, setting, (label,)):
        probes = train(session, job).probes
        steps = sorted(map(float, probes))
        ys.append([probes[str(int(step))][what] for step in steps])
    return name, steps, ys


def figure5(session: Session, setting: str) -> Outcome:
    """Figure 5: disagreement of members against accuracy and NLL, over the last looks at each network."""
    labels = (GAUSSIAN, BATCH_ENSEMBLE)
    table = rows(session, setting, labels, ("disagreement", "accuracy", "nll"))
    outcome = Outcome([table], checks=checks.disagreement_checks(table))
    for what in ("accuracy", "nll"):
        lines: list[Line] = []
        for label in labels:
            for job in jobs_of(session, setting, (label,)):
                probes = train(session, job).probes
                late = [p for step, p in probes.items() if int(step) > (1 - LAST) * max(map(int, probes))]
                late.sort(key=lambda p: p[what])
                name = f"{label}, seed {job.seed}"
                lines.append((name, [p[what] for p in late], [[p["disagreement"] for p in late]]))
        words = f"{title(session, setting)}: disagreement against {what} at the end of training"
        outcome.curves.append(curve(f"{setting}-{what}", words, what, "disagreement", lines))
    return outcome


COLLAPSE = (
    "KL summed", "KL averaged", "KL of the mixture", "KL from 40 %", "KL by 40 %", "KL at once", CAUCHY, BATCH_ENSEMBLE,
    DETERMINISTIC,
)  # fmt: skip


def collapse(session: Session, setting: str) -> Outcome:
    """Which ways of training keep components apart: their spread while they train, and what it is worth."""
    table = rows(session, setting, COLLAPSE, ("spread", "predicted", "scale", "disagreement", *BOTH))
    lines = [_line(session, setting, label, "spread", label) for label in COLLAPSE if label != DETERMINISTIC]
    words = f"{title(session, setting)}: spread of components while training"
    drawn = curve(setting, words, "step", "spread", lines, log_y=True)
    return Outcome([table], [drawn], checks=checks.collapse_checks(table))


def tuning(session: Session, setting: str) -> Outcome:
    """Every row's figures on held-out images, and which row of each method has the lowest NLL."""
    words = f"{title(session, setting)}: {len(prepare(session, setting).validation):,} images held out"
    table = Table(setting, words, ("nll", "accuracy", "ece", "spread", "scale"))
    for job in jobs_of(session, setting):
        found = train(session, job)
        figures = held_out(session, found, job)
        table.add(job.label, {**figures, **_last(found.probes, "spread", "scale")}, figures["errors"])
    best: dict[str, str] = {}
    for label in sorted(table.rows, key=lambda row: table.mean(row, "nll")):
        best.setdefault(label.split(",")[0], label)
    said = f"of each method the lowest NLL has: {'; '.join(best.values())}."
    return Outcome([table], deviations=[said])


def ood(session: Session, setting: str) -> Outcome:
    """Foreign images told from test images by entropy and by mutual information."""
    labels = [job.label for job in jobs_of(session, setting) if job.seed == 0]
    others = foreign_images(session, setting)
    return Outcome(
        [rows(session, setting, labels, ("auroc_entropy", "auroc_mutual_information"))],
        deviations=[f"foreign images: {len(others.inputs):,} {others.name}, {others.description}."],
    )


def _jobs(setting: str, labels: tuple[str, ...], session: Session) -> Sequence[Job]:
    return jobs_of(session, setting, labels)


def _runner(report: Callable[..., Outcome], *settings: str, labels: Sequence[str] = ()) -> Runner:
    return Runner(CIFAR, report, tuple(functools.partial(_jobs, s, tuple(labels)) for s in settings))


def _ablation(
    labels: Sequence[str], columns: tuple[str, ...], best: Mapping[str, Sequence[str]], ahead: dict[str, str],
    *settings: str,
) -> Runner:  # fmt: skip
    report = functools.partial(ablation, labels, columns, best, ahead)
    return _runner(report, ABLATIONS, *settings, labels=labels)


_PAIR = (GAUSSIAN, BATCH_ENSEMBLE)
_ORDER = {"K = 2": ("K = 1",), "K = 4": ("K = 1", "K = 2"), "K = 8": ("K = 4", "K = 16")}  # the paper's order
RUNNERS: dict[str, Runner] = {
    "rank1/table2": _runner(functools.partial(main_table, "rank1/table2"), MAIN, EQUAL, WIDE),
    "rank1/table3": _runner(functools.partial(main_table, "rank1/table3"), MORE),
    "rank1/table8": _runner(
        table8, MAIN, SHORT, labels=(GAUSSIAN, "Ensemble 4×WRN-28-5", "Ensemble 4×WRN-28-10")
    ),
    "rank1/figure2": _runner(figure2, ABLATIONS, SHORT, labels=("r (outputs)", "s (inputs)", "both")),
    "rank1/figure3": _ablation(
        ("K = 1", "K = 2", "K = 4", "K = 8", "K = 16", "K = 16, 4 per step"), (*BOTH, "spread"),
        _ORDER, {"nll": "NLL", "ece": "ECE", **_CORRUPTED}, SHORT,
    ),
    "rank1/figure4": _runner(figure4, ABLATIONS, labels=("Average", "Mixture")),
    "rank1/figure-v1-5": _runner(first_scales, ABLATIONS, SHORT, labels=("p = 0.001", *_NOISY)),
    "rank1/figure5": _runner(figure5, MAIN, MORE, labels=_PAIR),
    "rank1/figure7": _runner(functools.partial(severities, "mean"), MAIN, MORE),
    "rank1/figure9": _ablation(
        ("Real (Normal)", "Positive (log-normal)"), BOTH, {"Real (Normal)": ("Positive (log-normal)",)},
        {"nll": "NLL", "ece": "ECE"},
    ),
    "rank1/figure10": _runner(functools.partial(severities, "median"), MAIN),
    "rank1/figure11": _runner(functools.partial(severities, "median"), MORE),
    "rank1/collapse": _runner(collapse, ABLATIONS, labels=COLLAPSE),
    "rank1/tuning": _runner(tuning, TUNING),
    "rank1/shared": _runner(tuning, SHARED, HEAVY),
    "rank1/ood": _runner(ood, MAIN),
}  # fmt: skip
