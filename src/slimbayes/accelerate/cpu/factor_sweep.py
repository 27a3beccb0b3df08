"""The rank-1 layer by the kernels in C: factors that are never stored, and one sweep for their gradients.

A factor f = loc + σ∘ε is a seed until a kernel makes its numbers again: where it scales rows, and where their
gradients g ∘ f, Σ g∘x and Σ g∘x∘ε are summed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.accelerate import cpu, switches
from slimbayes.accelerate.cpu import rows as kernels
from slimbayes.accelerate.situation import by_pointers, dense_float, further
from slimbayes.core.context import Frame
from slimbayes.core.posteriors import EPSILON, CauchyPosterior, DeltaPosterior, NormalPosterior
from slimbayes.core.rules.base import Operation

if TYPE_CHECKING:
    from slimbayes.core.rules.rank1 import Factor

Grads = tuple[Tensor | None, ...]
_KINDS: dict[type, str] = {DeltaPosterior: "point", NormalPosterior: "normal", CauchyPosterior: "cauchy"}
MANY = 1 << 22  # elements of rows from which it pays to fold both factors into a matrix


@dataclass
class Seeded:
    """A factor [components, lines, channels] by its parameters [components, channels] and where its noise is from."""

    loc: Tensor
    rho: Tensor | None
    source: kernels.Source


def usable(op: Operation, x: Tensor, frame: Frame) -> bool:
    """Whether kernels may take this layer: plain float32 rows on the CPU, in eager code."""
    if not by_pointers() or cpu.library() is None or not dense_float(x):
        return False
    if x.numel() == 0 or frame.noise == "mean":
        return False
    if not (switches.paths.rows and switches.paths.factors) or torch.is_autocast_enabled("cpu"):
        return False
    for name in ("weight", "bias"):
        tensor = held(op, name)
        if tensor is not None and not (dense_float(tensor) and tensor.numel() > 0):
            return False
    return True


def given(value: Tensor, frame: Frame) -> Seeded | None:
    """A factor [K, S or 1, B or 1, C] of whatever numbers as points of their own; None where they are not float32."""
    if not dense_float(value):
        return None
    lines = value.expand(-1, frame.samples, -1, -1).flatten(0, 2).contiguous()
    return Seeded(lines, None, kernels.Source("point", 1))


def seeded(factor: Factor, stream: int, clip: float | None, frame: Frame, name: str) -> Seeded | None:
    """The factor in this draw, if kernels make its noise: normal or Cauchy without a seed of the user's, or a point.

    One seed for a layer, for all its calls and for those of layers tied to it.
    """
    loc, spread = held(factor, "loc"), factor._modules["spread"]
    kind, draw = _KINDS.get(type(spread)), frame.draw
    if kind is None or not dense_float(loc):
        return None
    picks = draw is not None and draw.component_ids is not None
    loc = (frame.pick(loc) if picks else loc).contiguous()
    if kind == "point":
        return Seeded(loc, None, kernels.Source("point", frame.samples, clip))
    rho = held(spread, "rho")  # type: ignore[arg-type]
    if (
        (draw is not None and draw.seed is not None)
        or not dense_float(rho)
        or getattr(spread, "maximum", None)
    ):
        return None
    lines = frame.samples * (frame.batch if frame.noise == "example" else 1)
    seed = _seed(frame, f"{name} seed")
    return Seeded(
        loc, (frame.pick(rho) if picks else rho).contiguous(), kernels.Source(kind, lines, clip, seed, stream)
    )


def sampled(
    factor: Factor, stream: int, clip: float | None, frame: Frame, name: str
) -> Callable[[], Tensor] | None:
    """What makes the same factor a tensor [K, S, B or 1, C]; None where no call of its layer is the kernels'."""
    if not (switches.paths.rows and switches.paths.factors and by_pointers()) or cpu.library() is None:
        return None
    if frame.draw is None:
        return None
    made = seeded(factor, stream, clip, frame, name)
    if made is None:
        return None
    known = made

    def make() -> Tensor:
        value, _ = factor_of(known.source, known.loc, known.rho)
        shaped: Tensor = clipped(value, known.source).unflatten(1, (frame.samples, -1))
        return shaped

    return make


def held(module: nn.Module, name: str) -> Any:
    """An attribute, without the detour that a module's parameters take."""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


def _seed(frame: Frame, key: str) -> int:
    return int(frame.once(key, _new_seed))


def _new_seed() -> Tensor:
    return torch.empty((), dtype=torch.int64).random_()  # follows torch's generator


def factor_of(source: kernels.Source, loc: Tensor, rho: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """f [components, lines, channels] in operations that can be differentiated, and ε where there is noise."""
    noise = None
    if rho is None:
        value = loc.unsqueeze(1).expand(-1, source.lines, -1)
    else:
        noise = kernels.noise(source, loc)
        value = torch.addcmul(loc.unsqueeze(1), (F.softplus(rho) + EPSILON).unsqueeze(1), noise)
    return value, noise


def clipped(value: Tensor, source: kernels.Source) -> Tensor:
    """The factor within its clip."""
    return value if source.clip is None else value.clamp(-source.clip, source.clip)


def to_parameters(
    grad: Tensor, value: Tensor, noise: Tensor | None, rho: Tensor | None, source: kernels.Source
) -> tuple[Tensor, Tensor | None]:
    """The gradients of loc and ρ from that of the factor [components, lines, channels]."""
    if source.clip is not None:
        grad = grad * (value.abs() <= source.clip)
    if noise is None or rho is None:
        return grad.sum(1), None
    return grad.sum(1), (grad * noise).sum(1) * torch.sigmoid(rho)


def scaled(
    x: Tensor,
    factor: Seeded,
    bias: Tensor | None,
    axis: int,
    draws: int = 1,
    private: bool = False,
    own: bool = False,
) -> Tensor | None:
    """x ∘ f + b along the channel ``axis`` of rows x; None for rows that do not lie densely in memory.

    ``draws``: how often x stands for the rows of a draw. ``private``: the result goes into one linear operation
    alone (then its gradient is fresh memory, which may be written over).
    ``own``: nobody else holds x, which may be written over.
    """
    layout = Layout.of(x, axis)
    if layout is None:
        return None
    if torch.is_grad_enabled():
        assert draws == 1
        made: Tensor = _Scaled.apply(x, factor.loc, factor.rho, bias, factor.source, layout, private)  # type: ignore[no-untyped-call]
        return made
    if draws == 1:
        out = x if own else torch.empty_like(x)
    else:
        moved = x.movedim(layout.axis, -1) if layout.last else x
        out = x.new_empty(draws * x.shape[0], *moved.shape[1:])
        out = out.movedim(-1, layout.axis) if layout.last else out
    shape = _shape(x, factor.loc, factor.source, layout, draws)
    return kernels.product(x, factor.loc, factor.rho, bias, factor.source, shape, out)


def _shape(x: Tensor, loc: Tensor, source: kernels.Source, layout: Layout, draws: int = 1) -> kernels.Shape:
    per_line = draws * x.shape[0] // (loc.shape[0] * source.lines)
    inner = x.numel() // (x.shape[0] * loc.shape[1])
    return kernels.Shape(per_line, inner, layout.last, x.shape[0])


class Layout:
    """Where the channels of dense rows lie in memory: behind all positions (``last``) or before them."""

    def __init__(self, axis: int, last: bool) -> None:
        self.axis = axis
        self.last = last

    @staticmethod
    def of(x: Tensor, axis: int) -> Layout | None:
        """The layout of x [R, ..., C, ...], or None for one with gaps or in another order."""
        axis = axis % x.dim()
        if x.movedim(axis, -1).is_contiguous():
            return Layout(axis, True)
        return Layout(axis, False) if axis == 1 and x.is_contiguous() else None

    def dense(self, x: Tensor) -> Tensor:
        """x itself if it lies in this layout, else a copy that does."""
        moved = x.movedim(self.axis, -1) if self.last else x
        if moved.is_contiguous():
            return x
        return moved.contiguous().movedim(-1, self.axis) if self.last else moved.contiguous()


class _Scaled(torch.autograd.Function):
    """x ∘ f + b for dense rows x [R, ...], loc, ρ and b [K, C]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        loc: Tensor,
        rho: Tensor | None,
        bias: Tensor | None,
        source: kernels.Source,
        layout: Layout,
        private: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, loc, rho)
        ctx.source, ctx.layout, ctx.private = source, layout, private
        shape = _shape(x, loc, source, layout)
        return kernels.product(x, loc, rho, bias, source, shape, torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        x, loc, rho = ctx.saved_tensors
        layout, source, needs = ctx.layout, ctx.source, ctx.needs_input_grad
        dense = layout.dense(grad)
        if further(grad):
            return (*_plain_scaled(dense, x, loc, rho, source, layout, needs[3]), None, None, None)
        out = None
        if needs[0]:
            out = dense if ctx.private or dense is not grad else torch.empty_like(dense)
        shape = _shape(x, loc, source, layout)
        made = kernels.gradients(dense, x, loc, rho, source, shape, out, needs[1:4])
        return (out, *made, None, None, None)


def _plain_scaled(
    grad: Tensor,
    x: Tensor,
    loc: Tensor,
    rho: Tensor | None,
    source: kernels.Source,
    layout: Layout,
    adds: bool,
) -> Grads:
    """The gradients of x, loc, ρ and b in operations that can be differentiated again."""
    value, noise = factor_of(source, loc, rho)
    moved, other = grad.movedim(layout.axis, -1), x.movedim(layout.axis, -1)
    lines = (*value.shape[:2], -1, value.shape[2])  # [K, lines, positions, C]
    flat, flat_x = moved.reshape(lines), other.reshape(lines)
    grad_x = (flat * clipped(value, source).unsqueeze(2)).reshape(moved.shape).movedim(-1, layout.axis)
    made = to_parameters((flat * flat_x).sum(2), value, noise, rho, source)
    return grad_x, *made, flat.sum((1, 2)) if adds else None
