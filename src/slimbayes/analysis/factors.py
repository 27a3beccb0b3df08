"""Rank-1 factors: how far components are apart, and how wide each is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.analysis.layers import root_of
from slimbayes.core.conversion import converted_layers
from slimbayes.core.rules.rank1 import Factor

COLLAPSED = 0.01  # spread of components around factors of 1, below which they are one network


@torch.no_grad()
def component_spread(model: nn.Module) -> dict[str, dict[str, float]]:
    """How far the components of rank-1 factors are apart, by layer and factor ("r" of outputs, "s" of inputs).

    (1/d) Σ_i sd_k(μ_ki), the standard deviation over components of a factor's locations [K, d], on average over its
    elements. It begins near ``random_sign_init``; at 0 the K components are copies of one network, and the mixture is
    no better than a member. Layers without rank-1 factors, and factors of one component, are left out.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(2, 3), sb.BatchEnsemble(components=2, random_sign_init=0.0))
    >>> component_spread(net)
    {'': {'r': 0.0, 's': 0.0}}
    """
    return _of_factors(
        model, lambda factor: factor.loc.float().std(0).mean() if len(factor.loc) > 1 else None
    )


@torch.no_grad()
def factor_scale(model: nn.Module) -> dict[str, dict[str, float]]:
    """How wide the posteriors of rank-1 factors are, by layer and factor ("r" of outputs, "s" of inputs).

    (1/Kd) Σ_ki σ_ki: the mean of σ (Normal; log-normal, in log-space) or γ (Cauchy, half-Cauchy) over components and
    elements. It begins at sqrt(p/(1 − p)) for ``dropout_rate`` p, and the KL draws it slowly to the prior's scale;
    beside ``component_spread`` it says whether components overlap. Points have none, and are left out.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(2, 3), sb.Rank1(posterior="cauchy", dropout_rate=0.01))
    >>> factor_scale(net)
    {'': {'r': 0.1005, 's': 0.1005}}
    """

    def scale(factor: Factor) -> Tensor | None:
        found = getattr(factor(), "scale", None)
        return found.float().mean() if isinstance(found, Tensor) else None

    return _of_factors(model, scale)


def rank1_factors(model: nn.Module) -> Iterator[tuple[str, str, Factor, Any]]:
    """Every rank-1 factor: its layer's name, "r" or "s", the factor, and the rule that it belongs to."""
    for name, layer in converted_layers(root_of(model)):
        for which, factor in layer.bayes.rank1_factors():
            yield name, which, factor, layer.bayes


def _of_factors(model: nn.Module, measure: Callable[[Factor], Tensor | None]) -> dict[str, dict[str, float]]:
    """A number of every rank-1 factor, by layer; factors and layers that have none are left out."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, which, factor, _ in rank1_factors(model):
        value = measure(factor)
        if value is not None:
            found.setdefault(name, {})[which] = value
    every = [value for layer in found.values() for value in layer.values()]
    numbers = iter(torch.stack(every).tolist() if every else ())  # a GPU is waited for once
    return {name: {which: next(numbers) for which in layer} for name, layer in found.items()}
