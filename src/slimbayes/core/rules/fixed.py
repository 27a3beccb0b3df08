"""A layer without noise for every example, as tensors; and what is known of a rule that has only ``forward``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from slimbayes.core.context import Frame, activate

if TYPE_CHECKING:
    from slimbayes.core.rules.base import Operation, Rule

_ROWS = 3  # of the vectors on which a rule is tried


class Drop(NamedTuple):
    """A Bernoulli mask of every draw, x ∘ b/(1 − rate), as large as its input: made when that comes."""

    source: str
    rate: float
    axis: int | None  # of whole channels; None: element by element


@dataclass(frozen=True)
class Fixed:
    """y = r_d ∘ op(s_d ∘ x, W_d) + b_d, or op(x + s_d, W_d) + r_d + b_d when additive; axis 0 counts draws, or is 1."""

    weight: Tensor | None
    bias: Tensor | None
    inner: Tensor | None = None  # s [draws, Σ inputs]
    outer: Tensor | None = None  # r [draws, outputs]
    additive: bool = False
    drops: dict[int, Drop] = field(default_factory=dict)  # by the position of the input that they mask
    statistics: tuple[Tensor, Tensor] | None = None  # running mean and variance of a norm, [draws, channels]


def alone(tensor: Tensor | None) -> Tensor | None:
    """One tensor for all draws, [1, *shape]."""
    return None if tensor is None else tensor.unsqueeze(0)


def own_tensors(rule: Rule, op: Operation, frame: Frame) -> Fixed:
    """The layer's own weight and bias, if noise="mean" leaves nothing but them: tried on an operation like this."""
    weight, bias = (_of_component(op, which, frame) for which in ("weight", "bias"))
    assert frame.draw is not None
    tried: Any = _Trial(op)
    given = tried.vectors(_ROWS * frame.draws * frame.batch)
    with torch.no_grad(), activate(frame.draw):
        made = rule(tried, given)
    plain = tried.compute(given, *[None if t is None else t[0] for t in (weight, bias)])
    close = 1e-5 if plain.dtype in (torch.float32, torch.float64) else 5e-2
    if made.shape != plain.shape or not torch.allclose(made, plain.to(made.dtype), close, close):
        raise TypeError(
            f"layer {rule.name!r} has a rule of its own ({type(rule).__name__}), which at noise='mean' does more than "
            f"run the layer with its weight and bias; say what by its method fixed(op, frame), or leave the layer out"
        )
    return Fixed(weight, bias)


def _of_component(op: Operation, which: str, frame: Frame) -> Tensor | None:
    tensor: Tensor | None = getattr(op, which)
    if tensor is not None and which in getattr(op, "component_tensors", ()):
        return frame.pick(tensor)
    return alone(tensor)


class _Trial:
    """Another operation with the tensors and sizes of one: affine in vectors [R, in], its weight and its bias.

    y = Σ x A + ⟨W, B⟩ c + b with random A, B and c, so that whatever is changed changes y.
    """

    output_axis = -1

    def __init__(self, op: Operation) -> None:
        self.op = op
        self.like = torch.empty(()) if op.weight is None else op.weight
        self.input_slots = tuple([slot._replace(axis=-1) for slot in op.input_slots])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.op, name)

    def _random(self, shape: Sequence[int], key: int) -> Tensor:
        made = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(key))
        return made.to(self.like.device, self.like.dtype)

    def vectors(self, rows: int) -> tuple[Tensor, ...]:
        """Inputs; of a table indices."""
        slots = self.input_slots
        if not slots and not self.op.float_input:
            return (torch.zeros(rows, dtype=torch.long, device=self.like.device),)
        sizes = [slot.size for slot in slots] or [self.op.output_size]
        return tuple([self._random((rows, size), i) for i, size in enumerate(sizes)])

    def compute(self, inputs: tuple[Any, ...], weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The output [R, out]."""
        size = self.op.output_size
        y = self._random((size,), 10) + torch.zeros_like(self._random((len(inputs[0]), 1), 0))
        for x in inputs:
            if x.is_floating_point():
                y = y + x @ self._random((x.shape[-1], size), 11) / x.shape[-1]
        for tensor, key in ((weight, 12), (bias, 13)):
            if tensor is not None and not (tensor is bias and tensor.shape == (size,)):
                y = y + (tensor * self._random(tensor.shape, key)).mean() * self._random((size,), key)
        return y if bias is None or bias.shape != (size,) else y + bias

    def grouped(self, inputs: tuple[Any, ...], weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same with a weight and a bias for every group of rows."""
        groups = len(weight)
        parts = zip(*[x.chunk(groups) for x in inputs], strict=True)
        return torch.cat(
            [self.compute(own, weight[g], None if bias is None else bias[g]) for g, own in enumerate(parts)]
        )
