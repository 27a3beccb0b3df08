"""Groups of rows, each with its own tensors: by one batched kernel where torch has one, else one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from slimbayes.core.rules.base import Inputs, Operation


def one_by_one(op: Operation, inputs: Inputs, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run torch's kernel on every group of rows in turn and join the rows again."""
    groups = weight.shape[0]
    rows = inputs[0].shape[0]
    parts = [split_rows(value, groups, rows) for value in inputs]
    return torch.cat(
        [
            op.compute(tuple(part[g] for part in parts), weight[g], None if bias is None else bias[g])
            for g in range(groups)
        ]
    )


def split_rows(value: Any, groups: int, rows: int) -> list[Any]:
    """Cut a tensor whose first axis is the rows into groups; anything else goes whole to each group."""
    if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows:
        return list(value.unflatten(0, (groups, rows // groups)).unbind(0))
    return [value] * groups


def run_members(
    call: Callable[[int, tuple[Any, ...], dict[str, Any]], Any],
    members: int,
    rows: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call every member on its own rows, component-major, and join the outputs leaf by leaf."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if members > 1:
        _refuse_state(leaves, members)
    parts = [split_rows(leaf, members, rows) for leaf in leaves]
    outputs = []
    for k in range(members):
        member_args, member_kwargs = pytree.tree_unflatten([part[k] for part in parts], spec)
        outputs.append(call(k, member_args, member_kwargs))
    return join_members(outputs)


def join_members(outputs: list[Any], copies: int = 1) -> Any:
    """Join the members' outputs leaf by leaf, component-major, each ``copies`` times."""
    flat = [pytree.tree_flatten(output) for output in outputs]
    return pytree.tree_unflatten(
        [_join(values, copies) for values in zip(*(f[0] for f in flat), strict=True)], flat[0][1]
    )


def _refuse_state(leaves: list[Any], members: int) -> None:
    # Every member gets the same object: a cache that the first fills would reach the second.
    plain = (Tensor, bool, int, float, complex, str, bytes, slice, torch.dtype, torch.device)
    for leaf in leaves:
        if not (leaf is None or isinstance(leaf, plain) or callable(leaf)):
            raise TypeError(
                f"got a {type(leaf).__name__} as an input, which holds state of its own and cannot be split "
                f"among {members} members; call the model without it (a cache: use_cache=False)"
            )


def _join(values: tuple[Any, ...], copies: int) -> Any:
    if not isinstance(values[0], Tensor):
        return values[0]
    if values[0].dim() == 0:  # a loss that the network computed itself
        return torch.stack(values).mean() if values[0].is_floating_point() else values[0]
    return torch.cat([value for value in values for _ in range(copies)])
