"""What the passes of one prediction choose of patches: for many passes by one evaluation, and handed to layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slimbayes import fast
from slimbayes.apply.base import Rule, parameter_of
from slimbayes.apply.indexed import IndexedRule
from slimbayes.apply.versions import (
    FEW,
    MANY,
    Apart,
    Beside,
    Layers,
    Patched,
    Way,
    index_type,
    noises_for,
    settles,
    stores_for,
    tensors,
    way_of,
)
from slimbayes.budget import out_of_memory
from slimbayes.context import Draw, Settled
from slimbayes.noise import transformed


class Part(NamedTuple):
    """Where a tensor lies: in which flat tensor, from where to where, and its shape."""

    flat: int
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass
class OneDraw(Settled):
    """The weight and bias that the one draw of a pass takes, by layer.

    Eager code has them ready. A compiled network reads them from few tensors, by place: each tensor that it is handed
    is looked at before every call.
    """

    rules: dict[str, Rule]
    ready: dict[str, tuple[Tensor, Tensor | None]]
    flat: list[Tensor]  # [1, Σ widths]
    places: dict[str, tuple[Part, ...]]

    def pair(self, rule: nn.Module, name: str) -> tuple[Tensor, Tensor | None] | None:
        """The layer's weight and bias, or None if it has to see for itself: another may have its name."""
        if self.rules.get(name) is not rule:
            return None
        if not torch.compiler.is_compiling():
            return self.ready[name]
        found = [self.flat[i][0, start:stop].view(shape) for i, start, stop, shape in self.places[name]]
        return found[0], found[1] if len(found) > 1 else None


class Ahead:
    """What the passes of one prediction choose, many passes by one evaluation: each asks for its own.

    ``samples``: of the whole prediction; ``most``: numbers of its inputs, as many bytes of which may be held ahead.
    Passes have as many samples as the first that asks, and follow each other.
    """

    def __init__(self, samples: int, most: int = 0) -> None:
        self.samples, self.most = samples, most
        self.short = False  # memory has ended: from then on one pass is made at a time
        self.only_patches = False  # nothing else is to be prepared for the network's layers
        self.first, self.each, self.passes = 0, 0, 0
        self.points: list[tuple[Patched, int]] = []  # what was chosen from, and its version then
        self.stores: list[Beside | Apart] = []
        self.noises: dict[str, tuple[Tensor, ...]] = {}  # by source, one for every pass
        self.layers: Layers = ()
        self.one: OneDraw | None = None

    def hand_over(self, draw: Draw) -> bool:
        """Give a draw its part, if it is among those made and nothing has changed since."""
        if draw.samples != self.each or (draw.first_sample - self.first) % self.each:
            return False
        place = (draw.first_sample - self.first) // self.each
        if not 0 <= place < self.passes or any([_changed(member, was) for member, was in self.points]):
            return False
        parts = [store.fill(place) for store in self.stores]
        chosen = (
            parts[0] if len(parts) == 1 else {name: value for part in parts for name, value in part.items()}
        )
        draw.noises.update({source: values[place] for source, values in self.noises.items()})
        # The first pass, which sees whether rows are where they should be, goes the long way.
        if draw.components * draw.samples == 1 and draw.rows_seen is None and not torch.is_grad_enabled():
            if self.one is None:
                self.one = _one_draw(self.layers, chosen, self.stores)
            draw.settled = self.one
        else:
            draw.prefilled.update({f"{name} chosen": value for name, value in chosen.items()})
        return True

    def room(self, draw: Draw, members: list[Patched]) -> int:
        """How many passes to make at once, of which this draw is the first."""
        if self.short or any(m.points.is_inference() for m in members):
            return 1  # whether those change cannot be known
        bytes_of = {
            m.source: m.count * (8 if m.way is Way.ITSELF else index_type(m.place[2]).itemsize)
            for m in members
        }
        each = draw.components * draw.samples * sum(bytes_of.values())
        most = min(max(self.most, FEW), MANY) // max(each, 1)
        return max(1, min((self.samples - draw.first_sample) // draw.samples, most))

    def take(self, draw: Draw, passes: int, members: list[Patched], layers: Layers) -> None:
        """Make what so many passes choose, from this draw's on."""
        stores: list[Beside | Apart] = []
        noises: dict[str, tuple[Tensor, ...]] = {}
        for place in dict.fromkeys(m.place for m in members):
            beside, apart, itself = ([m for m in members if m.place == place and m.way is way] for way in Way)
            noises |= noises_for(draw, passes, itself)
            stores += stores_for(draw, passes, beside, apart)
        self.first, self.each, self.passes = draw.first_sample, draw.samples, passes
        self.stores, self.noises, self.one, self.layers = stores, noises, None, layers
        self.points = [(m, -1 if m.points.is_inference() else m.points._version) for m in members]


def _changed(member: Patched, version: int) -> bool:
    """Whether a layer's tensor is another one now, or has been written to; −1: a tensor that does not count that."""
    if member.way is Way.ITSELF:
        return False  # the layer looks at it when it runs
    if parameter_of(member.op, member.which) is not member.points:
        return True
    return version >= 0 and version != member.points._version


def prefill_keyed(layers: Layers, draw: Draw, ahead: Ahead | None = None) -> None:
    """Of a draw with a seed: the keyed noise of all patches by one evaluation, and what it chooses of the small ones.

    The generator takes a hundred small operations whatever it makes: once per layer they would cost more than a
    network's pass over a few hundred rows, and once per pass as much as a part of it. So it makes what the passes
    after this one need too, where there is an ``ahead`` to keep it. The numbers are those that the layers would make.
    """
    if not may_choose(draw):
        return
    ahead = Ahead(draw.samples) if ahead is None else ahead
    if ahead.hand_over(draw):
        return
    several = ahead.samples > draw.samples and not torch.is_grad_enabled()
    members = list(tensors(layers, several and draw.components * draw.samples == 1))
    passes = ahead.room(draw, members)
    if several and passes == 1:  # nothing to share: large tensors are left to their layers
        members = list(tensors(layers, False))
    if passes > 1:
        try:
            ahead.take(draw, passes, members, layers)
        except Exception as error:
            if not out_of_memory(error):
                raise
            passes, ahead.short = 1, True
    if passes == 1:  # outside of the handler, which holds the memory of what failed
        ahead.take(draw, 1, members, layers)
    ahead.hand_over(draw)
    if any(m.points.is_inference() for m in members):
        ahead.passes = 0  # for one use: whether they change cannot be known


def may_choose(draw: Draw) -> bool:
    """Whether patches can be chosen before the network runs."""
    if not fast.paths.factors or draw.noise == "mean" or draw.component_ids is not None:
        return False
    return isinstance(draw.seed, int) and not torch.compiler.is_compiling() and not transformed()


def _one_draw(layers: Layers, chosen: dict[str, Tensor], stores: list[Beside | Apart]) -> OneDraw:
    places: dict[str, Part] = {}
    flat: list[Tensor] = []
    for store in stores:
        assert store.buffer is not None
        flat.append(store.buffer.view(1, -1))
        if isinstance(store, Apart):
            places[store.name] = Part(len(flat) - 1, 0, store.buffer.numel(), tuple(store.buffer.shape[1:]))
            continue
        start = 0
        for name, width, shape in zip(store.names, store.widths, store.shapes, strict=True):
            places[name] = Part(len(flat) - 1, start, start + width, shape)
            start += width
    one = OneDraw({}, {}, flat, {})
    for rule, op in layers:
        if not isinstance(rule, IndexedRule) or not settles(rule):
            continue
        names = [rule.weight_source, *([] if op.bias is None else [rule.bias_source])]
        # A tensor may have been chosen for another layer that has it too, where this one has to look at its own.
        if all(name in places for name in names) and way_of(rule, op, True) is not Way.ITSELF:
            weight, *bias = (chosen[name].squeeze(0) for name in names)
            one.rules[rule.name] = rule
            one.ready[rule.name] = weight, bias[0] if bias else None
            one.places[rule.name] = tuple(places[name] for name in names)
    return one
