"""Variances of pre-activations: local reparameterisation, with thin factors where the weight is k-tied."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from slimbayes.core import distributions as d
from slimbayes.core.rules.base import Inputs, Operation


def thin_factors(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A [in, k(k+1)/2] and B [out, k(k+1)/2] with Σ_i x_i² σ_ij² = (x² A Bᵀ)_j, for U [in, k] and V [out, k].

    With σ_ij = Σ_a u_ia v_ja: Var[y_j | x] = Σ_{a ≤ b} c_ab (Σ_i x_i² u_ia u_ib) v_ja v_jb, c = 1 on the
    diagonal and 2 off it.

    >>> a, b = thin_factors(torch.ones(3, 2), torch.ones(4, 2))
    >>> float((torch.ones(1, 3) @ a @ b.t())[0, 0])
    12.0
    """
    us, vs = u.unbind(1), v.unbind(1)  # not by indices, whose gradient adds in no certain order
    pairs = [(i, j) for i in range(len(us)) for j in range(i, len(us))]
    a = [us[i] * us[j] for i, j in pairs]
    b = [vs[i] * vs[j] * (1.0 if i == j else 2.0) for i, j in pairs]
    return torch.stack(a, 1), torch.stack(b, 1)


def thin_factors_of_logs(log_u: Tensor, log_v: Tensor) -> tuple[Tensor, Tensor]:
    """``thin_factors`` of U and V given as logs, with √2 on either side: few operations, one kernel when compiled.

    >>> a, b = thin_factors_of_logs(torch.zeros(3, 2), torch.zeros(4, 2))
    >>> round(float((torch.ones(1, 3) @ a @ b.t())[0, 0]), 4)
    12.0
    """
    logs = torch.cat([log_u, log_v]).unbind(1)
    pairs = [(i, j) for i in range(len(logs)) for j in range(i, len(logs))]
    products = [(logs[i] + logs[j] + (0.0 if i == j else 0.5 * math.log(2.0))).exp() for i, j in pairs]
    both = torch.stack(products, 1)  # [in + out, k(k+1)/2]
    return both[: len(log_u)], both[len(log_u) :]


def local_squares(op: Operation, weight: d.Spread) -> tuple[Tensor, ...]:
    """σ² [out, in] of a matrix, or the thin factors Aᵀ and B of a k-tied one: Var[y | x] = B Aᵀ x²."""
    if isinstance(weight, d.KTiedNormal):
        a, b = thin_factors(*op.matrix_sides(weight.u, weight.v))
        return a.t(), b
    return (weight.scale.square(),)  # type: ignore[union-attr]


def local_variance(op: Operation, inputs: Inputs, weight: d.Spread) -> Tensor:
    """Var[y | x] = op(x², σ²); for a k-tied matrix by k(k+1)/2 thin products instead of one m×n."""
    squares = list(inputs)
    for slot in op.input_slots:
        squares[slot.position] = inputs[slot.position].square()
    if isinstance(weight, d.KTiedNormal) and op.is_matrix:
        a, b = thin_factors(*op.matrix_sides(weight.u, weight.v))
        thin = F.linear(squares[0], a.t())  # [..., k(k+1)/2]
        return F.linear(thin, b)
    return op.compute(tuple(squares), weight.scale.square(), None)  # type: ignore[union-attr]


def spoil_infinite(y: Tensor, stddev: Tensor) -> Tensor:
    """y, but NaN where the variance was too large for its type: ±∞ would saturate the next layer, and nobody see it.

    >>> spoil_infinite(torch.ones(2), torch.tensor([3.0, math.inf]))
    tensor([1., nan])
    """
    return y.add(stddev, alpha=0.0)
