"""What the parameters of posteriors say: spreads at their start, at their cap, lost, or as in the prior."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.analysis.comparison import prior_pairs
from slimbayes.analysis.factors import rank1_factors
from slimbayes.analysis.layers import root_of
from slimbayes.core import distributions as d
from slimbayes.core.conversion import Record, converted_layers, find_record, unwrap
from slimbayes.core.kl import total_kl
from slimbayes.core.methods import KTied, MeanField, Rank1
from slimbayes.core.methods.base import Method
from slimbayes.core.posteriors import NormalPosterior, dropout_stddev, positive
from slimbayes.core.rules.rank1 import Factor
from slimbayes.verbs.diagnosis import limits
from slimbayes.verbs.diagnosis.findings import Finding


def not_finite(model: nn.Module) -> Iterator[Finding]:
    """Parameters and buffers that are NaN or infinite."""
    inner = unwrap(model)
    for name, tensor in (*inner.named_parameters(), *inner.named_buffers()):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = tensor.numel() - int(torch.isfinite(tensor).sum())
            yield Finding(
                "not-finite", "error", name, f"{bad} of {tensor.numel()} elements are NaN or infinite",
                "The training has diverged; every output that uses them is NaN",
                "Go back to an earlier checkpoint, lower the learning rate, or clip gradients (clip_norm=1.0)",
                bad, 0,
            )  # fmt: skip


def spreads(model: nn.Module) -> Iterator[Finding]:
    """σ of weights and of factors against its start, its cap, and the size of what it spreads."""
    record = find_record(model)
    for name, layer in converted_layers(root_of(model)):
        posterior, method = layer.bayes.weight_posterior(), method_of(record, name)
        if posterior is None or not hasattr(posterior(layer.weight), "scale"):
            continue
        sigma, mean = posterior(layer.weight).scale, layer.weight
        yield from _at_start(name, "σ", sigma, _start(method, mean))
        yield from _size(name, "σ", sigma, mean)
        if isinstance(posterior, NormalPosterior) and posterior.maximum is not None:
            yield from _at_cap(name, positive(posterior.rho), posterior.maximum)
    for name, which, factor, rule in rank1_factors(model):
        q: Any = factor()
        if isinstance(q, d.Delta):
            continue
        label = f"the scale of factor {which}"
        yield from _at_start(name, label, q.scale, _start(method_of(record, name), q.loc))
        if not isinstance(q, d.LogNormal | d.HalfCauchy):  # others have no location to compare with
            yield from _size(name, label, q.scale, q.loc)
        if rule.clip is not None:
            yield from _clipped(name, which, q, rule.clip)


def factors(model: nn.Module) -> Iterator[Finding]:
    """Locations of rank-1 factors far from where they are meant to be."""
    for name, which, factor, rule in rank1_factors(model):
        yield from _factor(name, which, factor, rule)


def dead(model: nn.Module) -> Iterator[Finding]:
    """Weights and factors whose posterior is the prior."""
    for name, tensor, q, p, _ in prior_pairs(model):
        if (
            tensor == "bias" or isinstance(q, d.Patch) or q.loc is p.loc
        ):  # a mean tied to the prior's is the data's
            continue
        each = float(total_kl(q, p)) / q.loc.numel()
        if each < limits.DEAD:
            factor = tensor in ("r", "s")
            yield Finding(
                "posterior-is-prior", "warning", name,
                f"the posterior of {'factor ' if factor else ''}{tensor} is its prior (KL {each:.2g} nats per element)",
                "The data have said nothing about these numbers: "
                + ("all components are alike up to the prior's noise" if factor else "the layer only adds noise"),
                "Lower the KL's weight or anneal it more slowly, check num_data (the size of the training set, not of "
                "a batch), or make the network smaller",
                each, limits.DEAD,
            )  # fmt: skip


def method_of(record: Record, name: str) -> Method | None:
    """The method that converted a layer, which may be one kernel of several."""
    while name not in record.layers and "." in name:
        name = name.rpartition(".")[0]
    index = record.layers.get(name, record.layers.get(""))
    return None if index is None else record.methods[index]


def _start(method: Method | None, mean: Tensor) -> tuple[float, bool] | None:
    """What the method gave a scale to begin with, around means of this size, and whether at random."""
    if isinstance(method, MeanField | KTied):
        return method.stddev_init * float(method.prior.unit(mean)), True
    if isinstance(method, Rank1):
        return dropout_stddev(method.first_rate), method.posterior in ("normal", "lognormal")
    return None


def _at_start(name: str, label: str, sigma: Tensor, known: tuple[float, bool] | None) -> Iterator[Finding]:
    if known is None:
        return
    start, random = known
    relative = sigma.double() / start
    if relative.numel() < limits.START_COUNT:
        return
    off, spread = abs(float(relative.mean()) - 1), float(relative.std())
    low, high = limits.START_SPREAD
    if off < limits.START_MEAN and (low < spread < high if random else spread < 0.01):
        yield Finding(
            "sigma-at-start", "warning", name,
            f"{label} has its initial values still: mean {float(sigma.double().mean()):.3g}, start {start:.3g}",
            "A spread that does not move is a setting, not a posterior: training was too short for it, its learning "
            "rate too small, or the optimizer does not have it",
            "Train longer or with a larger learning rate, on sb.elbo(...).loss, which has the KL; give the optimizer "
            "sb.parameter_groups(model, ...) or all of model.parameters(); or start σ nearer to where it goes",
            off, limits.START_MEAN,
        )  # fmt: skip


def _size(name: str, label: str, sigma: Tensor, mean: Tensor) -> Iterator[Finding]:
    spread, size = (float(t.double().square().mean().sqrt()) for t in (sigma, mean))
    ratio = spread / max(size, 1e-30)
    if ratio < limits.NEGLIGIBLE:
        yield Finding(
            "sigma-negligible", "warning", name, f"{label} is {ratio:.1g} of |μ|",
            "Draws are one network: there is no uncertainty left from this layer",
            "Start with a larger stddev_init (or dropout_rate), check that the KL has its weight and num_data is "
            "right, or train longer: the KL draws σ to the prior's slowly",
            ratio, limits.NEGLIGIBLE,
        )  # fmt: skip
    elif ratio > limits.DOMINANT:
        yield Finding(
            "sigma-dominates", "warning", name, f"{label} is {ratio:.3g} times |μ|",
            "The layer's output is noise, and what comes after it has to live with that",
            "Lower the KL's weight, use a narrower prior, or cap σ (MeanField(stddev_max=...))",
            ratio, limits.DOMINANT,
        )  # fmt: skip


def _at_cap(name: str, sigma: Tensor, cap: float) -> Iterator[Finding]:
    share = float((sigma >= limits.AT_CAP * cap).double().mean())
    if share > limits.CAPPED_SHARE:
        yield Finding(
            "sigma-at-cap", "warning", name, f"{100 * share:.0f} % of σ are at stddev_max={cap:g}",
            "The cap, not the data, says how uncertain these weights are", "Raise stddev_max, or use a narrower prior",
            share, limits.CAPPED_SHARE,
        )  # fmt: skip


def _clipped(name: str, which: str, q: Any, clip: float) -> Iterator[Finding]:
    inside = q.loc.abs() < clip if not isinstance(q, d.LogNormal) else q.loc < math.log(clip)
    share = float((beyond(q, clip) * inside).double().mean())
    if share > limits.CLIPPED_SHARE:
        yield Finding(
            "sigma-at-cap", "warning", name,
            f"{100 * share:.0f} % of the samples of factor {which} are cut off at clip={clip:g}",
            "The scale is so large that clipped samples are no samples of the posterior, which the KL knows nothing of",
            "Use a narrower prior, a lower KL weight, or a larger clip", share, limits.CLIPPED_SHARE,
        )  # fmt: skip


def beyond(q: Any, clip: float) -> Tensor:
    """P(|x| > clip) for x ~ q, elementwise.

    >>> beyond(d.Normal(torch.zeros(1), torch.ones(1)), 1.959964).item()
    0.05
    """
    loc, scale = q.loc.double(), q.scale.double()
    if isinstance(q, d.LogNormal):
        return 0.5 * torch.erfc((math.log(clip) - loc) / (scale * math.sqrt(2)))
    if isinstance(q, d.HalfCauchy):
        return 1 - 2 / math.pi * torch.atan((clip - loc).clamp_min(0) / scale)
    if isinstance(q, d.Cauchy):
        return 1 - (torch.atan((clip - loc) / scale) + torch.atan((clip + loc) / scale)) / math.pi
    return 0.5 * (
        torch.erfc((clip - loc) / (scale * math.sqrt(2))) + torch.erfc((clip + loc) / (scale * math.sqrt(2)))
    )


def _factor(name: str, which: str, factor: Factor, rule: Any) -> Iterator[Finding]:
    loc = factor.loc.exp() if isinstance(factor(), d.LogNormal) else factor.loc
    size, clip = loc.double().abs(), limits.DEFAULT_CLIP if rule.clip is None else rule.clip
    outside, mean = float((size > clip).double().mean()), float(size.mean())
    if outside > limits.OUTSIDE_SHARE or (mean > limits.FACTOR_LARGE and not rule.additive):
        beyond_clip = outside > limits.OUTSIDE_SHARE
        found = f"{100 * outside:.0f} % of factor {which} lie beyond ±{clip:g}; " if beyond_clip else ""
        yield Finding(
            "factors-exploded", "error", name, f"{found}mean |{which}| is {mean:.3g}, and was about 1",
            "Factors multiply activations layer by layer; so far from 1 they drown what the shared weights say",
            "Lower the learning rate of factors (factor_lr_multiplier), clip gradients, or raise the KL's weight",
            mean, limits.FACTOR_LARGE,
        )  # fmt: skip
    elif mean < limits.FACTOR_SMALL and not rule.additive:
        yield Finding(
            "factors-vanished", "warning", name, f"mean |{which}| is {mean:.2g}, and was about 1",
            "The layer passes next to nothing on", "Lower the learning rate, and keep weight decay off the factors "
            "(sb.parameter_groups does)", mean, limits.FACTOR_SMALL,
        )  # fmt: skip
