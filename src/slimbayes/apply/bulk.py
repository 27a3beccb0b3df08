"""The rank-1 factors of a whole network at once: one operation samples them, another sums their KL."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from slimbayes import fast, posteriors, priors
from slimbayes.apply.base import Rule
from slimbayes.apply.rank1 import Factor, Rank1Rule
from slimbayes.context import Draw
from slimbayes.kernels.factors import sample_flat
from slimbayes.kernels.factors_kl import flat_kl
from slimbayes.kernels.joined import join
from slimbayes.noise import transformed

DEVICES = ("cuda",)  # where sampling all at once pays: a launch costs more than the numbers
_FAMILIES: dict[type, str] = {
    posteriors.NormalPosterior: "normal",
    posteriors.CauchyPosterior: "cauchy",
    posteriors.LogNormalPosterior: "lognormal",
    posteriors.HalfCauchyPosterior: "halfcauchy",
}
_OWN_PRIOR: dict[str, type] = {
    "normal": priors.Normal,
    "cauchy": priors.Cauchy,
    "lognormal": priors.LogNormal,
    "halfcauchy": priors.HalfCauchy,
}


@dataclass
class Group:
    """Factors that are sampled together, with the names of their random tensors."""

    family: str
    clip: float | None
    reduction: str
    sources: list[str]
    factors: list[Factor]


def parameters(group: Group) -> tuple[list[Tensor], list[Tensor]]:
    """The locations and the scales before the softplus of a group's factors, [K, C] each."""
    locs: list[Tensor] = [factor.loc for factor in group.factors]
    return locs, [factor.spread.rho for factor in group.factors]  # type: ignore[misc]


def has_closed_kl(group: Group) -> bool:
    """Whether one closed form is the KL of all its factors."""
    own = type(group.factors[0].prior) is _OWN_PRIOR[group.family]
    return own and group.reduction in ("sum", "mean")


def find_groups(rules: Iterable[Rule]) -> list[Group]:
    """The noisy rank-1 factors of these rules, by what they have in common; each tensor once."""
    rank1: dict[str, Rank1Rule] = {}
    members: dict[str, dict[str, Factor]] = {}
    for rule in rules:
        if not isinstance(rule, Rank1Rule):
            continue
        for which, factor in (("r", rule.r), ("s", rule.s)):
            if factor is None or type(factor.spread) not in _FAMILIES:
                continue
            key = _key(rule, factor)
            if key not in members:
                rank1[key], members[key] = rule, {}
            members[key][f"{rule.name}.{which}"] = factor
    return [
        Group(_family(found), rank1[key].clip, rank1[key].reduction, list(found), list(found.values()))
        for key, found in members.items()
    ]


def _family(found: dict[str, Factor]) -> str:
    for factor in found.values():
        return _FAMILIES[type(factor.spread)]
    raise ValueError("a group has at least one factor")


def _key(rule: Rank1Rule, factor: Factor) -> str:
    """What factors of one group have in common, as a text: the compiler compares texts, but not all objects."""
    loc, prior = factor.loc, factor.prior
    law = f"{type(prior).__name__}({getattr(prior, 'loc', None)}, {getattr(prior, 'scale', None)})"
    place = f"{loc.device.type}:{loc.device.index} {loc.dtype.itemsize} {loc.dtype == torch.bfloat16}"
    return f"{_FAMILIES[type(factor.spread)]} {law} {rule.clip} {rule.reduction} {loc.shape[0]} {place}"


def prefill(groups: list[Group], draw: Draw) -> None:
    """Sample all factors of the groups before the network runs, where that saves time."""
    if not fast.paths.factors or draw.seed is not None or draw.noise == "mean":
        return
    if draw.component_ids is not None or (not torch.compiler.is_compiling() and transformed()):
        return
    for group in groups:
        loc = group.factors[0].loc
        if loc.device.type in DEVICES and loc.shape[0] == draw.components:
            _sample(group, draw)


def _sample(group: Group, draw: Draw) -> None:
    first = group.factors[0].loc
    examples = draw.batch if draw.noise == "example" else 1
    locs, rhos = parameters(group)
    widths = [loc.shape[1] for loc in locs]
    kind, dtype = first.device.type, first.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    loc, rho = join(locs), join(rhos)
    seed = torch.randint(0, 2**62, (1,), device=first.device)
    values = sample_flat(loc, rho, widths, seed, draw.samples, examples, group.family, group.clip, dtype)
    for source, value in zip(group.sources, values, strict=True):
        draw.cache[source] = value
        draw.prefilled[source] = value


def group_kl(group: Group) -> Tensor:
    """KL of all factors of a group against their prior, by its closed form."""
    prior = group.factors[0].prior
    locs, rhos = parameters(group)
    total = flat_kl(join(locs), join(rhos), group.family, prior.loc, prior.scale)  # type: ignore[attr-defined]
    return total / group.factors[0].loc.shape[0] if group.reduction == "mean" else total
