"""What passes over data and the history of a run say: equal draws, noise, a KL that outweighs the data, annealing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.conversion import find_record, unwrap
from slimbayes.core.draws import draw
from slimbayes.core.likelihoods import Categorical, Gaussian, Likelihood
from slimbayes.core.objective import elbo, kl
from slimbayes.core.predict import scored
from slimbayes.core.probes import evaluating
from slimbayes.verbs.diagnosis import limits
from slimbayes.verbs.diagnosis.findings import Finding
from slimbayes.verbs.evaluation import arguments

_LATER = 10**9  # a step by which every schedule has ended


def outputs(model: nn.Module, inputs: Any, samples: int, seed: int, noise: str = "example") -> Tensor:
    """The draws [D, B, ...] of the inputs in eval mode, without a gradient."""
    args, named = arguments(inputs)
    with torch.no_grad(), evaluating(unwrap(model)):
        return scored(draw(model, *args, samples=samples, noise=noise, seed=seed, **named)).detach()


def drawn(model: nn.Module, draws: Tensor) -> Iterator[Finding]:
    """Outputs that are not finite, or the same in every draw."""
    finite = torch.isfinite(draws)
    if not bool(finite.all()):
        bad = draws.numel() - int(finite.sum())
        yield Finding(
            "outputs-not-finite", "error", "", f"{bad} of {draws.numel()} outputs are NaN or infinite",
            "Nothing can be predicted from them",
            "Look at the inputs, then at factors and σ that are too large", bad, 0,
        )  # fmt: skip
        return
    if len(draws) < 2 or (find_record(model).components == 1 and not noisy(model)):
        return  # one network, on purpose
    wide = draws.double()
    size = float(wide.square().mean().sqrt())
    spread = float(wide.std(0).square().mean().sqrt())
    if spread <= limits.SAME_DRAWS * max(size, 1e-30):
        yield Finding(
            "draws-identical", "error", "",
            f"{len(draws)} draws differ by {spread:.1g}, the outputs are {size:.2g} large",
            "There is no uncertainty in the predictions: σ has vanished, or the random layers do not reach the output",
            "Look at σ (sb.analysis.stddevs, factor_scale) and at what was converted (print(sb.summary(model)))",
            spread / max(size, 1e-30), limits.SAME_DRAWS,
        )  # fmt: skip


def noisy(model: nn.Module) -> bool:
    """Whether draws of one component differ."""
    return any(method.traits.noisy for method in find_record(model).methods)


def drowned(
    model: nn.Module, inputs: Any, draws: Tensor, targets: Tensor, likelihood: Likelihood | None
) -> Iterator[Finding]:
    """Draws whose nll is far above that of the same network without noise."""
    if not noisy(model):
        return
    chosen = Categorical() if likelihood is None else likelihood
    silent = outputs(model, inputs, 1, 0, noise="mean")
    with torch.no_grad():
        sampled, mean = (float(chosen.mean_nll(each, targets)) for each in (draws, silent))
    if sampled - mean > limits.DROWNED:
        yield Finding(
            "noise-drowns", "warning", "",
            f"the nll of a draw is {sampled:.3g}, without noise (noise='mean') it is {mean:.3g}",
            "The noise of the posterior hides what the means have learned, in training as in prediction",
            "Start with less of it (a smaller stddev_init, dropout_rate or rate), use a narrower prior, lower the "
            "temperature of the method or kl_weight, or train longer: σ learns slowly",
            sampled - mean, limits.DROWNED,
        )  # fmt: skip


def balance(
    model: nn.Module,
    draws: Tensor,
    targets: Tensor,
    num_data: int,
    weight: float,
    likelihood: Likelihood | None,
    started: bool = False,
) -> Iterator[Finding]:
    """A KL per datum above the nll per datum; where the spreads are as they ``started``, it was not in the loss."""
    if isinstance(num_data, bool) or num_data < 1:
        raise ValueError(f"num_data={num_data!r}: pass the number of training examples")
    chosen = Categorical() if likelihood is None else likelihood
    with torch.no_grad():  # a num_data below the batch is an error of elbo, and here a finding
        parts = elbo(draws, targets, model, max(num_data, len(targets)), chosen)
    for finding in outweighed(float(parts.nll), weight * float(parts.kl), num_data, chosen):
        yield _unspent(finding) if started else finding


def outweighed(nll: float, divergence: float, num_data: int, likelihood: Likelihood) -> Iterator[Finding]:
    """The same of figures: nll per datum, and the KL as it enters the loss, weighted and tempered."""
    density = isinstance(likelihood, Gaussian)
    share = divergence / num_data
    ratio = share / max(abs(nll), limits.KL_DENSITY if density else 1e-12)
    if ratio > limits.KL_RATIO and (density or nll > limits.KL_FITTED):
        yield Finding(
            "kl-dominates", "warning", "",
            f"the KL is {share:.3g} nats per datum, the nll {nll:.3g}: the smaller part of the loss",
            "The prior counts more than the data, and the network fits them less than it could",
            f"Check that num_data={num_data} is the size of the training set and not of a batch, and that the loss was "
            "sb.elbo(...).loss; else lower the temperature of the method or kl_weight, choose a prior nearer to the "
            "weights (sb.HeNormal, a smaller scale), a larger stddev_init, or a method with fewer random numbers",
            ratio, limits.KL_RATIO,
        )  # fmt: skip


def annealed(
    model: nn.Module, history: Any, annealing: Callable[[int], float] | None, step: int | None
) -> tuple[float, list[Finding]]:
    """The KL's weight at the end of the run, and what is to be said of it."""
    if annealing is not None:
        if step is None:
            raise ValueError("annealing without step: pass the number of steps that were taken, too")
        taken = [float(annealing(t)) for t in (0, max(0, step - 1))]
        now, end = taken[-1], float(annealing(_LATER))
        if max(taken) == 0 and float(kl(model)) > 0:
            return now, list(unused(step))
        return now, [_annealing(now, end)] if now < end else []
    weights = _weights(history)
    if not weights:
        return 1.0, []
    now = weights[-1]
    if max(weights) == 0 and float(kl(model)) > 0:
        return now, list(unused(getattr(history, "step", None) or history[-1].get("step")))
    if now >= 1.0:
        return now, []
    if len(weights) == 1 or now > weights[-2]:
        return now, [_annealing(now, 1.0)]
    found = Finding(
        "kl-tempered", "notice", "", f"the KL had the weight {now:.3g} to the end",
        "This is a cold posterior: narrower "
        "than Bayes' rule says, which often predicts better and is less sure of being unsure",
        "Keep it if it was meant so; kl_weight=1 is the plain posterior", now, 1.0,
    )  # fmt: skip
    return now, [found]


def unused(steps: float | None) -> Iterator[Finding]:
    """A KL whose weight was 0 from the first step to the last."""
    yield Finding(
        "kl-unused", "warning", "", f"the KL had the weight 0 in {f'all {steps:.0f}' if steps else 'all'} steps",
        "The data alone only shrink the spreads: there is no posterior, and what is left of σ says nothing",
        "Train on sb.elbo(...).loss with a kl_weight above 0; if it has one, its schedule (kl_start, kl_coefficient, "
        "LinearAnnealing) began later than the training ended",
        0.0, 0.0,
    )  # fmt: skip


def _unspent(dominating: Finding) -> Finding:
    return replace(
        dominating, kind="kl-unused", what=f"{dominating.what}, and spreads are where they started",
        why="The KL would have moved them: it was not in the loss, or the optimizer does not have them",
        remedy="Train on sb.elbo(...).loss, with an optimizer that was made after sb.bayesianize, of "
        "sb.parameter_groups(model, ...) or model.parameters()",
    )  # fmt: skip


def _annealing(now: float, end: float) -> Finding:
    return Finding(
        "kl-annealing", "warning", "", f"the KL's weight was {now:.3g} when training ended, on its way to {end:.3g}",
        "The posterior has not settled under the objective that it is meant for, and σ is too small by as much",
        "Train longer, or let annealing end earlier (kl_annealing=0.5, LinearAnnealing with fewer steps)", now, end,
    )  # fmt: skip


def _weights(history: Any) -> list[float]:
    rows: Sequence[Any] = getattr(history, "history", history) or ()
    if not isinstance(rows, Sequence) or not all(isinstance(row, dict) for row in rows):
        raise TypeError(
            f"history is {type(history).__name__}: pass what sb.fit returned, or its rows (dicts with 'kl_weight')"
        )
    return [float(row["kl_weight"]) for row in rows if "kl_weight" in row]
