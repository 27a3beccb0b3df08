"""Random weights: one sample per draw, flipout, and local reparameterisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from slimbayes.core import context
from slimbayes.core import distributions as d
from slimbayes.core.context import Frame
from slimbayes.core.paths import ASKED, first
from slimbayes.core.posteriors import Posterior
from slimbayes.core.priors import Prior
from slimbayes.core.rules.base import Inputs, Operation, Rule, per_draw, rowwise, sample, scale_inputs
from slimbayes.core.rules.fixed import Fixed
from slimbayes.core.rules.kernel_map import Flips, Local, Mapped, by_row
from slimbayes.core.rules.local import (
    local_squares,
    local_variance,
    spoil_infinite,
)
from slimbayes.core.sampling import RandomTensor


class SampledRule(Rule):
    """Weight and bias are random; ``estimator`` says how: "shared", "flipout" or "local".

    shared: one weight sample per draw. flipout: one perturbation per draw, with independent random signs per
    example on its rows and columns (Wen et al. 2018). local: the pre-activation is sampled,
    y ~ N(op(x, M), op(x², σ²)) (Kingma et al. 2015): exact for a Linear layer on one vector per example, an
    approximation where a weight is used at several positions (convolutions, sequences), because those
    outputs are then sampled independently.
    """

    def __init__(
        self,
        name: str,
        weight: Posterior | None,
        bias: Posterior | None,
        estimator: str = "shared",
        prior: Prior | None = None,
        tied_mean: bool = False,
        weight_source: str | None = None,
        bias_source: str | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.weight = weight
        self.bias = bias
        self.estimator = estimator
        self.prior = prior
        self.tied_mean = tied_mean
        self.weight_source = weight_source or f"{name}.weight"
        self.bias_source = bias_source or f"{name}.bias"
        self.untiled_noise = ("example",) if estimator == "local" else ()

    def quick(self, op: Operation) -> Iterator[nn.Parameter]:
        """The scales of weight and bias."""
        for spread in (self.weight, self.bias):
            if spread is not None:
                yield from spread.parameters()

    def _spreads(self, op: Operation) -> tuple[d.Spread, d.Spread | None]:
        weight = self.weight(op.weight) if self.weight is not None else d.Delta(op.weight)
        if op.bias is None:
            return weight, None
        return weight, self.bias(op.bias) if self.bias is not None else d.Delta(op.bias)

    def forward(self, op: Operation, inputs: Inputs, untiled: bool = False) -> Tensor:
        """The layer's output for these inputs."""
        frame = context.frame(self.name, inputs[0].shape[0], untiled=untiled)
        if frame.noise == "mean":
            weight, bias = self._spreads(op)
            return op.compute(inputs, weight.point(), None if bias is None else bias.point())
        if self.estimator == "flipout" and frame.noise == "example":
            return self._flipout(op, inputs, frame)
        if self.estimator == "local" and frame.noise == "example":
            return self._local(op, inputs, frame)
        single = frame.ahead(f"{self.weight_source}.single")
        if single is not None:
            added = None if op.bias is None else frame.ahead(f"{self.bias_source}.single")
            if added is not None or op.bias is None:
                return op.compute(inputs, single, added)
        own = self.sample_tensor(op, "weight", frame)
        return per_draw(op, inputs, own, None if op.bias is None else self.sample_tensor(op, "bias", frame))

    def mapped(self, op: Operation, frame: Frame) -> Mapped:
        """One sample per draw; under flipout the mean, with one Δ per draw and signs for every row.

        local: the mean, with noise on every output, and a bias for every row.
        """
        if frame.noise == "mean":
            weight, bias = self._spreads(op)
            return Mapped(weight.point().unsqueeze(0), None if bias is None else bias.point().unsqueeze(0))
        if self.estimator == "local" and frame.noise == "example":
            return self._mapped_local(op, frame)
        own = None if op.bias is None else self.sample_tensor(op, "bias", frame)
        if self.estimator != "flipout" or frame.noise != "example":
            return Mapped(self.sample_tensor(op, "weight", frame), own)
        delta = self.sample_tensor(op, "weight", frame, centred=True)
        inner, outer = (
            by_row(self._signs(op, which, size, frame), frame)
            for which, size in (("signs_in", op.fan_in), ("signs_out", op.output_size))
        )
        return Mapped(op.weight.unsqueeze(0), own, flips=Flips(delta, inner, outer))

    def fixed(self, op: Operation, frame: Frame) -> Fixed:
        """One sample per draw, or the means."""
        one = self.mapped(op, frame)
        return Fixed(one.weight, one.bias)

    def weight_posterior(self) -> Posterior | None:
        """That of the weight, if it is random."""
        return self.weight

    def _mapped_local(self, op: Operation, frame: Frame) -> Mapped:
        weight = self._spreads(op)[0]

        def noise(y: Tensor) -> Tensor:
            shape = (frame.extra, *y.shape[1:])
            made = frame.noise_like("normal", f"{self.name}.local", shape, y.dtype, y.device, True)
            return made.flatten(0, 3)  # [R, ..., out]

        shift = None if op.bias is None else by_row(self._bias_by_example(op, frame), frame)
        return Mapped(
            weight.point().unsqueeze(0), None, shift=shift, local=Local(local_squares(op, weight), noise)
        )

    def _signs(self, op: Operation, which: str, channels: int, frame: Frame) -> Tensor:
        """±1 [K, S, B, channels], one for every example of a draw."""
        source, like = f"{self.name}.{which}", (op.weight.dtype, op.weight.device)

        def make() -> Tensor:
            made: Tensor | None = first(ASKED.signs, channels, *like, frame)
            return frame.noise_like("sign", source, (channels,), *like, True) if made is None else made

        signs: Tensor = frame.once(source, make)
        return signs

    def tensor(self, op: Operation, which: str) -> tuple[Posterior | None, Tensor, str, int | None]:
        """The spread, the mean, the name and the fan-in of the layer's "weight" or "bias"."""
        if which == "weight":
            return self.weight, op.weight, self.weight_source, op.fan_in
        return self.bias, op.bias, self.bias_source, None

    def sample_tensor(self, op: Operation, which: str, frame: Frame, centred: bool = False) -> Tensor:
        """One sample per draw of "weight" or "bias", [draws, *shape]; without the mean when ``centred``."""
        posterior, mean, source, _ = self.tensor(op, which)
        known = frame.ahead(f"{source}.centred" if centred else source)
        if known is not None:
            return known
        single = None if centred else frame.ahead(f"{source}.single")
        if single is not None:
            return single.unsqueeze(0)
        made: Tensor | None = first(ASKED.weight, self, op, which, frame, centred)
        if made is not None:
            return made

        def plain() -> Tensor:
            spread = posterior(mean) if posterior is not None else d.Delta(mean)
            value = sample(spread, frame, source, per_example=False, component_axis=False)
            value = value.expand(frame.components, frame.samples, *value.shape[2:])
            return value.flatten(0, 2)  # [draws, *shape]

        value: Tensor = frame.once(source, plain)
        return value - mean if centred else value

    def _flipout(self, op: Operation, inputs: Inputs, frame: Frame) -> Tensor:
        joined = self.joins_bias(op, frame)
        both = first(ASKED.mean_and_noise, self, op, frame)
        mean, delta = (
            (op.weight, self.sample_tensor(op, "weight", frame, centred=True)) if both is None else both
        )
        delta_bias = None
        if joined and self.bias is not None:
            delta_bias = self.sample_tensor(op, "bias", frame, centred=True)
        size = sum(slot.size for slot in op.input_slots)
        y = op.compute(inputs, mean, op.bias if joined else None)
        flipped = scale_inputs(op, inputs, self._signs(op, "signs_in", size, frame), frame, torch.mul)
        noise = per_draw(op, flipped, delta, delta_bias)
        y = _add_signed(y, noise, self._signs(op, "signs_out", op.output_size, frame), op.output_axis, frame)
        return y if joined else self.with_bias(op, y, frame)

    def joins_bias(self, op: Operation, frame: Frame) -> bool:
        """Whether the bias may share the weight's noise: the same moments for no noise of its own.

        Seeded draws keep the noise that their seed has always given.
        """
        seeded = frame.draw is not None and frame.draw.seed is not None
        return op.bias is None or self.bias is None or not seeded

    def with_bias(self, op: Operation, y: Tensor, frame: Frame) -> Tensor:
        """y + b with a bias of its own for every example."""
        if op.bias is None:
            return y
        return rowwise(y, self._bias_by_example(op, frame), op.output_axis, frame, torch.add)

    def _bias_by_example(self, op: Operation, frame: Frame) -> Tensor:
        """A bias for every example, [K, S, B, C]; [1, 1, 1, C] where it is a point."""
        bias = self.bias(op.bias) if self.bias is not None else d.Delta(op.bias)
        source = self.bias_source + ".example"
        return frame.once(source, lambda: sample(bias, frame, source, True, False))

    def joined_bias(self, op: Operation, inputs: Inputs, frame: Frame) -> tuple[bool, Tensor | None]:
        """Whether the bias is part of the pre-activation's mean and variance, and what it adds to the variance.

        So it is where an example has one output vector, not several that share the bias.
        """
        joined = inputs[0].dim() == 2 and frame.extra == 1 and op.is_matrix and self.joins_bias(op, frame)
        if not joined or self.bias is None or op.bias is None:
            return joined, None
        return joined, self.bias(op.bias).scale.square()

    def _local(self, op: Operation, inputs: Inputs, frame: Frame) -> Tensor:
        made: Tensor | None = first(ASKED.output, self, op, inputs, frame)
        if made is not None:
            return made
        weight = self.weight(op.weight) if self.weight is not None else d.Delta(op.weight)
        joined, extra = self.joined_bias(op, inputs, frame)
        y = op.compute(inputs, weight.point(), op.bias if joined else None)
        shape = (frame.extra, *y.shape[1:])
        noise = frame.noise_like("normal", f"{self.name}.local", shape, y.dtype, y.device, True)
        variance = local_variance(op, inputs, weight)
        if extra is not None:
            variance = variance + extra
        # A zero variance (an input of zeros) has no finite gradient of its square root.
        stddev = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
        y = spoil_infinite(y, stddev)
        if frame.tiled:
            y = torch.addcmul(y, stddev, noise.flatten(0, 3))
        else:  # mean and variance once, noise [K, S, B, extra, ...] for all draws
            one = (frame.batch, frame.extra)
            y = torch.addcmul(y.unflatten(0, one), stddev.unflatten(0, one), noise).flatten(0, 3)
            frame.tiled = True
        return y if joined else self.with_bias(op, y, frame)

    def covered(self, seen: set[str]) -> bool:
        """Whether the KL of all its tensors is among those ``seen``."""
        weight = self.weight is None or self.weight_source in seen
        bias = self.bias is None or self.bias_source in seen
        return self.prior is None or (weight and bias)

    def random(self, op: Operation) -> Iterator[RandomTensor]:
        """Weight and bias, as far as they are random."""
        for which in ("weight", "bias"):
            posterior, mean, source, fan_in = self.tensor(op, which)
            if posterior is not None and mean is not None:
                row = self.constant_row if which == "weight" else None
                yield RandomTensor(
                    source, posterior, mean, self.prior, fan_in, tied_mean=self.tied_mean, constant_row=row
                )

    def samples_whole(self, noise: str) -> bool:
        """With one weight for all examples of a draw, unless a path makes it when the layer runs."""
        return (self.estimator == "shared" or noise == "shared") and not ASKED.weight

    def means(self, op: Operation) -> Iterator[Tensor]:
        """The means of the tensors that have a prior."""
        return (one.loc for one in self.random(op) if one.prior is not None)


def _add_signed(y: Tensor, noise: Tensor, signs: Tensor, axis: int, frame: Frame) -> Tensor:
    """y + signs∘noise for rows [R, ...] and signs [K, S, B, C] along the channel ``axis``."""
    shape = [1] * (y.dim() - 1)
    shape[axis if axis < 0 else axis - 1] = signs.shape[-1]
    signs = signs.to(noise.dtype).reshape(*signs.shape[:3], 1, *shape)  # [K, S, B, 1, ..., C, ...]
    rows = (frame.components, frame.samples, frame.batch, frame.extra)
    return torch.addcmul(y.unflatten(0, rows), noise.unflatten(0, rows), signs).flatten(0, 3)  # [R, ...]
