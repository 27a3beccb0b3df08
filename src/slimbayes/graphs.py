"""What the passes over traced graphs ask of a node."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from slimbayes.apply.rows import row_product

_RELU = (F.relu, torch.relu, torch.relu_)
_SUM = (operator.add, operator.iadd, torch.add)
# What a factor may pass through between its sample and its use: no randomness, nothing written.
_PURE = ("expand", "flatten", "view", "reshape", "to", "unsqueeze", "squeeze", "contiguous")


def suits(value: Any, devices: tuple[str, ...]) -> bool:
    """Whether a value is a picture-like activation, channels last, on one of the devices."""
    image = example(value)
    return (
        image is not None
        and image.dim() == 4
        and image.device.type in devices
        and image.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        and image.is_contiguous(memory_format=torch.channels_last)
    )


def example(value: Any) -> Tensor | None:
    """The tensor that stands for a value, if one is known."""
    example = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    return example if isinstance(example, Tensor) else None


def late(arguments: tuple[Any, ...], place: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node] | None:
    """What the arguments need from behind ``place``, in order; None if it cannot be moved before it."""
    found: set[fx.Node] = set()
    waiting = [argument for argument in arguments if isinstance(argument, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node in found or order[node] < order[place]:
            continue
        pure = node.op == "call_method" and node.target in _PURE
        if node is place or not (pure or (node.op == "call_function" and node.target is operator.getitem)):
            return None
        found.add(node)
        waiting.extend(node.all_input_nodes)
    return sorted(found, key=order.__getitem__)


def sides(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """The two terms of a sum of two tensors."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target not in _SUM or node.kwargs:
        return None
    if len(node.args) != 2 or not all(isinstance(side, fx.Node) for side in node.args):
        return None
    if node.target is operator.iadd and len(node.args[0].users) > 1:  # type: ignore[union-attr]
        return None  # it is written over, and someone else reads it
    return node.args[0], node.args[1]  # type: ignore[return-value]


def alike(one: Any, other: Any) -> bool:
    """Whether two values have the same shape and type, channels last."""
    a, b = example(one), example(other)
    return (
        a is not None
        and b is not None
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.device == b.device
        and b.is_contiguous(memory_format=torch.channels_last)
    )


def only_user(node: fx.Node) -> fx.Node | None:
    """The one reader of a value, or None."""
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def is_product(node: Any) -> bool:
    """Whether a node is x∘f."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is row_product


def is_relu(node: fx.Node) -> bool:
    """Whether a node is a ReLU."""
    if node.op == "call_method":
        return node.target in ("relu", "relu_")
    return node.op == "call_function" and node.target in _RELU
