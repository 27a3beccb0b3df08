"""What the passes of one prediction choose of patches: for many passes by one evaluation, and handed to layers."""

from __future__ import annotations

import itertools
import sys
import weakref
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.accelerate import switches
from slimbayes.accelerate.factor_groups import on_gpu
from slimbayes.accelerate.patch_versions import (
    FEW,
    MANY,
    Patched,
    Store,
    Way,
    index_type,
    noises_for,
    settles,
    stores_for,
    tensors,
    way_of,
)
from slimbayes.core.context import Draw, Settled, activate
from slimbayes.core.conversion import hooked, unwrap
from slimbayes.core.memory import out_of_memory
from slimbayes.core.noise import transformed
from slimbayes.core.paths import FastPath, Layers
from slimbayes.core.plan import Plan
from slimbayes.core.rows import FlatInputs, unfold
from slimbayes.core.rules.base import Operation, stored
from slimbayes.core.rules.patching import IndexedRule

Pair = tuple[Tensor, Tensor | None]
SettledLayers = list[tuple[IndexedRule, Operation]]
_LARGEST = 1 << 22  # numbers that are kept from one prediction to the next
_SERIAL = itertools.count()
_VERSION = attrgetter("_version")


class OneDraw(Settled):
    """The place of the weights and biases that the one draw of a pass takes, and where each layer finds its own.

    A compiled network is bound to the tensors that it reads: so they are left with the layers, and the place is used
    again in later predictions. Only by one at a time: ``token`` tells whose tensors the layers have.
    """

    def __init__(self, token: str, kind: list[Any], stores: list[Store], layers: SettledLayers) -> None:
        self.token, self.kind = token, kind
        self.layers = [
            weakref.ref(op) for _, op in layers
        ]  # weakly: the network may be such a layer, and has this
        self.ready: dict[int, Pair] = {}  # by id, which those of living layers alone have
        found: dict[str, Tensor] = {}
        with torch.inference_mode(False):
            self.buffers = [store.place() for store in stores]
            for store, buffer in zip(stores, self.buffers, strict=True):
                found |= store.views(buffer)
            for rule, op in layers:
                bias = None if op.bias is None else found[rule.bias_source].squeeze(0)
                self.ready[id(op)] = found[rule.weight_source].squeeze(0), bias
        self._stay()

    def _stay(self) -> None:
        """Tell a compiler that these tensors do not move: CUDA graphs read them where they are, without a copy."""
        dynamo = sys.modules.get("torch._dynamo")  # what was not imported has compiled nothing
        if dynamo is not None and any(buffer.is_cuda for buffer in self.buffers):
            for tensor in itertools.chain(*self.ready.values()):
                if tensor is not None:
                    dynamo.mark_static_address(tensor, guard=False)

    def leave(self) -> None:
        """Leave the tensors with the layers, for compiled code."""
        for op, (weight, bias) in zip(self._living(), self.ready.values(), strict=True):
            known = vars(op)
            if known.get("settled_token") != self.token or known["settled_weight"] is not weight:
                known |= {"settled_token": self.token, "settled_weight": weight, "settled_bias": bias}

    def forget(self) -> None:
        """Take them away again: a layer that does not settle any more is not to find them."""
        for op in self._living():
            for key in ("settled_token", "settled_weight", "settled_bias"):
                vars(op).pop(key, None)

    def _living(self) -> list[nn.Module]:
        return [op for op in (ref() for ref in self.layers) if op is not None]

    def pair(self, layer: nn.Module) -> Pair | None:
        """The layer's weight and bias, or None if it has to see for itself."""
        if not torch.compiler.is_compiling():
            return self.ready.get(id(layer))
        if getattr(layer, "settled_token", "") != self.token:
            return None
        return layer.settled_weight, layer.settled_bias  # type: ignore[return-value]


class Places:
    """The place of a network's passes, which predictions leave to each other; one at a time has it."""

    def __init__(self) -> None:
        self.token = f"place {next(_SERIAL)}"
        self.kept: list[OneDraw | None] = [None]

    def __reduce__(self) -> tuple[type[Places], tuple[()]]:
        return Places, ()  # a copy, also in another process, has a token of its own

    def take(self, stores: list[Store], layers: SettledLayers) -> OneDraw | None:
        """A place for these: the last prediction's, or a new one. None while another prediction has it."""
        try:
            one = self.kept.pop()
        except IndexError:
            return None
        try:
            where = [_stream(store.versions.device) for store in stores]
            kind = [where, *(store.kind for store in stores), *(weakref.ref(op) for _, op in layers)]
            if one is not None and one.kind != kind:
                one.forget()
                one = None
            if one is None:
                one = OneDraw(self.token, kind, stores, layers)
        except BaseException:
            self.kept.append(None)
            raise
        one.leave()
        return one

    def give(self, one: OneDraw) -> None:
        """Leave it to the next prediction."""
        large = sum(buffer.numel() for buffer in one.buffers) > _LARGEST
        if large:
            one.forget()
        self.kept.append(None if large else one)


def _stream(device: torch.device) -> int:
    """What is written on one stream may still be read on it, but not on another."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


_PLACES: weakref.WeakKeyDictionary[nn.Module, Places] = weakref.WeakKeyDictionary()


def places_of(model: nn.Module) -> Places:
    """The place of a network's passes."""
    return _PLACES.setdefault(unwrap(model), Places())


class Ahead:
    """What the passes of one prediction choose, many passes by one evaluation: each asks for its own.

    ``samples``: of the whole prediction; ``most``: numbers of its inputs, and four bytes for each may be held ahead.
    Passes have as many samples as the first that asks, and follow each other. ``places``: the network's.
    """

    def __init__(self, samples: int, most: int = 0, places: Places | None = None) -> None:
        self.samples, self.most = samples, min(max(4 * most, FEW), MANY)
        self.places = Places() if places is None else places
        self.short = False  # memory has ended: from then on one pass is made at a time
        self.only_patches = False  # nothing else is to be prepared for the network's layers
        self.first, self.each, self.passes = 0, 0, 0
        self.points: list[Tensor] = []  # what was chosen from
        self.owners: list[dict[str, Any]] = []  # and where it is
        self.keys: list[str] = []
        self.counting: list[Tensor] = []  # those that count how often they were written to
        self.counts: list[int] = []
        self.stores: list[Store] = []
        self.noises: dict[str, tuple[Tensor, ...]] = {}  # by source, one for every pass
        self.layers: Layers = ()
        self.one: OneDraw | None = None
        self.lane: object = (
            None  # inputs of which a pass needed nothing but its patches: the next need not ask again
        )

    def hand_over(self, draw: Draw) -> bool:
        """Give a draw its part, if it is among those made and nothing has changed since."""
        if draw.samples != self.each or (draw.first_sample - self.first) % self.each:
            return False
        place = (draw.first_sample - self.first) // self.each
        if not 0 <= place < self.passes or self._changed():
            return False
        if self.noises:
            draw.noises.update({source: values[place] for source, values in self.noises.items()})
        # The first pass, which sees whether rows are where they should be, goes the long way.
        one = draw.components * draw.samples == 1 and draw.rows_seen is None
        if self.one is None and one and self.stores and not torch.is_grad_enabled():
            self.one = self._settle()
        if self.one is not None and one:
            draw.settled = self.one
            for store in self.stores:
                store.fill(place)
            return True
        for store in self.stores:
            if store.buffer is None and not torch.is_grad_enabled():
                store.buffer = store.place()
            views = store.views(store.fill(place))
            draw.prefilled.update({f"{name} chosen": value for name, value in views.items()})
        return True

    def output(self, model: nn.Module, flat: FlatInputs, plan: Plan) -> Any:
        """Of a pass over the inputs of the one before, which needed nothing but its patches."""
        if self.lane is not flat:
            return None
        now = Draw(1, plan.samples, flat.batch, plan.noise, plan.seed, plan.first_sample, plan.first_example)
        if not self.hand_over(now) or now.settled is None:
            return None
        args, kwargs = flat.tile(1)
        with activate(now):
            output = model(*args, **kwargs)
        return unfold(output, plan.samples, flat.batch)

    def ran(self, flat: FlatInputs, now: Draw) -> None:
        """The next pass over the same inputs need not ask again."""
        if self.only_patches and now.settled is not None:
            self.lane = flat

    def prepared(self, draw: Draw) -> bool:
        """Whether a draw got all that it needs: of a network in which nothing but patches is random."""
        return self.only_patches and may_choose(draw) and self.hand_over(draw)

    def _changed(self) -> bool:
        """Whether a layer's tensor is another one now, or was written to."""
        now = map(dict.get, self.owners, self.keys)
        return any(map(is_not, now, self.points)) or list(map(_VERSION, self.counting)) != self.counts

    def _settle(self) -> OneDraw | None:
        """A place for what passes choose, if there is one."""
        layers = _settled_layers(self.layers, {name for store in self.stores for name in store.names})
        one = self.places.take(self.stores, layers)
        if one is not None:
            for store, buffer in zip(self.stores, one.buffers, strict=True):
                store.buffer = buffer
        return one

    def close(self) -> None:
        """Leave the place to later predictions."""
        if self.one is not None:
            self.places.give(self.one)
        self.one = None

    def room(self, draw: Draw, members: list[Patched]) -> int:
        """How many passes to make at once, of which this draw is the first."""
        if self.short or any(m.points.is_inference() for m in members):
            return 1  # whether those change cannot be known
        bytes_of = {
            m.source: m.count * (8 if m.way is Way.ITSELF else index_type(m.place[2]).itemsize)
            for m in members
        }
        each = draw.components * draw.samples * sum(bytes_of.values())
        most = self.most // max(each, 1)
        return max(1, min((self.samples - draw.first_sample) // draw.samples, most))

    def take(self, draw: Draw, passes: int, members: list[Patched], layers: Layers) -> None:
        """Make what so many passes choose, from this draw's on."""
        stores: list[Store] = []
        noises: dict[str, tuple[Tensor, ...]] = {}
        for place in dict.fromkeys(m.place for m in members):
            beside, apart, itself = ([m for m in members if m.place == place and m.way is way] for way in Way)
            noises |= noises_for(draw, passes, itself)
            stores += stores_for(draw, passes, beside, apart, self.most)
        self.first, self.each, self.passes = draw.first_sample, draw.samples, passes
        self.close()
        self.stores, self.noises, self.layers = stores, noises, layers
        watched = [m for m in members if m.way is not Way.ITSELF]  # at others the layer looks when it runs
        self.points = [m.points for m in watched]
        where = [stored(m.op, m.which) for m in watched]
        self.owners, self.keys = [owner for owner, _ in where], [key for _, key in where]
        self.counting = [points for points in self.points if not points.is_inference()]
        self.counts = list(map(_VERSION, self.counting))


class PatchLookahead(FastPath):
    """What the passes of one prediction choose among the versions of patched tensors, by one evaluation."""

    def on(self) -> bool:
        """By ``factors``."""
        return switches.paths.factors

    def course(self, model: nn.Module, samples: int, numbers: int) -> Ahead:
        """What the passes choose, in the place that the network's predictions leave to each other."""
        return Ahead(samples, numbers, places_of(model))

    def prepare(self, model: nn.Module, layers: Layers, draw: Draw, course: Any) -> None:
        """Choose for this pass and those that follow."""
        if not isinstance(course, Ahead):
            return
        if on_gpu(layers) or not hooked(model):
            prefill_keyed(layers, draw, course)
        course.only_patches = bool(layers) and all([type(rule) is IndexedRule for rule, _ in layers])


def prefill_keyed(layers: Layers, draw: Draw, ahead: Ahead | None) -> None:
    """Of a draw with a seed: the keyed noise of all patches by one evaluation, and what it chooses of the small ones.

    The generator takes a hundred small operations whatever it makes: once per layer they would cost more than a
    network's pass over a few hundred rows, and once per pass as much as a part of it. So it makes what the passes
    after this one need too; the course keeps it. The numbers are those that the layers would make.
    """
    if ahead is None or not may_choose(draw):
        return
    if ahead.hand_over(draw):
        return
    several = ahead.samples > draw.samples and not torch.is_grad_enabled()
    members = list(tensors(layers, several and draw.components * draw.samples == 1))
    passes = ahead.room(draw, members)
    if several and passes == 1 and (ahead.short or ahead.passes <= 1):
        # Nothing to share: large tensors are left to their layers. The last of many passes is as those before it.
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
    if not switches.paths.factors or draw.noise == "mean" or draw.component_ids is not None:
        return False
    return isinstance(draw.seed, int) and not torch.compiler.is_compiling() and not transformed()


def _settled_layers(layers: Layers, names: set[str]) -> list[tuple[IndexedRule, Operation]]:
    """The layers whose weight and bias are among the chosen."""
    found = []
    for rule, op in layers:
        if not isinstance(rule, IndexedRule) or not settles(rule):
            continue
        own = [rule.weight_source, *([] if op.bias is None else [rule.bias_source])]
        # A tensor may have been chosen for another layer that has it too, where this one has to look at its own.
        if names.issuperset(own) and way_of(rule, op, True) is not Way.ITSELF:
            found.append((rule, op))
    return found
