"""Where faster ways to the same numbers attach: core asks at few places, and goes its own way if none answers.

Core knows no path. A path says "not me" by returning None; the first that answers is taken. Who is asked is settled
when paths attach or are switched, not while a network runs, so that a compiler sees a fixed row of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from slimbayes.core.context import Draw, Frame
    from slimbayes.core.plan import Plan
    from slimbayes.core.rows import FlatInputs
    from slimbayes.core.rules.base import Inputs, Operation, Rule
    from slimbayes.core.rules.kernel_map import Mapped

Way = Callable[..., Any]
Layers = Sequence[tuple["Rule", "Operation"]]  # every random layer of a model: its rule, and the layer


class Course(Protocol):
    """What the passes of one prediction share."""

    def output(self, model: nn.Module, flat: FlatInputs, plan: Plan) -> Any:
        """The unfolded output of a pass that needs nothing but what is known; None where it takes the long way."""

    def prepared(self, draw: Draw) -> bool:
        """Whether a draw got all that it needs."""

    def ran(self, flat: FlatInputs, now: Draw) -> None:
        """A pass has run."""

    def close(self) -> None:
        """No further pass follows."""


class MemberInputs(NamedTuple):
    """What an ensemble is called with."""

    rows: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    split: bool  # every member takes its own rows; else each takes all


class FastPath:
    """Another way to what core computes, with the same numbers (the same distribution where no seed is given)."""

    def on(self) -> bool:
        """Whether it is switched on: asked when paths attach or switches change, not while a network runs."""
        return True

    def noise(
        self, kind: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """Standard noise that torch's generators govern: ``core.noise.fresh_noise``."""

    def log_sigma(self, log_u: Tensor, log_v: Tensor) -> Tensor | None:
        """Σ log σ of the k-tied σ = U Vᵀ, k ≥ 2: ``core.kl.ktied_normal``."""

    def scaled(self, x: Tensor, factor: Tensor, axis: int, frame: Frame, private: bool) -> Tensor | None:
        """x ∘ f for rows x [R, ...] and f [K, S, B or 1, C] along an axis: ``core.rules.base.rowwise``.

        ``private``: the result goes into one linear operation and nowhere else.
        """

    def output(self, rule: Rule, op: Operation, inputs: Inputs, frame: Frame) -> Tensor | None:
        """A layer's output: the rule's own forward pass."""

    def factor(self, rule: Rule, factor: nn.Module, which: str, frame: Frame) -> Tensor | None:
        """Samples [K, S, B or 1, C] of a rank-1 layer's factor "r" or "s": ``core.rules.rank1``."""

    def weight(self, rule: Rule, op: Operation, which: str, frame: Frame, centred: bool) -> Tensor | None:
        """A sample per draw [draws, *shape] of a "weight" or "bias", without its mean when ``centred``."""

    def mean_and_noise(self, rule: Rule, op: Operation, frame: Frame) -> tuple[Tensor, Tensor] | None:
        """Flipout's mean [*shape] and σ∘ε [draws, *shape] of a layer's weight."""

    def signs(self, channels: int, dtype: torch.dtype, device: torch.device, frame: Frame) -> Tensor | None:
        """Flipout's signs [K, S, B, channels]."""

    def course(self, model: nn.Module, samples: int, numbers: int) -> Course | None:
        """What the passes of one prediction share, of so many samples and numbers of inputs."""

    def run(
        self, model: nn.Module, flat: FlatInputs, now: Draw, evaluated: bool, course: Any
    ) -> tuple[Any] | None:
        """The output for all rows of a draw without gradients; ``evaluated``: no module is in training mode."""

    def prepare(self, model: nn.Module, layers: Layers, draw: Draw, course: Any) -> None:
        """Sample for a draw before its network runs: all paths are asked. Layers find it by ``Draw.ahead``."""

    def kl(self, layers: Layers, seen: set[str]) -> Iterable[tuple[Tensor, Sequence[str]]]:
        """Parts of the KL, each with the names of its random tensors, but of none that was ``seen``: all are asked."""
        return ()

    def members(
        self, root: nn.Module, use: Way, stacked: dict[str, Tensor], inputs: MemberInputs
    ) -> tuple[Any] | None:
        """The output of all members of an ensemble, rows component-major: ``core.layers.ensemble``.

        ``use(tensors, args, kwargs)`` runs a member with its tensors, of which ``stacked`` holds those of all.
        """

    def kernels(
        self, layer: nn.Module, x: Tensor, states: tuple[Tensor, ...], frame: Frame
    ) -> dict[str, Mapped] | None:
        """What the kernels of a recurrent layer do with inputs [T, R, in]: ``sequences.recurrent``."""

    def unrolled(
        self,
        mode: str,
        x: Tensor,
        state: tuple[Tensor, ...],
        ih: Mapped,
        hh: Mapped,
        mask: Tensor | None,
        reverse: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Outputs [T, R, H] and the last state of one recurrent layer and direction: ``sequences.steps``."""


class Asked:
    """The ways that are asked, by question."""

    noise: tuple[Way, ...] = ()
    log_sigma: tuple[Way, ...] = ()
    scaled: tuple[Way, ...] = ()
    output: tuple[Way, ...] = ()
    factor: tuple[Way, ...] = ()
    weight: tuple[Way, ...] = ()
    mean_and_noise: tuple[Way, ...] = ()
    signs: tuple[Way, ...] = ()
    members: tuple[Way, ...] = ()
    course: tuple[Way, ...] = ()
    run: tuple[Way, ...] = ()
    prepare: tuple[Way, ...] = ()
    kl: tuple[Way, ...] = ()
    kernels: tuple[Way, ...] = ()
    unrolled: tuple[Way, ...] = ()


ASKED = Asked()
_ATTACHED: list[FastPath] = []
_LATER: list[Callable[[], object]] = []


def attach_later(load: Callable[[], object]) -> None:
    """Attach what ``load`` attaches when the first converted model comes to be: until then nobody asks."""
    _LATER.append(load)


def attach_now() -> None:
    """Call what ``attach_later`` has been told, once: before anything of a model runs, or is traced."""
    while _LATER:
        _LATER.pop()()


def attach(*paths: FastPath) -> None:
    """Ask these paths from now on, in this order, before those that are attached already."""
    attach_now()
    _ATTACHED[:0] = paths
    refresh()


def detach(*paths: FastPath) -> None:
    """Ask these no more."""
    for path in paths:
        _ATTACHED.remove(path)
    refresh()


def refresh() -> None:
    """Settle anew who is asked: a path has been switched on or off."""
    on = [path for path in _ATTACHED if path.on()]
    for question in Asked.__annotations__:
        plain = getattr(FastPath, question)
        ways = tuple([getattr(path, question) for path in on if getattr(type(path), question) is not plain])
        setattr(ASKED, question, ways)


def first(ways: tuple[Way, ...], *given: Any) -> Any:
    """What the first way that does not pass makes of what is given; None if all pass.

    >>> first((lambda x: None, lambda x: x + 1), 1), first((), 1)
    (2, None)
    """
    for way in ways:
        made = way(*given)
        if made is not None:
            return made
    return None
