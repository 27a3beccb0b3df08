"""One of K versions of many small tensors, each chosen at random, as one operation."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate.gpu.noise import philox_noise
from slimbayes.core.compiler import constant
from slimbayes.core.custom_operation import operation


def choose_patches(points: Sequence[Tensor], groups: Sequence[int], seed: Tensor, draws: int) -> list[Tensor]:
    """[draws, *shape] of every tensor [K, *shape], z ~ Uniform{1..K}: one index per draw and group, or per element.

    Tensors of one group share the index z; those of group −1 have one for every element. ``seed`` holds one int64
    on the device; in the backward pass the indices are made again from it.

    >>> weight, bias = torch.arange(3.0).view(3, 1).expand(3, 4), torch.arange(3.0).view(3, 1)
    >>> w, b = choose_patches([weight, bias], [0, 0], torch.tensor([7]), 2)
    >>> w.shape, bool((w == b).all())
    (torch.Size([2, 4]), True)
    """
    pairs = [f"{group}:{math.prod(each.shape[1:])}" for each, group in zip(points, groups, strict=True)]
    names = ",".join(pairs)
    _prepare(names, seed.device)
    return torch.ops.slimbayes.patches(list(points), seed, names, draws)  # type: ignore[no-any-return]


@constant
def _prepare(names: str, device: torch.device) -> bool:
    """Make the table while the compiler traces: inside a CUDA graph's run it would lie in the graph's memory."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        _table(names, device)
    return True


@functools.cache  # for good: CUDA graphs read them where they are
def _table(names: str, device: torch.device) -> tuple[Tensor, int]:
    """For every column the index that chooses it, and how many indices there are."""
    pairs = [[int(part) for part in name.split(":")] for name in names.split(",")]
    shared = {group: at for at, group in enumerate(dict.fromkeys(group for group, _ in pairs if group >= 0))}
    columns, count = [], len(shared)
    for group, width in pairs:
        if group >= 0:
            columns.append(torch.full((width,), shared[group]))
        else:
            columns.append(torch.arange(count, count + width))
            count += width
    return torch.cat(columns).to(device), count


def _indices(seed: Tensor, names: str, draws: int, components: int) -> Tensor:
    """Which version every draw takes of every column, [draws, columns]."""
    table, count = _table(names, seed.device)
    u = philox_noise(seed, "uniform", (draws, count), torch.float32)
    chosen = (u * components).long().clamp_(max=components - 1)  # rounding: the product can reach K
    return chosen.index_select(1, table)


def _apart(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The columns of [N, Σ columns] as [N, *shape] each, in memory of their own."""
    pieces = [flat.new_empty((flat.shape[0], *each.shape[1:])) for each in like]
    widths = [math.prod(each.shape[1:]) for each in like]
    torch._foreach_copy_([piece.view(flat.shape[0], -1) for piece in pieces], list(flat.split(widths, 1)))
    return pieces


@operation("patches", "(Tensor[] points, Tensor seed, str names, SymInt draws) -> Tensor[]")
def _patches(points: list[Tensor], seed: Tensor, names: str, draws: int) -> list[Tensor]:
    components = points[0].shape[0]
    flat = torch.cat([each.reshape(components, -1) for each in points], 1)
    return _apart(flat.gather(0, _indices(seed, names, draws, components)), points)


@_patches.register_fake
def _(points: list[Tensor], seed: Tensor, names: str, draws: int) -> list[Tensor]:
    return [each.new_empty((draws, *each.shape[1:])) for each in points]


@operation("patches_backward", "(Tensor[] grads, Tensor seed, str names, SymInt components) -> Tensor[]")
def _patches_backward(grads: list[Tensor], seed: Tensor, names: str, components: int) -> list[Tensor]:
    draws = grads[0].shape[0]
    flat = torch.cat([grad.reshape(draws, -1) for grad in grads], 1)
    total = flat.new_zeros((components, flat.shape[1]))
    total.scatter_add_(0, _indices(seed, names, draws, components), flat)
    return _apart(total, grads)


@_patches_backward.register_fake
def _(grads: list[Tensor], seed: Tensor, names: str, components: int) -> list[Tensor]:
    return [grad.new_empty((components, *grad.shape[1:])) for grad in grads]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    points, seed, ctx.names, _ = inputs
    ctx.save_for_backward(seed)
    ctx.components = points[0].shape[0]
    ctx.empty = [piece.detach()[:0] for piece in output]
    ctx.draws = output[0].shape[0]


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    filled = [
        empty.new_zeros((ctx.draws, *empty.shape[1:])) if grad is None else grad
        for grad, empty in zip(grads, ctx.empty, strict=True)
    ]
    made = torch.ops.slimbayes.patches_backward(filled, *ctx.saved_tensors, ctx.names, ctx.components)
    return made, None, None, None


_patches.register_autograd(_backward, setup_context=_setup)
