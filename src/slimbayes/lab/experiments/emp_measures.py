"""What is measured of the EMP paper's image networks: averages over ever more draws, corruption errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slimbayes.lab.data import Split
from slimbayes.lab.data.shifts import Shift, shifts_for
from slimbayes.lab.experiments.averages import columns_of, running_means
from slimbayes.lab.experiments.emp_figures import figures_of
from slimbayes.lab.experiments.emp_recipes import WAYS, prepare, size_of
from slimbayes.lab.experiments.images import Job, corrupted, evaluation, ready
from slimbayes.lab.experiments.networks import Trained
from slimbayes.lab.experiments.session import Session

VERSION = 1  # raise it when a function here changes what it gives


def inputs_of(session: Session, setting: str) -> Callable[[Tensor], Tensor]:
    """From raw images to the network's inputs, in the same layout."""
    scaling = prepare(session, setting).data.scaling
    layout = torch.channels_last if session.device.type == "cuda" else torch.contiguous_format
    return lambda raw: scaling(raw).contiguous(memory_format=layout)


def by_samples(session: Session, trained: Trained, job: Job, split: str = "test") -> dict[str, Any]:
    """Figures and reliability bins for every number of draws, by the number as text; kept beside the network."""
    size = size_of(job.setting, session.scale)
    counts = (1,) if job.label == "Vanilla" else size.samples
    key = f"by samples {list(counts)}, {split}, version {VERSION}"
    return dict(
        session.kept(trained, key, lambda: _by_samples(session, trained, job, counts, size.chunk, split))
    )


def _by_samples(
    session: Session, trained: Trained, job: Job, counts: Sequence[int], chunk: int, split: str
) -> dict[str, Any]:
    prepared = prepare(session, job.setting)
    rows = (prepared.data.test if split == "test" else prepared.validation).to(session.device)
    seed = 0 if WAYS[job.setting][job.label].keyed else None
    columns: dict[int, list[Tensor]] = {count: [] for count in counts}
    with evaluation(session, job.seed):
        model = ready(session, trained)
        change = inputs_of(session, job.setting)
        for block, means in running_means(model, rows.inputs, counts, chunk, seed, change):
            targets = rows.targets[block]
            for count, p in zip(counts, means, strict=True):
                columns[count].append(columns_of(p, targets).cpu())
            session.check_time()
    return {str(count): figures_of(torch.cat(parts)) for count, parts in columns.items()}


def corruption_rates(session: Session, trained: Trained, job: Job) -> dict[str, Any]:
    """Error rates: "clean", and by type of corruption a list over severities; kept beside the network."""
    size = size_of(job.setting, session.scale)
    samples = 1 if job.label == "Vanilla" else size.samples[-1]
    key = f"corruptions, {size.corrupted} images, {samples} samples, version {VERSION}"
    return dict(session.kept(trained, key, lambda: _corruption_rates(session, trained, job, samples)))


def _corruption_rates(session: Session, trained: Trained, job: Job, samples: int) -> dict[str, Any]:
    """The clean error is that of the same images."""
    size, change = size_of(job.setting, session.scale), inputs_of(session, job.setting)
    clean = prepare(session, job.setting).data.test[: size.corrupted].to(session.device)
    seed = 0 if WAYS[job.setting][job.label].keyed else None
    model = ready(session, trained)

    def error(rows: Split) -> float:
        wrong = 0
        for block, means in running_means(model, rows.inputs, (samples,), size.chunk, seed, change):
            wrong += int((means[0].argmax(-1) != rows.targets[block]).sum())
        session.check_time()
        return wrong / len(rows)

    with evaluation(session, job.seed):
        rates: dict[str, Any] = {"clean": error(clean)}
        for shift in _shifts(session, job.setting):
            rates[shift.name] = [
                error(corrupted(session, size.data, clean, shift, severity)) for severity in shift.severities
            ]
    return rates


def _shifts(session: Session, setting: str) -> tuple[Shift, ...]:
    """The 15 corruptions of images from 32 pixels on; the shifts of tiny ones in smoke tests."""
    return shifts_for(prepare(session, setting).data, root=session.data_root)
