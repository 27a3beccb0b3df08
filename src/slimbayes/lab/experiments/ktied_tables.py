"""The k-tied paper's tables: post-hoc ranks (Tables 2, 3, 5, Figures 5, 9) and trained ranks (Figure 6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from slimbayes import analysis
from slimbayes.lab.experiments.ktied_checks import (
    RANKS,
    differences,
    parameter_checks,
    posthoc_checks,
    trained_checks,
)
from slimbayes.lab.experiments.ktied_grid import searched
from slimbayes.lab.experiments.ktied_recipes import LABELS, TIED, Job, prepare, seeds_of, size_of, train
from slimbayes.lab.experiments.ktied_words import choices, posthoc_choice
from slimbayes.lab.experiments.networks import count_parameters
from slimbayes.lab.experiments.outcome import Outcome, Table, check
from slimbayes.lab.experiments.session import Session
from slimbayes.verbs.compression import compress


def converged(session: Session, setting: str) -> list[Job]:
    """Mean-field networks trained without annealing: what the post-hoc study starts from."""
    return [Job(setting, "converged", "Mean-field", seed) for seed in seeds_of(session, setting)]


def figure6_jobs(
    session: Session, setting: str, estimator: str = "shared", purpose: str = "by-nll"
) -> list[Job]:
    """Every row of Figure 6, left; of our own estimators three seeds, chosen by −ELBO too.

    On IMDB networks without annealing serve all figures.
    """
    purpose = "converged" if setting == "imdb" else purpose
    most = None if purpose == "by-nll" and estimator == "shared" else 3
    return [
        Job(setting, purpose, label, seed, estimator=estimator)
        for seed in seeds_of(session, setting, most)
        for label in LABELS
    ]


def posthoc(session: Session, setting: str, extra: bool = False) -> Table:
    """Figures of the mean-field networks and of their clipped SVDs; ``extra``: of ``sb.compress`` beside them."""
    size, prepared = size_of(setting, session.scale), prepare(session, setting)
    table = Table(setting, TITLES[setting], ("neg_elbo", "nll", "accuracy", "brier", "ece", "parameters"))
    for job in converged(session, setting):
        found = train(session, job)
        for label, rank, make in _variants(found.model, TIED[setting], extra):
            figures, errors = session.figures(found, label, prepared, size.samples, make)
            table.add(label, {**figures, "parameters": tied_parameters(found.model, rank, setting)}, errors)
        session.say(f"{setting}: post-hoc ranks of seed {job.seed} measured")
    first = table.rows["Mean-field"].values["parameters"][0]
    table.derive("parameters_percent", lambda values: 100 * values["parameters"] / first)
    return table


def measure(session: Session, job: Job) -> float:
    """Train a network and measure what the tables will ask of it, beside which it is kept; returns the seconds."""
    found = train(session, job)
    size, prepared = size_of(job.setting, session.scale), prepare(session, job.setting)
    if job.choice is not None:
        session.figures(found, "trained", prepared, 16, split="validation")
        return found.seconds
    if job.purpose in ("by-nll", "by-elbo") or job.setting == "imdb":
        session.figures(found, "trained", prepared, size.samples)
    if job.purpose == "converged" and job.label == "Mean-field":
        extra = job.setting in ("mnist", "cifar100")  # as ktied/compress asks
        for label, _, make in _variants(found.model, TIED[job.setting], extra):
            session.figures(found, label, prepared, size.samples, make)
    return found.seconds


Variant = tuple[str, int | None, Callable[[], nn.Module]]


def _variants(model: nn.Module, include: str | None, extra: bool) -> list[Variant]:
    """(label, rank, how it is made) of every row."""
    found: list[Variant] = [("Mean-field", None, lambda: model)]
    for rank in RANKS:
        found.append((f"{rank}-tied", rank, partial(analysis.truncate, model, rank, include=include)))
        if extra:
            found.append((f"{rank}-tied, sb.compress", rank, partial(compress, model, rank, include=include)))
    return found


def counted(model: nn.Module, setting: str) -> int:
    """Parameters as the paper counts them: those of the LSTM's network without its dense head."""
    head = model.get_submodule("output") if setting == "imdb" else nn.Identity()
    return count_parameters(model) - sum(p.numel() for p in head.parameters())


def tied_parameters(model: nn.Module, rank: int | None, setting: str) -> int:
    """Parameters of a mean-field model when σ of its tied layers is kept as U and V: k(m + n) for mn."""
    if rank is None:
        return counted(model, setting)
    shapes = [matrix.stddev.shape for matrix in analysis.matrices(model, TIED[setting]).values()]
    return counted(model, setting) - sum(m * n for m, n in shapes) + rank * sum(m + n for m, n in shapes)


TITLES = {
    "mnist": "MNIST, MLP 784-400-400-10",
    "cifar100": "CIFAR-100, LeNet",
    "imdb": "IMDB, LSTM",
    "resnet": "CIFAR-10, TFP's ResNet",
    "resnet-he": "CIFAR-10, TFP's ResNet, He-scaled prior",
}


def table2(session: Session, setting: str) -> Outcome:
    """Table 2: what clipped SVDs of σ do to trained mean-field networks."""
    outcome = Outcome()
    outcome.deviations += posthoc_choice(session, setting)
    if setting != "imdb":
        outcome.deviations.append(searched(setting))
    table = posthoc(session, setting).select("neg_elbo", "nll", "accuracy")
    outcome.tables.append(table)
    outcome.checks += posthoc_checks(table, "neg_elbo" if setting == "imdb" else "nll")
    return outcome


def resnet_table(name: str, columns: Sequence[str]) -> Any:
    """Figure 5, Tables 3 and 5 and Figure 9: columns of the same post-hoc study."""

    def report(session: Session, setting: str) -> Outcome:
        outcome = Outcome()
        table = posthoc(session, setting).select(*columns)
        outcome.tables.append(table)
        if "nll" in columns:
            outcome.checks += posthoc_checks(table)
        if "parameters" in columns:
            outcome.checks += parameter_checks(session, f"ktied/{name}", table)
        if name == "figure5":
            from slimbayes.lab.experiments.ktied_figures import spectra

            outcome.curves += spectra(session, setting)
        return outcome

    return report


def trained_table(
    session: Session, setting: str, estimator: str = "shared", purpose: str = "by-nll"
) -> Table:
    """Figure 6, left: networks trained with mean-field and tied posteriors."""
    size, prepared = size_of(setting, session.scale), prepare(session, setting)
    columns = ("neg_elbo", "nll", "accuracy", "parameters_k", "parameters", "brier", "ece")
    table = Table(setting, TITLES[setting], columns)
    for job in figure6_jobs(session, setting, estimator, purpose):
        found = train(session, job)
        figures, errors = session.figures(found, "trained", prepared, size.samples)
        number = counted(found.model, setting)
        counts = {"parameters": float(number), "parameters_k": number / 1000}
        table.add(job.label, {**figures, **counts}, errors)
    return table


def by_elbo(session: Session, setting: str) -> Outcome:
    """The MNIST table of Figure 6 with hyper-parameters chosen by −ELBO instead of NLL."""
    outcome = Outcome()
    table = trained_table(session, setting, purpose="by-elbo")
    outcome.tables.append(table.select("neg_elbo", "nll", "accuracy", "parameters_k"))
    outcome.checks += trained_checks(table, setting)
    outcome.deviations += [choices(session, setting, "by-elbo"), differences(table)]
    return outcome


def local(session: Session, setting: str) -> Outcome:
    """The MNIST table of Figure 6 with the local estimator, beside the shared one."""
    outcome = Outcome()
    table = trained_table(session, setting, "local").select("neg_elbo", "nll", "accuracy", "parameters_k")
    shared = trained_table(session, setting).select("neg_elbo", "nll", "accuracy", "parameters_k")
    joined = Table(setting, TITLES[setting], table.columns)
    for label in LABELS:
        joined.take(label, shared.rows[label])
        joined.take(f"{label}, local", table.rows[label])
    outcome.tables.append(joined)
    outcome.deviations.append(choices(session, setting))
    outcome.deviations.append("The local rows take the values of the shared ones, and were not searched.")
    return outcome


def compression(session: Session, setting: str) -> Outcome:
    """``sb.compress`` beside the paper's clipped SVD."""
    outcome = Outcome()
    outcome.deviations += posthoc_choice(session, setting)
    table = posthoc(session, setting, extra=True).select("neg_elbo", "nll", "accuracy", "parameters")
    outcome.tables.append(table)
    for rank in RANKS:
        ours, theirs = (table.mean(f"{rank}-tied{end}", "neg_elbo") for end in (", sb.compress", ""))
        words = f"{table.title}: −ELBO of sb.compress at rank {rank} is not above the clipped SVD's"
        outcome.checks.append(check(words, ours <= theirs, ours - theirs, "≤ 0"))
    return outcome


def counts(session: Session, setting: str) -> Outcome:
    """Table 1: variational parameters of a 784×400 matrix, counted where slimbayes has the family."""
    from slimbayes.core.convert import bayesianize
    from slimbayes.core.methods import KTied, MeanField, Method

    m, n = 784, 400
    outcome = Outcome()
    table = Table("counts", f"Variational parameters of a {m}×{n} matrix", ("parameters",))
    families: dict[str, Method] = {"Mean-field": MeanField.paper(biases=False)}
    families |= {f"{k}-tied": KTied.paper(rank=k, biases=False) for k in RANKS}
    wanted = {"Mean-field": 2 * m * n} | {f"{k}-tied": m * n + k * (m + n) for k in RANKS}
    for label, method in families.items():
        layer = bayesianize(nn.Linear(m, n, bias=False), method)
        number = sum(p.numel() for p in layer.parameters())
        table.add(label, {"parameters": float(number)}, {})
        outcome.checks.append(
            check(f"{label}: as the formula says", number == wanted[label], number, f"{wanted[label]:,}")
        )
    outcome.tables.append(table)
    outcome.deviations.append("Families that slimbayes does not have (full covariances) are not counted.")
    return outcome
