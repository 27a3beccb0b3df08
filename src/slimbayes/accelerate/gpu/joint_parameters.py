"""Many small tensors as one, and back, as operations that the compiler takes whole.

Traced, a concatenation of a hundred parameters becomes a hundred small kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimbayes.core.custom_operation import operation


def join(tensors: Sequence[Tensor]) -> Tensor:
    """All elements one after the other, [Σ numel].

    >>> join([torch.zeros(2, 3), torch.zeros(2, 1)]).shape
    torch.Size([8])
    """
    if torch.compiler.is_compiling():
        return torch.ops.slimbayes.join(list(tensors))  # type: ignore[no-any-return]
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def part(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Consecutive parts of a flat tensor in these shapes: the inverse of ``join``.

    >>> [t.shape for t in part(torch.zeros(8), [(2, 3), (2, 1)])]
    [torch.Size([2, 3]), torch.Size([2, 1])]
    """
    sizes = [math.prod(shape) for shape in shapes]
    pieces = torch.ops.slimbayes.part(flat, sizes) if torch.compiler.is_compiling() else flat.split(sizes)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


@operation("join", "(Tensor[] tensors) -> Tensor")
def _join(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@_join.register_fake
def _(tensors: list[Tensor]) -> Tensor:
    return tensors[0].new_empty(sum([tensor.numel() for tensor in tensors]))


@operation("part", "(Tensor flat, SymInt[] sizes) -> Tensor[]")
def _part(flat: Tensor, sizes: list[int]) -> list[Tensor]:
    # Copies: the outputs of an operation may not share memory.
    pieces = [flat.new_empty(size) for size in sizes]
    torch._foreach_copy_(pieces, list(flat.split(sizes)))
    return pieces


@_part.register_fake
def _(flat: Tensor, sizes: list[int]) -> list[Tensor]:
    return [flat.new_empty(size) for size in sizes]


def _join_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shapes = [tensor.shape for tensor in inputs[0]]


def _join_backward(ctx: Any, grad: Tensor) -> tuple[Any]:
    sizes = [math.prod(shape) for shape in ctx.shapes]
    pieces = torch.ops.slimbayes.part(grad, sizes)
    return ([piece.view(shape) for piece, shape in zip(pieces, ctx.shapes, strict=True)],)


def _part_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.sizes, ctx.like = inputs[1], inputs[0].detach()[:0]


def _part_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, None]:
    filled = [
        ctx.like.new_zeros(size) if grad is None else grad
        for grad, size in zip(grads, ctx.sizes, strict=True)
    ]
    return torch.ops.slimbayes.join(filled), None


_join.register_autograd(_join_backward, setup_context=_join_setup)
_part.register_autograd(_part_backward, setup_context=_part_setup)
