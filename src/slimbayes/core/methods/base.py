"""The protocol of a method: a frozen dataclass that joins posteriors, a rule and layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, nn

from slimbayes.core.layers.base import Converted
from slimbayes.core.options import (
    check_choice,
    check_count,
    check_flag,
    check_least,
    check_positive,
    check_rate,
)
from slimbayes.core.priors import Prior
from slimbayes.core.rules.base import Rule
from slimbayes.sequences.kernels import Several

__all__ = [
    "LATER",
    "Method",
    "Outline",
    "Shared",
    "Traits",
    "add_component_axis",
    "as_written",
    "check_choice",
    "check_count",
    "check_flag",
    "check_least",
    "check_positive",
    "check_prior",
    "check_rate",
    "needs_linear",
    "needs_matrix",
    "no_local",
]

# Metadata of an option that came after the first checkpoints: written down only where it is not the papers' value,
# which it has where it is left out (``as_written``). What was saved without it is then the same method, to be loaded
# and resumed as before.
LATER = {"later": True}


@dataclass
class Shared:
    """What layers converted together share: one new tensor, spread or index per tied parameter."""

    made: dict[tuple[int, str], Any] = field(default_factory=dict)
    keep: list[Tensor] = field(default_factory=list)  # old tensors stay alive, so that ids stay unique
    gathered: dict[Tensor, nn.Parameter] = field(default_factory=dict)  # whole, by what processes share out
    leaders: dict[int, Tensor] = field(
        default_factory=dict
    )  # the first weight of a layer, by all its tensors
    claimed: set[str] = field(default_factory=set)  # what one layer of a conversion has, and no other

    def claim(self, role: str) -> bool:
        """Take a role that one layer of a conversion has; whether it was free."""
        free = role not in self.claimed
        self.claimed.add(role)
        return free

    def join(self, tensors: list[Tensor]) -> None:
        """These are the tensors of one layer with several weights: what there is one of per layer, they share."""
        self.keep += tensors
        self.leaders.update({id(tensor): tensors[0] for tensor in tensors if id(tensor) not in self.leaders})

    def leader(self, tensor: Tensor) -> Tensor:
        """The tensor that stands for the layer of this one."""
        return self.leaders.get(id(tensor), tensor)

    def get(self, tensor: Tensor, role: str) -> Any | None:
        """What an earlier layer made for this tensor, or None."""
        return self.made.get((id(tensor), role))

    def follow(self, old: Tensor, new: Tensor) -> None:
        """``new`` is in the place of ``old`` and has all that was made for it: two layers may hold one place."""
        self.keep.append(new)
        self.made.update(
            {(id(new), role): value for (key, role), value in self.made.items() if key == id(old)}
        )
        if id(old) in self.leaders:
            self.leaders[id(new)] = self.leaders[id(old)]

    def put(self, tensor: Tensor, role: str, value: Any) -> None:
        """Remember what was made for this tensor."""
        self.keep.append(tensor)
        self.made[(id(tensor), role)] = value


@dataclass(frozen=True)
class Outline:
    """What default selections look at: the candidate layers of the whole model, in order."""

    modules: tuple[nn.Module, ...]


@dataclass(frozen=True)
class Traits:
    """What conversion, draws and the objective need to know of a method.

    ``components`` is what the draws axis counts, ``step_components`` how many of them one training step uses
    (None: all). ``trains_base=False`` freezes all but the new parameters. With ``randomizes_weight`` the
    weight itself is random, so that layers tied to it must follow. ``shared_prior`` is the prior of the
    parameters that no rule converted. Where a method is not ``noisy``, samples of one component are copies.
    ``temperature`` multiplies the KL of the layers in ``elbo``, and ``lr_multiplier`` the learning rate of what their
    rules call ``quick`` in ``parameter_groups``.
    """

    components: int = 1
    step_components: int | None = None
    trains_base: bool = True
    randomizes_weight: bool = False
    shared_prior: Prior | None = None
    noisy: bool = True
    temperature: float = 1.0
    lr_multiplier: float = 1.0


class Method(ABC):
    """One way to make a layer Bayesian."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        if not all(item.name in state for item in fields(self)):  # type: ignore[arg-type]
            state = {**as_written(type(self))().__dict__, **state}  # a pickle of an older version
        self.__dict__.update(state)

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """What conversion and draws need to know."""

    @abstractmethod
    def selects(self, name: str, module: nn.Module, outline: Outline) -> bool:
        """Whether a layer is converted when the user selects nothing."""

    @abstractmethod
    def refuses(self, layer: type[Converted] | type[Several]) -> str | None:
        """Why this kind of layer cannot be converted, or None if it can."""

    @abstractmethod
    def attach(self, layer: Converted, name: str, shared: Shared) -> Rule:
        """Give a retyped layer its new parameters and return its rule."""


def as_written(kind: type[Method]) -> Callable[..., Method]:
    """What makes a method from the options that a file names: those it leaves out have the papers' values.

    They were the defaults of the versions whose files leave options out; today's defaults may be others.
    """
    made: Callable[..., Method] = getattr(kind, "paper", kind)
    return made


def needs_linear(method: str, layer: type[Converted] | type[Several]) -> str | None:
    """Reason to refuse a layer that is not linear in a float input."""
    if layer.linear:
        return None
    return f"{method} acts on layers that are linear in their input"


def no_local(layer: type[Converted] | type[Several]) -> str | None:
    """Reason to refuse a recurrent layer to an estimator that samples pre-activations."""
    if not layer.recurrent:
        return None
    return (
        "estimator='local' samples pre-activations, and at every time step anew: a sequence would meet another weight "
        "at each; use estimator='shared' or 'flipout'"
    )


def needs_matrix(method: str, layer: type[Converted] | type[Several]) -> str | None:
    """Reason to refuse a layer whose weight is a vector."""
    return (
        None
        if layer.matrix_weight
        else f"{method} needs a weight matrix, and this layer's weight is a vector"
    )


def add_component_axis(layer: Converted, tensor: str, components: int, shared: Shared) -> None:
    """Replace a parameter by ``components`` copies of it on a new leading axis."""
    old = getattr(layer, tensor)
    if old is None:
        return
    new = shared.get(old, "components")
    if new is None:
        stacked = old.detach().expand(components, *old.shape).clone()
        new = nn.Parameter(stacked, requires_grad=old.requires_grad)
        shared.put(old, "components", new)
        shared.follow(old, new)
    layer.replace(tensor, new)
    layer.component_tensors = (*layer.component_tensors, tensor)


def check_prior(value: Any, optional: bool = False) -> None:
    """Raise unless ``value`` is a prior, or None where it is ``optional``."""
    if isinstance(value, Prior) or (optional and value is None):
        return
    raise ValueError(
        f"prior must be a prior such as sb.Normal(0.0, 1.0){' or None' if optional else ''}, got {value!r}"
    )
