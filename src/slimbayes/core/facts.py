"""The facts of a draw: what outlives it, for the loss that scores its outputs, which lead to it.

They hold log-probabilities and by-products for the KL, never a sample.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from slimbayes.core import second_runs
from slimbayes.core.context import Draw

_KEY = "_slimbayes_facts"  # of a tensor's attribute, and among what autograd's nodes carry
_FARTHEST = 128  # nodes between a draw's outputs and what is scored


@dataclass
class Facts:
    """What a loss may want to know of a draw: the log-probabilities of what was chosen, and known KLs."""

    model: Any  # the record of the converted model, weakly
    passes: list[list[Tensor]] = field(
        default_factory=list
    )  # log-probabilities [draws of the pass] of every pass
    byproducts: dict[str, Any] = field(default_factory=dict)  # what a KL of the same weights need not redo

    def of(self, record: object) -> bool:
        """Whether the draw was one of this model's."""
        return (self.model() if isinstance(self.model, weakref.ref) else self.model) is record

    @property
    def log_probs(self) -> list[Tensor]:
        """Log-probabilities [draws], whose sum is the draw's."""
        if len(self.passes) == 1:
            return self.passes[0]
        sums = [torch.stack(own).sum(0) if own else None for own in self.passes]
        known = [value for value in sums if value is not None]
        return (
            [torch.cat([known[0].new_zeros(1) if value is None else value for value in sums])]
            if known
            else []
        )

    def take_byproducts(self) -> list[Any]:
        """What is known of the KL, for one use: it may hold as much memory as the weights."""
        found, self.byproducts = list(self.byproducts.values()), {}
        return found


@dataclass
class Trace:
    """Draws that were made in compiled code, where no graph leads back: known by their outputs themselves."""

    draws: list[tuple[list[Tensor], Facts]] = field(default_factory=list)
    whole: bool = False  # one call of a function compiled by ``sb.compile``, and nothing else, was traced


TRACE = Trace()


class Marker(torch.autograd.Function):
    """An identity at an output of a draw: from it the output leads to the facts, and a backward pass into the draw.

    What was sampled before the network ran is kept with the first of a draw's markers for a second run, and freed with
    it. An output has a marker of its own, for a backward pass frees all that it may come to. ``others``: tensors whose
    nodes are to be visited, too, with gradients of zero, to which a hook adds.
    """

    @staticmethod
    def forward(ctx: Any, draw: Draw, first: Any, output: Tensor, *others: Tensor) -> Tensor:
        ctx.draw, ctx.first = draw, first
        ctx.set_materialize_grads(False)
        if first is None and draw.memory is not None and draw.prefilled:
            ctx.save_for_backward(*[one for one in draw.prefilled.values() if isinstance(one, Tensor)])
        ctx.others = [(given.shape, given.dtype, given.device) for given in others]
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        keeper = ctx if ctx.first is None else ctx.first
        if ctx.draw.memory is not None:
            try:
                second_runs.enter(ctx.draw, keeper.saved_tensors)
            except RuntimeError:  # freed by an earlier backward pass: a layer that is run again will say so
                second_runs.enter(ctx.draw, ())
        others = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others]
        return None, None, grad, *others


def remembers() -> bool:
    """Whether a draw that starts now leaves a graph that leads back to it: eager code, with gradients."""
    return (
        torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
    )


def facts_for(record: object) -> Facts:
    """Facts of a draw that is about to be made."""
    return Facts(record if torch.compiler.is_compiling() else weakref.ref(record))


def leave_facts(output: Any, record: object, now: Draw, facts: Facts | None = None) -> Any:
    """The outputs of a draw, which lead to its facts from here on; ``facts`` where it is one pass of several."""
    if not torch.is_grad_enabled():
        return output
    log_probs = (
        [mixing.log_prob(index) if value is None else value for mixing, index, value in now.chosen.values()]
        if now.chosen
        else []
    )
    whole = facts is None
    facts = facts_for(record) if facts is None else facts
    facts.passes.append(log_probs)
    facts.byproducts.update(now.byproducts)
    if now.first_node is None:
        return leave_all(output, facts) if whole else output
    if type(output) is Tensor:
        return _marked([output], facts, now, log_probs)[0]
    leaves, spec = pytree.tree_flatten(output)
    return pytree.tree_unflatten(_marked(leaves, facts, now, log_probs), spec)


def leave_all(output: Any, facts: Facts) -> Any:
    """The outputs of all passes of a draw: where no graph leads back, they themselves are remembered."""
    if not torch.is_grad_enabled() or not facts.passes:
        return output
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    if torch.compiler.is_compiling():
        if TRACE.whole or any(facts.passes):
            before = TRACE.draws if TRACE.whole else []
            TRACE.draws = [*before, (leaves, facts)]
    elif not remembers():  # a transform, whose tensors have no graph of their own
        for leaf in leaves:
            if leaf.is_floating_point():
                setattr(leaf, _KEY, facts)
    return output


def _marked(leaves: list[Any], facts: Facts, now: Draw, log_probs: list[Tensor]) -> list[Any]:
    by_hand = [] if now.memory is None else now.memory.end(now.prefilled)
    # Where nothing but the mixing is learned, its score has to find the way, too.
    learned = any([value.requires_grad for value in log_probs])
    first = None
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not (leaf.requires_grad or (learned and leaf.is_floating_point())):
            continue
        if now.memory is not None or log_probs:
            link = [] if leaf.requires_grad else [torch.zeros((), requires_grad=True)]
            leaf = leaves[i] = Marker.apply(now, first, leaf, *link, *by_hand)  # type: ignore[no-untyped-call]
            first = leaf.grad_fn if first is None else first
        if leaf.grad_fn is not None:
            leaf.grad_fn.metadata[_KEY] = facts
    now.end()
    return leaves


def facts_of(scored: Any, record: object) -> list[Facts]:
    """The facts of this model's draws to which these tensors lead, each draw once, as they follow each other."""
    found: list[Facts] = []
    for tensor in [scored] if type(scored) is Tensor else pytree.tree_leaves(scored):
        if isinstance(tensor, Tensor):
            for facts in _found(tensor):
                if facts.of(record) and not any([facts is known for known in found]):
                    found.append(facts)
    return found


def sums_of_trace(record: object) -> list[Any]:
    """In compiled code: what all draws of this model know of its KL."""
    return [known for _, facts in TRACE.draws if facts.of(record) for known in facts.byproducts.values()]


def _found(tensor: Tensor) -> list[Facts]:
    if not torch.compiler.is_compiling():
        own = getattr(tensor, _KEY, None)
        found = [own] if own is not None else list(_markers(tensor.grad_fn))
        if found:
            return found
    return [facts for given, facts in TRACE.draws if any([one is tensor for one in given])]


def _markers(node: Any) -> Iterator[Facts]:
    """The facts that the nearest nodes carry, in the order of the operations' arguments."""
    waiting = [] if node is None else [node]
    seen: set[Any] = set()
    while waiting and len(seen) < _FARTHEST:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        facts = node.metadata.get(_KEY)
        if facts is not None:
            yield facts
        else:
            waiting.extend([before for before, _ in reversed(node.next_functions) if before is not None])
