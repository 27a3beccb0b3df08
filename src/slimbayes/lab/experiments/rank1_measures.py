"""What is measured of the rank-1 paper's networks on CIFAR: test images clean and corrupted, and foreign ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slimbayes.core.conversion import find_record
from slimbayes.lab.data import OutOfDistribution, Split, out_of_distribution
from slimbayes.lab.data.shifts import Shift, shifts_for
from slimbayes.lab.experiments.images import Job, corrupted, evaluation, ready
from slimbayes.lab.experiments.networks import Trained
from slimbayes.lab.experiments.rank1_recipes import (
    EQUAL,
    GAUSSIAN,
    MAIN,
    MORE,
    SHORT,
    WIDE,
    data_of,
    prepare,
    rows_of,
    size_of,
    train,
)
from slimbayes.lab.experiments.session import Session
from slimbayes.metrics import Evaluation, ood_scores
from slimbayes.verbs.evaluation import assess

VERSION = 1  # raise it when a function here changes what it gives
SAMPLES = (1, 4, 25)
# The paper's own CIFAR-100-C: two of the fifteen types are missing, and the four extra ones are there.
_WITHOUT, _WITH = ("motion_blur", "snow"), ("speckle_noise", "gaussian_blur", "spatter", "saturate")


def samples_of(session: Session, job: Job, on_corrupted: bool = False) -> int:
    """Samples of every component in evaluation, as the row has them: mean-field networks five on corrupted images."""
    samples = 5 if on_corrupted and job.label == "MFVI BNN" else rows_of(job.setting)[job.label].samples
    return min(samples, size_of(job.setting, session.scale).most_samples)


def held_out(session: Session, trained: Trained, job: Job) -> dict[str, Any]:
    """Figures on training images that were held out, and their errors over examples; kept beside the network."""
    count = samples_of(session, job)
    rows = prepare(session, job.setting).validation
    key = f"{len(rows)} held out, {count} samples, version {VERSION}"
    return dict(session.kept(trained, key, lambda: _clean(session, trained, job, count, rows)))


def clean(session: Session, trained: Trained, job: Job, samples: int | None = None) -> dict[str, Any]:
    """Figures on the test images, and their errors over examples; kept beside the network."""
    count = samples_of(session, job) if samples is None else samples
    key = f"clean, {count} samples, version {VERSION}"
    rows = prepare(session, job.setting).data.test
    return dict(session.kept(trained, key, lambda: _clean(session, trained, job, count, rows)))


def _clean(session: Session, trained: Trained, job: Job, samples: int, rows: Split) -> dict[str, Any]:
    with evaluation(session, job.seed):
        found = _assessed(session, trained, job, rows, samples)
    examples, values = found.examples, found.compute()
    right = (examples["prediction"] == examples["target"]).double() * 100
    figures: dict[str, Any] = {**_figures(found), "gibbs_nll": values["gibbs_nll"]}
    if "disagreement" in values:
        figures["disagreement"] = values["disagreement"]
    figures["errors"] = {"nll": _error(examples["nll"]), "accuracy": _error(right)}
    return figures


def on_corrupted(
    session: Session, trained: Trained, job: Job, samples: int | None = None
) -> dict[str, list[dict[str, float]]]:
    """Figures by type of corruption, a list over severities; kept beside the network."""
    size = size_of(job.setting, session.scale)
    count = samples_of(session, job, True) if samples is None else samples
    key = f"corrupted, {size.corrupted} images, {count} samples, version {VERSION}"
    return dict(session.kept(trained, key, lambda: _on_corrupted(session, trained, job, count)))


def _on_corrupted(
    session: Session, trained: Trained, job: Job, samples: int
) -> dict[str, list[dict[str, float]]]:
    size, data = size_of(job.setting, session.scale), data_of(job.setting, session.scale)
    rows = prepare(session, job.setting).data.test[: size.corrupted].to(session.device)
    found: dict[str, list[dict[str, float]]] = {}
    with evaluation(session, job.seed):
        for shift in shifts(session, job.setting):
            found[shift.name] = [
                _figures(
                    _assessed(session, trained, job, corrupted(session, data, rows, shift, severity), samples)
                )
                for severity in shift.severities
            ]
            session.check_time()
    return found


def shifts(session: Session, setting: str) -> tuple[Shift, ...]:
    """The 15 corruptions of CIFAR-10, the 17 of the paper's CIFAR-100-C; the shifts of tiny images in smoke tests."""
    data = prepare(session, setting).data
    standard = shifts_for(data, root=session.data_root)
    if setting != MORE or data.name == "digits":
        return standard
    names = [shift.name for shift in standard if shift.name not in _WITHOUT]
    return shifts_for(data, [*names, *_WITH], root=session.data_root)


def foreign(session: Session, trained: Trained, job: Job) -> dict[str, float]:
    """AUROC of entropy and of mutual information for telling foreign images from test images; kept likewise.

    One draw has no mutual information.
    """
    samples, others = samples_of(session, job), foreign_images(session, job.setting)
    key = f"foreign, {len(others.inputs)} of {others.name}, {samples} samples, version {VERSION}"
    return dict(session.kept(trained, key, lambda: _foreign(session, trained, job, others, samples)))


def foreign_images(session: Session, setting: str) -> OutOfDistribution:
    """House numbers if the data root has them, else patches of photographs: at most as many as test images."""
    data = prepare(session, setting).data
    others = out_of_distribution(data, session.data_root)
    assert others is not None, "images have some"
    return replace(others, inputs=others.inputs[: len(data.test)])


def _foreign(
    session: Session, trained: Trained, job: Job, others: OutOfDistribution, samples: int
) -> dict[str, float]:
    test, count = prepare(session, job.setting).data.test, len(others.inputs)
    split = Split(others.inputs, torch.zeros(count, dtype=torch.long))
    with evaluation(session, job.seed):
        inside, outside = (_assessed(session, trained, job, rows, samples).examples for rows in (test, split))
    several = find_record(trained.model).components * samples > 1
    names = ("entropy", "mutual_information") if several else ("entropy",)
    return {f"auroc_{name}": ood_scores(inside[name], outside[name]).auroc for name in names}


def _assessed(session: Session, trained: Trained, job: Job, rows: Split, samples: int) -> Evaluation:
    """All draws of every example, in passes of a bounded number of rows, with noise from torch's generator."""
    model = ready(session, trained)
    draws = find_record(model).components * samples
    size = max(1, size_of(job.setting, session.scale).chunk // draws)
    scaling = prepare(session, job.setting).data.scaling
    layout = torch.channels_last if session.device.type == "cuda" else torch.contiguous_format

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(rows), size):
            yield rows.inputs[start : start + size], rows.targets[start : start + size]

    return assess(
        model, batches(), samples, prepare=lambda raw: scaling(raw).contiguous(memory_format=layout)
    )


def _figures(found: Evaluation) -> dict[str, float]:
    values = found.compute()
    return {"nll": values["nll"], "accuracy": 100 * values["accuracy"], "ece": values["ece"]}


def _error(column: Tensor) -> float:
    return float(column.double().std() / len(column) ** 0.5)


def measure(session: Session, job: Job) -> float:
    """Train a network and measure what the reports will ask of it; returns the seconds of training."""
    found = train(session, job)
    if size_of(job.setting, session.scale).held_out:
        held_out(session, found, job)
        return found.seconds
    clean(session, found, job)
    on_corrupted(session, found, job)
    if job.setting == MAIN:
        foreign(session, found, job)
    if job.label == GAUSSIAN and job.setting in (MAIN, SHORT, EQUAL, WIDE):
        for count in by_samples(session):
            clean(session, found, job, count)
            if job.setting in (MAIN, SHORT):
                on_corrupted(session, found, job, count)
    return found.seconds


def by_samples(session: Session) -> tuple[int, ...]:
    """The numbers of samples of Table 8, as far as the scale goes."""
    most = size_of(MAIN, session.scale).most_samples
    return tuple(min(count, most) for count in SAMPLES)
