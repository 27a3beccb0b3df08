"""A draw is run again where activation checkpointing calls layers a second time, from within a backward pass.

An identity at the draw's outputs (``facts.Marker``) tells the backward pass which draw it comes to; the number of the
node that asks for the recomputation tells which of several. What the layers sampled is found again: what was made
before the network ran is kept with the graph, and what a layer made for itself it makes again, from torch's generator
in the state that it had then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from slimbayes.core.context import Draw

Value = TypeVar("Value")
_task_id = torch._C._current_graph_task_id
next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.7


def may_run_again() -> bool:
    """Whether the layer that runs in a draw with gradients may be inside a checkpoint.

    Reentrant checkpointing turns gradients off; the other catches what autograd keeps, which older torch does not tell.
    """
    return not torch.is_grad_enabled() or _top_hooks is None or _top_hooks(False) is not None


class Memory:
    """What a second run of a draw needs and the draw itself does not say: made at the first sign of a checkpoint."""

    def __init__(self, first: int) -> None:
        self.thread = threading.get_ident()
        self.first = self.last = first  # numbers of the nodes made in the draw
        self.start: Tensor | None = None  # of the generator, which a draw with a seed leaves as it was
        self.places = 0
        self.remade = 0  # samples made again
        self.generators: dict[str, list[Tensor]] = {}  # their states when a sample was made, by its name
        self.streams: dict[str, dict[int, int]] = {}  # of keyed noise: source, place of the generator, stream
        self.early: dict[str, Any] = {}  # what was sampled before the network ran, but for tensors (None)
        self.by_hand: set[str] = set()  # those that were used with gradients turned off
        self.returns: dict[str, tuple[Returned, int]] = {}  # where their gradients go, and of which output

    def note(self, name: str) -> None:
        """A sample is about to be made: from here it can be made again."""
        self.generators[name] = _generators()

    def make_again(self, name: str, make: Callable[[], Value]) -> Value:
        """The sample in a second run of a layer.

        Where the layer made it in its first run, too, the same operations make it. Where it was found then, made by an
        earlier call that may not run now, the checkpoint expects nothing of its making, and sees nothing of it.
        """
        then, now = self.generators.get(name), _generators()
        if then is None:
            return self._make_anew(name, make, now[0])
        self.remade += 1
        if all(map(torch.equal, then, now)):
            return make()
        _set_generators(then)
        try:
            with unseen():
                return make()
        finally:
            _set_generators(now)

    def _make_anew(self, name: str, make: Callable[[], Value], now: Tensor) -> Value:
        """What the first run went without, with gradients turned off: computed from known samples, or an error."""
        before = self.remade
        value = make()
        if self.remade == before and not torch.equal(torch.get_rng_state(), now):
            raise RuntimeError(
                f"activation checkpointing runs a layer again that now draws {name!r}, which it did not draw before: "
                f"checkpoint with use_reentrant=False"
            )
        return value

    def note_stream(self, source: str, stream: int) -> None:
        """Keyed noise with this number is about to be made."""
        if self.start is None:
            self.start = torch.get_rng_state()
        self.places += 1
        self.streams.setdefault(source, {})[_place()] = stream

    def stream_again(self, source: str) -> int:
        """Its number in a second run of the layer: a layer that is called several times has several."""
        known, place = self.streams.get(source, {}), _place()
        if place in known:
            return known[place]
        if len(known) == 1:
            return next(iter(known.values()))
        raise RuntimeError(
            f"the noise {source!r} was drawn {len(known)} times in this draw, and activation checkpointing runs a part "
            f"of it again without torch's generator in the state of then: checkpoint with preserve_rng_state=True"
        )

    def early_again(self, name: str, known: dict[str, Any]) -> Any:
        """What was sampled before the network ran, in a second run of a layer.

        Reentrant checkpointing ran the layer with gradients turned off, and runs a backward pass of its own over the
        second run: its gradients are collected for the node that made the sample.
        """
        if name not in known:
            raise RuntimeError(
                f"a layer is computed again, but the sample {name!r} of its draw went with the graph in an earlier "
                f"backward pass: call backward(retain_graph=True) there"
            )
        value = known[name]
        if name not in self.returns:
            return value
        leaf = value.detach().requires_grad_()
        target, place = self.returns[name]
        leaf.register_hook(lambda grad: target.add(place, grad))
        return leaf

    def end(self, prefilled: dict[str, Any]) -> list[Tensor]:
        """The network has run: the samples to which gradients come by hand, whose nodes have to be visited for them."""
        self.last = next_node()
        self._put_back()
        self.early = {name: None if isinstance(value, Tensor) else value for name, value in prefilled.items()}
        if not self.by_hand:
            return []
        found: dict[Any, Returned] = {}
        values = {name: prefilled[name] for name in self.by_hand if isinstance(prefilled[name], Tensor)}
        wanted = {name: value for name, value in values.items() if value.grad_fn is not None}
        for name, value in wanted.items():
            node = value.grad_fn
            if node not in found:
                found[node] = Returned()
                node.register_prehook(found[node])
            self.returns[name] = found[node], value.output_nr
        return list(wanted.values())

    def _put_back(self) -> None:
        """The generator as it was before the draw, if nothing but places have been taken from it."""
        if self.start is None or self.places == 0:
            return
        now = torch.get_rng_state()
        torch.set_rng_state(self.start)
        for _ in range(self.places):
            _place()
        torch.set_rng_state(self.start if torch.equal(torch.get_rng_state(), now) else now)

    def known(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """What was sampled before the network ran, with the tensors that the graph has kept."""
        names = [name for name, value in self.early.items() if value is None]
        found = dict(zip(names, tensors, strict=True)) if tensors else {}
        return {name: value for name, value in self.early.items() if value is not None} | found

    def check_returned(self) -> None:
        """Raise if gradients were left behind."""
        if any([target.sums for target, _ in self.returns.values()]):
            raise RuntimeError(
                "reentrant activation checkpointing ran layers again after their samples' own backward pass, as "
                "happens where a network is spread over devices: checkpoint with use_reentrant=False"
            )


class Returned:
    """Gradients of a node's outputs that second runs of layers have found: added when the node's turn has come."""

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = {}

    def add(self, place: int, grad: Tensor) -> None:
        """One more gradient of the output at this place."""
        self.sums[place] = self.sums[place] + grad if place in self.sums else grad

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        found = list(grads)
        for place, grad in self.sums.items():
            own = found[place]
            found[place] = grad if own is None else own + grad
        self.sums.clear()
        return tuple(found)


class Pass:
    """A backward pass, and the draws that it has come to with the samples that their graphs have kept."""

    def __init__(self, task: int) -> None:
        self.task = task
        self.entered: list[tuple[Memory, Draw, Sequence[Tensor]]] = []
        self.again: dict[int, Draw] = {}  # second runs, by place

    def end(self) -> None:
        """The pass is over."""
        _PASSES.pop(self.task, None)
        for memory, _, _ in self.entered:
            memory.check_returned()

    def find(self, node: int) -> Draw | None:
        """The second run of the innermost draw in which this node was made."""
        found = [
            (memory, i) for i, (memory, _, _) in enumerate(self.entered) if memory.first <= node < memory.last
        ]
        if not found:
            return None
        if len({memory.thread for memory, _ in found}) > 1:
            raise RuntimeError(
                "this backward pass covers draws that were made in several threads, and activation checkpointing runs "
                "a layer again that may belong to any of them: call backward() for each draw"
            )
        memory, place = max(found, key=lambda one: one[0].first)
        if place not in self.again:
            _, draw, tensors = self.entered[place]
            self.again[place] = draw.second_run(memory.known(tensors))
        return self.again[place]


class _Here(threading.local):
    def __init__(self) -> None:
        self.task = -1
        self.draw: weakref.ref[Draw] | None = None  # the one that was last run again in this thread


_HERE = _Here()
# By number; each is kept by the backward pass itself, and goes with it, also where that fails.
_PASSES: dict[int, weakref.ref[Pass]] = {}


def enter(draw: Draw, tensors: Sequence[Tensor]) -> None:
    """The backward pass in this thread has come to the outputs of this draw, whose graph has kept these samples."""
    task, memory = _task_id(), draw.memory
    assert memory is not None
    known = _pass_of(task)
    if known is None:
        known = Pass(task)
        _PASSES[task] = weakref.ref(known)
        torch.autograd.Variable._execution_engine.queue_callback(known.end)
    if all([one is not memory for one, _, _ in known.entered]):
        known.entered.append((memory, draw, tensors))


def _pass_of(task: int) -> Pass | None:
    found = _PASSES.get(task)
    return None if found is None else found()


def draw_run_again() -> Draw | None:
    """The draw a layer of which is computed again, or None where no backward pass asks for it."""
    task = _task_id()
    if task == -1:
        return None
    known, node = _pass_of(task), torch._C._current_autograd_node()
    draw = None if known is None or node is None else known.find(node._sequence_nr())
    if draw is not None:
        _HERE.task, _HERE.draw = task, weakref.ref(draw)
        return draw
    # Reentrant checkpointing has a backward pass of its own inside the draw's, with nodes of its own.
    return None if _HERE.draw is None or _HERE.task == task else _HERE.draw()


def unseen() -> AbstractContextManager[Any]:
    """Inside, checkpointing does not see what autograd keeps: it is as if made outside of the checkpointed part."""
    return torch.autograd.graph.saved_tensors_hooks(_itself, _itself)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _place() -> int:
    """A number by which a place in the sequence of torch's generator is known, which checkpointing restores."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def _generators() -> list[Tensor]:
    """The states of torch's generators: the CPU's, and those of the GPUs in use."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        states += torch.cuda.get_rng_state_all()
    return states


def _set_generators(states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state_all(states[1:])
