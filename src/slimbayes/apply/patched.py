"""The patches of a whole network at once: one operation chooses among the versions of all its small tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slimbayes import fast
from slimbayes.apply.base import Operation, Rule
from slimbayes.apply.indexed import IndexedRule
from slimbayes.budget import out_of_memory
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

    ``samples``: of the whole prediction; ``most``: numbers of its inputs, of which an eighth may be chosen ahead.
    Passes have as many samples as the first that asks, and follow each other.
    """

    def __init__(self, samples: int, most: int = 0) -> None:
        self.samples, self.most = samples, most
        self.first, self.each, self.passes = 0, 0, 0
        self.points: list[tuple[Tensor, int]] = []  # what was chosen from, and its version then
        self.prefilled: dict[str, tuple[Tensor, ...]] = {}  # by name, one for every pass
        self.noises: dict[str, tuple[Tensor, ...]] = {}

    def hand_over(self, draw: Draw) -> bool:
        """Give a draw its part, if it is among those made and nothing has changed since."""
        if draw.samples != self.each or (draw.first_sample - self.first) % self.each:
            return False
        place = (draw.first_sample - self.first) // self.each
        if not 0 <= place < self.passes or any([points._version != was for points, was in self.points]):
            return False
        draw.prefilled.update({name: parts[place] for name, parts in self.prefilled.items()})
        draw.noises.update({source: parts[place] for source, parts in self.noises.items()})
        return True

    def room(self, draw: Draw, members: list[_Patched]) -> int:
        """How many passes to make at once, of which this draw is the first."""
        if any(m.points.is_inference() for m in members):
            return 1  # whether they change cannot be known
        numbers = sum(1 if m.alone and not m.per_element else m.points[0].numel() for m in members)
        most = min(max(self.most // 8, _FEW), _AT_ONCE) // max(draw.components * draw.samples * numbers, 1)
        return max(1, min((self.samples - draw.first_sample) // draw.samples, most))

    def take(self, draw: Draw, passes: int, members: list[_Patched]) -> None:
        """Make what so many passes choose, from this draw's on."""
        prefilled, noises = _made(draw, passes, members)
        self.first, self.each, self.passes = draw.first_sample, draw.samples, passes
        self.prefilled, self.noises = prefilled, noises
        self.points = [(m.points, m.points._version) for m in members if not m.points.is_inference()]


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
    members = list(_tensors(layers))
    passes = ahead.room(draw, members)
    if passes > 1:
        try:
            ahead.take(draw, passes, members)
        except Exception as error:
            if not out_of_memory(error):
                raise
            passes, ahead.samples = 1, 0  # from now on, too
    if passes == 1:  # outside of the handler, which holds the memory of what failed
        ahead.take(draw, 1, members)
    ahead.hand_over(draw)


Parts = dict[str, tuple[Tensor, ...]]  # by name, one tensor for every pass


def _made(draw: Draw, passes: int, members: list[_Patched]) -> tuple[Parts, Parts]:
    """What is chosen, and the noise of layers that choose for themselves, of as many passes from the draw's on."""
    assert isinstance(draw.seed, int)
    prefilled: Parts = {}
    noises: Parts = {}
    places: dict[tuple[torch.device, torch.dtype, int], list[_Patched]] = {}
    for each in members:
        places.setdefault(each.place, []).append(each)
    for (device, dtype, _), own in places.items():
        counts = {m.source: m.points[0].numel() if m.per_element else 1 for m in own}
        samples = torch.arange(passes * draw.samples, device=device) + draw.first_sample
        noise_type = torch.promote_types(dtype, torch.float32)
        u = keyed_uniforms(draw.seed, tuple(counts.items()), draw.components, samples, noise_type)
        if u is None:
            continue
        by_pass = u.view(draw.components, passes, draw.samples, -1).transpose(0, 1)  # [P, C, S, Σ counts]
        noise = dict(zip(counts, by_pass.split(list(counts.values()), 3), strict=True))
        for m in own:
            if m.alone:
                shape = m.shape if m.per_element else ()
                noises[m.source] = noise[m.source].unflatten(3, (1, *shape)).unbind()
        prefilled |= _chosen([m for m in own if not m.alone], noise)
    return prefilled, noises


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


def _chosen(members: list[_Patched], noise: dict[str, Tensor]) -> Parts:
    """Versions [draws, *shape] of all members for every pass, by one gather."""
    if not members:
        return {}
    components = members[0].points.shape[0]
    widths = [m.points[0].numel() for m in members]
    parts = [noise[m.source].expand(-1, -1, -1, w) for m, w in zip(members, widths, strict=True)]
    u = torch.cat(parts, 3).flatten(1, 2)  # [P, draws, Σ widths]
    index = (u * components).long().clamp_(max=components - 1)  # as ``Mixing`` has it
    flat = torch.cat([m.points.reshape(components, -1) for m in members], 1)
    chosen = flat.gather(0, index.flatten(0, 1)).view(u.shape).split(widths, 2)
    return {
        f"{m.name} chosen": part.unflatten(2, m.shape).unbind()
        for m, part in zip(members, chosen, strict=True)
    }
