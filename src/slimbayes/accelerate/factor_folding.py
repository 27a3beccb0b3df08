"""Shared factors folded into the weights: one W ∘ r_d s_dᵀ per draw, where that is cheaper than scaling rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.accelerate import switches
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
    x, typed = inputs[0], not torch.is_autocast_enabled(inputs[0].device.type)
    trains = op.training and torch.is_grad_enabled()  # else it may be exported, and others do not know it
    if (
        torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and trains
        and typed
        and x.dtype == op.weight.dtype
    ):
        first = left is outer  # the weight is [out, in]
        # One opaque operation on the rows as they are: of a view the compiler would keep other things.
        y: Tensor = torch.ops.slimbayes.folded(
            x.contiguous(), op.weight, left, right, shift, first, frame.draws
        )
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
