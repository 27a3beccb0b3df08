"""Bernoulli masks on the inputs of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from slimbayes.core import context
from slimbayes.core.context import Frame
from slimbayes.core.rules.base import Inputs, Operation, Rule, rowwise
from slimbayes.core.rules.fixed import Drop, Fixed, alone
from slimbayes.core.rules.kernel_map import Mapped, by_draw, by_row


class DroppedRule(Rule):
    """y = op(x ∘ b/(1 − rate), W) with b Bernoulli: per element, or per channel of every example."""

    drops = True

    def __init__(self, name: str, rate: float, per_channel: bool) -> None:
        super().__init__()
        self.name = name
        self.rate = rate
        self.per_channel = per_channel

    def forward(self, op: Operation, inputs: Inputs) -> Tensor:
        """The layer's output for these inputs."""
        frame = context.frame(self.name, inputs[0].shape[0])
        if frame.noise != "mean" and self.rate > 0:
            changed = list(inputs)
            for slot in op.input_slots:
                source = f"{self.name}.mask{slot.position}"
                axis = slot.axis if self.per_channel else None
                changed[slot.position] = dropped(inputs[slot.position], frame, source, self.rate, axis)
            inputs = tuple(changed)
        return op.compute(inputs, op.weight, op.bias)

    def mapped(self, op: Operation, frame: Frame) -> Mapped:
        """A mask on the channels of every kernel's input, the same at every step; or on the elements of the inputs.

        Elements of the layer's own state are not dropped: their masks would add up over the steps.
        """
        weight, bias = op.weight.unsqueeze(0), None if op.bias is None else op.bias.unsqueeze(0)
        if frame.noise == "mean" or self.rate == 0:
            return Mapped(weight, bias)
        source = f"{self.name}.mask0"
        if not self.per_channel:
            drop = None if op.recurrent else lambda x: dropped(x, frame, source, self.rate, None)
            return Mapped(weight, bias, before=drop)
        dtype = torch.promote_types(op.weight.dtype, torch.float32)
        per_example = frame.noise == "example"

        def make() -> Tensor:
            noise = frame.noise_like("uniform", source, (op.fan_in,), dtype, weight.device, per_example)
            return (noise >= self.rate).to(weight.dtype) / (1.0 - self.rate)

        mask = frame.once(source, make)  # [K, S, B or 1, C]
        if mask.shape[2] == 1:
            return Mapped(op.weight * by_draw(mask).unsqueeze(1), bias)
        return Mapped(weight, bias, inner=by_row(mask, frame))

    def fixed(self, op: Operation, frame: Frame) -> Fixed:
        """The layer's own tensors, and a mask of every input."""
        drops = {}
        for slot in op.input_slots if frame.noise != "mean" else ():
            axis = slot.axis if self.per_channel else None
            drops[slot.position] = Drop(f"{self.name}.mask{slot.position}", self.rate, axis)
        return Fixed(alone(op.weight), alone(op.bias), drops=drops)


def dropped(x: Tensor, frame: Frame, source: str, rate: float, channel_axis: int | None) -> Tensor:
    """Drop elements of x [R, ...] (whole channels when ``channel_axis`` is given), scaled to mean one."""
    per_example = frame.noise == "example"
    dtype = torch.promote_types(x.dtype, torch.float32)  # 16-bit uniforms are too coarse for small rates
    if rate >= 1.0:
        return torch.zeros_like(x)
    if channel_axis is not None:
        channels = (x.shape[channel_axis],)
        noise = frame.noise_like("uniform", source, channels, dtype, x.device, per_example)
        return rowwise(x, (noise >= rate).to(dtype) / (1.0 - rate), channel_axis, frame, torch.mul)
    shape = (frame.extra, *x.shape[1:])
    noise = frame.noise_like("uniform", source, shape, dtype, x.device, per_example)
    mask = (noise >= rate).to(x.dtype) / (1.0 - rate)  # [K, S, B or 1, extra, ...]
    rows = x.view(frame.components, frame.samples, frame.batch, frame.extra, *x.shape[1:])
    return (rows * mask).flatten(0, 3)
