"""The rank-1 factors of a network in eager code: two nodes for autograd, however many layers there are.

A network of fifty layers has two hundred parameters of factors. Joined and parted by operations of torch's own, each
of them is a node of its own, and so is every sample; here ``_Join`` is one node, and ``_Samples`` another. What else
is computed from the same parameters, their KL, takes its gradients through the same ``_Join``: they are added before
they are parted, not parameter by parameter.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.accelerate.gpu.factors import check_family, factors_gradient, factors_value, prepared
from slimbayes.accelerate.gpu.rows import batched

_KNOWN = {Tensor, nn.Parameter}
_flatten = torch._C._nn.flatten_dense_tensors
_unflatten = torch._C._nn.unflatten_dense_tensors


class Joint(NamedTuple):
    """Parameters put together, and the node through which their gradients come back."""

    parameters: tuple[Tensor, ...]
    wanted: tuple[bool, ...]
    loc: Tensor
    rho: Tensor


def joinable(parameters: Sequence[Tensor]) -> bool:
    """Whether all are tensors of torch's own classes.

    >>> joinable([torch.ones(2), nn.Parameter(torch.ones(2))])
    True
    """
    return {type(parameter) for parameter in parameters} <= _KNOWN


def join_all(locs: Sequence[Tensor], rhos: Sequence[Tensor]) -> Joint:
    """All locations one after the other, and all scales before the softplus.

    >>> join_all([torch.zeros(2, 3), torch.zeros(2, 1)], [torch.ones(2, 3), torch.ones(2, 1)]).rho.tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    parameters = (*locs, *rhos)
    loc, rho = _Join.apply(*parameters)  # type: ignore[no-untyped-call]
    return Joint(parameters, tuple([one.requires_grad for one in parameters]), loc, rho)


def samples(
    joint: Joint,
    widths: Sequence[int],
    seed: Tensor,
    number: int,
    examples: int,
    family: str,
    clip: float | None,
    dtype: torch.dtype,
) -> Sequence[Tensor]:
    """``gpu.factors.sample_flat`` of joined parameters: [K, number, examples, C] for every factor."""
    check_family(family)
    names = prepared(joint.loc, widths)
    settings = (names, number, examples, family, clip, dtype)
    values: Sequence[Tensor] = _Samples.apply(joint.loc, joint.rho, seed, settings)  # type: ignore[no-untyped-call]
    return values


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers one after the other, in memory of their own."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1).clone()  # one tensor would be its own view
    if any([batched(tensor) for tensor in tensors]):
        return torch.cat([tensor.reshape(-1) for tensor in tensors])
    joined: Tensor = _flatten(list(tensors))
    return joined


def _parted(flat: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """The parts of a flat tensor in these shapes."""
    if batched(flat):
        parts = flat.split([one.numel() for one in like])
        return [part.view(one.shape) for part, one in zip(parts, like, strict=True)]
    parted: Sequence[Tensor] = _unflatten(flat, list(like))
    return parted


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters  # for their shapes alone: joining is linear, whatever their values become
        count = len(parameters) // 2
        return _flat(parameters[:count]), _flat(parameters[count:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        count = len(ctx.parameters) // 2
        result: list[Tensor | None] = []
        for half, grad in enumerate(grads):
            own = ctx.parameters[half * count : (half + 1) * count]
            result += [None] * count if grad is None else _parted(grad, own)
        return tuple(result)


@functools.lru_cache(maxsize=64)
def _shapes(names: str, components: int, number: int, examples: int) -> list[Tensor]:
    """Tensors without memory, in the shapes of the samples."""
    return [torch.empty(components, number, examples, int(name), device="meta") for name in names.split(",")]


class _Samples(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, loc: Tensor, rho: Tensor, seed: Tensor, settings: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        names, number, examples, *_ = ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(loc, rho, seed)
        flat = factors_value(loc, rho, seed, *settings)
        ctx.shapes = _shapes(names, flat.numel() // (number * examples * _columns(names)), number, examples)
        return tuple(_unflatten(flat, ctx.shapes))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        loc, rho, seed = ctx.saved_tensors
        found: list[Any] = list(grads)
        if any([grad is None for grad in grads]):
            dtype = ctx.settings[-1]
            found = [
                loc.new_zeros(like.shape, dtype=dtype) if grad is None else grad
                for grad, like in zip(grads, ctx.shapes, strict=True)
            ]
        return *factors_gradient(_flat(found), loc, rho, seed, *ctx.settings), None, None


@functools.lru_cache(maxsize=64)
def _columns(names: str) -> int:
    return sum([int(name) for name in names.split(",")])


class _Fresh(torch.autograd.Function):
    """The parameters as they are now, joined; the gradient goes to what was joined of them before."""

    @staticmethod
    def forward(ctx: Any, before: Tensor, parameters: tuple[Tensor, ...]) -> Tensor:
        return _flat(parameters)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


# By the first factor of a group. Nothing but the draw's own joined parameters, for one use.
_LAST: weakref.WeakKeyDictionary[nn.Module, Joint] = weakref.WeakKeyDictionary()


def keep(first: nn.Module, joint: Joint) -> None:
    """Remember what a draw joined, for its KL; not what was computed from something else, whose graph it would hold."""
    if all([parameter.is_leaf for parameter in joint.parameters]):
        _LAST[first] = joint
    else:
        _LAST.pop(first, None)


def again(first: nn.Module, locs: Sequence[Tensor], rhos: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """Both joined as they are now, with gradients through the node of the last draw; None if that had others.

    The values are never those of the draw: parameters may have been changed since, in ways that leave no trace.
    """
    known = _LAST.pop(first, None)
    if known is None or not torch.is_grad_enabled():
        return None
    parameters = (*locs, *rhos)
    if len(parameters) != len(known.parameters):
        return None
    for half, before in ((locs[0], known.loc), (rhos[0], known.rho)):
        if half.dtype != before.dtype or half.device != before.device:
            return None
    for mine, theirs, wanted in zip(parameters, known.parameters, known.wanted, strict=True):
        if mine is not theirs or mine.requires_grad != wanted:
            return None
    count = len(locs)
    loc: Tensor = _Fresh.apply(known.loc, parameters[:count])  # type: ignore[no-untyped-call]
    rho: Tensor = _Fresh.apply(known.rho, parameters[count:])  # type: ignore[no-untyped-call]
    return loc, rho
