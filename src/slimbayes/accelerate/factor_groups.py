"""The rank-1 factors of a whole network at once: one operation samples them, another sums their KL."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.accelerate import switches
from slimbayes.accelerate.cpu.factor_sweep import held
from slimbayes.accelerate.factor_samples import normal_kl
from slimbayes.accelerate.gpu import factor_samples
from slimbayes.accelerate.gpu.factors import sample_flat
from slimbayes.accelerate.gpu.factors_kl import _formula as formula
from slimbayes.accelerate.gpu.factors_kl import flat_kl
from slimbayes.accelerate.gpu.joint_parameters import join
from slimbayes.accelerate.gpu.weight_samples import SCOPE
from slimbayes.accelerate.situation import eager
from slimbayes.core import posteriors, priors
from slimbayes.core.context import Draw
from slimbayes.core.noise import transformed
from slimbayes.core.paths import FastPath, Layers
from slimbayes.core.rules.base import Rule
from slimbayes.core.rules.rank1 import Factor, Rank1Rule

DEVICES = ("cuda",)  # where the samples of all factors are one kernel
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


@dataclass
class Joined:
    """The parameters of a group put together, for as long as one call of a compiled function lasts."""

    group: Group
    loc: Tensor
    rho: Tensor


@dataclass
class Joins:
    """What was put together in this call: the gradients of a draw and of its KL then meet before they are parted."""

    made: list[Joined] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)


JOINS = Joins()


def joined(group: Group) -> tuple[Tensor, Tensor]:
    """All locations of a group and all its scales before the softplus, [Σ K·C] each."""
    for known in JOINS.made:
        if known.group.factors[0] is group.factors[0] and len(known.group.factors) == len(group.factors):
            return known.loc, known.rho
    locs, rhos = parameters(group)
    loc, rho = join(locs), join(rhos)
    if SCOPE.open and torch.compiler.is_compiling():
        JOINS.made = [*JOINS.made, Joined(group, loc, rho)]
    return loc, rho


def parameters(group: Group) -> tuple[list[Tensor], list[Tensor]]:
    """The locations and the scales before the softplus of a group's factors, [K, C] each."""
    if torch.compiler.is_compiling():
        locs: list[Tensor] = [factor.loc for factor in group.factors]
        return locs, [factor.spread.rho for factor in group.factors]  # type: ignore[misc]
    locs = [held(factor, "loc") for factor in group.factors]
    return locs, [held(factor._modules["spread"], "rho") for factor in group.factors]  # type: ignore[arg-type]


def has_closed_kl(group: Group) -> bool:
    """Whether one closed form is the KL of all its factors."""
    own = type(group.factors[0].prior) is _OWN_PRIOR[group.family]
    return own and group.reduction in ("sum", "mean")


def find_groups(rules: Iterable[Rule]) -> list[Group]:
    """The noisy rank-1 factors of these rules, by what they have in common; each tensor once."""
    given = list(rules)
    if SCOPE.open and torch.compiler.is_compiling():  # what is looked up twice would be traced twice
        if JOINS.rules and len(JOINS.rules) == len(given) and JOINS.rules[0] is given[0]:
            return JOINS.groups
        JOINS.rules, JOINS.groups = given, _find_groups(given)
        return JOINS.groups
    return _find_groups(given)


def _find_groups(rules: list[Rule]) -> list[Group]:
    groups: list[Group] = []
    firsts: list[Rank1Rule] = []
    known: set[str] = set()
    for rule in rules:
        if not isinstance(rule, Rank1Rule):
            continue
        for which, factor in (("r", rule.r), ("s", rule.s)):
            source = f"{rule.name}.{which}"
            if factor is None or source in known:
                continue
            kind = type(factor.spread)
            if kind not in _FAMILIES:
                continue
            known.add(source)
            at = 0
            while at < len(groups) and not _together(rule, factor, firsts[at], groups[at].factors[0]):
                at += 1
            if at == len(groups):
                groups.append(Group(_FAMILIES[kind], rule.clip, rule.reduction, [], []))
                firsts.append(rule)
            groups[at].sources.append(source)
            groups[at].factors.append(factor)
    return groups


def _together(rule: Rank1Rule, factor: Factor, other_rule: Rank1Rule, other: Factor) -> bool:
    """Whether two factors have a family, a prior, a clip, a reduction, components, a device and a type in common."""
    if factor.prior is not other.prior:  # those of one method share an object
        mine, theirs = factor.prior, other.prior
        if type(mine) is not type(theirs):
            return False
        for name in ("loc", "scale"):
            if getattr(mine, name, None) != getattr(theirs, name, None):
                return False
    loc, place = factor.loc, other.loc
    return (
        type(factor.spread) is type(other.spread)
        and rule.clip == other_rule.clip
        and rule.reduction == other_rule.reduction
        and loc.shape[0] == place.shape[0]
        and loc.device == place.device
        and loc.dtype == place.dtype
    )


def fingerprint(rules: Iterable[Rule]) -> list[Any]:
    """All that decides how these rules' factors are grouped."""
    facts: list[Any] = []
    for rule in rules:
        if type(rule) is Rank1Rule:
            facts += (rule.name, rule.clip, rule.reduction)
            held = rule._modules  # not by attribute: a module's own take a detour
            for factor in (held.get("r"), held.get("s")):
                if factor is not None:
                    assert isinstance(factor, Factor)
                    loc, spread = factor._parameters.get("loc"), factor._modules["spread"]
                    loc = factor.loc if loc is None else loc
                    facts += (id(factor), factor.prior, type(spread), loc.dtype, loc.device, loc.shape[0])
    return facts


class FactorGroups(FastPath):
    """The factors of all rank-1 layers together."""

    def __init__(self) -> None:
        self.known: weakref.WeakKeyDictionary[Rule, tuple[list[Any], list[Group]]] = (
            weakref.WeakKeyDictionary()
        )

    def on(self) -> bool:
        """By ``factors``."""
        return switches.paths.factors

    def prepare(self, model: nn.Module, layers: Layers, draw: Draw, course: Any) -> None:
        """One operation for the factors of a group."""
        prefill(self.groups(layers), draw)

    def kl(self, layers: Layers, seen: set[str]) -> Iterator[tuple[Tensor, Sequence[str]]]:
        """One closed form for a group."""
        for group in self.groups(layers):
            if has_closed_kl(group) and seen.isdisjoint(group.sources):
                yield group_kl(group), group.sources

    def groups(self, layers: Layers) -> list[Group]:
        """The groups of these layers, found anew where something about them has changed."""
        rules = [rule for rule, _ in layers]
        if not rules or torch.compiler.is_compiling():
            return find_groups(rules)
        now = fingerprint(rules)
        before = self.known.get(rules[0])
        if before is None or before[0] != now:
            self.known[rules[0]] = before = now, find_groups(rules)
        return before[1]


def on_gpu(layers: Layers) -> bool:
    """Whether these layers are where whole kernels pay for what few calls do elsewhere."""
    for _, op in layers:
        if op.weight is not None:
            return op.weight.device.type in DEVICES
    return False


def prefill(groups: list[Group], draw: Draw) -> None:
    """Sample all factors of the groups before the network runs, where that saves time."""
    if draw.seed is not None or draw.noise == "mean":
        return
    if draw.component_ids is not None or (not torch.compiler.is_compiling() and transformed()):
        return
    for group in groups:
        loc = group.factors[0].loc
        if loc.shape[0] != draw.components:
            continue
        if loc.device.type in DEVICES:
            _sample(group, draw)


def _sample(group: Group, draw: Draw) -> None:
    first = group.factors[0].loc
    examples = draw.batch if draw.noise == "example" else 1
    locs, rhos = parameters(group)
    widths = [loc.shape[1] for loc in locs]
    kind, dtype = first.device.type, first.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    settings = (draw.samples, examples, group.family, group.clip, dtype)
    seed = torch.randint(0, 2**62, (1,), device=first.device)
    values: Sequence[Tensor]
    if eager() and torch.is_grad_enabled() and factor_samples.joinable((*locs, *rhos)):
        joint = factor_samples.join_all(locs, rhos)
        factor_samples.keep(group.factors[0], joint)
        values = factor_samples.samples(joint, widths, seed, *settings)
    else:
        loc, rho = joined(group)
        values = sample_flat(loc, rho, widths, seed, *settings)
    for source, value in zip(group.sources, values, strict=True):
        draw.prefilled[source] = value


def group_kl(group: Group) -> Tensor:
    """KL of all factors of a group against their prior, by its closed form."""
    prior: Any = group.factors[0].prior
    first = group.factors[0].loc
    known = None
    if first.device.type in DEVICES and eager():
        known = factor_samples.again(group.factors[0], *parameters(group))
    if group.family in ("normal", "lognormal") and first.dtype.itemsize >= 4 and eager():
        locs, rhos = parameters(group) if known is None else ([known[0]], [known[1]])
        total = normal_kl(locs, rhos, prior.loc, prior.scale)
    elif known is not None:
        total = flat_kl(*known, group.family, prior.loc, prior.scale)
    else:
        loc, rho = joined(group)
        # On a CPU the compiler's own loop takes less than a call out of compiled code.
        inline = first.device.type == "cpu" and torch.compiler.is_compiling()
        total = (formula if inline else flat_kl)(loc, rho, group.family, prior.loc, prior.scale)
    return total / first.shape[0] if group.reduction == "mean" else total
