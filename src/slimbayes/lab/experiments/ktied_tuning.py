"""The sweep over the k-tied paper's grids that its hyper-parameters were chosen from."""

from __future__ import annotations

from slimbayes.lab.experiments.ktied_grid import tuning_jobs
from slimbayes.lab.experiments.ktied_recipes import prepare, train
from slimbayes.lab.experiments.ktied_tables import TITLES
from slimbayes.lab.experiments.outcome import Outcome, Table
from slimbayes.lab.experiments.session import Session

CRITERIA = {"by-nll": "by NLL", "converged": "post-hoc study, by −ELBO"}


def tuning(session: Session, setting: str) -> Outcome:
    """Validation figures over the paper's grids: the lowest NLL of a row (−ELBO without annealing) is chosen."""
    tables: dict[str, Table] = {}
    for job in tuning_jobs(session):
        if job.setting != setting or job.choice is None:
            continue
        prepared = prepare(session, setting)
        figures, errors = session.figures(train(session, job), "trained", prepared, 16, split="validation")
        title = f"{TITLES[setting]}, {CRITERIA[job.purpose]}: validation data"
        empty = Table(f"{setting}-{job.purpose}", title, ("neg_elbo", "nll", "accuracy"))
        coefficient = "" if job.choice.coefficient is None else f", coefficient {job.choice.coefficient:g}"
        label = f"{job.label}, lr {job.choice.lr:g}, prior {job.choice.prior:g}{coefficient}"
        label += f", {job.choice.schedule}" if job.choice.schedule != "constant" else ""
        tables.setdefault(job.purpose, empty).add(label, figures, errors)
    words = (
        "Seed 0 only. Mean-field and 2-tied are searched, 1- and 3-tied take 2-tied's winner. Of LeNet's grid, of "
        "falling rates and of training without annealing only the rows shown were tried."
    )
    return Outcome(list(tables.values()), deviations=[words])
