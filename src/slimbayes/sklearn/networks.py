"""The plain networks of the estimators: dense layers, or a network of one's own."""

from __future__ import annotations

import copy
import numbers
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from slimbayes.networks.dense import MLP

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "elu": nn.ELU,
    "logistic": nn.Sigmoid,
    "identity": nn.Identity,
}


def dense_network(features: int, hidden: Any, outputs: int, activation: str, dtype: torch.dtype) -> nn.Module:
    """Dense layers of these sizes with an activation between them.

    >>> dense_network(3, (8,), 2, "tanh", torch.float64).output
    Linear(in_features=8, out_features=2, bias=True)
    """
    sizes: Any = [hidden] if isinstance(hidden, numbers.Integral) else hidden
    try:
        sizes = [operator.index(size) for size in sizes]
    except TypeError:
        sizes = [0]
    if not all(size > 0 for size in sizes):
        raise ValueError(f"hidden_layer_sizes={hidden!r}: give whole numbers of at least 1, such as (64, 64)")
    if activation not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation={activation!r} is unknown; use one of {known}")
    return MLP((features, *sizes, outputs), ACTIVATIONS[activation]).to(dtype)


def given_network(network: Any, shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A copy of the user's module, or what the user's function of (features, outputs) makes.

    For rows of more than one axis the function gets their shape in the place of the number of features.

    >>> given_network(nn.Linear, (3,), 2)
    Linear(in_features=3, out_features=2, bias=True)
    """
    if isinstance(network, nn.Module):
        return copy.deepcopy(network)
    if not callable(network):
        raise TypeError(
            f"network={network!r}: give a torch module, or a function of (n_features, n_outputs) that makes one"
        )
    made = network(shape[0] if len(shape) == 1 else tuple(shape), outputs)
    if not isinstance(made, nn.Module):
        raise TypeError(f"network={network!r} returned {type(made).__name__}, not a torch module")
    return made
