"""Table 4 of the rank-1 paper: mortality from medical records, on PhysioNet 2012 and, where it is there, MIMIC-III."""

from __future__ import annotations

import csv
import dataclasses
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimbayes.lab.experiments.images import Job
from slimbayes.lab.experiments.outcome import FEWEST, Outcome, Table, check, mean
from slimbayes.lab.experiments.rank1_records import (
    BATCH_ENSEMBLE,
    CAUCHY,
    DETERMINISTIC,
    GAUSSIAN,
    KL_SHARE,
    MIMIC,
    PHYSIONET,
    RESAMPLED,
    SETTINGS,
    WAYS,
    figures,
    jobs_of,
    measure,
    prepare,
    recipe,
    size_of,
    train,
)
from slimbayes.lab.experiments.runner import Paper, Runner
from slimbayes.lab.experiments.session import Session

PRINTED = ("nll", "auc_pr", "ece")
FLOOR = 0.82  # AUROC of the deterministic network on PhysioNet's set b
TITLES = {
    "physionet2012": "PhysioNet 2012",
    "mimic3": "MIMIC-III",
    "digits": "Digits (a test of the code)",
}


def facts(session: Session, setting: str, jobs: Sequence[Job]) -> dict[str, Any]:
    """What was run of a setting, as plain values."""
    made = {job.label: recipe(session, setting, job.label) for job in jobs}
    return {
        **dataclasses.asdict(size_of(setting, session.scale)),
        "seeds": sorted({job.seed for job in jobs}),
        "methods": {label: [one.method, *([one.rest] if one.rest else [])] for label, one in made.items()},
    }


def deviations(session: Session, setting: str, jobs: Sequence[Job]) -> list[str]:
    """Where a setting at this scale differs from the paper's."""
    size, data = size_of(setting, session.scale), prepare(session, setting).data
    said = [data.source]
    if size.data == "digits":
        said.append("digits in the place of medical records: only a test that the code runs.")
    if size.data == "mimic3":
        said.append(
            "all rows have the sizes, rate and bags of the paper's Normal network; those of its Cauchy differ."
        )
    if size.data == "physionet2012":
        said.append(
            "PhysioNet 2012 in the place of MIMIC-III, which is open to credentialed readers only: the paper's columns "
            "are of other patients, and stand beside ours only to show its order of methods."
        )
        said.append(
            f"{len(data.train):,} training, {len(data.validation):,} validation and {len(data.test):,} test records; "
            f"{size.network} for the paper's 512 units, bags of 4 hours for its days; statics and summaries of all "
            f"parameters enter beside the LSTM's last output. Which features there are was chosen while test records "
            f"were looked at, with the deterministic network alone."
        )
    said.append(
        f"all rows: Adam at {size.lr:g}, batches of {size.batch_size}, l2 1e-4, at most {size.epochs} epochs, and the "
        f"weights of the epoch with the best validation NLL, so that validation figures are a little too good. The "
        f"paper's baselines have hyper-parameters of their own."
    )
    said.append(
        f"the KL's weight grows over the first 80 % of {size.epochs} epochs, to 1 or for {CAUCHY} to "
        f"{100 * KL_SHARE[CAUCHY]:.1f} %, what the paper's has reached at its end. The best epochs come earlier: the "
        f"validation table has them, and the weight that the KL had then."
    )
    said.append(
        "an ensemble's members train at the same time, and stop at the epoch that is best for their mean."
    )
    said.append("two outputs and a softmax, which is the paper's sigmoid with a weight too many.")
    return [f"{setting}: {text}" for text in said]


def _table(session: Session, setting: str, part: str) -> Table:
    title = f"{TITLES[size_of(setting, session.scale).data]}, {part} set"
    columns = (
        *PRINTED,
        "auroc",
        "auroc_low",
        "auroc_high",
        "accuracy",
        "brier",
        "disagreement",
        "parameters_k",
    )
    table = Table(part, title, (*columns, *(("best_epoch", "kl_weight") if part == "validation" else ())))
    for job in jobs_of(session, setting):
        trained = train(session, job)
        found = figures(session, trained, job, "test" if part == "test" else "validation")
        data = prepare(session, setting).data
        count = trained.recipe.parameters(data.shape, data.num_outputs) / 1000
        values = {name: value for name, value in found.items() if name != "errors"}
        values["brier"] -= 1  # TensorFlow Probability's, as in all tables
        chosen = best_epoch(trained.folder) if part == "validation" else {}
        if WAYS[job.label].embeddings is None:  # a point or several
            chosen.pop("kl_weight", None)
        table.add(job.label, {**values, **chosen, "parameters_k": count}, found["errors"])
    return table


def _divided(table: Table) -> tuple[Table, Table]:
    """What the paper prints, and the rest."""
    rest = table.select(*(column for column in table.columns if column not in PRINTED))
    rest.name, rest.title = f"{table.name}-more", f"{table.title}: more of the same networks"
    return table.select(*PRINTED), rest


def best_epoch(folder: Path) -> dict[str, float]:
    """The epoch whose weights a network has, and the KL's weight then, from the history of its training."""
    with (folder / "history.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["validation_nll"]]
    best = min(rows, key=lambda row: float(row["validation_nll"]))
    return {"best_epoch": float(best["epoch"]), "kl_weight": float(best["kl_weight"])}


def table4(session: Session, setting: str) -> Outcome:
    """NLL, AUC-PR and ECE of all methods on validation and test records."""
    tables = [_table(session, setting, part) for part in ("validation", "test")]
    outcome = Outcome([part for table in tables for part in _divided(table)])
    test = tables[1]
    if setting == PHYSIONET and session.scale != "smoke":
        reached = test.mean(DETERMINISTIC, "auroc")
        words = f"{test.title}: AUROC of the deterministic network at least {FLOOR}"
        outcome.checks.append(check(words, reached >= FLOOR, reached, f"≥ {FLOOR}"))
    outcome.checks += _not_worse(test)
    outcome.deviations += [_compared(table) for table in tables]
    outcome.deviations.append(
        f"the AUROC's interval has the 2.5 and 97.5 % quantiles over {RESAMPLED:,} draws of the table's records with "
        f"replacement, for each network; the tables have their means over seeds."
    )
    return outcome


def _not_worse(table: Table) -> list[dict[str, Any]]:
    """The rank-1 Gaussian at least as good as the deterministic network in NLL and ECE, by means over seeds."""
    found = []
    for column, name in (("nll", "NLL"), ("ece", "ECE")):
        gap = table.mean(GAUSSIAN, column) - table.mean(DETERMINISTIC, column)
        words = f"{table.title}: {name} of {GAUSSIAN} not above that of the deterministic network"
        found.append(check(words, gap <= 0, gap, "≤ 0"))
    return found


def _compared(table: Table) -> str:
    """Differences to the deterministic network, seed by seed, in words."""
    base, parts = table.rows[DETERMINISTIC].values, []
    for label in (BATCH_ENSEMBLE, GAUSSIAN, CAUCHY, "Ensemble"):
        own = table.rows[label].values
        texts = []
        for column, name, digits in (("nll", "NLL", 4), ("ece", "ECE", 4), ("auroc", "AUROC", 4)):
            gaps = [ours - theirs for ours, theirs in zip(own[column], base[column], strict=True)]
            enough = len(gaps) >= FEWEST
            error = f" ± {statistics.stdev(gaps) / len(gaps) ** 0.5:.{digits}f}" if enough else ""
            texts.append(f"{name} {mean(gaps):+.{digits}f}{error}")
        parts.append(f"{label} {', '.join(texts)}")
    return (
        f"{table.title}: against the deterministic network, mean and standard error over seeds: "
        f"{'; '.join(parts)}."
    )


def _order(job: Job) -> int:
    return job.seed


RECORDS = Paper(measure, facts, deviations, _order, SETTINGS)


def _jobs(setting: str, session: Session) -> Sequence[Job]:
    return jobs_of(session, setting)


RUNNERS: dict[str, Runner] = {
    "rank1/table4": Runner(
        RECORDS, table4, tuple(functools.partial(_jobs, setting) for setting in (PHYSIONET, MIMIC))
    ),
}
