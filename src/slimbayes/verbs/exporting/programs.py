"""A frozen model as a torch.export program, for any batch."""

from __future__ import annotations

import inspect
import io
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slimbayes.core.rows import FlatInputs, flatten_inputs
from slimbayes.files import write_whole
from slimbayes.verbs.freezing.making import as_arguments
from slimbayes.verbs.freezing.network import Frozen
from slimbayes.verbs.provenance import versions

FORMAT = "slimbayes-export"
Dynamic = Mapping[
    str, Mapping[int, str]
]  # axes of inputs that may change, and a name for each: one name, one size


class ExportError(RuntimeError):
    """An export that cannot be made, or whose outputs are not those of the frozen model."""


def to_program(
    frozen: Frozen, example: Any, dynamic_batch: bool = True, dynamic: Dynamic | None = None
) -> Any:
    """The frozen model as a ``torch.export.ExportedProgram``, whose ``.module()`` runs on any batch.

    ``example``: a tensor, a tuple of inputs, or a dict of named ones; the batch is the first dimension of the first
    tensor and of all others of that length. All other sizes are those of the example, but for those that ``dynamic``
    names, by input and axis: ``{"tokens": {1: "steps"}, "mask": {1: "steps"}}``. What is no tensor is fixed.

    >>> import slimbayes as sb
    >>> frozen = sb.freeze(sb.bayesianize(torch.nn.Linear(3, 2), sb.Rank1(components=2)), draws=4)
    >>> program = sb.export.to_program(frozen, torch.randn(5, 3))
    >>> program.module()(torch.randn(7, 3)).shape
    torch.Size([4, 7, 2])
    """
    flat = example_inputs(frozen, example)
    args, kwargs = flat.tile(1)
    with torch.no_grad():
        frozen(*args, **kwargs)  # masks of dropout are made when the first inputs come
        names = argument_names(frozen, len(args), list(kwargs))
        shapes = _dynamic_shapes(flat, names, dynamic_batch, dynamic or {})
        with warnings.catch_warnings():
            # torch's recurrent layers keep a list of their own weights, which tracing takes for new ones.
            warnings.filterwarnings("ignore", "The tensor attributes")
            return torch.export.export(
                _Named(frozen, names), args, kwargs, dynamic_shapes=shapes, strict=False
            )


class _Named(nn.Module):
    """The frozen model with arguments of these names: torch.export cannot mark a dimension of gathered ones."""

    def __init__(self, frozen: Frozen, names: list[str]) -> None:
        super().__init__()
        self.frozen = frozen

        def forward(*args: Any, **kwargs: Any) -> Any:
            return frozen(*args, **kwargs)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])  # type: ignore[attr-defined]
        self.forward = forward
        self.eval()


def argument_names(frozen: Frozen, count: int, named: list[str]) -> list[str]:
    """The network's own names of so many inputs by position, then those of the named ones."""
    own = frozen.arguments
    return [own[i] if i < len(own) and own[i] not in named else f"input_{i}" for i in range(count)] + named


def save_program(program: Any, path: str | os.PathLike[str], metadata: dict[str, Any] | None = None) -> Path:
    """Write a program for ``torch.export.load``, whole or not at all; its metadata beside it, as NAME.json.

    slimbayes itself never loads such a file: torch may unpickle parts of it. Load only files that you trust.
    """
    path = Path(path)
    words = None if metadata is None else _as_json(metadata)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    write_whole(path, buffer.getvalue())
    if words is not None:
        write_whole(path.with_name(f"{path.name}.json"), words)
    return path


def _as_json(metadata: dict[str, Any]) -> str:
    try:
        return json.dumps(metadata, indent=1)
    except TypeError as error:
        raise TypeError(
            f"metadata is kept as JSON, of numbers, texts, lists and dicts alone: {error}"
        ) from error


def describe(frozen: Frozen, more: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a file says of the model in it: methods, draws, components, seed, versions, and ``more``."""
    content = {"format": FORMAT, "version": 1, **frozen.metadata, "versions": versions()}
    if taken := sorted(content.keys() & (more or {}).keys()):
        raise ValueError(
            f"metadata has {', '.join(map(repr, taken))}, which the file says of itself: choose another name"
        )
    return json.loads(_as_json({**content, **(more or {})}))  # type: ignore[no-any-return]


def example_inputs(frozen: Frozen, example: Any) -> FlatInputs:
    """The example's tensors, with at least two rows: a batch of one would be traced as one forever."""
    if not isinstance(frozen, Frozen):
        raise TypeError(f"export takes what sb.freeze(model) returned, got {type(frozen).__name__}")
    args, kwargs = as_arguments(example)
    names = frozen.arguments[: len(args)]
    whole = [names.index(one) if one in names and one not in kwargs else one for one in frozen.shared_inputs]
    flat = flatten_inputs(frozen.network, args, kwargs, whole)
    return flat if flat.batch > 1 else flat.resized(2)


def _dynamic_shapes(flat: FlatInputs, names: list[str], batch: bool, more: Dynamic) -> dict[str, Any]:
    """The dimensions that may change, for every input in its place."""
    rows = torch.export.Dim("batch", min=1)
    marks = [
        ({0: rows} if batch and i in flat.tiled else {}) if isinstance(leaf, Tensor) else None
        for i, leaf in enumerate(flat.leaves)
    ]
    args, kwargs = pytree.tree_unflatten(marks, flat.spec)
    shapes: dict[str, Any] = dict(zip(names, (*args, *kwargs.values()), strict=True))
    given = pytree.tree_unflatten(flat.leaves, flat.spec)
    tensors = dict(zip(names, (*given[0], *given[1].values()), strict=True))
    sizes: dict[str, Any] = {}
    for name, axes in more.items():
        if not isinstance(tensors.get(name), Tensor):
            raise ValueError(
                f"dynamic names {name!r}, which is no tensor among the inputs {', '.join(names)}"
            )
        marked = {
            axis: sizes.setdefault(label, torch.export.Dim(label, min=1)) for axis, label in axes.items()
        }
        shapes[name] = {**shapes[name], **marked}
    return shapes
