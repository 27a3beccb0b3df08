"""The KL of a converted model, written out: a sum over the elements of every random tensor, tied ones once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributions as td

import slimbayes as sb
from reliability.cases.values import deviation, softplus
from slimbayes.core.conversion import converted_layers
from slimbayes.core.posteriors import CauchyPosterior, DeltaPosterior, HalfCauchyPosterior, LogNormalPosterior
from slimbayes.core.rules.meanfield import SampledRule
from slimbayes.core.rules.patching import IndexedRule
from slimbayes.core.rules.rank1 import Factor, Rank1Rule


def _factor_kl(factor: Factor, reduction: str) -> float:
    if isinstance(factor.spread, DeltaPosterior):
        return 0.0
    loc, scale = factor.loc.detach().double(), softplus(factor.spread.rho)
    p: Any = factor.prior
    if isinstance(factor.spread, CauchyPosterior | HalfCauchyPosterior):
        apart = 0.0 if isinstance(factor.spread, HalfCauchyPosterior) else (loc - p.loc) ** 2
        each = (((scale + p.scale) ** 2 + apart) / (4 * scale * p.scale)).log()
    elif isinstance(factor.spread, LogNormalPosterior):  # in log-space
        each = td.kl_divergence(td.Normal(loc, scale), td.Normal(*_pair(p.loc, p.scale)))
    else:
        each = td.kl_divergence(td.Normal(loc, scale), td.Normal(*_pair(p.loc, p.scale)))
    return float(each.sum()) / (len(loc) if reduction == "mean" else 1)


def _pair(loc: float, scale: float) -> tuple[Tensor, Tensor]:
    return torch.tensor(loc, dtype=torch.float64), torch.tensor(scale, dtype=torch.float64)


def _fan_in(layer: Any) -> int:
    """Inputs of one output unit, from the layer's own numbers."""
    if isinstance(layer, nn.Bilinear):
        return layer.in1_features * layer.in2_features
    if hasattr(layer, "kernel_size"):
        return layer.in_channels // layer.groups * math.prod(layer.kernel_size)
    if isinstance(layer, nn.Linear):
        return layer.in_features
    return int(layer.weight.shape[-1]) if hasattr(layer, "store") else 1


def _normal_kl(posterior: Any, mean: Tensor, prior: Any, tied: bool, fan_in: int | None) -> float:
    wide = mean.detach().double()
    decay = 0.0
    if isinstance(prior, sb.HeNormal):
        loc, scale = 0.0, 1.0 if fan_in is None else math.sqrt(2 / fan_in)
    elif isinstance(
        prior, sb.RelativeNormal
    ):  # around the means, which are N(0, 1/precision) where they are not tied
        loc, scale = 0.0, prior.scale * max(math.sqrt(float(wide.square().mean())), 1e-3)
        decay = 0.0 if tied else prior.precision / 2 * float(wide.square().sum())
        tied = True
    else:
        loc, scale = prior.loc, prior.scale
    prior_loc, prior_scale = _pair(loc, scale)
    p = td.Normal(wide if tied else prior_loc, prior_scale)
    return float(td.kl_divergence(td.Normal(wide, deviation(posterior, mean)), p).sum()) + decay


def reference_kl(model: nn.Module, method: Any) -> float:
    """The sum over all elements of all random tensors, tied ones once."""
    total, seen = 0.0, set()
    patched: set[int] = set()
    for _, layer in converted_layers(model):
        rule: Any = layer.bayes
        if isinstance(rule, Rank1Rule):
            total += sum(
                _factor_kl(f, getattr(method, "kl_reduction", "sum"))
                for f in (rule.r, rule.s)
                if f is not None
            )
        if isinstance(rule, SampledRule) and rule.prior is not None:
            pairs = ((rule.weight, layer.weight, _fan_in(layer)), (rule.bias, layer.bias, None))
            for posterior, mean, fan_in in pairs:
                if posterior is not None and mean is not None and id(mean) not in seen:
                    seen.add(id(mean))
                    total += _normal_kl(posterior, mean, rule.prior, rule.tied_mean, fan_in)
        if isinstance(rule, IndexedRule) and rule.prior is not None:
            tau = method.prior_precision
            logits = rule.mixing.logits
            count = method.components
            p = (
                torch.full((count,), 1 / count, dtype=torch.float64)
                if logits is None
                else logits.detach().double().softmax(0)
            )
            law = float((p * (p * count).log()).sum())
            if not rule.per_element and id(rule.mixing) not in seen:
                seen.add(id(rule.mixing))
                total += law
            for points in (layer.weight, layer.bias):
                if points is not None and id(points) not in seen:
                    seen.add(id(points))
                    patched.add(id(points))
                    energy = points.detach().double().square().flatten(1).sum(1)
                    total += tau / 2 * float((p * energy).sum())
                    total += points[0].numel() * law if rule.per_element else 0.0
    if getattr(method, "prior_precision", None) is not None:
        own = {id(q) for _, layer in converted_layers(model) for q in layer.parameters()} | patched
        rest = [q for q in model.parameters() if q.requires_grad and id(q) not in own]
        total += method.prior_precision / 2 * sum(float(q.detach().double().square().sum()) for q in rest)
    return total
