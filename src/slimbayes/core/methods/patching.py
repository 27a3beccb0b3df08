"""EMP and ECMP: K versions of chosen layers, drawn by a categorical index (Chang et al. 2019)."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slimbayes.core import priors
from slimbayes.core.fitness import check_not_computed
from slimbayes.core.layers.base import Converted, constant_row
from slimbayes.core.layers.table import EMBEDDINGS, NORMS, is_weighted
from slimbayes.core.methods.base import (
    LATER,
    Method,
    Outline,
    Shared,
    Traits,
    add_component_axis,
    check_count,
    check_flag,
    check_least,
    check_positive,
)
from slimbayes.core.rules.base import Rule
from slimbayes.core.rules.patching import IndexedRule, Mixing, Normalizing
from slimbayes.sequences.kernels import Several

Patch = str | type[nn.Module] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class _Patching(Method, ABC):
    """What EMP and ECMP share: everything but how many indices a layer draws."""

    components: int = 5
    patch: tuple[Patch, ...] = ("norm", "output")
    learn_mixing: bool = False
    prior_precision: float | None = None
    init_noise: float = 0.0
    component_rate: float = field(default=2.0, metadata=LATER)

    def __post_init__(self) -> None:
        check_count("components", self.components)
        check_positive("prior_precision", self.prior_precision)
        check_flag("learn_mixing", self.learn_mixing)
        check_flag("own_statistics", getattr(self, "own_statistics", False))  # EMP's alone
        check_least("init_noise", self.init_noise)
        check_positive("component_rate", self.component_rate, optional=False)
        if isinstance(self.patch, str) or not isinstance(self.patch, Iterable):
            object.__setattr__(self, "patch", (self.patch,))
        object.__setattr__(self, "patch", tuple(self.patch))
        if not self.patch:
            raise ValueError('patch is empty; name what to patch, for example patch=("norm", "output")')
        for item in self.patch:
            if not (isinstance(item, str | type) or callable(item)):
                raise ValueError(
                    f"patch entry {item!r} is not understood; use 'norm', 'input', 'output', a layer's full "
                    f"name, a module type, or a callable on (name, module)"
                )

    @property
    def traits(self) -> Traits:
        """What conversion and draws need to know."""
        return Traits(randomizes_weight=True, shared_prior=self._prior(), lr_multiplier=self.component_rate)

    def selects(self, name: str, module: nn.Module, outline: Outline) -> bool:
        """Layers that one of the ``patch`` entries names."""
        return any(_matches(item, name, module, outline) for item in self.patch)

    def refuses(self, layer: type[Converted] | type[Several]) -> str | None:
        """Every layer type can be patched."""
        return None

    def _prior(self) -> priors.Normal | None:
        if self.prior_precision is None:
            return None
        return priors.Normal(0.0, self.prior_precision**-0.5)

    def _attach(
        self, layer: Converted, name: str, shared: Shared, per_element: bool, own_statistics: bool = False
    ) -> Rule:
        check_not_computed(layer, name, f"{type(self).__name__} keeps several weights, not several of those")
        leader = shared.leader(layer.weight)
        mixing = shared.get(leader, "mixing")
        if mixing is None:
            mixing = Mixing(name, self.components, self.learn_mixing, layer.weight)
            shared.put(leader, "mixing", mixing)
        weight_source = shared.get(layer.weight, "weight source") or f"{name}.weight"
        shared.put(layer.weight, "weight source", weight_source)
        bias_source = f"{name}.bias"
        if layer.bias is not None:
            bias_source = shared.get(layer.bias, "bias source") or bias_source
            shared.put(layer.bias, "bias source", bias_source)
        for tensor in ("weight", "bias"):
            old = getattr(layer, tensor)
            fresh = old is not None and shared.get(old, "components") is None
            add_component_axis(layer, tensor, self.components, shared)
            if self.init_noise > 0 and fresh:
                value = getattr(layer, tensor)
                noise = self.init_noise * torch.randn_like(value)
                row = constant_row(layer)
                if row is not None:
                    noise[:, row] = 0.0
                with torch.no_grad():
                    value.add_(noise)
        own = own_statistics and isinstance(layer, Normalizing) and layer.running_mean is not None
        if own:
            _copy_statistics(layer, self.components)
        return IndexedRule(
            name, mixing, bias_source, per_element, self._prior(), own, weight_source, joint=layer.partial
        )


def _copy_statistics(layer: Converted, components: int) -> None:
    """Running statistics of every component, from those of the layer."""
    for buffer in ("running_mean", "running_var", "num_batches_tracked"):
        old = getattr(layer, buffer)
        setattr(layer, buffer, old.expand(components, *old.shape).clone())
        layer.component_tensors = (*layer.component_tensors, buffer)


def _matches(item: Patch, name: str, module: nn.Module, outline: Outline) -> bool:
    if isinstance(item, type):
        return type(module) is item
    if not isinstance(item, str):
        return bool(item(name, module))
    if item == "norm":
        return type(module) in NORMS and getattr(module, "weight", None) is not None
    if item == "output":
        return module is next((m for m in reversed(outline.modules) if is_weighted(m)), None)
    if item == "input":
        return module is next((m for m in outline.modules if is_weighted(m) or type(m) in EMBEDDINGS), None)
    return name == item


_PAPER: dict[str, Any] = {
    "components": 5, "patch": ("norm", "output"), "learn_mixing": False, "prior_precision": None, "init_noise": 0.0,
    "component_rate": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class EMP(_Patching):
    """Ensemble model patching: one index z ~ Categorical(p) per patched layer and draw.

    ``patch`` takes "norm", "input", "output", a layer's full name, module types, or a callable on
    (name, module). ``learn_mixing`` learns p by a score-function estimator that ``sb.elbo`` adds.
    With ``prior_precision`` τ the KL is Equation 6 of the paper; without, it is 0 and the penalty is weight
    decay. ``init_noise`` sets the components apart at the start by that standard deviation.
    ``own_statistics`` gives every component of a patched BatchNorm running statistics of its own: in training a
    component is normalised by the rows that drew it, in prediction by its own averages. ``component_rate`` multiplies
    the learning rate of the components in ``sb.parameter_groups``: a step trains one of them, so that each has only
    the K-th part of the steps.

    >>> EMP(components=3, patch=("norm",)).components
    3
    """

    own_statistics: bool = False

    @classmethod
    def paper(cls, **overrides: Any) -> EMP:
        """With the paper's values, which stay what they are when defaults change.

        >>> EMP.paper(components=2).patch
        ('norm', 'output')
        """
        return cls(**{**_PAPER, "own_statistics": False, **overrides})

    def attach(self, layer: Converted, name: str, shared: Shared) -> Rule:
        """Give the layer K versions of its tensors and one index."""
        return self._attach(layer, name, shared, per_element=False, own_statistics=self.own_statistics)


@dataclass(frozen=True)
class ECMP(_Patching):
    """Ensemble cross model patching: an independent index for every scalar of a patched layer.

    Options as in :class:`EMP`, but for ``own_statistics``: a channel has no single component.

    >>> ECMP().components
    5
    """

    @classmethod
    def paper(cls, **overrides: Any) -> ECMP:
        """With the paper's values, which stay what they are when defaults change.

        >>> ECMP.paper().components
        5
        """
        return cls(**{**_PAPER, **overrides})

    def attach(self, layer: Converted, name: str, shared: Shared) -> Rule:
        """Give the layer K versions of its tensors and an index per element."""
        return self._attach(layer, name, shared, per_element=True)
