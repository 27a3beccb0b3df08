"""The rank-1 paper's Table 1 and Figures 6 and 12: ImageNet and ImageNet-C, from its networks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from slimbayes.lab.experiments import imagenet
from slimbayes.lab.experiments import rank1_imagenet as rank1
from slimbayes.lab.experiments.catalogue import find
from slimbayes.lab.experiments.imagenet_data import SIZES, TREE, check_scale
from slimbayes.lab.experiments.images import Job
from slimbayes.lab.experiments.outcome import Outcome, Table
from slimbayes.lab.experiments.rank1_checks import imagenet_checks
from slimbayes.lab.experiments.rank1_counts import parameter_checks
from slimbayes.lab.experiments.rank1_curves import BOTH, Corrupted, averaged, beside, by_severity
from slimbayes.lab.experiments.rank1_recipes import BATCH_ENSEMBLE, DETERMINISTIC, GAUSSIAN, rows_of
from slimbayes.lab.experiments.runner import Paper, Runner
from slimbayes.lab.experiments.session import Session
from slimbayes.metrics import mean_corruption_error


def title(session: Session) -> str:
    """A table's title: the data and the network that were run.

    >>> title(Session("paper", "work"))
    'ImageNet, resnet50'
    """
    data = "Made-up images (a test of the code)" if SIZES[session.scale].data == TREE else "ImageNet"
    return f"{data}, {rank1.recipe(session, GAUSSIAN).network}"


def facts(session: Session, setting: str, jobs: Sequence[Job]) -> dict[str, Any]:
    """What was run, as plain values."""
    made = {job.label: rank1.recipe(session, job.label) for job in jobs}
    return {
        **dataclasses.asdict(SIZES[session.scale]),
        "network": made[GAUSSIAN].network,
        "methods": {label: [one.method] for label, one in made.items()},
        "epochs": {label: one.training.epochs for label, one in made.items()},
        "batch_size": {label: one.training.batch_size for label, one in made.items()},
        "samples": {label: rank1.samples_of(session, label) for label in made},
        "seeds": sorted({job.seed for job in jobs}),
        "processes": session.processes.number,
    }


def deviations(session: Session, setting: str, jobs: Sequence[Job]) -> list[str]:
    """Where a run at this scale differs from the paper's, in words."""
    paper = rows_of(setting)[BATCH_ENSEMBLE].setting.training["factor_lr_multiplier"]
    said = [
        *imagenet.words(session, rank1.recipe(session, GAUSSIAN).network),
        imagenet.CORRUPTED,
        "rows quoted from other papers (MCMC) are not run.",
        "members of an ensemble train at the same time, on the same batches and crops.",
        "norms' statistics are those of all rows that a process has of a step; the reference's are those of a core's "
        "128 of 4,096 rows.",
        "crops are resized to whole numbers from 0 to 255, averaging where they shrink; the reference leaves the "
        "numbers that bicubic interpolation gives.",
        f"the rate of {BATCH_ENSEMBLE}'s factors is {paper:g} of the others'; the reference code, which goes by names, "
        "has it so for norms too.",
    ]
    return [f"{setting}: {text}" for text in said]


def table1(session: Session, setting: str) -> Outcome:
    """Table 1: every method, clean and corrupted, beside the paper's and the reference README's numbers."""
    check_scale(session)
    table = Table("imagenet", title(session), (*BOTH, "mce", "parameters_m"))
    for job in rank1.jobs(session):
        found, data = rank1.train(session, job), rank1.prepare(session).data
        figures, corrupted = rank1.clean(session, found), rank1.on_corrupted(session, found)
        number = found.recipe.parameters(data.shape, data.num_outputs)
        values = {**figures, **averaged(corrupted), "mce": mce(corrupted), "parameters_m": number / 1e6}
        table.add(job.label, values, figures["errors"])
    checks = [*parameter_checks("rank1/table1"), *imagenet_checks(table)]
    return Outcome([table, *beside(table, find("rank1/table1").printed[1:])], checks=checks)


def mce(found: Corrupted) -> float:
    """The mean corruption error in percent of AlexNet's.

    >>> round(mce({"snow": [{"accuracy": 56.6592}] * 5}), 4)
    50.0
    """
    return mean_corruption_error(
        {name: [1 - one["accuracy"] / 100 for one in by] for name, by in found.items()}
    )


def severities(statistic: str, session: Session, setting: str) -> Outcome:
    """Figures 6 and 12: every metric by severity, the mean or the median over types."""
    check_scale(session)
    found: dict[str, list[Corrupted]] = {}
    for job in rank1.jobs(session):
        found.setdefault(job.label, []).append(rank1.on_corrupted(session, rank1.train(session, job)))
    return by_severity(setting, title(session), statistic, found, SIZES[session.scale].severities)


def _order(job: Job) -> int:
    """Before everything else; networks of several components take longest."""
    return -1 if job.label == DETERMINISTIC else -2


PAPER = Paper(rank1.measure, facts, deviations, _order, (imagenet.SETTING,))


def _runner(report: Callable[[Session, str], Outcome]) -> Runner:
    return Runner(PAPER, report, (rank1.jobs,), several=(imagenet.SETTING,))


RUNNERS: dict[str, Runner] = {
    "rank1/table1": _runner(table1),
    "rank1/figure6": _runner(functools.partial(severities, "mean")),
    "rank1/figure12": _runner(functools.partial(severities, "median")),
}
