"""Draws in passes: the network runs once for every component and sample, on the batch as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from slimbayes.core.context import Draw, RowError

Place = tuple[int, int]  # component and sample


def places(now: Draw) -> list[Place]:
    """Those of a whole draw, component-major."""
    return [(k, s) for k in range(now.components) for s in range(now.samples)]


def one_pass(now: Draw, place: Place, several: bool, device: torch.device) -> Draw:
    """The draw of one component and sample, with the noise that it has in ``now``.

    ``several``: the model has components, of which one is to be picked.
    """
    component, sample = place
    ids = now.component_ids
    if ids is not None:
        ids = ids[component : component + 1]
    elif several:
        ids = torch.arange(component, component + 1, device=device)
    return Draw(
        1, 1, now.batch, now.noise, now.seed, now.first_sample + sample, now.first_example, ids,
        whole=True, first_component=component,
    )  # fmt: skip


def stack(outputs: list[Any]) -> Any:
    """Outputs of the passes, leaf by leaf [draws, ...]; what is no tensor is the first pass's.

    >>> stack([(torch.zeros(2), "a"), (torch.ones(2), "a")])
    (tensor([[0., 0.],
            [1., 1.]]), 'a')
    """
    if all(type(output) is Tensor for output in outputs):
        flat, spec = [[output] for output in outputs], None
    else:
        pairs = [pytree.tree_flatten(output) for output in outputs]
        flat, spec = [leaves for leaves, _ in pairs], pairs[0][1]
        if any(other != spec for _, other in pairs):
            raise RowError("the passes of this draw returned different structures: they cannot be stacked")
    joined = [_stacked(leaves) for leaves in zip(*flat, strict=True)]
    if not any(isinstance(leaf, Tensor) for leaf in joined):
        raise RowError(f"the network returned no tensor to stack, but {type(outputs[0]).__name__}")
    return joined[0] if spec is None else pytree.tree_unflatten(joined, spec)


def _stacked(leaves: tuple[Any, ...]) -> Any:
    if not isinstance(leaves[0], Tensor):
        return leaves[0]
    shapes = list(dict.fromkeys(tuple(leaf.shape) for leaf in leaves))
    if len(shapes) > 1:
        raise RowError(
            f"the passes of this draw returned tensors of shapes {shapes[0]} and {shapes[1]}: they cannot be stacked. "
            f"Return outputs of one size"
        )
    return torch.stack(leaves)
