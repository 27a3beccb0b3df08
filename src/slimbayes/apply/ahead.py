"""What the passes of one prediction choose of patches: which versions, for many passes by one evaluation."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slimbayes import fast
from slimbayes.apply.base import Operation, Rule
from slimbayes.apply.indexed import IndexedRule
from slimbayes.budget import out_of_memory
from slimbayes.context import Draw, Settled
from slimbayes.keyed import keyed_uniforms
from slimbayes.noise import transformed

Layers = Iterable[tuple[Rule, Operation]]
# Elements of one version that may be chosen ahead, for one draw and for many: others are chosen where they are used.
_LARGEST, _LARGE = 1 << 20, 1 << 14
_FEW, _MANY = 1 << 18, 1 << 22  # bytes that may be held ahead however few the inputs, and however many
_PIECE = 1 << 20  # random numbers made at a time


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

    @property
    def width(self) -> int:
        return self.points[0].numel()

    @property
    def count(self) -> int:
        """Random numbers that it takes."""
        return self.width if self.per_element else 1


def _tensors(layers: Layers, draws: int) -> Iterator[_Patched]:
    seen: set[str] = set()
    largest = max(_LARGE, _LARGEST // draws)
    for rule, op in layers:
        if not isinstance(rule, IndexedRule):
            continue
        large = op.weight.numel() > largest * op.weight.shape[0]
        alone = large or rule.own_statistics or rule.mixing.logits is not None
        for name, points in ((rule.weight_source, op.weight), (rule.bias_source, op.bias)):
            if points is not None and name not in seen:
                seen.add(name)
                source = name if rule.per_element else f"{rule.mixing.name}.index"
                yield _Patched(name, points, source, rule.per_element, alone)


class _Store:
    """All versions of some tensors side by side [K, Σ widths], and which of them every pass takes."""

    def __init__(self, members: list[_Patched], index: Tensor, columns: Tensor | None) -> None:
        components = members[0].points.shape[0]
        self.names = [m.name for m in members]
        self.shapes = [m.shape for m in members]
        self.widths = [m.width for m in members]
        self.versions = torch.cat([m.points.reshape(components, -1) for m in members], 1)
        self.index = index  # [passes, draws, numbers]
        self.columns = columns  # the number of every column; None: its own
        self.buffer: Tensor | None = None
        self.views: dict[str, Tensor] = {}

    def fill(self, place: int) -> dict[str, Tensor]:
        """What a pass takes, [draws, *shape] by name: without gradients in memory that the next one overwrites."""
        index = self.index[place]
        if self.columns is not None:
            index = index.index_select(1, self.columns)
        if torch.is_grad_enabled():
            return self._apart(self.versions.gather(0, index.long()))
        if self.buffer is None:
            self.buffer = self.versions.new_empty(index.shape)
            self.views = self._apart(self.buffer)
        torch.gather(self.versions, 0, index.long(), out=self.buffer)
        return self.views

    def _apart(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split(self.widths, 1)
        return {
            name: part.unflatten(1, shape) if len(shape) != 1 else part
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }


@dataclass
class OneDraw(Settled):
    """The weight and bias that the one draw of a pass takes, by layer.

    Eager code has them ready. A compiled network reads them from few tensors, by place: each tensor that it is handed
    is looked at before every call.
    """

    ready: dict[str, tuple[Tensor, Tensor | None]]
    flat: list[Tensor]  # [1, Σ widths]
    places: dict[str, tuple[tuple[int, int, int, tuple[int, ...]], ...]]  # (which, start, stop, shape)

    def pair(self, layer: str) -> tuple[Tensor, Tensor | None] | None:
        """The layer's weight and bias, or None if it has to see for itself."""
        if not torch.compiler.is_compiling():
            return self.ready.get(layer)
        if layer not in self.places:
            return None
        found = [self.flat[i][0, start:stop].view(shape) for i, start, stop, shape in self.places[layer]]
        return found[0], found[1] if len(found) > 1 else None


class Ahead:
    """What the passes of one prediction choose, many passes by one evaluation: each asks for its own.

    ``samples``: of the whole prediction; ``most``: numbers of its inputs, as many bytes of which may be held ahead.
    Passes have as many samples as the first that asks, and follow each other.
    """

    def __init__(self, samples: int, most: int = 0) -> None:
        self.samples, self.most = samples, most
        self.alone = False  # nothing but this is to be prepared for the network's layers
        self.first, self.each, self.passes = 0, 0, 0
        self.points: list[tuple[Tensor, int]] = []  # what was chosen from, and its version then
        self.stores: list[_Store] = []
        self.noises: dict[str, tuple[Tensor, ...]] = {}  # by source, one for every pass
        self.layers: list[tuple[str, str, str | None]] = []  # name, and the names of weight and bias
        self.one: OneDraw | None = None

    def hand_over(self, draw: Draw) -> bool:
        """Give a draw its part, if it is among those made and nothing has changed since."""
        if draw.samples != self.each or (draw.first_sample - self.first) % self.each:
            return False
        place = (draw.first_sample - self.first) // self.each
        if not 0 <= place < self.passes or any([points._version != was for points, was in self.points]):
            return False
        parts = [store.fill(place) for store in self.stores]
        chosen = (
            parts[0] if len(parts) == 1 else {name: value for part in parts for name, value in part.items()}
        )
        draw.noises.update({source: parts[place] for source, parts in self.noises.items()})
        # The first pass, which sees whether rows are where they should be, goes the long way.
        if draw.components * draw.samples == 1 and draw.rows_seen is None and not torch.is_grad_enabled():
            if self.one is None:
                self.one = _one_draw(self.layers, chosen, self.stores)
            draw.settled = self.one
        else:
            draw.prefilled.update({f"{name} chosen": value for name, value in chosen.items()})
        return True

    def room(self, draw: Draw, members: list[_Patched]) -> int:
        """How many passes to make at once, of which this draw is the first."""
        if any(m.points.is_inference() for m in members):
            return 1  # whether they change cannot be known
        bytes_of = {m.source: m.count * (4 if m.alone else 1) for m in members}
        each = draw.components * draw.samples * sum(bytes_of.values())
        most = min(max(self.most, _FEW), _MANY) // max(each, 1)
        return max(1, min((self.samples - draw.first_sample) // draw.samples, most))

    def take(self, draw: Draw, passes: int, members: list[_Patched], layers: Layers) -> None:
        """Make what so many passes choose, from this draw's on."""
        stores: list[_Store] = []
        noises: dict[str, tuple[Tensor, ...]] = {}
        places: dict[tuple[torch.device, torch.dtype, int], list[_Patched]] = {}
        for each in members:
            places.setdefault(each.place, []).append(each)
        for own in places.values():
            alone, together = ([m for m in own if m.alone is kind] for kind in (True, False))
            noises |= _noises(draw, passes, alone)
            store = _store(draw, passes, together)
            stores += [] if store is None else [store]
        self.first, self.each, self.passes = draw.first_sample, draw.samples, passes
        self.stores, self.noises, self.one = stores, noises, None
        self.points = [(m.points, m.points._version) for m in members if not m.points.is_inference()]
        self.layers = [
            (rule.name, rule.weight_source, None if op.bias is None else rule.bias_source)
            for rule, op in layers
            if isinstance(rule, IndexedRule)
        ]


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
    layers = list(layers)
    members = list(_tensors(layers, draw.components * draw.samples))
    passes = ahead.room(draw, members)
    if passes > 1:
        try:
            ahead.take(draw, passes, members, layers)
        except Exception as error:
            if not out_of_memory(error):
                raise
            passes, ahead.samples = 1, 0  # from now on, too
    if passes == 1:  # outside of the handler, which holds the memory of what failed
        ahead.take(draw, 1, members, layers)
    ahead.hand_over(draw)


def may_choose(draw: Draw) -> bool:
    """Whether patches can be chosen before the network runs."""
    if not fast.paths.factors or draw.noise == "mean" or draw.component_ids is not None:
        return False
    return isinstance(draw.seed, int) and not torch.compiler.is_compiling() and not transformed()


def _store(draw: Draw, passes: int, members: list[_Patched]) -> _Store | None:
    """The versions of these tensors, and what each of the passes takes; None where there is nothing to hold."""
    if not members:
        return None
    device, dtype, components = members[0].place
    counts = {m.source: m.count for m in members}
    size = passes, draw.components, draw.samples, sum(counts.values())
    few = math.prod(size) <= _FEW // 8
    index = torch.empty(size, dtype=torch.int64 if few or components > 256 else torch.uint8, device=device)
    for piece in _pieces(draw, passes, counts):
        u = _uniforms(draw, piece, counts, dtype, device)
        if u is None:
            return None
        # As ``Mixing`` has it: rounding, u can reach 1.
        index[piece.start : piece.stop] = (u * components).long().clamp_(max=components - 1)
    return _Store(
        members, index.flatten(1, 2), _columns(tuple((m.source, m.count, m.width) for m in members), device)
    )


def _noises(draw: Draw, passes: int, members: list[_Patched]) -> dict[str, tuple[Tensor, ...]]:
    """The noise of layers that choose for themselves, of every pass."""
    if not members:
        return {}
    device, dtype, _ = members[0].place
    shapes = {m.source: m.shape if m.per_element else () for m in members}
    counts = {m.source: m.count for m in members}
    u = _uniforms(draw, range(passes), counts, dtype, device)
    if u is None:
        return {}
    parts = u.split(list(counts.values()), 3)  # [P, C, S, count]
    return {
        source: part.unflatten(3, (1, *shape)).unbind()
        for (source, shape), part in zip(shapes.items(), parts, strict=True)
    }


def _pieces(draw: Draw, passes: int, counts: dict[str, int]) -> Iterator[range]:
    """Passes whose numbers are made together."""
    step = max(1, _PIECE // (draw.components * draw.samples * sum(counts.values())))
    for start in range(0, passes, step):
        yield range(start, min(start + step, passes))


def _uniforms(
    draw: Draw, passes: range, counts: dict[str, int], dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Numbers [P, C, S, Σ counts] of these passes, from the draw's on; None where they are too many."""
    assert isinstance(draw.seed, int)
    samples = torch.arange(passes.start * draw.samples, passes.stop * draw.samples, device=device)
    noise_type = torch.promote_types(dtype, torch.float32)
    u = keyed_uniforms(
        draw.seed, tuple(counts.items()), draw.components, samples + draw.first_sample, noise_type
    )
    return None if u is None else u.view(draw.components, len(passes), draw.samples, -1).transpose(0, 1)


@functools.lru_cache(maxsize=32)
def _columns(members: tuple[tuple[str, int, int], ...], device: torch.device) -> Tensor | None:
    """For every column of (source, numbers, width) the number that chooses it; None if each has its own."""
    starts: dict[str, int] = {}
    total = 0
    for source, count, _ in members:
        if source not in starts:
            starts[source], total = total, total + count
    with torch.inference_mode(False):
        parts = [
            torch.arange(count) + starts[source] if count == width else torch.full((width,), starts[source])
            for source, count, width in members
        ]
        columns = torch.cat(parts)
        return None if torch.equal(columns, torch.arange(total)) else columns.to(device)


def _one_draw(
    layers: list[tuple[str, str, str | None]], chosen: dict[str, Tensor], stores: list[_Store]
) -> OneDraw:
    places: dict[str, tuple[int, int, int, tuple[int, ...]]] = {}
    for i, store in enumerate(stores):
        start = 0
        for name, width, shape in zip(store.names, store.widths, store.shapes, strict=True):
            places[name] = i, start, start + width, shape
            start += width
    ready: dict[str, tuple[Tensor, Tensor | None]] = {}
    found: dict[str, tuple[tuple[int, int, int, tuple[int, ...]], ...]] = {}
    for layer, weight, bias in layers:
        names = [name for name in (weight, bias) if name is not None]
        if all(name in places for name in names):
            ready[layer] = chosen[weight].squeeze(0), None if bias is None else chosen[bias].squeeze(0)
            found[layer] = tuple(places[name] for name in names)
    return OneDraw(ready, [store.buffer for store in stores if store.buffer is not None], found)
