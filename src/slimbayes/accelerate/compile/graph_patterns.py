"""What the passes over traced graphs ask of a node, and of what lies between two."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from slimbayes.accelerate.row_factors import row_product

_RELU = (F.relu, torch.relu, torch.relu_)
_SUM = (operator.add, operator.iadd, torch.add)
# What a factor may pass through between its sample and its use: no randomness, nothing written.
_PURE = ("expand", "flatten", "view", "reshape", "to", "unsqueeze", "squeeze", "contiguous")
# The results of these are memory of their own.
_FRESH = (F.batch_norm, F.conv2d, row_product)
_WRITING = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift,
    operator.irshift, operator.setitem, operator.delitem,
)  # fmt: skip
_MODES = ("set_grad_enabled", "inference_mode", "autocast", "fwd_grad_enabled")
_KNOWN = ("torch", "_operator", "operator", "builtins", "math", "slimbayes", "typing")


def suits(value: Any, devices: tuple[str, ...]) -> bool:
    """Whether a value is a picture-like activation, channels last, on one of the devices."""
    image = example(value)
    return (
        image is not None
        and image.dim() == 4
        and image.device.type in devices
        and image.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        and _channels_last(image)
    )


def _channels_last(image: Tensor) -> bool:
    """Whether the channels lie next to each other: by strides, for stand-ins of unknown size may not say so."""
    if image.dim() != 4 or image.is_contiguous(memory_format=torch.channels_last):
        return image.dim() == 4
    _, channels, height, width = image.shape
    wanted = (height * width * channels, 1, width * channels, channels)
    return all(
        size == 1 or own == other
        for size, own, other in zip(image.shape, image.stride(), wanted, strict=True)
    )


def example(value: Any) -> Tensor | None:
    """The tensor that stands for a value, if one is known."""
    found = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    if not isinstance(found, Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(found):
        return None  # inside torch.func our operations have no rules
    return found


def late(
    arguments: tuple[Any, ...], place: fx.Node, order: dict[fx.Node, int], inner: Iterable[fx.Node] = ()
) -> list[fx.Node] | None:
    """What the arguments need from behind ``place``, in order; None if it cannot be moved before it.

    Nor if that needs one of ``inner``, which are to be replaced.
    """
    replaced = set(inner)
    found: set[fx.Node] = set()
    waiting = [argument for argument in arguments if isinstance(argument, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        if node in replaced:
            return None
        if order[node] < order[place]:
            continue
        pure = node.op == "call_method" and node.target in _PURE
        if node is place or not (pure or (node.op == "call_function" and node.target is operator.getitem)):
            return None
        found.add(node)
        waiting.extend(node.all_input_nodes)
    return sorted(found, key=order.__getitem__)


def _shares(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors that stand for values lie in the same memory."""
    shares: bool = torch._C._is_alias_of(one, other)  # type: ignore[attr-defined]
    return shares


def overwritten(node: fx.Node, inner: Iterable[fx.Node]) -> bool:
    """Whether a reader outside ``inner`` writes to a value, or to a view of it."""
    own = example(node)
    seen, waiting = set(inner), [node]
    while waiting:
        value = waiting.pop()
        for user in value.users:
            if user in seen:
                continue
            seen.add(user)
            if _writes(user) and value in user.args[:1]:
                return True
            found = example(user)
            if own is not None and found is not None and _shares(own, found):
                waiting.append(user)
    return False


def disturbed(nodes: Iterable[fx.Node], order: dict[fx.Node, int], until: fx.Node | None = None) -> bool:
    """Whether these nodes cannot be one operation, at whichever of their places, for what lies between them.

    A mode of autograd or autocast that changes, or memory that is written: an operation in another place would see
    another mode or other values. Nodes of the collection itself may write.
    """
    members = set(nodes)
    ends = [*members] if until is None else [*members, until]
    node, last = min(ends, key=order.__getitem__), max(ends, key=order.__getitem__)
    while node is not last:
        if node not in members and (_switches(node) or _writes(node)):
            return True
        node = node.next
    return False


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _switches(node: fx.Node) -> bool:
    return node.op == "call_function" and any(word in _name(node) for word in _MODES)


def _writes(node: fx.Node) -> bool:
    """Whether a node writes to memory that another may read, or may do so for all that is known."""
    if node.op not in ("call_function", "call_method"):
        return node.op == "call_module"
    name = _name(node)
    in_place = (
        node.target in _WRITING
        or (name.endswith("_") and not name.endswith("__"))
        or _in_place(node)
        or "out" in node.kwargs
    )
    if in_place:
        return not _harmless(node.args[0] if node.args else None, node)
    return node.op == "call_function" and _unknown(node.target)


def _in_place(node: fx.Node) -> bool:
    """Whether a function is told to work in place, by name or by position."""
    if node.kwargs.get("inplace"):
        return True
    code = getattr(node.target, "__code__", None)
    names = () if code is None else code.co_varnames[: code.co_argcount]
    at = names.index("inplace") if "inplace" in names else len(node.args)
    return at < len(node.args) and bool(node.args[at])


def _harmless(written: Any, writer: fx.Node) -> bool:
    """Whether what is written is a count (of BatchNorm's batches), or memory that the writer alone can see."""
    if not isinstance(written, fx.Node):
        return False
    value = example(written)
    if written.op in ("placeholder", "get_attr"):
        return value is not None and value.dim() == 0 and not value.is_floating_point()
    return written.target in _FRESH and only_user(written) is writer


def _unknown(function: Any) -> bool:
    """Whether a function may write without its name saying so."""
    if isinstance(function, torch._ops.HigherOrderOperator):
        return True
    if isinstance(function, torch._ops.OpOverloadPacket):
        return any(getattr(function, name)._schema.is_mutable for name in function.overloads())
    if isinstance(function, torch._ops.OpOverload):
        return function._schema.is_mutable
    module = getattr(function, "__module__", None) or "torch"
    return module.split(".")[0] not in _KNOWN


def sides(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """The two terms of a sum of two tensors."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target not in _SUM or node.kwargs:
        return None
    if len(node.args) != 2 or node.args[0] is node.args[1]:
        return None
    one, other = node.args
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        return None
    if node.target is operator.iadd and (one.target not in _FRESH or only_user(one) is not node):
        return None  # it is written over, and someone else may read it
    return one, other


def alike(one: Any, other: Any) -> bool:
    """Whether two values have the same shape and type, channels last."""
    a, b = example(one), example(other)
    return (
        a is not None
        and b is not None
        and a.shape == b.shape
        and a.dtype == b.dtype
        and a.device == b.device
        and _channels_last(b)
    )


def only_user(node: fx.Node) -> fx.Node | None:
    """The one reader of a value, or None."""
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def is_product(node: Any) -> bool:
    """Whether a node is x∘f, of the type of x."""
    if not isinstance(node, fx.Node) or node.op != "call_function" or node.target is not row_product:
        return False
    x, factor = example(node.args[0]), example(node.args[1])
    return x is None or factor is None or x.dtype == factor.dtype


def is_relu(node: fx.Node) -> bool:
    """Whether a node is a ReLU."""
    if node.op == "call_method":
        return node.target in ("relu", "relu_")
    return node.op == "call_function" and node.target in _RELU
