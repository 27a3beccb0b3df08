"""How the EMP paper's entries run, from the modules that know what each needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slimbayes.experiments import (
    emp_cards,
    emp_counts,
    emp_imagenet_tables,
    emp_images,
    emp_priors,
    emp_uci_tables,
)
from slimbayes.experiments.runner import Paper, Runner, together
from slimbayes.experiments.session import Session


def _measure(session: Session, job: Any) -> float:
    raise AssertionError(f"{job!r}: these entries train nothing")


def _facts(session: Session, setting: str, jobs: Sequence[Any]) -> dict[str, Any]:
    return {}


def _deviations(session: Session, setting: str) -> list[str]:
    return []


def _order(job: Any) -> int:
    return 0


UNTRAINED = Paper(_measure, _facts, _deviations, _order)  # entries without networks: they have no jobs
RUNNERS: dict[str, Runner] = {
    "emp/figure1": Runner(UNTRAINED, emp_cards.figure1),
    "emp/table1": Runner(UNTRAINED, emp_counts.table1),
    "emp/figure3": Runner(UNTRAINED, emp_priors.figure3),
    "emp/table3": Runner(UNTRAINED, emp_counts.table3),
    **together(emp_images.RUNNERS, emp_imagenet_tables.RUNNERS),
    **emp_uci_tables.RUNNERS,
}
