"""The random tensors of a whole network in few operations: those of one family side by side.

A network of a hundred layers has a handful of groups. Which tensors are random, rules say (``Rule.random``); how
several of a family become one distribution, posteriors say (``Posterior.joint``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from slimbayes.core import distributions as d
from slimbayes.core.distributions import with_parameters
from slimbayes.core.kl import fitted, total_kl
from slimbayes.core.noise import fresh_noise

if TYPE_CHECKING:
    from slimbayes.core.context import Draw
    from slimbayes.core.posteriors import Posterior
    from slimbayes.core.priors import Prior
    from slimbayes.core.rules.base import Operation, Rule

_LARGE = 1 << 18  # numbers of one tensor: to move so many on a CPU costs more than the calls that it saves
_TOGETHER = 1 << 26  # numbers of one group: side by side they are a copy
_MOST = 1 << 22  # numbers that a pass without gradients holds at once; autograd holds all samples anyway


class RandomTensor(NamedTuple):
    """One random tensor of a layer: its name, the spread around its location, and its prior, if that costs KL."""

    name: str
    posterior: Posterior
    loc: Tensor
    prior: Prior | None
    fan_in: int | None = None
    components: bool = False  # its first axis is that; else it has one sample for every draw
    clip: float | None = None
    reduction: str = "sum"  # of the KL over components
    tied_mean: bool = False  # the prior lies around its own location
    constant_row: int | None = None  # never random, and in no KL

    @property
    def pair(self) -> tuple[Any, Any]:
        """Its distribution and its prior's."""
        assert self.prior is not None
        q: Any = self.posterior(self.loc)
        row = self.constant_row
        if row is not None and isinstance(q, d.KTiedNormal):
            q = d.KTiedNormal(d.without_row(q.loc, row), d.without_row(q.u, row), q.v)
        elif row is not None:
            q = type(q)(d.without_row(q.loc, row), d.without_row(q.scale, row))
        p: Any = self.prior.distribution(q.loc, self.fan_in)
        return q, d.Normal(q.loc, fitted(q, p).scale) if self.tied_mean else p

    def alike(self, *settings: Any) -> tuple[Any, ...] | None:
        """What it has in common with those that it may be joined with; None if it stands alone."""
        kind, loc = self.posterior.likeness(), self.loc
        if (
            kind is None
            or self.constant_row is not None
            or (loc.numel() > _LARGE and loc.device.type == "cpu")
        ):
            return None
        rows = loc.shape[0] if self.components else 0
        return kind, rows, loc.dtype, loc.device, *settings


def joint(members: Sequence[RandomTensor]) -> d.Spread:
    """Their distribution: [K, Σ numbers] of those with components, [Σ numbers] of others."""
    first = members[0]
    return first.posterior.joint([m.posterior for m in members], [m.loc for m in members], first.components)


def find_groups(layers: Iterable[tuple[Rule, Operation]], draw: Draw) -> list[list[RandomTensor]]:
    """What the layers of an unseeded draw will ask for, as far as it is sampled together; the rest they make."""
    groups: dict[Any, dict[str, RandomTensor]] = defaultdict(dict)
    numbers, examples = 0, draw.samples * (draw.batch if draw.noise == "example" else 1)
    for rule, op in layers:
        if rule.samples_whole(draw.noise):
            for one in rule.random(op):
                kind = one.alike(numbers // _TOGETHER, one.clip)
                if kind is not None and one.name not in draw.prefilled:
                    groups[kind][one.name] = one
                    numbers += one.loc.numel() * (examples if one.components else draw.samples)
    if numbers > _MOST and not torch.is_grad_enabled():
        return []
    return [list(group.values()) for group in groups.values()]


def sample_group(members: list[RandomTensor], draw: Draw) -> None:
    """Their samples, by name in ``draw.prefilled``: one call of noise, and the arithmetic once."""
    first, spread = members[0], joint(members)
    dtype, device = first.loc.dtype, first.loc.device
    if not first.components:
        size: tuple[int, ...] = (draw.components * draw.samples, spread.loc.numel())
        value = spread.from_noise(fresh_noise(spread.noise, size, dtype, device))  # type: ignore[arg-type]
        for one, own in zip(members, value.split([one.loc.numel() for one in members], -1), strict=True):
            draw.prefilled[one.name] = own.view(len(own), *one.loc.shape)  # [draws, *shape]
        return
    ids = draw.component_ids
    if (spread.loc.shape[0] if ids is None else len(ids)) != draw.components:
        return
    spread = with_parameters(spread, lambda t: (t if ids is None else t.index_select(0, ids))[:, None, None])
    size = (draw.components, draw.samples, draw.batch if draw.noise == "example" else 1, spread.loc.shape[-1])
    value = spread.from_noise(fresh_noise(spread.noise, size, dtype, device))  # type: ignore[arg-type]
    if first.clip is not None:
        value = value.clamp(-first.clip, first.clip)
    values = value.split([one.loc.shape[1] for one in members], -1)  # each [K, S, B or 1, C]
    draw.prefilled.update({one.name: own for one, own in zip(members, values, strict=True)})


def kl_parts(members: Iterable[RandomTensor]) -> list[Tensor]:
    """The KL of these tensors: one number for each group."""
    groups: dict[Any, list[RandomTensor]] = defaultdict(list)
    parts, numbers = [], 0
    for one in members:
        assert one.prior is not None
        prior = one.prior.at(one.fan_in)
        kind = None if one.tied_mean else one.alike(numbers // _TOGETHER, prior, one.reduction)
        groups[one.name if kind is None else kind].append(one)
        numbers += one.loc.numel()
    for kind, group in groups.items():
        first = group[0]
        if isinstance(kind, str):
            total = total_kl(*first.pair)
        else:
            q = joint(group)
            rows = first.loc.shape[0] if first.components else 1
            total = total_kl(q, kind[-2].beside(q.loc, [one.loc.numel() // rows for one in group]))
        parts.append(total / first.loc.shape[0] if first.reduction == "mean" else total)
    return parts
