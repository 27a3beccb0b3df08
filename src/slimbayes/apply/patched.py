"""The patches of a whole network at once: one operation chooses among the versions of all its small tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slimbayes import fast
from slimbayes.apply.base import Operation, Rule
from slimbayes.apply.indexed import IndexedRule
from slimbayes.context import Draw
from slimbayes.kernels.patches import choose_patches
from slimbayes.keyed import keyed_uniforms
from slimbayes.noise import transformed

_LARGEST = (
    1 << 14
)  # elements of one version: what is larger is chosen where it is used, without a copy of all versions
_FEW, _AT_ONCE = 1 << 14, 1 << 20  # numbers that may be chosen ahead however few the inputs, however many


def prefill_patches(layers: Iterable[tuple[Rule, Operation]], draw: Draw) -> None:
    """Choose all small patches with fixed mixing probabilities before the network runs.

    A compiler would else repeat index and gather for every pixel that reads a norm's weight, and eager code start
    a handful of kernels for each.
    """
    if (
        not fast.paths.factors
        or draw.seed is not None
        or draw.noise == "mean"
        or draw.component_ids is not None
    ):
        return
    if not torch.compiler.is_compiling() and transformed():
        return
    found: dict[str, list[tuple[str, Tensor, int]]] = {}
    sources: set[str] = set()
    mixings: dict[str, int] = {}
    for rule, op in layers:
        if not isinstance(rule, IndexedRule) or rule.mixing.logits is not None or rule.own_statistics:
            continue  # statistics need the index itself
        group = -1 if rule.per_element else mixings.setdefault(rule.mixing.name, len(mixings))
        for source, points in ((rule.weight_source, op.weight), (rule.bias_source, op.bias)):
            if points is None or source in sources or points.numel() > _LARGEST * points.shape[0]:
                continue
            if group >= 0 and op.weight.numel() > _LARGEST * points.shape[0]:
                continue  # the weight's own index is drawn elsewhere
            sources.add(source)
            place = f"{points.device.type}:{points.device.index} {points.dtype} {points.shape[0]}"
            found.setdefault(place, []).append((source, points, group))
    draws = draw.components * draw.samples
    for members in found.values():
        seed = torch.randint(0, 2**62, (1,), device=members[0][1].device)
        chosen = choose_patches([each[1] for each in members], [each[2] for each in members], seed, draws)
        for (source, _, _), value in zip(members, chosen, strict=True):
            draw.prefilled[f"{source} chosen"] = value


@dataclass
class _Patched:
    """A tensor [K, *shape] and the noise that chooses among its versions."""

    name: str  # of the random tensor
    points: Tensor
    source: str  # of the noise: one number for the tensor and those that share it, or one per element
    per_element: bool
    alone: bool  # the layer chooses for itself, and needs the noise alone

    @property
    def place(self) -> tuple[torch.device, torch.dtype, int]:
        return self.points.device, self.points.dtype, self.points.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.points.shape[1:])


class Ahead:
    """What the passes of one prediction choose, several passes by one evaluation: each asks for its own.

    ``samples``: of the whole prediction; ``most``: numbers of its inputs, and as many may be chosen ahead. Passes have
    as many samples as the first that asks, and follow each other.
    """

    def __init__(self, samples: int, most: int = 0) -> None:
        self.samples, self.most = samples, most
        self.first, self.each, self.passes = 0, 0, 0
        self.prefilled: dict[str, tuple[Tensor, ...]] = {}  # by name, one for every pass
        self.noises: dict[str, tuple[Tensor, ...]] = {}

    def hand_over(self, draw: Draw) -> bool:
        """Give a draw its part, if it is among those made."""
        if draw.samples != self.each or (draw.first_sample - self.first) % self.each:
            return False
        place = (draw.first_sample - self.first) // self.each
        if not 0 <= place < self.passes:
            return False
        draw.prefilled.update({name: parts[place] for name, parts in self.prefilled.items()})
        draw.noises.update({source: parts[place] for source, parts in self.noises.items()})
        return True

    def begin(self, draw: Draw, passes: int) -> None:
        """Room for so many passes, of which this draw is the first."""
        self.first, self.each, self.passes = draw.first_sample, draw.samples, passes
        self.prefilled, self.noises = {}, {}

    def room(self, draw: Draw, numbers: int) -> int:
        """How many passes to make at once, when one chooses so many numbers."""
        left = max(self.samples - draw.first_sample, draw.samples) // draw.samples
        return max(1, min(left, min(max(self.most, _FEW), _AT_ONCE) // max(numbers, 1)))


def prefill_keyed(layers: Iterable[tuple[Rule, Operation]], draw: Draw, ahead: Ahead | None = None) -> None:
    """Of a draw with a seed: the keyed noise of all patches by one evaluation, and what it chooses of the small ones.

    The generator takes a hundred small operations whatever it makes: once per layer they would cost more than a
    network's pass over a few hundred rows, and once per pass as much as a part of it. So it makes what the passes
    after this one need too, where there is an ``ahead`` to keep it. The numbers are those that the layers would make.
    """
    if not fast.paths.factors or draw.noise == "mean" or draw.component_ids is not None:
        return
    if not isinstance(draw.seed, int) or torch.compiler.is_compiling() or transformed():
        return
    ahead = Ahead(draw.samples) if ahead is None else ahead
    if ahead.hand_over(draw):
        return
    places: dict[tuple[torch.device, torch.dtype, int], list[_Patched]] = {}
    for each in _tensors(layers):
        places.setdefault(each.place, []).append(each)
    numbers = sum(m.points[0].numel() for members in places.values() for m in members)
    passes = ahead.room(draw, draw.components * draw.samples * numbers)
    ahead.begin(draw, passes)
    for (device, dtype, _), members in places.items():
        counts = {m.source: m.points[0].numel() if m.per_element else 1 for m in members}
        samples = torch.arange(passes * draw.samples, device=device) + draw.first_sample
        noise_type = torch.promote_types(dtype, torch.float32)
        u = keyed_uniforms(draw.seed, tuple(counts.items()), draw.components, samples, noise_type)
        if u is None:
            continue
        by_pass = u.view(draw.components, passes, draw.samples, -1).transpose(0, 1)  # [P, C, S, Σ counts]
        noise = dict(zip(counts, by_pass.split(list(counts.values()), 3), strict=True))
        for m in members:
            if m.alone:
                shape = m.shape if m.per_element else ()
                ahead.noises[m.source] = noise[m.source].unflatten(3, (1, *shape)).unbind()
        _choose([m for m in members if not m.alone], noise, ahead)
    ahead.hand_over(draw)


def _tensors(layers: Iterable[tuple[Rule, Operation]]) -> Iterator[_Patched]:
    seen: set[str] = set()
    for rule, op in layers:
        if not isinstance(rule, IndexedRule):
            continue
        large = op.weight.numel() > _LARGEST * op.weight.shape[0]
        alone = large or rule.own_statistics or rule.mixing.logits is not None
        for name, points in ((rule.weight_source, op.weight), (rule.bias_source, op.bias)):
            if points is not None and name not in seen:
                seen.add(name)
                source = name if rule.per_element else f"{rule.mixing.name}.index"
                yield _Patched(name, points, source, rule.per_element, alone)


def _choose(members: list[_Patched], noise: dict[str, Tensor], ahead: Ahead) -> None:
    """Versions [draws, *shape] of all members for every pass, by one gather."""
    if not members:
        return
    components = members[0].points.shape[0]
    widths = [m.points[0].numel() for m in members]
    parts = [noise[m.source].expand(-1, -1, -1, w) for m, w in zip(members, widths, strict=True)]
    u = torch.cat(parts, 3).flatten(1, 2)  # [P, draws, Σ widths]
    index = (u * components).long().clamp_(max=components - 1)  # as ``Mixing`` has it
    flat = torch.cat([m.points.reshape(components, -1) for m in members], 1)
    chosen = flat.gather(0, index.flatten(0, 1)).view(u.shape)
    for m, part in zip(members, chosen.split(widths, 2), strict=True):
        ahead.prefilled[f"{m.name} chosen"] = part.unflatten(2, m.shape).unbind()
