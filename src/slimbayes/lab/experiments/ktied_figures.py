"""The k-tied paper's figures: spectra, heat maps, signal-to-noise ratios and convergence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimbayes import analysis
from slimbayes.lab.experiments.ktied_checks import differences, parameter_checks, trained_checks
from slimbayes.lab.experiments.ktied_recipes import LABELS, TIED, Job, seeds_of, size_of, train
from slimbayes.lab.experiments.ktied_tables import TITLES, converged, figure6_jobs, trained_table
from slimbayes.lab.experiments.ktied_words import chosen, posthoc_choice, probed_choice
from slimbayes.lab.experiments.outcome import Outcome, Table, check, curve
from slimbayes.lab.experiments.session import Session

SHOWN = 20  # singular values of a curve
PIXELS = 48  # of a heat map, each way
_NAMES = {
    "hidden.0": "dense 1",
    "hidden.1": "dense 2",
    "output": "output",
    "dense": "dense 1",
    "lstm.ih_l0": "input kernel",
    "lstm.hh_l0": "recurrent kernel",
}


def probed(session: Session, setting: str) -> list[Job]:
    """Networks trained without annealing whose −ELBO and SNR are measured on the way: one of LeNet."""
    if setting == "imdb":
        return figure6_jobs(session, setting)
    seeds = seeds_of(session, setting, 3 if setting == "mnist" else 1)
    return [Job(setting, "probed", label, seed) for seed in seeds for label in LABELS]


def _spectra(session: Session, setting: str) -> dict[str, dict[str, list[list[float]]]]:
    """Explained variance per singular value, by layer and by "mean" or "stddev", for every seed."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for job in converged(session, setting):
        for layer, parts in analysis.spectrum(train(session, job).model, TIED[setting]).items():
            for part, values in parts.items():
                found.setdefault(layer, {}).setdefault(part, []).append(values.tolist())
    return found


def spectra(session: Session, setting: str) -> list[dict[str, Any]]:
    """One figure for standard deviations, one for means."""
    found = _spectra(session, setting)
    curves = []
    for part, title in (("stddev", "posterior standard deviations"), ("mean", "posterior means")):
        lines = []
        for layer, parts in found.items():
            ys = [one[:SHOWN] for one in parts[part]]
            lines.append((_NAMES.get(layer, layer), [float(i + 1) for i in range(len(ys[0]))], ys))
        words = f"{TITLES[setting]}: variance explained per singular value of the {title}"
        curves.append(
            curve(f"{setting}-{part}", words, "singular value", "fraction of variance", lines, log_y=True)
        )
    return curves


def _explained(session: Session, setting: str) -> tuple[Table, list[dict[str, Any]]]:
    """What the first two singular values explain, per layer, and whether that is 90 % of σ's variance, not of μ's."""
    columns = ("σ, first", "σ, first two", "μ, first", "μ, first two")
    table = Table(f"{setting}-explained", f"{TITLES[setting]}: variance explained", columns)
    checks = []
    for layer, parts in _spectra(session, setting).items():
        for stddev, centre in zip(parts["stddev"], parts["mean"], strict=True):
            numbers = (stddev[0], sum(stddev[:2]), centre[0], sum(centre[:2]))
            table.add(_NAMES.get(layer, layer), dict(zip(columns, numbers, strict=True)), {})
    for layer in table.rows:
        sigma, mu = table.mean(layer, columns[1]), table.mean(layer, columns[3])
        where = f"{TITLES[setting]}, {layer}: two singular values"
        checks.append(check(f"{where} explain at least 90 % of σ's variance", sigma >= 0.9, sigma, "≥ 0.9"))
        checks.append(check(f"{where} explain less than 90 % of μ's variance", mu < 0.9, mu, "< 0.9"))
    return table, checks


def variances(session: Session, setting: str) -> Outcome:
    """Spectra of the dense layers of the MLP and of LeNet (Figure 3), and of the ResNet's layers (Figure 12)."""
    outcome = Outcome()
    outcome.deviations += posthoc_choice(session, setting)
    outcome.curves += spectra(session, setting)
    table, checks = _explained(session, setting)
    outcome.tables.append(table)
    outcome.checks += checks
    return outcome


def block_means(matrix: Tensor, pixels: int = PIXELS) -> list[list[float]]:
    """A matrix of at most so many rows and columns: means of blocks.

    >>> block_means(torch.tensor([[1.0, 3.0], [5.0, 7.0]]), pixels=1)
    [[4.0]]
    """
    size = (min(pixels, matrix.shape[0]), min(pixels, matrix.shape[1]))
    small = torch.nn.functional.adaptive_avg_pool2d(matrix[None, None].double(), size)[0, 0]
    return [[float(f"{x:.4g}") for x in row] for row in small.tolist()]


def heat_map(name: str, title: str, matrix: Tensor) -> dict[str, Any]:
    """A matrix of standard deviations beside its clipped approximations of rank 1 and 2."""
    panels = [("no approximation", matrix)]
    panels += [(f"rank {rank}", analysis.low_rank(matrix, rank).clamp_min(0.0)) for rank in (1, 2)]
    drawn = [{"label": label, "shape": list(m.shape), "values": block_means(m)} for label, m in panels]
    return {"name": name, "title": title, "panels": drawn}


def figure4(session: Session, setting: str) -> Outcome:
    """Heat maps of the first dense layer: LeNet's as in the paper, and the MLP's."""
    outcome = Outcome()
    outcome.deviations += posthoc_choice(session, setting)
    layer = "dense" if setting == "cifar100" else "hidden.0"
    matrix = analysis.matrices(train(session, converged(session, setting)[0]).model)[layer].stddev.cpu()
    words = f"{TITLES[setting]}: σ of the first dense layer (rows: inputs, columns: outputs)"
    outcome.maps.append(heat_map(f"{setting}-{layer.replace('.', '')}", words, matrix))
    outcome.deviations.append(f"Maps are means of blocks, at most {PIXELS}×{PIXELS}; seed 0.")
    return outcome


def figure11(session: Session, setting: str) -> Outcome:
    """Heat maps of convolutions of the ResNet, kernels as [h·w·inputs, outputs]."""
    outcome = Outcome()
    matrices = analysis.matrices(train(session, converged(session, setting)[0]).model)
    for layer in ("block1.conv2", "block2.conv2", "block4.conv2"):
        words = f"{TITLES[setting]}: σ of {layer}"
        name = f"{setting}-{layer.replace('.', '-')}"
        outcome.maps.append(heat_map(name, words, matrices[layer].stddev.cpu()))
    outcome.deviations.append(f"Maps are means of blocks, at most {PIXELS}×{PIXELS}; seed 0.")
    return outcome


def figure10(session: Session, setting: str) -> Outcome:
    """Mean standard deviation of every layer over training, of the ResNet as in the paper and of the MLP."""
    outcome = Outcome()
    outcome.deviations += posthoc_choice(session, setting)
    by_layer: dict[str, list[list[float]]] = {}
    steps: list[float] = []
    for job in converged(session, setting):
        probes = train(session, job).probes
        steps = [float(step) for step in sorted(map(int, probes))]
        for layer in next(iter(probes.values()))["stddev"]:
            line = [probes[str(int(step))]["stddev"][layer] for step in steps]
            by_layer.setdefault(layer, []).append(line)
    lines = [(_NAMES.get(layer, layer), steps, ys) for layer, ys in by_layer.items()]
    words = f"{TITLES[setting]}: mean posterior standard deviation over training"
    outcome.curves.append(curve(f"{setting}-stddev", words, "step", "mean σ", lines, log_y=True))
    table = Table(f"{setting}-stddev", words, ("middle", "end"))
    for name, _, ys in lines:
        for one in ys:
            table.add(name, {"middle": one[len(one) // 2], "end": one[-1]}, {})
    outcome.tables.append(table)
    return outcome


def _over_steps(session: Session, setting: str, key: str, name: str, title: str) -> Table:
    """A probe's figures at the size's steps, by row."""
    steps = [str(step) for step in size_of(setting, session.scale).probe_steps]
    table = Table(name, title, tuple(steps))
    for job in probed(session, setting):
        probes = train(session, job).probes
        table.add(job.label, {step: probes[step][key] for step in steps}, {})
    return table


def convergence_curves(session: Session, setting: str) -> dict[str, Any]:
    """−ELBO on validation data over steps."""
    by_label: dict[str, list[list[float]]] = {}
    steps: list[float] = []
    for job in probed(session, setting):
        probes = train(session, job).probes
        steps = [float(step) for step in sorted(map(int, probes))]
        by_label.setdefault(job.label, []).append([probes[str(int(s))]["neg_elbo"] for s in steps])
    lines = [(label, steps, ys) for label, ys in by_label.items()]
    words = f"{TITLES[setting]}: −ELBO on validation data, without annealing"
    return curve(f"{setting}-convergence", words, "step", "−ELBO per example", lines, log_y=True)


def figure6(session: Session, setting: str) -> Outcome:
    """Trained rows, gradient SNR and −ELBO by step."""
    outcome = Outcome()
    table = trained_table(session, setting)
    outcome.deviations += [*chosen(session, setting), differences(table)]
    outcome.checks += [
        *trained_checks(table, setting),
        *parameter_checks(session, "ktied/figure6", table),
    ]
    outcome.tables.append(table.select("neg_elbo", "nll", "accuracy", "parameters_k", "parameters"))
    if setting == "mnist":
        _by_step(session, outcome)
    return outcome


def _by_step(session: Session, outcome: Outcome) -> None:
    """Figure 6, right: the tables by step, and what was to hold of them."""
    title = "MNIST, MLP: gradient SNR of dense 2"
    snr = _over_steps(session, "mnist", "snr", "snr", f"{title}, median over parameters, at step")
    pooled = _over_steps(session, "mnist", "snr_pooled", "snr-pooled", f"{title}, ΣE[g²]/ΣVar[g], at step")
    average = _over_steps(session, "mnist", "snr_mean", "snr-mean", f"{title}, mean over parameters, at step")
    words = "MNIST, MLP: share of dense 2's parameters that only the KL moves at step"
    constant = _over_steps(session, "mnist", "constant", "constant", words)
    elbo = _over_steps(session, "mnist", "neg_elbo", "convergence", "MNIST, MLP: validation −ELBO at step")
    outcome.tables += [snr, pooled, average, constant, elbo]
    outcome.deviations += probed_choice(session, "mnist")
    outcome.deviations.append(
        "SNR: the paper prints means over parameters. Here a mean is that of the few parameters whose units are nearly "
        "dead and whose gradients hardly vary, so the median stands beside the paper's numbers, and the mean below. "
        "Parameters whose gradient is the KL's alone have no variance and are left out; their share is given. "
        "Ten batches are drawn at the weights of the step, without updates between them."
    )
    first, *later = snr.columns
    for label in LABELS[1:]:
        # The mean is what the paper defines; the others were looked at because nearly dead units rule the mean.
        for table, kind in (
            (average, "mean over parameters, the paper's"),
            (snr, "median"),
            (pooled, "pooled"),
        ):
            ratio = table.mean(label, first) / table.mean("Mean-field", first)
            words = f"MNIST: SNR ({kind}) of {label} at step {first} at least 100 times mean-field's"
            outcome.checks.append(check(words, ratio >= 100, ratio, "≥ 100"))
        for step in later:
            below = elbo.mean(label, step) - elbo.mean("Mean-field", step)
            words = f"MNIST: −ELBO of {label} at step {step} below mean-field's"
            outcome.checks.append(check(words, below < 0, below, "< 0"))


def figure7(session: Session, setting: str) -> Outcome:
    """Convergence of the MLP, of LeNet and of the LSTM."""
    outcome = Outcome(
        curves=[convergence_curves(session, setting)], deviations=probed_choice(session, setting)
    )
    name, title = f"{setting}-convergence", f"{TITLES[setting]}: validation −ELBO at step"
    outcome.tables.append(_over_steps(session, setting, "neg_elbo", name, title))
    return outcome
