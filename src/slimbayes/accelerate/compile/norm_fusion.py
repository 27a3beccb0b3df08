"""A pass over a traced graph: BatchNorm, the ReLU, the factors and the residual sum beside it become one operation."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from slimbayes.accelerate.compile.graph_patterns import (
    alike,
    disturbed,
    example,
    is_product,
    is_relu,
    late,
    only_user,
    overwritten,
    sides,
    suits,
)
from slimbayes.accelerate.gpu import norm_sum, sum_norm
from slimbayes.accelerate.gpu.norm import follow, follow_all

assert norm_sum and sum_norm  # imported for the operations that they define
NORM_ROWS = torch.ops.slimbayes.norm_rows.default
SUM_NORM_ROWS = torch.ops.slimbayes.sum_norm_rows.default
NORM_SUM_ROWS = torch.ops.slimbayes.norm_sum_rows.default

_STATISTICS = {NORM_ROWS: 1, SUM_NORM_ROWS: 2, NORM_SUM_ROWS: 3}  # place of the mean; the variance is next
_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}


def fuse_norms(graph: fx.Graph, devices: tuple[str, ...] = ("cuda",)) -> int:
    """Replace training-mode BatchNorm beside row factors by one operation; return how many were replaced.

    The patterns, with at least one factor in each:

        [r∘] → batch_norm → [relu] → [∘s]                      norm_rows
        r∘y + [q∘]x → batch_norm → [relu] → [∘s]               sum_norm_rows: the sum may have other readers
        [r∘] → batch_norm → + x → [relu] → [∘s], [∘t]          norm_sum_rows: so may what is behind the ReLU

    Whatever else has other readers stays; so do norms with a change of modes or a write in between, and norms that are
    used twice: the order in which their running statistics move would change.
    """
    count = 0
    moved: list[_Moved] = []
    for norm in list(graph.nodes):
        if norm.op != "call_function" or norm.target is not F.batch_norm:
            continue
        arguments = _norm_arguments(norm)
        if arguments is None or not suits(arguments["input"], devices):
            continue
        found = _Norm(graph, norm, arguments, moved)
        if found.private():
            count += found.after_sum() or found.before_sum() or found.alone()
    with graph.inserting_before(list(graph.nodes)[-1]):
        for device in dict.fromkeys(move.device for move in moved):
            own = [move for move in moved if move.device == device]
            images = [None if move.spread is None else move.spread.args[0] for move in own]
            columns: list[Any] = [[move.running for move in own], [move.value for move in own], images]
            graph.call_function(follow_all, (*columns, [move.momentum for move in own]))
    if count:
        graph.lint()
    return count


@dataclass
class _Moved:
    """A running statistic to be moved: towards which value; for a variance also the operation that it is of.

    Of that the image counts, not its size: numbers that are not known yet are lost as arguments of a node.
    """

    running: fx.Node
    value: fx.Node
    spread: fx.Node | None
    momentum: float
    device: torch.device


def _norm_arguments(norm: fx.Node) -> dict[str, Any] | None:
    """The arguments of F.batch_norm by name, or None if it is not the training mode with an affine map."""
    found = {**_DEFAULTS, **dict(zip(_NAMES, norm.args, strict=False)), **norm.kwargs}
    if found["training"] is not True or found["weight"] is None or found["bias"] is None:
        return None
    return found if isinstance(found["momentum"], float) else None


@dataclass
class _Norm:
    """One BatchNorm of a graph, and the rewriting of what is around it."""

    graph: fx.Graph
    node: fx.Node
    given: dict[str, Any]
    moved: list[_Moved]

    def alone(self) -> int:
        """[r∘] → batch_norm → [relu] → [∘s]."""
        y, r, products = _factored(self.given["input"])
        relu, s, tail = _tail(self.node)
        if r is None and s is None:
            return 0
        arguments = (y, r, *self._affine(), s, self.given["eps"], relu)
        return self._replace(NORM_ROWS, arguments, [[self.node, *tail][-1]], [*products, self.node, *tail])

    def after_sum(self) -> int:
        """r∘y + [q∘]x → batch_norm → [relu] → [∘s]."""
        total = self.given["input"]
        terms = sides(total)
        if terms is None:
            return 0
        own, other = (_factored(side) for side in terms)
        if own[1] is None:
            own, other = other, own
        if own[1] is None or not alike(own[0], other[0]) or not alike(own[0], total):
            return 0
        relu, s, tail = _tail(self.node)
        keep = len(total.users) > 1
        arguments = (*own[:2], *other[:2], *self._affine(), s, self.given["eps"], relu, keep)
        inner = [*own[2], *other[2], total, self.node, *tail]
        if overwritten(total, inner):  # the gradients need it
            return 0
        return self._replace(SUM_NORM_ROWS, arguments, [total, [self.node, *tail][-1]], inner)

    def before_sum(self) -> int:
        """[r∘] → batch_norm → + x → [relu] → [∘s], [∘t]."""
        total = only_user(self.node)
        terms = None if total is None else sides(total)
        if total is None or terms is None:
            return 0
        x = terms[1] if terms[0] is self.node else terms[0]
        y, r, products = _factored(self.given["input"])
        if x is self.node or not alike(y, x) or not alike(y, total):
            return 0
        inner = [*products, self.node, total]
        behind = only_user(total)
        relu = behind is not None and is_relu(behind)
        if relu and behind is not None:
            inner.append(behind)
        z = inner[-1]
        if overwritten(z, inner):  # the gradients need it
            return 0
        scaled = [
            user for user in z.users if is_product(user) and user.args[0] is z and user.args[1] is not z
        ]
        for count in (2, 1, 0):  # a factor may be made too late to be taken along
            taken = scaled[:count]
            if len(taken) < count or (r is None and not taken):
                continue
            s, t = [*(product.args[1] for product in taken), None, None][:2]
            keep = len(z.users) > len(taken)
            arguments = (y, r, x, *self._affine(), s, t, self.given["eps"], relu, keep)
            if self._replace(NORM_SUM_ROWS, arguments, [z, *taken], [*inner, *taken]):
                return 1
        return 0

    def _affine(self) -> tuple[Any, Any]:
        return self.given["weight"], self.given["bias"]

    def _follow(self, made: fx.Node) -> None:
        """Move the running statistics: with those of all norms, or at once where they are of another type."""
        pair = self._running()
        if pair == (None, None):
            return
        first = _STATISTICS[made.target]  # type: ignore[index]
        values = [self.graph.call_function(operator.getitem, (made, first + at)) for at in range(2)]
        momentum = self.given["momentum"]
        known = [example(node) for node in (self.given["input"], *pair)]
        wide = torch.promote_types(known[0].dtype, torch.float32)  # type: ignore[union-attr]
        if all(value is not None and value.dtype == wide for value in known[1:]):
            device = known[1].device  # type: ignore[union-attr]
            self.moved += [
                _Moved(pair[0], values[0], None, momentum, device),
                _Moved(pair[1], values[1], made, momentum, device),
            ]
        else:
            self.graph.call_function(follow, (*pair, *values, made.args[0], momentum))

    def _running(self) -> tuple[Any, Any]:
        return self.given["running_mean"], self.given["running_var"]

    def private(self) -> bool:
        """Whether nobody else reads the running statistics: they are moved later than the norm would move them."""
        mean, var = self._running()
        if mean is None or var is None:
            return mean is var
        return mean is not var and all(
            isinstance(node, fx.Node)
            and node.op in ("placeholder", "get_attr")  # no part of something larger
            and only_user(node) is self.node
            for node in (mean, var)
        )

    def _replace(
        self, function: Any, arguments: tuple[Any, ...], results: list[fx.Node], inner: list[fx.Node]
    ) -> int:
        """Call the function in place of the ``inner`` nodes, before the first reader of those it gives: ``results``.

        0, and nothing changed, where an argument is not known by then, or what it does would be another thing there.
        """
        order = {node: at for at, node in enumerate(self.graph.nodes)}
        readers = [user for node in results for user in node.users if user not in inner]
        if not readers:
            return 0
        place = min(readers, key=order.__getitem__)
        behind = late(arguments, place, order, inner)
        if behind is None or disturbed([*inner, *behind], order, place):
            return 0
        for node in behind:
            place.prepend(node)
        with self.graph.inserting_before(place):
            made = self.graph.call_function(function, arguments)
            outputs = [self.graph.call_function(operator.getitem, (made, at)) for at in range(len(results))]
            self._follow(made)
        for old, new in zip(results, outputs, strict=True):
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)
        for node in sorted(inner, key=order.__getitem__, reverse=True):  # each has lost its readers by then
            self.graph.erase_node(node)
        return 1


def _factored(value: Any) -> tuple[Any, Any, list[fx.Node]]:
    """(y, r, [the product]) of r∘y with no other reader, else (the value itself, None, [])."""
    if is_product(value) and len(value.users) == 1:
        return value.args[0], value.args[1], [value]
    return value, None, []


def _tail(node: fx.Node) -> tuple[bool, Any, list[fx.Node]]:
    """Of [relu] → [∘s] behind a node: whether there is a ReLU, s, and the nodes."""
    found: list[fx.Node] = []
    only = only_user(node)
    relu = only is not None and is_relu(only)
    if relu and only is not None:
        found.append(only)
    last = [node, *found][-1]
    after = only_user(last)
    if after is not None and is_product(after) and after.args[0] is last:
        return relu, after.args[1], [*found, after]
    return relu, None, found
