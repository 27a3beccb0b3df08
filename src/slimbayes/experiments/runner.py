"""What an entry needs to run: its paper's functions, its networks, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slimbayes.experiments.outcome import Outcome
from slimbayes.experiments.session import Session


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
    deviations: Callable[[Session, str], list[str]]  # where a setting at this scale differs from the paper's
    order: Callable[[Any], int]  # of jobs: the lowest take longest and begin first


@dataclass(frozen=True)
class Runner:
    """How an experiment runs: the networks it needs, and what it makes of them.

    ``report(session, setting)`` is called for each of its settings, and once with "" where it has none.
    """

    paper: Paper
    report: Callable[[Session, str], Outcome]
    jobs: tuple[Callable[[Session], Sequence[Job]], ...] = ()
    alone: bool = False  # its networks are trained one at a time, because their seconds are measured
    several: bool = False  # several processes may train one network together


@dataclass(frozen=True)
class Task:
    """A job and the paper that knows how to do it."""

    paper: Paper
    job: Job

    def run(self, session: Session) -> float:
        """Do it; the seconds that its training took."""
        return self.paper.measure(session, self.job)
