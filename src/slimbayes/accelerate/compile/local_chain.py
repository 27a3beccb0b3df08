"""Local noise, the ReLU behind it and the T of the product behind that as one operation of a compiled graph.

Apart they are three sweeps over the activations forward and four backward; together one each (``kernels/local.py``).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from slimbayes.accelerate.gpu import local  # registers the operators

__all__ = ["chain_noise", "local"]

_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv)
_RELU = (F.relu, torch.relu, torch.relu_)


def chain_noise(graph: fx.Graph) -> int:
    """Join local_noise → [relu] → thin_squares where nothing else needs what lies between; return how many."""
    count = 0
    for node in list(graph.nodes):
        if _calls(node, "local_noise"):
            count += _join(graph, node)
    if count:
        graph.lint()
    return count


def _calls(node: fx.Node, name: str) -> bool:
    if node.op != "call_function":
        return False
    operation = getattr(torch.ops.slimbayes, name)
    return node.target in (operation, operation.default)


def _is_relu(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("relu", "relu_")
    return node.op == "call_function" and node.target in _RELU


def _join(graph: fx.Graph, noise: fx.Node) -> int:
    """Replace one noise and what follows it; 0 where there is nothing to join."""
    y, t, b, extra, bias, next_a, seed, stream, relu, kernel = noise.args
    for user in list(noise.users):
        if not user.users:  # the tracer unpacks all results
            graph.erase_node(user)
    rows = _only_user(noise)
    if relu or next_a is not None or rows is None or rows.target is not operator.getitem or rows.args[1] != 0:
        return 0
    activation = _only_user(rows)
    joins_relu = activation is not None and _is_relu(activation)
    last = activation if joins_relu else rows
    assert last is not None
    following = _first_user(graph, last)
    joins_next = (
        following is not None
        and _calls(following, "thin_squares")
        and following.args[0] is last
        and following.args[2] == kernel
    )
    if not (joins_relu or joins_next):
        return 0
    # All arguments are known where the last of the joined stands, and nothing reads the rows before that.
    place = following if joins_next and following is not None else last
    if _changes_between(noise, place):
        return 0
    with graph.inserting_before(place):
        a = following.args[1] if joins_next and following is not None else None
        made = graph.call_function(
            torch.ops.slimbayes.local_noise, (y, t, b, extra, bias, a, seed, stream, joins_relu, kernel)
        )
        value = graph.call_function(operator.getitem, (made, 0))
        made.meta, value.meta = dict(noise.meta), dict(last.meta)
        if joins_next and following is not None:
            thin = graph.call_function(operator.getitem, (made, 1))
            thin.meta = dict(following.meta)
            following.replace_all_uses_with(thin)
            graph.erase_node(following)
    last.replace_all_uses_with(value)
    for node in (last, rows, noise) if joins_relu else (rows, noise):
        graph.erase_node(node)
    return 1


def _changes_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether a mode of autograd or autocast changes between two nodes, or something is written in place."""
    node = first.next
    while node is not last:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        joined = _is_relu(node) and first in node.args[0].args  # type: ignore[union-attr]
        if not joined and (
            any(word in name for word in ("set_grad_enabled", "inference_mode", "autocast", "setitem"))
            or (name.endswith("_") and not name.endswith("__"))
            or node.target in _IN_PLACE
            or node.kwargs.get("inplace")
            or "out" in node.kwargs
        ):
            return True
        node = node.next
    return False


def _only_user(node: fx.Node) -> Any:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _first_user(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The user of a node that comes first in the graph."""
    for other in graph.nodes:
        if other in node.users:
            return other  # type: ignore[no-any-return, unused-ignore]
    return None
