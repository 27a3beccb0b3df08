"""Exact binomial tails: what a finite number of held-out examples can promise."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch


def at_most(errors: int, count: int, rate: float) -> float:
    """P(X ≤ errors) for X ~ Binomial(count, rate), in float64.

    >>> round(at_most(1, 10, 0.1), 6)
    0.736099
    """
    if errors >= count or rate <= 0.0:
        return 1.0
    if rate >= 1.0 or errors < 0:
        return 0.0
    k = torch.arange(errors + 1, dtype=torch.float64)
    logs = (
        math.lgamma(count + 1)
        - torch.lgamma(k + 1)
        - torch.lgamma(count - k + 1)
        + k * math.log(rate)
        + (count - k) * math.log1p(-rate)
    )
    return min(1.0, float(logs.logsumexp(0).exp()))


def upper_bound(errors: int, count: int, delta: float) -> float:
    """The Clopper–Pearson bound: the largest rate at which so few errors still have probability ``delta``.

    With probability at least 1 − delta the true rate is no larger.

    >>> round(upper_bound(0, 59, 0.05), 4)  # 1 − 0.05^(1/59)
    0.0495
    >>> upper_bound(3, 3, 0.05)
    1.0
    """
    if errors >= count:
        return 1.0
    return _root(lambda rate: at_most(errors, count, rate) > delta)


def coverage_quantile(q: float, rank: int, count: int) -> float:
    """The q-quantile of Beta(rank, count + 1 − rank), by P(B ≤ x) = P(Binomial(count, x) ≥ rank).

    >>> round(coverage_quantile(0.5, 90, 99), 4)
    0.9027
    """
    return _root(lambda x: 1.0 - at_most(rank - 1, count, x) < q)


def _root(below: Callable[[float], bool]) -> float:
    """Where ``below`` stops being true on [0, 1]."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2
