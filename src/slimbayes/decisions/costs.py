"""Decisions by expected cost: what to do when errors are not all as bad."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimbayes.decisions.inputs import class_probabilities
from slimbayes.decisions.selective import ABSTAIN
from slimbayes.metrics.checks import finite


class Decisions(NamedTuple):
    """The action taken for every example, int64 [N] (−1: none), and its expected cost, float64 [N]."""

    action: Tensor
    cost: Tensor


@torch.no_grad()
def least_cost(predictions: Any, costs: Any, abstain: float | None = None) -> Decisions:
    """The action a of least expected cost Σ_y p(y) costs[y, a] for every example; of equals the first.

    ``costs`` [C, A] are those of action a where class y is true; utilities are negative costs. There may be more or
    fewer actions than classes: "operate", "another test", "send home". ``abstain`` is the cost of deciding nothing,
    which is chosen (−1) where every action would cost more. With costs 1 − I and abstain = λ this is Chow's rule:
    abstain where max_c p_c < 1 − λ.

    >>> p = torch.tensor([[0.9, 0.1], [0.97, 0.03], [0.5, 0.5]], dtype=torch.float64)  # healthy, ill
    >>> costs = [[0.0, 1.0], [20.0, 0.0]]  # to treat the healthy costs 1, to miss an illness 20
    >>> least_cost(p, costs)
    Decisions(action=tensor([1, 0, 1]), cost=tensor([0.9000, 0.6000, 0.5000], dtype=torch.float64))
    >>> least_cost(p, costs, abstain=0.7).action
    tensor([-1,  0,  1])
    """
    p = class_probabilities(predictions)
    table = finite(costs, "costs").to(p)
    if table.ndim != 2 or len(table) != p.shape[1]:
        raise ValueError(
            f"costs {list(table.shape)} do not fit {p.shape[1]} classes: give [{p.shape[1]}, A], a row for every true "
            "class and a column for every action"
        )
    cost, action = (p @ table).min(-1)
    if abstain is None:
        return Decisions(action, cost)
    price = float(finite(abstain, "the cost of abstention"))
    leave = cost > price
    return Decisions(action.masked_fill(leave, ABSTAIN), cost.clamp(max=price))
