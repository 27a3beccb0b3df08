"""MCDropout and DropConnect: Bernoulli noise on inputs or weights, scaled to mean one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from slimbayes.core.layers.base import Converted
from slimbayes.core.layers.table import is_weighted
from slimbayes.core.methods.base import (
    Method,
    Outline,
    Shared,
    Traits,
    check_choice,
    check_rate,
    needs_matrix,
)
from slimbayes.core.posteriors import BernoulliPosterior, Posterior
from slimbayes.core.rules.base import Rule
from slimbayes.core.rules.dropout import DroppedRule
from slimbayes.core.rules.meanfield import SampledRule
from slimbayes.sequences.kernels import Several


@dataclass(frozen=True)
class MCDropout(Method):
    """Dropout on the inputs of the selected layers, active in draws whether training or not.

    ``granularity``: "element", or "channel" for whole channels (filters). The network's own dropout modules
    stay active in draws too.

    >>> MCDropout(rate=0.05).granularity
    'element'
    """

    rate: float = 0.1
    granularity: str = "element"

    def __post_init__(self) -> None:
        check_rate("rate", self.rate)
        check_choice("granularity", self.granularity, ("element", "channel"))

    @property
    def traits(self) -> Traits:
        """What conversion and draws need to know."""
        return Traits()

    def selects(self, name: str, module: nn.Module, outline: Outline) -> bool:
        """Layers that multiply by a weight."""
        return is_weighted(module)

    def refuses(self, layer: type[Converted] | type[Several]) -> str | None:
        """Why this kind of layer cannot be converted, or None if it can."""
        return None if layer.float_input else "MCDropout drops inputs, and this layer's input is an index"

    def attach(self, layer: Converted, name: str, shared: Shared) -> Rule:
        """No new parameters."""
        return DroppedRule(name, self.rate, self.granularity == "channel")


@dataclass(frozen=True)
class DropConnect(Method):
    """Bernoulli noise on every weight, one mask per draw; biases are kept.

    >>> DropConnect(rate=0.2).rate
    0.2
    """

    rate: float = 0.1

    def __post_init__(self) -> None:
        check_rate("rate", self.rate)

    @property
    def traits(self) -> Traits:
        """What conversion and draws need to know."""
        return Traits(randomizes_weight=True)

    def selects(self, name: str, module: nn.Module, outline: Outline) -> bool:
        """Layers that multiply by a weight."""
        return is_weighted(module)

    def refuses(self, layer: type[Converted] | type[Several]) -> str | None:
        """Why this kind of layer cannot be converted, or None if it can."""
        return needs_matrix("DropConnect", layer)

    def attach(self, layer: Converted, name: str, shared: Shared) -> Rule:
        """No new parameters; tied weights share one mask."""
        known: tuple[Posterior, str] | None = shared.get(layer.weight, "spread")
        if known is None:
            known = (BernoulliPosterior(self.rate), f"{name}.weight")
            shared.put(layer.weight, "spread", known)
        return SampledRule(name, known[0], None, weight_source=known[1])
