"""The random weights of a network in compiled code on the CPU: one operation for all of them and their KL."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slimbayes.accelerate import cpu, switches
from slimbayes.accelerate.cpu.weight_operation import sampled_weights
from slimbayes.accelerate.cpu.weights import fits
from slimbayes.accelerate.gpu.weight_samples import SCOPE
from slimbayes.accelerate.random_weights import own_prior
from slimbayes.accelerate.weight_kl import RawPrior, spread_of
from slimbayes.core.context import Draw
from slimbayes.core.rules.base import Operation, Rule, parameter_of
from slimbayes.core.rules.meanfield import SampledRule


@dataclass
class KnownKL:
    """The KL of the tensors that one operation sampled, but for its constant."""

    value: Tensor
    constant: float
    names: list[str]

    def valid(self, layers: Sequence[object]) -> bool:
        """Whether it was made in this call of a compiled function."""
        return torch.compiler.is_compiling() and any([one is self for one in SCOPE.made])  # type: ignore[comparison-overlap]

    def kl(self) -> Tensor:
        """KL of these tensors."""
        return self.value + self.constant


def compiled_weights(layers: Sequence[tuple[Rule, Operation]], draw: Draw, most: int) -> None:
    """Sample the weights of all layers that share them, up to ``most`` numbers, where there are kernels in C."""
    if not (switches.paths.native and cpu.compiled()):
        return
    sources: list[str] = []
    tensors: list[Tensor] = []
    sizes: list[int] = []
    priors: list[RawPrior | None] = []
    numbers = 0
    for rule, op in layers:
        if type(rule) is not SampledRule or (rule.estimator != "shared" and draw.noise == "example"):
            continue
        if not op.training:  # it may be exported, and others do not know our operation
            continue
        for which in ("weight", "bias"):
            posterior, mean, source, fan_in = rule.tensor(op, which)
            if mean is None or source in sources or not _suits(op, which, mean):
                continue
            spread = spread_of(posterior)
            if len(spread) == 0 or not all([_plain(one) for one in spread]) or not fits((mean, *spread)):
                continue
            sources.append(source)
            tensors += [mean, *spread]
            sizes.append(1 + len(spread))
            priors.append(own_prior(rule, source, fan_in))
            numbers += mean.numel()
    draws = draw.components * draw.samples
    if not sources or draws * numbers > most:
        return
    counted = SCOPE.open and torch.is_grad_enabled()
    known = [None if prior is None or not counted else prior for prior in priors]
    seed = torch.randint(1 << 62, (1,))
    values, total = sampled_weights(
        tensors,
        sizes,
        [0.0 if prior is None or prior.loc is None else prior.loc for prior in known],
        [0.0 if prior is None else prior.precision for prior in known],
        [0.0 if prior is None or prior.loc is None else prior.precision for prior in known],
        seed,
        draws,
    )
    constant, names, start = 0.0, [], 0
    for i, source in enumerate(sources):
        draw.prefilled[source] = values[i]
        prior = known[i]
        if prior is not None:
            names.append(source)
            constant += tensors[start].numel() * (math.log(prior.scale) - 0.5)
        start += sizes[i]
    if names:
        left = KnownKL(total, constant, names)
        SCOPE.made = [*SCOPE.made, left]  # type: ignore[list-item]
        draw.byproducts[sources[0]] = left


def _plain(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32


def _suits(op: Operation, which: str, mean: Tensor) -> bool:
    """Whether the tensor is the layer's own parameter, which no hook sets."""
    own = isinstance(mean, nn.Parameter) and parameter_of(op, which) is mean
    return own and len(op._forward_pre_hooks) == 0 and _plain(mean)
