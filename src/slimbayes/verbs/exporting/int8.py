"""Weights of 8 bits, through torchao."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from torch import Tensor, nn

from slimbayes.extras import missing
from slimbayes.verbs.freezing import plain
from slimbayes.verbs.freezing.layers import Matrices, Members
from slimbayes.verbs.freezing.network import Frozen


def quantize(frozen: Frozen) -> Frozen:
    """A copy whose Linear layers keep int8 weights, with one scale for every output unit: a quarter of their size.

    W ≈ c ∘ round(W / c), c = max|W| / 127 over every row of W. Inputs, biases, rank-1 factors, convolutions, norms and
    recurrent layers stay as they are. The rounding moves outputs, so compare them on your own data; for ONNX freeze
    again without it.

    >>> import torch, slimbayes as sb
    >>> frozen = sb.freeze(sb.bayesianize(nn.Linear(64, 8), sb.Rank1(components=2)), draws=2)
    >>> x = torch.randn(5, 64)
    >>> bool((sb.export.quantize(frozen)(x) - frozen(x)).abs().max() < 0.05)
    True
    """
    if not isinstance(frozen, Frozen):
        raise TypeError(f"quantize takes what sb.freeze(model) returned, got {type(frozen).__name__}")
    quantize_, config = _torchao()
    made = copy.deepcopy(frozen)
    _one_by_one(made)
    if not any(isinstance(module, nn.Linear) for module in made.modules()):
        raise ValueError("this frozen model has no Linear layer, and quantize changes no other")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(made, config)
    made.metadata = {**frozen.metadata, "weights": "int8"}
    return made


def _one_by_one(module: nn.Module) -> None:
    """Matrices of all draws as one Linear layer for each: what torchao knows."""
    for name, child in module.named_children():
        if isinstance(child, Matrices):
            biases: Any = child.bias
            each: list[Tensor | None] = [None] * len(child.weight) if biases is None else list(biases)
            layers = Members([plain.linear(w, b) for w, b in zip(child.weight, each, strict=True)])
            layers.repeats = child.repeats
            module._modules[name] = layers.eval()
        else:
            _one_by_one(child)


def _torchao() -> tuple[Any, Any]:
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ImportError(missing("torchao", "a model of int8 weights", "int8")) from error
    return quantize_, Int8WeightOnlyConfig()
