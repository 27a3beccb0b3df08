"""Versions of patched tensors, and which of them each pass of a prediction takes."""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from slimbayes.core.context import Draw
from slimbayes.core.keyed_noise import keyed_uniforms
from slimbayes.core.rules.base import Operation, Rule, own_parameter
from slimbayes.core.rules.patching import IndexedRule

Layers = Sequence[tuple[Rule, Operation]]
Place = tuple[torch.device, torch.dtype, int]  # what tensors that are chosen together share; the last is K
# Elements of one version: up to here versions are copied side by side; up to there, or of any size where one number
# chooses them all, they are chosen from where they lie, for passes of one draw.
_SMALL, _LARGEST = 1 << 14, 1 << 20
FEW, MANY = 1 << 18, 1 << 23  # bytes that may be held ahead however few the inputs, and however many
_PIECE = 1 << 20  # random numbers made at a time


class Way(Enum):
    """How a tensor's version comes to its layer."""

    BESIDE = "with those of others, by one operation"
    APART = "from where its versions lie, into a place of its own"
    ITSELF = "the layer chooses, and gets the noise"


@dataclass
class Patched:
    """A tensor [K, *shape] of a layer, and the noise that chooses among its versions."""

    name: str  # of the random tensor
    op: Operation
    which: str  # "weight" or "bias"
    points: Tensor
    source: str  # of the noise: one number for the tensor and those that share it, or one per element
    per_element: bool
    way: Way

    @property
    def place(self) -> Place:
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


def way_of(rule: IndexedRule, op: Operation, one_by_one: bool) -> Way:
    """How a layer's weight and bias are chosen; ``one_by_one``: for several passes of one draw without gradients."""
    if not settles(rule):
        return Way.ITSELF
    own = [(which, getattr(op, which)) for which in ("weight", "bias") if getattr(op, which) is not None]
    if not all([own_parameter(op, which, points) for which, points in own]):
        return Way.ITSELF
    width = op.weight[0].numel()
    if width <= _SMALL:
        return Way.BESIDE
    fits = width <= _LARGEST or not rule.per_element
    return Way.APART if one_by_one and fits and op.weight.is_contiguous() else Way.ITSELF


def settles(rule: IndexedRule) -> bool:
    """Whether weight and bias are all that the layer needs to know of its index."""
    return not rule.own_statistics and not rule.joint and rule.mixing.logits is None


def tensors(layers: Layers, one_by_one: bool) -> Iterator[Patched]:
    """The tensors to choose from, each once; ``one_by_one``: for several passes of one draw without gradients."""
    seen: set[str] = set()
    for rule, op in layers:
        if not isinstance(rule, IndexedRule):
            continue
        way = way_of(rule, op, one_by_one)
        for which, name in (("weight", rule.weight_source), ("bias", rule.bias_source)):
            points = getattr(op, which)
            if points is not None and name not in seen:
                seen.add(name)
                source = name if rule.per_element else f"{rule.mixing.name}.index"
                # The bias of a large weight is small itself.
                near = way is Way.APART and points[0].numel() <= _SMALL
                yield Patched(name, op, which, points, source, rule.per_element, Way.BESIDE if near else way)


class Store(ABC):
    """What passes choose from, and which of it every pass takes: put into one place, which the next overwrites."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    versions: Tensor
    buffer: Tensor | None = None

    @property
    def kind(self) -> tuple[object, ...]:
        """What stores whose places are alike have in common."""
        return type(self), *self.names, *self.shapes, self.versions.dtype, self.versions.device

    @abstractmethod
    def place(self) -> Tensor:
        """Where a pass's versions are put: [draws, Σ widths] or [1, *shape]."""

    @abstractmethod
    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors [draws, *shape] in such a place, by name."""

    @abstractmethod
    def fill(self, place: int) -> Tensor:
        """Put what a pass takes into the buffer; with gradients into memory of its own."""


class Beside(Store):
    """All versions of some tensors side by side [K, Σ widths]; what a few passes take is chosen at once.

    ``most``: numbers that may be held for that.
    """

    def __init__(self, members: list[Patched], index: Tensor, most: int) -> None:
        components = members[0].points.shape[0]
        self.names = [m.name for m in members]
        self.shapes = [m.shape for m in members]
        self.widths = [m.width for m in members]
        self.versions = torch.cat([m.points.reshape(components, -1) for m in members], 1)
        self.index = index  # [passes, draws, numbers]
        described = tuple((m.source, m.count, m.width) for m in members)
        self.columns = _columns(described, index.device)  # the number of every column; None: its own
        self.together = max(1, most // (index.shape[1] * self.versions.shape[1]))
        self.first = 0
        self.rows: tuple[Tensor, ...] = ()

    def place(self) -> Tensor:
        return self.versions.new_empty(self.index.shape[1], self.versions.shape[1])

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        parts = buffer.split(self.widths, 1)
        return {
            name: part.unflatten(1, shape) if len(shape) != 1 else part
            for name, part, shape in zip(self.names, parts, self.shapes, strict=True)
        }

    def fill(self, place: int) -> Tensor:
        if torch.is_grad_enabled():
            return self._chosen(place, place + 1)[0]
        if not self.first <= place < self.first + len(self.rows):
            self.rows = ()  # their memory first
            self.first, self.rows = place, self._chosen(place, place + self.together).unbind()
        assert self.buffer is not None
        return self.buffer.copy_(self.rows[place - self.first])

    def _chosen(self, start: int, stop: int) -> Tensor:
        """What these passes take, [passes, draws, Σ widths]."""
        index = self.index[start:stop]
        if self.columns is not None:
            index = index.index_select(2, self.columns)
        return self.versions.gather(0, index.flatten(0, 1).long()).view(index.shape)


class Apart(Store):
    """One large tensor: the version of every pass is copied from where all lie."""

    def __init__(self, member: Patched, index: Tensor) -> None:
        self.names, self.shapes = [member.name], [member.shape]
        self.versions, self.per_element = member.points.detach(), member.per_element
        self.index = index[:, 0].unbind()  # numbers, by pass

    def place(self) -> Tensor:
        return torch.empty_like(self.versions[:1])

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        return {self.names[0]: buffer}

    def fill(self, place: int) -> Tensor:
        assert self.buffer is not None
        index = self.index[place].long()
        if self.per_element:
            flat = self.versions.view(len(self.versions), -1)
            torch.gather(flat, 0, index.unsqueeze(0), out=self.buffer.view(1, -1))
        else:
            torch.index_select(self.versions, 0, index, out=self.buffer)
        return self.buffer


def index_type(components: int) -> torch.dtype:
    """In which the choice among so many versions is held.

    >>> index_type(5), index_type(300)
    (torch.uint8, torch.int64)
    """
    return torch.uint8 if components <= 256 else torch.int64


def stores_for(
    draw: Draw, passes: int, beside: list[Patched], apart: list[Patched], most: int
) -> list[Store]:
    """What is chosen from, with what each of the passes takes; none where that is too much to hold.

    ``most``: bytes that may be held of what passes take.
    """
    members = [*beside, *apart]
    if not members:
        return []
    device, dtype, components = members[0].place
    counts = {m.source: m.count for m in members}
    size = passes, draw.components, draw.samples, sum(counts.values())
    few = math.prod(size) <= FEW // 8
    index = torch.empty(size, dtype=torch.int64 if few else index_type(components), device=device)
    for piece in _pieces(draw, passes, counts):
        u = _uniforms(draw, piece, counts, dtype, device)
        if u is None:
            return []
        # As ``Mixing`` has it: rounding, u can reach 1.
        index[piece.start : piece.stop] = (u * components).long().clamp_(max=components - 1)
    index = index.flatten(1, 2)
    starts = dict(zip(counts, itertools.accumulate(counts.values(), initial=0), strict=False))
    found: list[Store] = [Apart(m, index[:, :, starts[m.source] : starts[m.source] + m.count]) for m in apart]
    if beside:
        numbers = sum({m.source: m.count for m in beside}.values())  # theirs come first
        found.insert(0, Beside(beside, index[:, :, :numbers], most // 12))  # and an index of 8 bytes each
    return found


def noises_for(draw: Draw, passes: int, members: list[Patched]) -> dict[str, tuple[Tensor, ...]]:
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
    step = max(1, _PIECE // max(1, draw.components * draw.samples * sum(counts.values())))
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
    if u is None:
        return None
    return u.view(draw.components, len(passes), draw.samples, u.shape[-1]).transpose(0, 1)


@functools.lru_cache(maxsize=4)  # small: only of tensors that lie side by side
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
