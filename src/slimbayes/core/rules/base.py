"""What rules and operations share: the operation's geometry, the rule's protocol, factors on rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.core import distributions as d
from slimbayes.core.context import Draw, Frame, activate
from slimbayes.core.distributions import with_parameters
from slimbayes.core.paths import ASKED, first
from slimbayes.core.rules.fixed import Fixed, own_tensors
from slimbayes.core.rules.kernel_map import Mapped

if TYPE_CHECKING:
    from slimbayes.core.posteriors import Posterior
    from slimbayes.core.rules.patching import Mixing
    from slimbayes.core.rules.rank1 import Factor
    from slimbayes.core.sampling import RandomTensor

__all__ = [
    "Inputs",
    "KLTerm",
    "Operation",
    "Rule",
    "Slot",
    "own_parameter",
    "parameter_of",
    "per_draw",
    "rowwise",
    "sample",
    "scale_inputs",
    "stored",
]

Combine = Callable[[Tensor, Tensor], Tensor]
Inputs = tuple[Any, ...]
KLTerm = tuple[str, Any, Any, str]  # (name of the random tensor, q, p, reduction over components)


class Slot(NamedTuple):
    """One float input of an operation: its position among the inputs, its channel axis and size."""

    position: int
    axis: int
    size: int


class Operation(nn.Module, ABC):
    """A layer seen by a rule: tensors, geometry, and two ways to run it. Rows are always axis 0."""

    weight: Any  # Tensor; torch's own classes disagree on whether it may be None
    bias: Any  # Tensor or None
    linear: ClassVar[bool]  # linear in the weight and in every input
    float_input: ClassVar[bool]  # the input is numbers, not indices
    matrix_weight: ClassVar[bool]  # the weight has at least two axes
    is_matrix: ClassVar[bool]  # a plain matrix product, so that a k-tied variance has a thin form
    output_axis: ClassVar[int]  # channel axis of the output
    recurrent: bool = False  # the input is the layer's own state, step after step
    partial: bool = False  # one of several weights that a layer has

    @property
    @abstractmethod
    def input_slots(self) -> tuple[Slot, ...]:
        """Float inputs that a factor can scale; empty for embeddings."""

    @property
    @abstractmethod
    def output_size(self) -> int:
        """Channels of the output."""

    @property
    @abstractmethod
    def fan_in(self) -> int:
        """Inputs that one output unit sums over: sets the He prior's scale."""

    @abstractmethod
    def matrix_sides(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The k-tied factors of the weight's matrix as (input side, output side)."""

    @abstractmethod
    def compute(self, inputs: Inputs, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Run torch's own kernel with this weight and bias."""

    @abstractmethod
    def grouped(self, inputs: Inputs, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Run with one weight and bias per group of rows: [groups, *shape]."""


class Rule(nn.Module, ABC):
    """How one layer's random tensors are sampled and applied. Only ``forward`` has to be written.

    Under the noise modes in ``untiled_noise`` it is called with ``untiled=True`` where its inputs are the same
    for all draws and not repeated: it needs the rows of one draw only, and returns those of all.
    """

    name: str
    untiled_noise: tuple[str, ...] = ()
    components: int = 1  # into which it takes the rows to be divided
    drops: bool = False  # dropout of the layer's own is part of the draw
    constant_row: int | None = None  # of the weight: never random, and in no KL (an embedding's padding)
    kl_temperature: float = 1.0  # what ``elbo`` multiplies its KL by: the method's ``traits.temperature``
    lr_multiplier: float = 1.0  # of what is ``quick``: the method's ``traits.lr_multiplier``

    @abstractmethod
    def forward(self, op: Operation, inputs: Inputs) -> Tensor:
        """The layer's output for these inputs."""

    def random(self, op: Operation) -> Iterator[RandomTensor]:
        """The layer's random tensors, for whole networks to be sampled and scored in few operations; or none."""
        return iter(())

    def quick(self, op: Operation) -> Iterator[nn.Parameter]:
        """The parameters that learn ``lr_multiplier`` times as fast as others by ``parameter_groups``."""
        return iter(())

    def samples_whole(self, noise: str) -> bool:
        """Whether ``forward`` takes samples of these tensors, which may have been made before the network runs."""
        return False

    def kl_terms(self, op: Operation) -> Iterator[KLTerm]:
        """The pairs whose KL this layer adds; by default those of its random tensors that have a prior."""
        for one in self.random(op):
            if one.prior is not None:
                yield one.name, *one.pair, one.reduction

    def covered(self, seen: set[str]) -> bool:
        """Whether the KL of all its random tensors is among those ``seen``, by their names."""
        return False

    def means(self, op: Operation) -> Iterator[Tensor]:
        """The layer's own tensors whose prior is in the KL: weight decay would count it twice. None by default."""
        return iter(())

    def fixed(self, op: Operation, frame: Frame) -> Fixed | None:
        """The layer in the draws of a frame without noise for every example: tensors for each of them.

        None, the default: it has no such form, and what ``forward`` does with its noise held is all that is known.
        """
        return None

    def mean(self, op: Operation, frame: Frame) -> Fixed:
        """The layer at noise="mean": as ``fixed`` has it, or else its own weight and bias, where that is so."""
        return self.fixed(op, frame) or own_tensors(self, op, frame)

    def mapped(self, op: Operation, frame: Frame) -> Mapped:
        """The kernel's tensors in this call, for a layer that has several; by default what ``forward`` does."""
        # Outside of a draw it has one of its own, so that all steps of a sequence meet the same samples.
        draw = frame.draw or Draw(frame.components, frame.samples, frame.batch, frame.noise)

        def whole(x: Tensor, op: Operation = op) -> Tensor:
            if draw is frame.draw:
                return self(op, (x,))  # type: ignore[no-any-return]
            with activate(draw):
                return self(op, (x,))  # type: ignore[no-any-return]

        return Mapped(op.weight.unsqueeze(0), None, whole=whole)

    def weight_posterior(self) -> Posterior | None:
        """The posterior around the layer's weight, if that is what is random."""
        return None

    def rank1_factors(self) -> tuple[tuple[str, Factor], ...]:
        """Rank-1 factors by name, "r" of outputs and "s" of inputs, which have a learning rate of their own."""
        return ()

    def mixing_law(self) -> Mixing | None:
        """The law by which draws choose among versions of the layer's weight and bias, if it has such."""
        return None


def sample(spread: d.Spread, frame: Frame, source: str, per_example: bool, component_axis: bool) -> Tensor:
    """Samples [K, S, B or 1, *shape] of a spread; its own leading axis is K when ``component_axis``."""
    loc = spread.loc
    shape = tuple(loc.shape[1:] if component_axis else loc.shape)
    if spread.noise is None or frame.noise == "mean":
        point = spread.point()
        return point[:, None, None] if component_axis else point[None, None, None]
    noise = frame.noise_like(spread.noise, source, shape, loc.dtype, loc.device, per_example)
    if component_axis:
        spread = with_parameters(spread, lambda tensor: tensor[:, None, None])  # [K, 1, 1, *shape]
    return spread.from_noise(noise)


def rowwise(
    x: Tensor, factor: Tensor, axis: int, frame: Frame, combine: Combine, private: bool = False
) -> Tensor:
    """Combine rows ``x`` [R, ...] with a factor [K, S, B or 1, C] along the channel ``axis`` of x.

    ``private``: the result goes into one linear operation and nowhere else.
    """
    if frame.tiled and combine is torch.mul and ASKED.scaled:
        made: Tensor | None = first(ASKED.scaled, x, factor, axis, frame, private)
        if made is not None:
            return made
    factor = by_channel(factor, x, axis)
    if frame.tiled:
        rows = x.unflatten(0, (frame.components, frame.samples, frame.batch, frame.extra))
        return combine(rows, factor).reshape(x.shape)  # [R, ...]
    result = combine(x.unflatten(0, (frame.batch, frame.extra)), factor)  # [K, S or 1, B, extra, ...]
    return result.expand(frame.components, frame.samples, *result.shape[2:]).flatten(0, 3)  # [R, ...]


def affine(y: Tensor, factor: Tensor, bias: Tensor, axis: int, frame: Frame) -> Tensor:
    """y ∘ factor + bias in one operation, for rows y [R, ...], a factor [K, S, B or 1, C] and a bias [K, C]."""
    rows = y.unflatten(0, (frame.components, frame.samples, frame.batch, frame.extra))
    shift = bias[:, None, None]  # [K, 1, 1, C]
    return torch.addcmul(by_channel(shift, y, axis), rows, by_channel(factor, y, axis)).reshape(y.shape)


def by_channel(factor: Tensor, x: Tensor, axis: int) -> Tensor:
    """A factor [K, S, B or 1, C] as it broadcasts against rows [K, S, B, extra, ...] along the channel ``axis``."""
    shape = [1] * (x.dim() - 1)
    shape[axis if axis < 0 else axis - 1] = factor.shape[-1]
    return factor.to(x.dtype).reshape(*factor.shape[:3], 1, *shape)  # [K, S, B or 1, 1, ..., C, ...]


def scale_inputs(
    op: Operation,
    inputs: Inputs,
    factor: Tensor,
    frame: Frame,
    combine: Combine,
    private: bool = False,
) -> Inputs:
    """Combine every float input of the operation with its part of the factor [K, S, B or 1, Σ channels].

    ``private``: the results go into this operation alone.
    """
    changed = list(inputs)
    start = 0
    for slot in op.input_slots:
        part = factor if slot.size == factor.shape[-1] else factor[..., start : start + slot.size]
        x = inputs[slot.position]
        changed[slot.position] = rowwise(x, part, slot.axis, frame, combine, private)
        start += slot.size
    return tuple(changed)


def own_parameter(op: Operation, which: str, tensor: Tensor) -> bool:
    """Whether a layer's tensor is what it will be when the layer runs: its own parameter, which no hook sets."""
    return parameter_of(op, which) is tensor and not op._forward_pre_hooks


def parameter_of(op: Operation, which: str) -> Tensor | None:
    """A layer's own parameter, or None."""
    owner, key = stored(op, which)
    return owner.get(key)


def stored(op: Operation, which: str) -> tuple[dict[str, Any], str]:
    """Where a layer's parameter is, and under which name; that of a kernel lies with the layer that has it."""
    if "store" not in op.__dict__:
        return op._parameters, which
    kernel: Any = op
    return kernel.store, kernel.names[which] or ""


def per_draw(op: Operation, inputs: Inputs, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run an operation with one weight per draw, [draws, *shape]; one draw calls torch's own kernel."""
    if weight.shape[0] == 1:
        # Not weight[0], whose backward pass fills zeros and copies.
        return op.compute(inputs, weight.squeeze(0), None if bias is None else bias.squeeze(0))
    return op.grouped(inputs, weight, bias)
