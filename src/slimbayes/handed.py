"""What a draw hands to a network: inputs that cannot be repeated, rows that would be split, errors that say so."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.budget import out_of_memory
from slimbayes.context import Draw, RowError
from slimbayes.layers.several import Several
from slimbayes.record import Record, unwrap


def check_meta(leaves: list[Any]) -> None:
    """A tensor without values gives none, which not all layers notice; some of torch's crash on it."""
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_meta:
            raise ValueError(
                f"input {i} of shape {tuple(leaf.shape)} is on the meta device, where tensors have no values: a draw "
                f"needs values, and the model on a device that has them"
            )


@contextlib.contextmanager
def no_single_sequence(model: nn.Module, now: Draw) -> Iterator[None]:
    """Refuse a sequence without a batch in layers that are not converted: its steps would be taken for examples.

    Repeated for the draws, [T, ·] would be one sequence that is longer. Converted layers see it by their rows. A
    network that hands over its rows one by one calls the layer for each.
    """
    seen: dict[nn.Module, list[tuple[int, ...]]] = {}

    def look(module: nn.Module, given: tuple[Any, ...]) -> None:
        if given and isinstance(given[0], Tensor) and given[0].dim() == 2:
            seen.setdefault(module, []).append(tuple(given[0].shape))

    kinds = (nn.RNNBase, nn.MultiheadAttention)
    hooks = [
        module.register_forward_pre_hook(look)
        for module in unwrap(model).modules()
        if isinstance(module, kinds) and not isinstance(module, Several)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for module, shapes in seen.items():
        steps = sum(shape[0] for shape in shapes)
        # Members of an ensemble have one call each, or all of them one, in which each sees its own rows.
        if any(steps * times == now.rows and len(shapes) * times < now.rows for times in (1, now.components)):
            raise RowError(
                f"a {type(module).__name__} that is not converted got one sequence without a batch, of shape "
                f"{shapes[0]}: its steps would run on from draw to draw. Give the sequence a batch, x.unsqueeze(0)"
            )


def explain(error: Exception, leaves: list[Any], tiled: set[int], now: Draw) -> None:
    """Say beside an error of the network's, or of torch's, what the network was handed: rows it never saw before."""
    if isinstance(error, RowError) or out_of_memory(error):
        return
    given = [
        f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
        + (f" as {now.rows} rows" if i in tiled else " as it is")
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for i, leaf in enumerate(leaves)
    ]
    note = (
        f"This was a draw of {now.components} components x {now.samples} samples of {now.batch} examples, the first "
        f"dimension of the first input: the batch comes first, and is repeated. The network got {'; '.join(given)}."
    )
    add = getattr(error, "add_note", None)
    if add is not None:
        add(note)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def may_be_split(record: Record, leaves: list[Any], tiled: set[int], now: Draw) -> tuple[Any, ...]:
    """What to remember of inputs that are not repeated and still have as many rows as all draws together; or ()."""
    if now.rows == now.batch or len(tiled) == len(leaves) or torch.compiler.is_compiling():
        return ()
    found = [
        (i, tuple(leaf.shape))
        for i, leaf in enumerate(leaves)
        if i not in tiled and isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == now.rows
    ]
    key = (now.batch, now.components, now.samples, *found)
    return key if found and key not in record.unsplit else ()
