"""DeepEnsemble (K independent networks in one) and Deterministic (the network as it is)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from slimbayes.core.layers.base import Converted
from slimbayes.core.methods.base import Method, Outline, Shared, Traits, check_count
from slimbayes.core.rules.base import Rule
from slimbayes.sequences.kernels import Several


@dataclass(frozen=True)
class DeepEnsemble(Method):
    """K full members (Lakshminarayanan et al. 2017): every tensor gets a member axis, statistics included.

    Member 0 keeps the given weights; the others are re-initialised through the modules' own
    ``reset_parameters`` (or transformers' ``_init_weights``). ``reinitialize=False`` copies instead, and a
    callable on the member does it your way.

    >>> DeepEnsemble(members=3).members
    3
    """

    members: int = 4
    reinitialize: bool | Callable[[nn.Module], None] = True

    def __post_init__(self) -> None:
        check_count("members", self.members)
        if not (isinstance(self.reinitialize, bool) or callable(self.reinitialize)):
            raise ValueError(
                f"reinitialize must be True, False or a function of the member, got {self.reinitialize!r}"
            )

    @property
    def traits(self) -> Traits:
        """What conversion and draws need to know."""
        return Traits(components=self.members, noisy=False)

    def selects(self, name: str, module: nn.Module, outline: Outline) -> bool:
        """The whole model is one ensemble; conversion handles it as such."""
        return True

    def refuses(self, layer: type[Converted] | type[Several]) -> str | None:
        """Every module can be copied."""
        return None

    def attach(self, layer: Converted, name: str, shared: Shared) -> Rule:
        """Whole modules are converted, not layers."""
        raise TypeError("DeepEnsemble converts whole modules")

    def resetter(self, root: nn.Module) -> Callable[[nn.Module], None] | None:
        """What re-draws a member's tensors, or None when members are copies."""
        if self.reinitialize is False:
            return None
        if callable(self.reinitialize):
            return self.reinitialize
        initializer = getattr(root, "_init_weights", None)
        return lambda member: reset_tree(member, initializer)


def reset_tree(
    member: nn.Module, initializer: Callable[[nn.Module], None] | None, covered: bool = False
) -> None:
    """Re-initialise a module: its children, then its own ``reset_parameters`` (which may not reach them all).

    ``covered`` says that a module above has such a method, and answers for parameters that have none.

    >>> layer = nn.Linear(2, 2)
    >>> before = layer.weight.clone()
    >>> reset_tree(layer, None)
    >>> bool((before == layer.weight).all())
    False
    """
    if initializer is not None:
        with torch.no_grad():
            for module in member.modules():
                for parameter in module.parameters(recurse=False):
                    parameter._is_hf_initialized = False  # type: ignore[attr-defined]
                module._is_hf_initialized = False  # type: ignore[assignment]
                initializer(module)
        return
    methods = (getattr(member, name, None) for name in ("reset_parameters", "_reset_parameters"))
    reset = next((method for method in methods if callable(method)), None)
    if reset is None and not covered and next(member.parameters(recurse=False), None) is not None:
        raise ValueError(
            f"{type(member).__name__} holds parameters but no reset_parameters method, so new members cannot "
            f"be drawn; pass DeepEnsemble(reinitialize=your_function), or reinitialize=False to copy weights"
        )
    for child in member.children():
        reset_tree(child, None, covered or reset is not None)
    if reset is not None:
        reset()


@dataclass(frozen=True)
class Deterministic(Method):
    """The network as it is, behind the same verbs: the baseline of every comparison.

    >>> Deterministic().traits.components
    1
    """

    @property
    def traits(self) -> Traits:
        """What conversion and draws need to know."""
        return Traits(noisy=False)

    def selects(self, name: str, module: nn.Module, outline: Outline) -> bool:
        """Every layer, and none is changed."""
        return True

    def refuses(self, layer: type[Converted] | type[Several]) -> str | None:
        """Nothing is refused."""
        return None

    def attach(self, layer: Converted, name: str, shared: Shared) -> Rule:
        """No layer is changed."""
        raise TypeError("Deterministic converts no layer")
