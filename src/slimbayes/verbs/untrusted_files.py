"""What a file asks for, held against what it holds, before memory is taken for it.

A few bytes can name an ensemble of a billion members or a network of a billion units. Files that were saved hold the
tensors of what they name, so that anything else is refused by looking at shapes alone.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import json
import math
import os
import stat
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from slimbayes.core.methods import DeepEnsemble, Method

LARGEST_HEADER = 100_000_000  # bytes: what safetensors itself takes
_SMALL = 10_000_000  # numbers that any machine has room for
_MEMBERS = 100  # of a module without tensors
_LOOPS = ("depth", "layers")  # options of networks that are numbers of modules


def sizes_in(method: Method) -> list[int]:
    """The options of a method that multiply tensors: components, members, ranks.

    >>> from slimbayes.core.methods import KTied
    >>> sizes_in(KTied(rank=3))
    [3]
    """
    values = [getattr(method, item.name) for item in dataclasses.fields(method)]  # type: ignore[arg-type]
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool)]


def outgrows(network: nn.Module, methods: Iterable[Method], tensors: dict[str, Tensor]) -> bool:
    """Whether a conversion may need many times what a file holds, so that it is tried without memory first."""
    held = sum(value.numel() for value in tensors.values())
    base = sum(value.numel() for value in network.state_dict().values() if isinstance(value, Tensor))
    return (
        max((size for method in methods for size in sizes_in(method)), default=0) * base > 4 * held + _SMALL
    )


def check_members(methods: list[Method], layers: dict[str, int], tensors: dict[str, Tensor]) -> None:
    """Raise a ValueError unless every tensor of an ensembled module is there for as many members as are named.

    Members are copies of modules, which take time and memory beside their numbers.
    """
    for layer, rule in layers.items():
        method = methods[rule]
        if not isinstance(method, DeepEnsemble):
            continue
        own = {name: value for name, value in tensors.items() if not layer or name.startswith(f"{layer}.")}
        other = [name for name, value in own.items() if value.shape[:1] != (method.members,)]
        if other or (not own and method.members > _MEMBERS):
            raise ValueError(
                f"{method.members} members are named, and {', '.join(other[:4]) or layer!r} has others"
            )


def weightless(network: nn.Module) -> nn.Module:
    """A copy of a network on the meta device: shapes and types, and no memory for numbers.

    >>> weightless(nn.Linear(3, 2)).weight.device.type
    'meta'
    """
    memo: dict[int, Tensor] = {}
    for parameter in network.parameters():
        memo[id(parameter)] = nn.Parameter(
            parameter.detach().to("meta"), requires_grad=parameter.requires_grad
        )
    for buffer in network.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(network, memo)


def check_network(
    build: Callable[[], nn.Module], text: str, shapes: dict[str, tuple[int, ...]], prefix: str = ""
) -> None:
    """Raise a ValueError unless the network that ``build`` makes has tensors of these shapes, without making it.

    ``text`` is the network as it was written; a converted tensor may have one axis more, of components.
    """
    deepest = max(_loops(text), default=0)
    if deepest > max(64, len(shapes)):
        raise ValueError(
            f"the network {text[:100]!r} is of {deepest} layers, and there are {len(shapes)} tensors"
        )
    with torch.device("meta"):
        plain = build()
    for name, value in plain.state_dict().items():
        found = shapes.get(prefix + name)
        if found is None or tuple(value.shape) not in (found, found[1:]):
            there = "none" if found is None else list(found)
            raise ValueError(
                f"the network {text[:100]!r} has {name} of {list(value.shape)}, the weights have {there}"
            )


def _loops(text: str) -> list[int]:
    """The numbers of modules that the text of a network asks for."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # whoever builds it says what is wrong
    words = node.keywords if isinstance(node, ast.Call) else []
    values = [word.value for word in words if word.arg in _LOOPS]
    return [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, int)]


def shapes_of(path: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a safetensors file, by its header; without room for them it is a ValueError.

    >>> import slimbayes as sb, pathlib, tempfile
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "net.safetensors"
    >>> sb.save(sb.bayesianize(nn.Linear(3, 2), sb.Deterministic()), file)
    >>> sorted(shapes_of(file).items())
    [('bias', (2,)), ('weight', (2, 3))]
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no file")
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > min(LARGEST_HEADER, found.st_size):
            raise ValueError("its header is longer than the file")
        text = file.read(size)
    try:
        header = json.loads(text)
        shapes = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            shape = tuple(int(length) for length in entry["shape"])
            if not 0 <= begin <= end <= found.st_size or min(shape, default=0) < 0:
                raise ValueError(f"{name[:100]!r} lies outside of the file")
            if math.prod(shape) > 2 * (end - begin):  # the smallest type has half a byte
                raise ValueError(f"{name[:100]!r} is larger than the file")
            shapes[str(name)] = shape
        return shapes
    except (AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"its header is damaged ({type(error).__name__})") from error
