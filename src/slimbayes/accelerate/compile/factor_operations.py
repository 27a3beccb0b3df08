"""``folded`` for compiled code on the CPU: an operation that the compiler takes whole.

It would fold shared factors into a weight for every draw and multiply in batches, which takes longer. Here one draw's
weight follows the other, in the cache. With G_d the gradient of draw d's weight, dW = Σ_d G_d ∘ l_d r_dᵀ,
dl_d = (G_d ∘ W) r_d and dr_d = (G_d ∘ W)ᵀ l_d: a layer whose input needs no gradient never computes one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimbayes.core.custom_operation import operation


@operation(
    "folded",
    "(Tensor x, Tensor weight, Tensor? left, Tensor? right, Tensor? bias, bool first, SymInt draws) -> Tensor",
)
def folded(
    x: Tensor,
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    bias: Tensor | None,
    first: bool,
    draws: int,
) -> Tensor:
    """x_d (W ∘ l_d r_dᵀ) + b_d for rows x [R, ..., in], the weight transposed when ``first`` (it is [out, in])."""
    y = _products(x.view(draws, -1, x.shape[-1]), weight, left, right, bias, first)
    return y.view(*x.shape[:-1], y.shape[-1])


@folded.register_fake
def _(x: Tensor, weight: Tensor, left: Any, right: Any, bias: Any, first: bool, draws: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0 if first else 1])


@operation(
    "folded_backward",
    "(Tensor grad, Tensor x, Tensor weight, Tensor? left, Tensor? right, bool[] needs, bool first, "
    "SymInt draws) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    needs: list[bool],
    first: bool,
    draws: int,
) -> tuple[Tensor, ...]:
    grad, flat = (side.view(draws, -1, side.shape[-1]) for side in (grad, x))
    of_x = _products(grad, weight, left, right, None, not first).view(x.shape) if needs[0] else None
    made: tuple[Tensor | None, ...] = (None, None, None)
    if any(needs[1:4]):
        made = _weight_gradients(
            (grad, flat) if first else (flat, grad), weight, left, right, (needs[1], needs[2], needs[3])
        )
    found = (of_x, *made, grad.sum(1) if needs[4] else None)
    return tuple([x.new_empty(0) if one is None else one for one in found])


@_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    needs: list[bool],
    first: bool,
    draws: int,
) -> tuple[Tensor, ...]:
    made = []
    for like, wanted in zip((x, weight, left, right), needs[:4], strict=True):
        there = wanted and like is not None
        made.append(like.new_empty(like.shape) if there else x.new_empty(0))  # type: ignore[union-attr]
    made.append(x.new_empty(draws, grad.shape[-1]) if needs[4] else x.new_empty(0))
    return tuple(made)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.first, ctx.draws = inputs[5:]


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = [bool(need) for need in ctx.needs_input_grad[:5]]
    made = _backward(grad.contiguous(), *ctx.saved_tensors, needs, ctx.first, ctx.draws)
    return (*[one if need else None for one, need in zip(made, needs, strict=True)], None, None)


folded.register_autograd(_gradients, setup_context=_keep)


def _products(
    x: Tensor,
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    bias: Tensor | None,
    transposed: bool,
) -> Tensor:
    """x_d (W ∘ l_d r_dᵀ) + b_d, or with the transposed matrix."""
    own = torch.empty_like(weight)
    matrix = own.t() if transposed else own
    out = x.new_empty(*x.shape[:2], matrix.shape[1])
    for d in range(x.shape[0]):
        if right is None:
            torch.mul(weight, left[d].unsqueeze(1), out=own)  # type: ignore[index]
        else:
            torch.mul(weight, right[d], out=own)
            if left is not None:
                own.mul_(left[d].unsqueeze(1))
        if bias is None:
            torch.mm(x[d], matrix, out=out[d])
        else:
            torch.addmm(bias[d], x[d], matrix, out=out[d])
    return out


def _weight_gradients(
    sides: tuple[Tensor, Tensor],
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, ...]:
    """(dW, dl, dr) from G_d = a_dᵀ b_d [m, n] of the two ``sides``, one after the other."""
    grad_w = torch.zeros_like(weight) if needs[0] else None
    grad_l = torch.empty_like(left) if needs[1] and left is not None else None
    grad_r = torch.empty_like(right) if needs[2] and right is not None else None
    own, product = torch.empty_like(weight), torch.empty_like(weight)
    for d, (a, b) in enumerate(zip(*sides, strict=True)):
        torch.mm(a.t(), b, out=own)
        row, column = (None if f is None else f[d] for f in (right, left))
        if grad_l is not None or grad_r is not None:
            torch.mul(own, weight, out=product)
        if grad_l is not None:
            grad_l[d] = product.sum(1) if row is None else torch.mv(product, row)
        if grad_r is not None:
            grad_r[d] = product.sum(0) if column is None else torch.mv(product.t(), column)
        if grad_w is not None and row is not None and column is not None:
            grad_w.addcmul_(own.mul_(row), column.unsqueeze(1))
        elif grad_w is not None:
            grad_w.addcmul_(own, column.unsqueeze(1) if row is None else row)  # type: ignore[union-attr]
    return grad_w, grad_l, grad_r
