"""What one example meets in one draw: a layer's weight and bias, from its noise by the formula of the method."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.core.keyed_noise import keyed_noise, layer_key
from slimbayes.core.posteriors import (
    BernoulliPosterior,
    CauchyPosterior,
    DeltaPosterior,
    HalfCauchyPosterior,
    KTiedPosterior,
    LogNormalPosterior,
    NormalPosterior,
)
from slimbayes.core.rules.dropout import DroppedRule
from slimbayes.core.rules.meanfield import SampledRule
from slimbayes.core.rules.patching import IndexedRule
from slimbayes.core.rules.rank1 import Factor, Rank1Rule

CPU = torch.device("cpu")


class NoReference(Exception):
    """The replay has no form for this pair of method and layer; only invariances can be checked."""


@dataclass
class Place:
    """One example of one draw: its noise, and how often each source has been asked."""

    seed: int
    noise: str
    component: int
    sample: int
    example: int
    calls: dict[str, int] = field(default_factory=dict)

    def of(
        self, kind: str, source: str, shape: tuple[int, ...], dtype: torch.dtype, per_example: bool
    ) -> Tensor:
        """Standard noise for this place, float64."""
        examples = torch.tensor([self.example]) if per_example else None
        stream = self.calls.get(source, 0)
        ids = torch.tensor([self.component]), torch.tensor([self.sample]), examples
        made = keyed_noise(kind, layer_key(self.seed, source), stream, *ids, shape, dtype, CPU)
        return made.double().reshape(shape)


def softplus(rho: Tensor) -> Tensor:
    """σ = log(1 + e^ρ) + 1e-7."""
    return F.softplus(rho.detach().double()) + 1e-7


def factor_value(factor: Factor, rule: Rank1Rule, which: str, place: Place) -> Tensor:
    """r or s of one component."""
    loc = factor.loc.detach()[place.component].double()
    spread = factor.spread
    if isinstance(spread, DeltaPosterior):
        bounded = rule.clip is not None and place.noise != "mean"
        return loc.clamp(-rule.clip, rule.clip) if bounded else loc
    if place.noise == "mean":
        return loc.exp() if isinstance(spread, LogNormalPosterior) else loc
    scale = softplus(spread.rho)[place.component]
    kind = "cauchy" if isinstance(spread, CauchyPosterior | HalfCauchyPosterior) else "normal"
    epsilon = place.of(
        kind, f"{rule.name}.{which}", tuple(loc.shape), factor.loc.dtype, place.noise == "example"
    )
    if isinstance(spread, HalfCauchyPosterior):
        epsilon = epsilon.abs()
    value = loc + scale * epsilon
    if isinstance(spread, LogNormalPosterior):
        value = value.exp()
    return value if rule.clip is None else value.clamp(-rule.clip, rule.clip)


def outer(layer: Any, weight: Tensor, r: Tensor, s: Tensor) -> Tensor:
    """W ∘ r sᵀ over the channels of any layer that is linear in its inputs."""
    if isinstance(layer, nn.Bilinear):
        a, b = s.split((layer.in1_features, layer.in2_features))
        return weight * r[:, None, None] * a[:, None] * b
    if not hasattr(layer, "kernel_size"):
        return weight * r[:, None] * s
    groups = layer.groups
    inner, out = s.reshape(groups, -1), r.reshape(groups, -1)
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        both = torch.einsum("gi,go->gio", inner, out)
    else:
        both = torch.einsum("go,gi->goi", out, inner)
    return weight * both.flatten(0, 1).reshape(*weight.shape[:2], *[1] * len(layer.kernel_size))


def deviation(posterior: Any, mean: Tensor) -> Tensor:
    """σ of every element of a tensor."""
    if isinstance(posterior, KTiedPosterior):
        u, v = posterior.log_u.detach().double().exp(), posterior.log_v.detach().double().exp()
        return torch.einsum("mk,nk->mn", u, v).reshape(mean.shape)
    assert isinstance(posterior, NormalPosterior)
    sigma = softplus(posterior.rho)
    return sigma if posterior.maximum is None else sigma.clamp(max=posterior.maximum)


def sampled_value(posterior: Any, mean: Tensor, source: str, place: Place) -> Tensor:
    """One sample of a weight or bias, the same for all examples of the draw."""
    wide = mean.detach().double()
    if posterior is None or place.noise == "mean":
        return wide
    if isinstance(posterior, BernoulliPosterior):
        u = place.of("uniform", source, tuple(mean.shape), mean.dtype, False)
        return wide * (u >= posterior.rate) / (1.0 - posterior.rate)
    return wide + deviation(posterior, mean) * place.of(
        "normal", source, tuple(mean.shape), mean.dtype, False
    )


def signs(rule: SampledRule, layer: Any, place: Place, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Flipout's signs of outputs and inputs for one example."""
    inputs = sum(slot.size for slot in layer.input_slots)
    made = [
        place.of("sign", f"{rule.name}.{which}", (size,), dtype, True)
        for which, size in (("signs_out", layer.output_size), ("signs_in", inputs))
    ]
    return made[0], made[1]


def chosen(rule: IndexedRule, points: Tensor, source: str, place: Place) -> Tensor:
    """The version of a tensor that this draw takes."""
    wide = points.detach().double()
    count = len(points)
    logits = rule.mixing.logits
    p = (
        torch.full((count,), 1 / count, dtype=torch.float64)
        if logits is None
        else logits.detach().double().softmax(0)
    )
    if place.noise == "mean":
        return torch.einsum("k,k...->...", p, wide)
    shape = tuple(points.shape[1:]) if rule.per_element else ()
    name = source if rule.per_element else f"{rule.mixing.name}.index"
    u = place.of("uniform", name, shape, torch.promote_types(points.dtype, torch.float32), False)
    index = (u.unsqueeze(-1) >= p.cumsum(0)).sum(-1).clamp(max=count - 1)
    return wide.gather(0, index.unsqueeze(0)).squeeze(0) if rule.per_element else wide[int(index)]


def tensors(layer: Any, place: Place) -> tuple[Tensor, Tensor | None]:
    """The weight and the bias of a converted layer (or kernel) at this place."""
    rule, weight, bias = layer.bayes, layer.weight, layer.bias
    kernel = hasattr(layer, "store")
    if isinstance(rule, Rank1Rule):
        own = None if bias is None else bias.detach()[place.component].double()
        one = weight.detach().double()
        r, s = (
            None if f is None else factor_value(f, rule, w, place) for f, w in ((rule.r, "r"), (rule.s, "s"))
        )
        if rule.additive:
            if kernel:
                raise NoReference("added factors in a layer of several weights")
            return one, own
        ones = torch.ones(max(one.shape) * max(one.shape) + 64).double()
        inputs = sum(slot.size for slot in layer.input_slots)
        return outer(
            layer, one, ones[: layer.output_size] if r is None else r, ones[:inputs] if s is None else s
        ), own
    if isinstance(rule, IndexedRule):
        own = None if bias is None else chosen(rule, bias, rule.bias_source, place)
        return chosen(rule, weight, rule.weight_source, place), own
    if isinstance(rule, DroppedRule):
        one = weight.detach().double() if weight is not None else None
        if kernel and rule.rate > 0 and place.noise != "mean":
            if not rule.per_channel:
                raise NoReference("elements dropped inside a layer of several weights")
            dtype = torch.promote_types(weight.dtype, torch.float32)
            u = place.of("uniform", f"{rule.name}.mask0", (weight.shape[1],), dtype, place.noise == "example")
            one = one * (u >= rule.rate) / (1 - rule.rate)
        return one, None if bias is None else bias.detach().double()
    assert isinstance(rule, SampledRule)
    by_example = rule.estimator != "shared" and place.noise == "example"
    if by_example and rule.estimator == "local":
        if kernel:
            raise NoReference("noise on the outputs inside a layer of several weights")
        return weight.detach().double(), None if bias is None else bias.detach().double()
    value = sampled_value(rule.weight, weight, rule.weight_source, place)
    if by_example:
        out, inner = signs(rule, layer, place, weight.dtype)
        mean = weight.detach().double()
        value = mean + outer(layer, value - mean, out, inner)
    own = None if bias is None else sampled_value(rule.bias, bias, rule.bias_source, place)
    if by_example and own is not None and not kernel and rule.bias is not None:
        epsilon = place.of("normal", f"{rule.bias_source}.example", tuple(bias.shape), bias.dtype, True)
        own = bias.detach().double() + deviation(rule.bias, bias) * epsilon
    return value, own
