"""What an entry needs to run: its paper's functions, its networks, and what is made of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from slimbayes.lab.experiments.outcome import Outcome

if TYPE_CHECKING:
    from slimbayes.lab.experiments.session import Session


class Job(Protocol):
    """One piece of work of a paper, as plain values that can travel to another process: a network, or several."""

    @property
    def setting(self) -> str:
        """The setting it belongs to, as "mnist"."""

    def words(self) -> str:
        """What it is, for a line of progress."""


@dataclass(frozen=True)
class Paper:
    """What the entries of a paper have in common."""

    measure: Callable[
        [Session, Any], float
    ]  # does a job, keeps what is found in ``work``, returns the seconds
    facts: Callable[
        [Session, str, Sequence[Any]], dict[str, Any]
    ]  # what was run of a setting, as plain values
    deviations: Callable[
        [Session, str, Sequence[Any]], list[str]
    ]  # where a setting at this scale, and these jobs of it, differ from the paper's
    order: Callable[[Any], int]  # of jobs: the lowest take longest and begin first
    settings: tuple[str, ...] = ()  # that it knows, where several share the entries of one paper


@dataclass(frozen=True)
class Runner:
    """How an experiment runs: the networks it needs, and what it makes of them.

    ``report(session, setting)`` is called for each of its settings, and once with "" where it has none.
    """

    paper: Paper
    report: Callable[[Session, str], Outcome]
    jobs: tuple[Callable[[Session], Sequence[Job]], ...] = ()
    alone: bool = False  # its networks are trained one at a time, because their seconds are measured
    several: tuple[str, ...] = ()  # settings whose networks several processes may train together


@dataclass(frozen=True)
class Task:
    """A job and the paper that knows how to do it."""

    paper: Paper
    job: Job

    def run(self, session: Session) -> float:
        """Do it; the seconds that its training took."""
        return self.paper.measure(session, self.job)


def together(*parts: Mapping[str, Runner]) -> dict[str, Runner]:
    """Runners of one paper from several modules, each with a ``Paper`` that names its settings.

    An entry that several of them run has the settings of all, and each reports its own. All entries get one ``Paper``,
    so that a network which two of them need is trained once.
    """
    runners = [runner for part in parts for runner in part.values()]
    known = {setting: runner.paper for runner in runners for setting in runner.paper.settings}
    paper = Paper(
        functools.partial(_measure, known),
        functools.partial(_facts, known),
        functools.partial(_deviations, known),
        functools.partial(_order, known),
        tuple(known),
    )
    found: dict[str, Runner] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        same = [part[name] for part in parts if name in part]
        reports = {setting: runner.report for runner in same for setting in runner.paper.settings}
        report = same[0].report if len(same) == 1 else functools.partial(_report, reports)
        jobs = tuple(plan for runner in same for plan in runner.jobs)
        several = tuple(setting for runner in same for setting in runner.several)
        alone = any(runner.alone for runner in same)
        found[name] = replace(same[0], paper=paper, report=report, jobs=jobs, alone=alone, several=several)
    return found


Known = Mapping[str, Paper]  # by setting; functions of a module, for a task travels to other processes


def _measure(known: Known, session: Session, job: Any) -> float:
    return known[job.setting].measure(session, job)


def _facts(known: Known, session: Session, setting: str, jobs: Sequence[Any]) -> dict[str, Any]:
    return known[setting].facts(session, setting, jobs)


def _deviations(known: Known, session: Session, setting: str, jobs: Sequence[Any]) -> list[str]:
    return known[setting].deviations(session, setting, jobs)


def _order(known: Known, job: Any) -> int:
    return known[job.setting].order(job)


def _report(
    reports: Mapping[str, Callable[[Session, str], Outcome]], session: Session, setting: str
) -> Outcome:
    return reports[setting](session, setting)


def _measure_none(session: Session, job: Any) -> float:
    raise AssertionError(f"{job!r}: these entries train nothing")


def _facts_none(session: Session, setting: str, jobs: Sequence[Any]) -> dict[str, Any]:
    return {}


def _deviations_none(session: Session, setting: str, jobs: Sequence[Any]) -> list[str]:
    return []


def _order_none(job: Any) -> int:
    return 0


# of entries without networks: they have no jobs
UNTRAINED = Paper(_measure_none, _facts_none, _deviations_none, _order_none)
