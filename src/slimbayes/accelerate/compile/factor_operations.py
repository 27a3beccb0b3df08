"""``product`` and ``folded`` for compiled code on the CPU: operations that the compiler takes whole.

It would fold shared factors into a weight for every draw and multiply in batches, which takes longer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate import factor_folding, factor_product
from slimbayes.core.custom_operation import operation

_ARGUMENTS = "Tensor x, Tensor weight, Tensor? s, Tensor? r, Tensor? bias, bool first, bool by_draw"


@operation("product", f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")
def factored(
    x: Tensor,
    weight: Tensor,
    s: Tensor | None,
    r: Tensor | None,
    bias: Tensor | None,
    first: bool,
    by_draw: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and what its gradients need: x ∘ s unless they come draw by draw, and h; empty where there is none."""
    y, scaled, h = factor_product.forward(x, weight, s, r, bias, first, False)
    return y, x.new_empty(0) if s is None or by_draw else scaled, x.new_empty(0) if r is None else h


@factored.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    s: Tensor | None,
    r: Tensor | None,
    bias: Tensor | None,
    first: bool,
    by_draw: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = weight.shape[0 if first else 1]
    positions = x.numel() // x.shape[-1]
    scaled = x.new_empty(0) if s is None or by_draw else x.new_empty(positions, x.shape[-1])
    h = x.new_empty(0) if r is None else x.new_empty(positions, outputs)
    return x.new_empty(*x.shape[:-1], outputs), scaled, h


@operation(
    "product_backward",
    f"(Tensor grad, Tensor scaled, Tensor h, {_ARGUMENTS}, bool[] needs) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad: Tensor,
    scaled: Tensor,
    h: Tensor,
    x: Tensor,
    weight: Tensor,
    s: Tensor | None,
    r: Tensor | None,
    bias: Tensor | None,
    first: bool,
    by_draw: bool,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    given = factor_product.Kept(x, weight, s, r, None if s is None or by_draw else scaled, h)
    components = 0 if bias is None else bias.shape[0]
    made = factor_product.gradients(given, grad, needs, components, first, by_draw)
    return tuple([x.new_empty(0) if one is None else one for one in made])


@_backward.register_fake
def _(
    grad: Tensor,
    scaled: Tensor,
    h: Tensor,
    x: Tensor,
    weight: Tensor,
    s: Tensor | None,
    r: Tensor | None,
    bias: Tensor | None,
    first: bool,
    by_draw: bool,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    made = []
    for like, wanted in zip((x, weight, s, r, bias), needs, strict=True):
        there = wanted and like is not None
        made.append(like.new_empty(like.shape) if there else x.new_empty(0))  # type: ignore[union-attr]
    return tuple(made)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, s, r, bias, ctx.first, ctx.by_draw = inputs
    _, scaled, h = output
    ctx.save_for_backward(scaled, h, x, weight, s, r, bias)


def _gradients(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    needs = [bool(need) for need in ctx.needs_input_grad[:5]]
    by_draw = ctx.by_draw
    made = torch.ops.slimbayes.product_backward(
        grad.contiguous(), *ctx.saved_tensors, ctx.first, by_draw, needs
    )
    return (*[one if need else None for one, need in zip(made, needs, strict=True)], None, None)


factored.register_autograd(_gradients, setup_context=_setup)


_FOLDED = "Tensor x, Tensor weight, Tensor? left, Tensor? right, Tensor? bias, bool first, SymInt draws"


@operation("folded", f"({_FOLDED}) -> Tensor")
def multiplied(
    x: Tensor,
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    bias: Tensor | None,
    first: bool,
    draws: int,
) -> Tensor:
    """x_d (W ∘ l_d r_dᵀ) + b_d for rows x [R, ..., in]."""
    y = factor_folding.multiplied(x.view(draws, -1, x.shape[-1]), weight, left, right, bias, first)
    return y.view(*x.shape[:-1], y.shape[-1])


@multiplied.register_fake
def _(x: Tensor, weight: Tensor, left: Any, right: Any, bias: Any, first: bool, draws: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0 if first else 1])


@operation(
    "folded_backward",
    "(Tensor grad, Tensor x, Tensor weight, Tensor? left, Tensor? right, bool[] needs, bool first, "
    "SymInt draws) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _folded_backward(
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
    grad_x, *made = factor_folding.gradients(grad, flat, weight, left, right, needs, first, plain=False)
    made.insert(0, None if grad_x is None else grad_x.view(x.shape))
    return tuple([x.new_empty(0) if one is None else one for one in made])


@_folded_backward.register_fake
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


def _folded_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.first, ctx.draws = inputs[5:]


def _folded_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = [bool(need) for need in ctx.needs_input_grad[:5]]
    made = torch.ops.slimbayes.folded_backward(
        grad.contiguous(), *ctx.saved_tensors, needs, ctx.first, ctx.draws
    )
    return (*[one if need else None for one, need in zip(made, needs, strict=True)], None, None)


multiplied.register_autograd(_folded_gradients, setup_context=_folded_setup)
