"""Which of the k-tied paper's hyper-parameters the sweep tries."""

from __future__ import annotations

from slimbayes.experiments.ktied_recipes import Choice, Job
from slimbayes.experiments.session import Session


def tuning_jobs(session: Session) -> list[Job]:
    """The networks of the sweep: all of them, and two in a smoke run."""
    jobs = all_jobs()
    return jobs if session.scale != "smoke" else [jobs[0], jobs[-1]]


def all_jobs() -> list[Job]:
    """The paper's grids, for seed 0: whole on MNIST with a constant rate and annealing, else a part."""
    rates = (1e-4, 3e-4, 1e-3, 3e-3)
    jobs = [
        Job("mnist", "annealed", label, 0, Choice(lr, prior, coefficient))
        for label in ("Mean-field", "2-tied")
        for lr in rates
        for prior in (0.2, 0.3)
        for coefficient in (5e-5, 5e-6)
    ]
    jobs += [
        Job("mnist", "converged", "Mean-field", 0, Choice(lr, p)) for lr in rates[1:] for p in (0.2, 0.3)
    ]
    jobs += [
        Job("cifar100", "annealed", "2-tied", 0, Choice(lr, 0.2, coefficient))
        for lr in rates[1:3]
        for coefficient in (5e-5, 5e-6)
    ]
    jobs += [*lenet_jobs(), *cosine_jobs("mnist"), *cosine_jobs("cifar100")]
    return jobs


def lenet_jobs() -> list[Job]:
    """LeNet at the highest rates, with the faster annealing and without any."""
    tried = {
        "2-tied": ((1e-3, 0.3), (3e-3, 0.2), (3e-3, 0.3)),
        "Mean-field": ((1e-3, 0.2), (3e-3, 0.2), (3e-3, 0.3)),
    }
    annealed = [
        Job("cifar100", "annealed", label, 0, Choice(lr, prior, 5e-5))
        for label, pairs in tried.items()
        for lr, prior in pairs
    ]
    return [
        *annealed,
        *[Job("cifar100", "converged", "Mean-field", 0, Choice(lr, 0.2)) for lr in (1e-3, 3e-3)],
    ]


def cosine_jobs(setting: str) -> list[Job]:
    """The learning rate falls to 0 along a cosine: a step that never shrinks leaves its noise in the last weights."""
    mnist = setting == "mnist"
    jobs = [
        Job(setting, "annealed", label, 0, Choice(lr, prior, coefficient, "cosine"))
        for label in ("Mean-field", "2-tied")
        for lr in ((3e-4, 1e-3, 3e-3) if mnist else (1e-3, 3e-3))
        for prior in ((0.2, 0.3) if mnist else (0.2,))
        for coefficient in ((5e-5, 5e-6) if mnist else (5e-5,))
    ]
    rates = (1e-3, 3e-3) if mnist else (3e-3,)
    return jobs + [
        Job(setting, "converged", "Mean-field", 0, Choice(lr, 0.2, schedule="cosine")) for lr in rates
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
