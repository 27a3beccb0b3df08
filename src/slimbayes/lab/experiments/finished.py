"""Reports of what is finished: networks that a work folder holds, whatever machine trained them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from slimbayes.lab.experiments.runner import Job

if TYPE_CHECKING:
    from slimbayes.lab.experiments.session import Session

FACTS = "run.json"  # beside every network that was trained to its end
J = TypeVar("J", bound=Job)


class Unfinished(ValueError):
    """What a report of finished networks needs is not in the work folder: trying again does not help."""


def trained_on(work: Path) -> list[torch.device]:
    """The kinds of devices that the networks of a folder were trained on: their recipes name them.

    >>> trained_on(Path("nothing there"))
    [device(type='cpu')]
    """
    kinds = set()
    for path in work.rglob(FACTS):
        try:
            kinds.add(json.loads(path.read_text(encoding="utf-8"))["facts"]["training"]["accelerator"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged, or of another kind: it is no finished network
    return [torch.device(kind) for kind in ("cpu", "cuda") if kind in kinds] or [torch.device("cpu")]


def present(session: Session, jobs: Sequence[J], train: Callable[[Session, J], Any]) -> list[J]:
    """The jobs or, where a session reports what is finished, those whose networks are there; it notes the others.

    Settings that the call leaves out stay as they are: nobody asks for their networks.
    """
    if session.finished is None:
        return list(jobs)
    return [
        job
        for job in jobs
        if (session.only and job.setting not in session.only) or _is_there(session, job, train)
    ]


def _is_there(session: Session, job: J, train: Callable[[Session, J], Any]) -> bool:
    before = list(session.runs)  # a look is no use of a network
    try:
        train(session, job)
    except Unfinished:
        if job not in session.missing:
            session.missing.append(job)
        return False
    finally:
        session.runs[:] = before
    return True


def left_out(session: Session, setting: str) -> list[str]:
    """A sentence on the networks of a setting that were not finished, if there are some.

    >>> from slimbayes.lab.experiments.images import Job
    >>> from slimbayes.lab.experiments.session import Session
    >>> session = Session("gpu", "work")
    >>> session.missing += [Job("cifar10", "Deterministic", 1), Job("cifar10", "Deterministic", 2)]
    >>> left_out(session, "cifar10")
    ['cifar10: not finished, and left out: Deterministic seed 1, Deterministic seed 2.']
    """
    names = [job.words().removeprefix(f"{setting} ") for job in session.missing if job.setting == setting]
    return [f"{setting}: not finished, and left out: {', '.join(names)}."] if names else []


def origin(runs: Sequence[dict[str, Any]], here: dict[str, Any]) -> dict[str, Any]:
    """The provenance of a report on networks that were trained elsewhere: theirs, and under "reported" its own.

    >>> run = {"hardware": "GPU", "commit": "abc", "torch": "2.6", "created": "2026-01-01"}
    >>> made = origin([run, run], {"hardware": "CPU", "commit": "def", "created": "2026-02-01", "versions": {}})
    >>> made["hardware"], made["commit"], made["created"], made["reported"]["hardware"]
    ('GPU', 'abc', '2026-01-01', 'CPU')
    """
    if not runs:
        return {}

    def all_of(key: str) -> str:
        return "; ".join(dict.fromkeys(str(run[key]) for run in runs if run.get(key)))

    return {
        "created": max(str(run.get("created")) for run in runs), "commit": all_of("commit"),
        "hardware": all_of("hardware"), "versions": {"torch": all_of("torch")},
        "reported": {key: here.get(key) for key in ("created", "commit", "hardware", "versions")},
    }  # fmt: skip
