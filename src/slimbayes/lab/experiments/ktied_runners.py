"""How the k-tied paper's entries run: the networks of each, and what is made of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from slimbayes.lab.experiments import ktied_figures as figures
from slimbayes.lab.experiments import ktied_tables as tables
from slimbayes.lab.experiments import ktied_times as times
from slimbayes.lab.experiments.ktied_grid import tuning_jobs
from slimbayes.lab.experiments.ktied_recipes import Job, recipe, size_of
from slimbayes.lab.experiments.ktied_tuning import tuning
from slimbayes.lab.experiments.ktied_words import deviations
from slimbayes.lab.experiments.runner import Paper, Runner
from slimbayes.lab.experiments.session import Session


def facts(session: Session, setting: str, jobs: Sequence[Job]) -> dict[str, Any]:
    """What was run of a setting, as plain values."""
    methods: dict[str, list[str]] = {}
    for job in jobs:
        made = recipe(session, setting, job.purpose, job.label, job.choice, job.estimator)
        methods.setdefault(f"{job.label}, {job.purpose}", []).append(made.method)
    return {
        **dataclasses.asdict(size_of(setting, session.scale)),
        "seeds": sorted({job.seed for job in jobs}),
        "methods": {label: list(dict.fromkeys(texts)) for label, texts in methods.items()},
    }


def _order(job: Job) -> int:
    return {"resnet": 0, "resnet-he": 0, "imdb": 0, "cifar100": 1}.get(job.setting, 2)


KTIED = Paper(tables.measure, facts, deviations, _order)
_Runner = functools.partial(Runner, KTIED)


def _jobs(
    function: Callable[..., Sequence[Job]], *settings: str
) -> tuple[Callable[[Session], Sequence[Job]], ...]:
    return tuple(functools.partial(_for, function, setting) for setting in settings)


def _for(function: Callable[..., Sequence[Job]], setting: str, session: Session) -> Sequence[Job]:
    return function(session, setting)


def _local_jobs(session: Session) -> Sequence[Job]:
    return [
        *tables.figure6_jobs(session, "mnist"),
        *tables.figure6_jobs(session, "mnist", "local"),
    ]


def _by_elbo_jobs(session: Session) -> Sequence[Job]:
    return tables.figure6_jobs(session, "mnist", purpose="by-elbo")


_MLP_AND_CNN = _jobs(tables.converged, "mnist", "cifar100")
_COARSE = (*_MLP_AND_CNN, *_jobs(tables.converged, "imdb"))
_RESNET = _jobs(tables.converged, "resnet")
_FIGURES = ("neg_elbo", "nll", "accuracy")
RUNNERS: dict[str, Runner] = {
    "ktied/table1": _Runner(tables.counts),
    "ktied/figure3": _Runner(figures.variances, _COARSE),
    "ktied/figure4": _Runner(figures.figure4, _jobs(tables.converged, "cifar100", "mnist")),
    "ktied/table2": _Runner(tables.table2, _COARSE),
    "ktied/figure5": _Runner(tables.resnet_table("figure5", _FIGURES), _RESNET),
    "ktied/table3": _Runner(tables.resnet_table("table3", ("brier", "nll", "ece")), _RESNET),
    "ktied/figure6": _Runner(
        figures.figure6,
        (*_jobs(tables.figure6_jobs, "mnist", "cifar100", "imdb"), *_jobs(figures.probed, "mnist")),
    ),
    "ktied/figure7": _Runner(figures.figure7, _jobs(figures.probed, "mnist", "cifar100", "imdb")),
    "ktied/table4": _Runner(times.table4, alone=True),
    "ktied/table5": _Runner(
        tables.resnet_table("table5", (*_FIGURES, "parameters", "parameters_percent")),
        _RESNET,
    ),
    "ktied/figure9": _Runner(
        tables.resnet_table("figure9", _FIGURES),
        _jobs(tables.converged, "resnet-he"),
    ),
    "ktied/figure10": _Runner(figures.figure10, (*_RESNET, *_jobs(tables.converged, "mnist"))),
    "ktied/figure11": _Runner(figures.figure11, _RESNET),
    "ktied/figure12": _Runner(figures.variances, _RESNET),
    "ktied/local": _Runner(tables.local, (_local_jobs,)),
    "ktied/by-elbo": _Runner(tables.by_elbo, (_by_elbo_jobs,)),
    "ktied/time": _Runner(times.time_to_elbo, (times.timed,), alone=True),
    "ktied/compress": _Runner(tables.compression, _MLP_AND_CNN),
    "ktied/tuning": _Runner(tuning, (tuning_jobs,)),
}
