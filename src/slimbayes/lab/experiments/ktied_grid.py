"""Which of the k-tied paper's hyper-parameters the sweep tries."""

from __future__ import annotations

from collections.abc import Sequence

from slimbayes.lab.experiments.ktied_recipes import Choice, Job
from slimbayes.lab.experiments.session import Session


def tuning_jobs(session: Session) -> list[Job]:
    """The networks of the sweep: all of them, and two in a smoke run."""
    jobs = all_jobs()
    return jobs if session.scale != "smoke" else [jobs[0], jobs[-1]]


BOTH = ("Mean-field", "2-tied")
RATES = (1e-4, 3e-4, 1e-3, 3e-3)
PRIORS = (0.2, 0.3)
SLOPES = (5e-5, 5e-6)  # of the KL's weight per batch


def all_jobs() -> list[Job]:
    """The paper's grids, for seed 0: whole on MNIST with a constant rate and annealing, else a part.

    A rate that never falls leaves its noise in the last weights: with a cosine it falls to 0 from the start, with steps
    to a tenth in the last tenth.
    """
    return [
        *_grid("mnist", BOTH, RATES, PRIORS, SLOPES),
        *_grid("mnist", BOTH, RATES[1:], PRIORS, SLOPES, "cosine"),
        *_grid("mnist", BOTH[:1], RATES[1:], PRIORS, (None,)),
        *_grid("mnist", BOTH[:1], RATES[2:], PRIORS[:1], (None,), "cosine"),
        *_grid("cifar100", BOTH[1:], RATES[1:3], PRIORS[:1], SLOPES),
        *_grid("cifar100", BOTH[1:], RATES[2:3], PRIORS[1:], SLOPES[:1]),
        *_grid("cifar100", BOTH[:1], RATES[2:3], PRIORS[:1], SLOPES[:1]),
        *_grid("cifar100", BOTH, RATES[3:], PRIORS, SLOPES[:1]),
        *_grid("cifar100", BOTH, RATES[2:], PRIORS[:1], SLOPES[:1], "cosine"),
        *_grid("cifar100", BOTH[:1], RATES[:2], PRIORS[:1], SLOPES[:1]),
        *_grid("cifar100", BOTH, RATES[1:3], PRIORS[:1], (None,), purpose="by-nll"),
        *_grid("cifar100", BOTH[1:], RATES[2:3], PRIORS[:1], (None,), "cosine", "by-nll"),
        *_grid("cifar100", BOTH[1:], RATES[1:2], PRIORS[:1], (SLOPES[0], None), "steps", "by-nll"),
        *_grid("cifar100", BOTH, RATES[2:3], PRIORS[:1], (SLOPES[0], None), "steps", "by-nll"),
        *_grid("cifar100", BOTH[:1], RATES[2:], PRIORS[:1], (None,)),
        *_grid("cifar100", BOTH[:1], RATES[3:], PRIORS[:1], (None,), "cosine"),
    ]


def _grid(
    setting: str,
    labels: Sequence[str],
    rates: Sequence[float],
    priors: Sequence[float],
    slopes: Sequence[float | None],
    schedule: str = "constant",
    purpose: str | None = None,
) -> list[Job]:
    """All combinations; without a slope of the KL's weight there is no annealing, which is the post-hoc study's."""
    return [
        Job(
            setting,
            purpose or ("converged" if slope is None else "by-nll"),
            label,
            0,
            Choice(lr, prior, slope, schedule),
        )
        for label in labels
        for lr in rates
        for prior in priors
        for slope in slopes
    ]


def searched(setting: str) -> str:
    """What the sweep tries of a setting, in words.

    >>> print(searched("cifar100"))
    cifar100: the sweep tries, for one seed and not in all combinations: 2-tied with lr 0.0003, 0.001, 0.003 (...
    """
    found: dict[str, dict[str, set[str]]] = {}
    for job in all_jobs():
        if job.setting != setting or job.choice is None:
            continue
        how = (
            "without annealing" if job.choice.coefficient is None else f"{job.choice.coefficient:g} per batch"
        )
        parts = found.setdefault(job.label, {"lr": set(), "prior": set(), "kl": set(), "schedule": set()})
        parts["lr"].add(f"{job.choice.lr:g}")
        parts["prior"].add(f"{job.choice.prior:g}")
        parts["kl"].add(how)
        parts["schedule"].add(job.choice.schedule)
    rows = [
        f"{label} with lr {_list(parts['lr'])} ({_list(parts['schedule'])}), prior scale {_list(parts['prior'])}, "
        f"{_list(parts['kl'])}"
        for label, parts in sorted(found.items())
    ]
    return f"{setting}: the sweep tries, for one seed and not in all combinations: {'; '.join(rows)}."


def _list(words: set[str]) -> str:
    return ", ".join(sorted(words))
