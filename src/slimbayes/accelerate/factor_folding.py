"""Shared factors folded into the weights: one W ∘ r_d s_dᵀ per draw, where that is cheaper than scaling rows.

With G_d the gradient of draw d's weight, dW = Σ_d G_d ∘ r_d s_dᵀ, dr_d = (G_d ∘ W) s_d and
ds_d = (G_d ∘ W)ᵀ r_d: a layer whose input needs no gradient, the first of a network, never computes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.accelerate import row_factors, switches
from slimbayes.accelerate.convolution import convolve, is_convolution, outer_product, output_ratio
from slimbayes.core.context import Frame
from slimbayes.core.rules.base import Inputs, Operation, per_draw

# Costs in visits of one element by an element-wise operation, measured.
PRODUCT = {"cpu": 0.02, "cuda": 0.002}  # one multiply-add of a matrix product
SIDE = {
    True: 3.5,
    False: 1.0,
}  # a factor on rows, per element of the rows: in training, and without gradients
ONE = {True: 4.0, False: 1.0}  # one factor in the weights, per element of all draws' weights
BOTH = {True: 7.0, False: 2.0}  # both factors
CALLS = 50_000  # what the calls of one factor's operations cost, whatever their size
LARGE = 2**15  # elements of a weight from which its gradients are taken draw by draw, within the cache
FEWEST_ROWS = 16  # of a draw, below which one convolution per draw wastes its kernel
MOST_DRAWS = 16  # each is a convolution of its own


class Choice(NamedTuple):
    """Which factors go into the weight."""

    inner: bool
    outer: bool


ROWS = Choice(False, False)


def choose(op: Operation, inputs: Inputs, r: Tensor | None, s: Tensor | None, frame: Frame) -> Choice:
    """The cheapest place for factors [K, S, B or 1, C]; those that differ between examples stay on rows."""
    if (r is not None and r.shape[2] != 1) or (s is not None and s.shape[2] != 1):
        return ROWS
    return choose_shared(op, inputs, r is not None, s is not None, frame)


def choose_shared(op: Operation, inputs: Inputs, has_r: bool, has_s: bool, frame: Frame) -> Choice:
    """The same for factors that all examples of a draw share."""
    x, weight = inputs[0], op.weight
    if not switches.paths.folded or not (has_r or has_s) or x.shape[0] == 0:
        return ROWS
    if not torch.compiler.is_compiling() and type(weight) not in (Tensor, nn.Parameter):
        return ROWS  # a weight of 8 bits, which knows the layer's operation alone
    if op.is_matrix:
        return _choose_matrix(x, weight, has_r, has_s, frame)
    if not is_convolution(op):
        return ROWS
    both = Choice(has_s, has_r)
    if frame.draws == 1:
        return both
    if x.device.type != "cpu" or frame.draws > MOST_DRAWS or x.shape[0] < FEWEST_ROWS * frame.draws:
        return ROWS
    if not torch.is_grad_enabled():  # a factor then changes its rows in place, and nothing is joined
        return ROWS
    positions = x.numel() / x.shape[1] * output_ratio(op)
    scaling = (x.numel() if has_s else 0) + (positions * op.output_size if has_r else 0)
    folding = BOTH[True] * frame.draws * weight.numel() + x.numel() + positions * op.output_size
    on_rows = SIDE[True] * scaling + _product(x, has_s, positions * weight.numel())
    return both if folding < on_rows else ROWS


def _choose_matrix(x: Tensor, weight: Tensor, has_r: bool, has_s: bool, frame: Frame) -> Choice:
    """Count visits of elements: forward, and backward where there is one."""
    trains = torch.is_grad_enabled()
    sizes, channels = frame.draws * weight.numel(), x.shape[-1]
    positions = x.numel() // channels
    outputs = positions * (weight.numel() // channels)
    on_inputs = SIDE[trains] * x.numel() + _product(x, True, positions * weight.numel()) + CALLS
    on_outputs = SIDE[trains] * outputs + CALLS
    on_inputs, on_outputs = (on_inputs if has_s else 0.0), (on_outputs if has_r else 0.0)
    best, cost = ROWS, on_inputs + on_outputs
    if has_s and ONE[trains] * sizes + CALLS + on_outputs < cost:
        best, cost = Choice(True, False), ONE[trains] * sizes + CALLS + on_outputs
    if has_r and (BOTH if has_s else ONE)[trains] * sizes + CALLS < cost:
        best = Choice(has_s, True)
    return best


def _product(x: Tensor, scaled: bool, products: float) -> float:
    """The cost of an input gradient that only the input's factor needs."""
    if not scaled or x.requires_grad or not torch.is_grad_enabled():
        return 0.0
    return PRODUCT.get(x.device.type, PRODUCT["cuda"]) * products


def apply(
    op: Operation,
    inputs: Inputs,
    r: Tensor | None,
    s: Tensor | None,
    bias: Tensor | None,
    frame: Frame,
) -> Tensor:
    """op(x, W ∘ r_d s_dᵀ) + b for factors [K, S, 1, C] (None: not folded) and a bias [K, C], draw by draw."""
    outer, inner = (None if f is None else _per_draw(f[:, :, 0], frame).to(op.weight.dtype) for f in (r, s))
    shift = None if bias is None else _per_draw(bias[:, None], frame)  # [draws, C]
    if not op.is_matrix:
        weight = op.weight * outer_product(op, outer, inner)  # [draws, *shape]
        return convolve(op, inputs, weight, shift)
    left, right = op.matrix_sides(inner, outer)  # type: ignore[arg-type]  # None is swapped all the same
    x = inputs[0]
    if x.dtype == op.weight.dtype and not torch.is_autocast_enabled(x.device.type):
        first = left is outer  # the weight is [out, in]
        if row_factors.eager():
            flat = x.reshape(frame.draws, -1, x.shape[-1])  # [draws, positions, in]
            y: Tensor = _Folded.apply(flat, op.weight, left, right, shift, first)  # type: ignore[no-untyped-call]
            return y.reshape(*x.shape[:-1], y.shape[-1])
        trains = op.training and torch.is_grad_enabled()  # else it may be exported, and others do not know it
        if trains and x.device.type == "cpu" and torch.compiler.is_compiling():
            # One opaque operation on the rows as they are: of a view the compiler would keep other things.
            y = torch.ops.slimbayes.folded(x.contiguous(), op.weight, left, right, shift, first, frame.draws)
            return y
    return per_draw(op, inputs, fold(op.weight, left, right), shift)


def fold(weight: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """W ∘ l_d r_dᵀ [D, m, n] for a weight [m, n], l [D, m] and r [D, n]; None stands for ones.

    >>> fold(torch.ones(2, 2), torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0]]))
    tensor([[[ 3.,  5.],
             [ 6., 10.]]])
    """
    if left is not None:
        weight = weight * left.unsqueeze(2)
    return weight if right is None else weight * right.unsqueeze(1)


def _per_draw(tensor: Tensor, frame: Frame) -> Tensor:
    """[K, S or 1, C] to [draws, C]."""
    return tensor.expand(frame.components, frame.samples, -1).flatten(0, 1)


class _Folded(torch.autograd.Function):
    """x_d (W ∘ l_d r_dᵀ) + b_d, or with the folded weight transposed when ``first`` (it is [out, in])."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        left: Tensor | None,
        right: Tensor | None,
        bias: Tensor | None,
        first: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, left, right)
        ctx.first = first
        return multiplied(x, weight, left, right, bias, first)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, left, right = ctx.saved_tensors
        plain = row_factors.plain_backward(grad)
        return *gradients(grad, x, weight, left, right, ctx.needs_input_grad, ctx.first, plain), None


def multiplied(
    x: Tensor, weight: Tensor, left: Tensor | None, right: Tensor | None, bias: Tensor | None, first: bool
) -> Tensor:
    """x_d (W ∘ l_d r_dᵀ) + b_d [draws, positions, out]."""
    inner, outer = (right, left) if first else (left, right)
    if outer is None and bias is None and inner is not None and x[0].numel() < weight.numel():
        # Fewer numbers to scale, and one product of all rows; what is kept for the backward pass is x.
        return torch.matmul(x * inner.unsqueeze(1), weight.t() if first else weight)
    if weight.numel() >= LARGE:
        return _products(x, weight, left, right, bias, first)
    folded = fold(weight, left, right)
    matrices = folded.transpose(1, 2) if first else folded  # [D, in, out]
    return torch.bmm(x, matrices) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, matrices)


def gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    needs: Sequence[bool],
    first: bool,
    plain: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, W, l, r and b that are needed; ``plain``: in operations that have gradients themselves."""
    large = weight.numel() >= LARGE and not plain
    grad_x = None
    if needs[0] and large:
        grad_x = _products(grad, weight, left, right, None, not first)
    elif needs[0]:
        folded = fold(weight, left, right)
        grad_x = torch.bmm(grad, folded if first else folded.transpose(1, 2))
    grad_b = grad.sum(1) if needs[4] else None
    sides = (grad, x) if first else (x, grad)  # G_d = sides[0]ᵀ sides[1]
    made: tuple[Tensor | None, ...] = (None, None, None)
    if any(needs[1:4]):
        made = (_one_by_one if large else _at_once)(sides, weight, left, right, tuple(needs[1:4]))
    return grad_x, *made, grad_b


def _products(
    x: Tensor,
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    bias: Tensor | None,
    transposed: bool,
) -> Tensor:
    """x_d (W ∘ l_d r_dᵀ) + b_d, or with the transposed matrix; one draw's weight at a time, in the cache."""
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


def _at_once(
    sides: tuple[Tensor, Tensor],
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """(dW, dl, dr) from all G_d [D, m, n] together, in operations that can be differentiated again."""
    own = torch.bmm(sides[0].transpose(1, 2), sides[1])
    grad_w = fold(own, left, right).sum(0) if needs[0] else None
    grad_l = grad_r = None
    if needs[1] or needs[2]:
        product = own * weight
        if needs[1]:
            grad_l = product.sum(2) if right is None else torch.bmm(product, right.unsqueeze(2)).squeeze(2)
        if needs[2]:
            grad_r = product.sum(1) if left is None else torch.bmm(left.unsqueeze(1), product).squeeze(1)
    return grad_w, grad_l, grad_r


def _one_by_one(
    sides: tuple[Tensor, Tensor],
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """(dW, dl, dr) from one G_d [m, n] after the other, in two tensors of the weight's size."""
    grad_w = grad_l = grad_r = None
    own = torch.empty_like(weight)
    product = own if left is None or right is None else torch.empty_like(weight)
    if needs[0]:
        grad_w = torch.zeros_like(weight)
    if needs[1] and left is not None:
        grad_l = torch.empty_like(left)
    if needs[2] and right is not None:
        grad_r = torch.empty_like(right)
    for d, (a, b) in enumerate(zip(sides[0], sides[1], strict=True)):
        torch.mm(a.t(), b, out=own)
        row, column = (None if f is None else f[d] for f in (right, left))
        if grad_w is not None and product is own:  # before the product takes the place of G_d
            grad_w.addcmul_(own, column.unsqueeze(1) if row is None else row)  # type: ignore[union-attr]
        if grad_l is not None or grad_r is not None:
            torch.mul(own, weight, out=product)
        if grad_l is not None:
            grad_l[d] = product.sum(1) if row is None else torch.mv(product, row)
        if grad_r is not None:
            grad_r[d] = product.sum(0) if column is None else torch.mv(product.t(), column)
        if grad_w is not None and product is not own:
            assert row is not None and column is not None
            grad_w.addcmul_(own.mul_(row), column.unsqueeze(1))
    return grad_w, grad_l, grad_r
