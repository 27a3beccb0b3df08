"""How far the KL alone draws the components of rank-1 factors together in a run: known before it begins."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.analysis import rank1_factors
from slimbayes.core import distributions as d
from slimbayes.core.rules.rank1 import Factor
from slimbayes.training.settings import Training, whole_number

_HALVINGS = 40


@torch.no_grad()
def predicted_spread(
    model: nn.Module, training: Training, num_data: int, per_epoch: int | None = None
) -> list[float]:
    """The spread of components (``sb.analysis.component_spread``, mean over factors) after 0, 1, ... epochs of SGD.

    As if there were no likelihood: each location m follows dm/dτ = −w ∂KL/∂m, with w the method's temperature for
    kl_reduction "sum" and a K-th of it for the others, in the time of the run

        τ = Σ_t lr_t β_t / ((1 − momentum) num_data).

    For Normals, also log-normals in log-space, its distance from the prior's location is multiplied by exp(−wτ/σ_p²);
    for Cauchys δ² / 2 + (γ + γ_p)² log δ falls by 2wτ. Scales stay where they are, and so do points and half-Cauchys.
    "monte_carlo" is so only while components are apart.

    ``per_epoch``: steps of an epoch, where batches come from a loader of its own; None: num_data // batch_size.
    Gradients that are clipped, early stopping, weights of 16 bits (precision "bf16-true") and runs of a few steps, in
    which momentum has not built up, are not reckoned with: there components stay further apart.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(400, 400), sb.Rank1.paper(components=4))
    >>> sgd = Training(optimizer="sgd", lr=0.1, epochs=20, schedule="steps")
    >>> spreads = predicted_spread(net, sgd, num_data=50_000)
    >>> round(spreads[0], 1), round(spreads[-1] / spreads[0], 2)
    (0.5, 0.07)
    """
    if training.optimizer != "sgd":
        raise ValueError(
            f"what the KL does to components is known for optimizer='sgd', not for {training.optimizer!r}, whose steps "
            f"do not grow with the gradient; watch component_spread in the history of a run instead"
        )
    if training.momentum >= 1:
        raise ValueError(f"momentum={training.momentum} adds up all gradients for ever; give less than 1")
    for name, value in (("num_data", num_data), ("per_epoch", 1 if per_epoch is None else per_epoch)):
        if not whole_number(value) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    factors = [(factor, rule) for _, _, factor, rule in rank1_factors(model) if rule.components > 1]
    if not factors:
        raise ValueError(
            "the model has no rank-1 factors of several components: Rank1 and BatchEnsemble have them"
        )
    if any(factor.loc.is_meta for factor, _ in factors):
        raise ValueError("the model is on the meta device, which holds no numbers: load it first")
    found = []
    for time in _times(training, num_data, per_epoch or max(1, num_data // training.batch_size)):
        spreads = [_moved(factor, rule, time).std(0).mean() for factor, rule in factors]
        found.append(float(torch.stack(spreads).mean()))
    return found


def _times(training: Training, num_data: int, per_epoch: int) -> list[float]:
    """τ at the start and after every epoch."""
    steps = training.length(per_epoch)
    rate = training.lr * training.factor_lr_multiplier / ((1 - training.momentum) * num_data)
    times, now = [0.0], 0.0
    for step in range(steps):
        now += rate * training.multiplier(step, steps, per_epoch) * training.kl_factor(step, steps)
        if (step + 1) % per_epoch == 0 or step + 1 == steps:
            times.append(now)
    return times


def _moved(factor: Factor, rule: Any, time: float) -> Tensor:
    """A factor's locations [K, d] when the KL has drawn on them for so long."""
    q, loc = factor(), factor.loc.cpu().double()
    time = rule.kl_temperature * (time if rule.reduction == "sum" else time / rule.components)
    if isinstance(q, d.Delta) or not factor.loc.requires_grad or not time:
        return loc
    p: d.Spread = factor.prior.distribution(loc)
    apart = loc - p.loc
    if isinstance(q, (d.Normal, d.LogNormal)) and type(p) is type(q):
        return p.loc + apart * math.exp(-time / float(p.scale) ** 2)
    if isinstance(q, d.Cauchy) and type(p) is type(q):
        width = (q.scale.cpu().double() + p.scale).square()
        return p.loc + apart.sign() * _nearer(apart.abs(), width, 2 * time)
    raise ValueError(
        f"what the KL from {type(q).__name__} to a {type(p).__name__} prior does to components is not known; "
        f"Normal, log-normal and Cauchy factors with a prior of their own family are"
    )


def _nearer(apart: Tensor, width: Tensor, fallen: float) -> Tensor:
    """The δ > 0 at which δ²/2 + width · log δ has fallen by so much from where it was: by halving on log δ."""
    high = apart.clamp_min(torch.finfo(apart.dtype).tiny).log()
    goal = (2 * high).exp() / 2 + width * high - fallen
    low = high - fallen / width  # where the logarithm alone has fallen by it
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = (2 * middle).exp() / 2 + width * middle > goal
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return ((low + high) / 2).exp()
