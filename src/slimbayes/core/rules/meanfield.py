"""Random weights: one sample per draw, flipout, and local reparameterisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from slimbayes.accelerate import switches
from slimbayes.accelerate.gpu import weight_samples
from slimbayes.accelerate.gpu.local import local_noise, thin_squares
from slimbayes.accelerate.gpu.noise import packed_signs
from slimbayes.accelerate.thin_noise import add_thin_noise
from slimbayes.accelerate.weight_kl import Byproduct, Raw, RawPrior, raw_prior, raw_spread
from slimbayes.accelerate.weight_samples import by_kernel, make_weights, sample_weights
from slimbayes.core import context
from slimbayes.core import distributions as d
from slimbayes.core.context import Frame
from slimbayes.core.posteriors import KTiedPosterior, Posterior
from slimbayes.core.priors import Prior
from slimbayes.core.rules.base import Inputs, KLTerm, Operation, Rule, per_draw, rowwise, sample, scale_inputs
from slimbayes.core.rules.kernel_map import Flips, Local, Mapped, by_row
from slimbayes.core.rules.local import (
    local_squares,
    local_variance,
    spoil_infinite,
    thin_factors,
    thin_factors_of_logs,
)


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
        own = self._per_draw(op, "weight", frame)
        return per_draw(op, inputs, own, None if op.bias is None else self._per_draw(op, "bias", frame))

    def mapped(self, op: Operation, frame: Frame) -> Mapped:
        """One sample per draw; under flipout the mean, with one Δ per draw and signs for every row.

        local: the mean, with noise on every output, and a bias for every row.
        """
        if frame.noise == "mean":
            weight, bias = self._spreads(op)
            return Mapped(weight.point().unsqueeze(0), None if bias is None else bias.point().unsqueeze(0))
        if self.estimator == "local" and frame.noise == "example":
            return self._mapped_local(op, frame)
        own = None if op.bias is None else self._per_draw(op, "bias", frame)
        if self.estimator != "flipout" or frame.noise != "example":
            return Mapped(self._per_draw(op, "weight", frame), own)
        delta = self._per_draw(op, "weight", frame, centred=True)
        inner, outer = (
            by_row(self._signs(op, which, size, frame), frame)
            for which, size in (("signs_in", op.fan_in), ("signs_out", op.output_size))
        )
        return Mapped(op.weight.unsqueeze(0), own, flips=Flips(delta, inner, outer))

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
        if weight_samples.packs_signs(op.weight.device, frame):
            shape = (frame.components, frame.samples, frame.batch, channels)
            return frame.once(source, lambda: packed_signs(shape, *like))
        return frame.once(source, lambda: frame.noise_like("sign", source, (channels,), *like, True))

    def tensor(self, op: Operation, which: str) -> tuple[Posterior | None, Tensor, str, int | None]:
        """The spread, the mean, the name and the fan-in of the layer's "weight" or "bias"."""
        if which == "weight":
            return self.weight, op.weight, self.weight_source, op.fan_in
        return self.bias, op.bias, self.bias_source, None

    def by_parameters(
        self, op: Operation, which: str
    ) -> tuple[Raw, RawPrior | None, Callable[[], tuple[Operation, Raw | None, RawPrior | None]]] | None:
        """A tensor as the fast paths sample it: its parameters, the prior if it is its own, and what they are now."""
        posterior, mean, source, fan_in = self.tensor(op, which)
        raw = raw_spread(posterior, mean)
        if raw is None:
            return None

        def now() -> tuple[Operation, Raw | None, RawPrior | None]:
            spread, tensor, name, inputs = self.tensor(op, which)
            return op, raw_spread(spread, tensor), self.own_prior(name, inputs)

        return raw, self.own_prior(source, fan_in), now

    def _per_draw(self, op: Operation, which: str, frame: Frame, centred: bool = False) -> Tensor:
        """One sample per draw of "weight" or "bias", [draws, *shape]; without the mean when ``centred``."""
        posterior, mean, source, _ = self.tensor(op, which)
        key = f"{source}.centred" if centred else source
        known = frame.ahead(key)
        if known is not None:
            return known
        single = None if centred else frame.ahead(f"{source}.single")
        if single is not None:
            return single.unsqueeze(0)

        def plain() -> Tensor:
            spread = posterior(mean) if posterior is not None else d.Delta(mean)
            value = sample(spread, frame, source, per_example=False, component_axis=False)
            value = value.expand(frame.components, frame.samples, *value.shape[2:])
            return value.flatten(0, 2)  # [draws, *shape]

        if weight_samples.usable(posterior, mean, frame):
            return self._by_kernel(op, which, frame, "noise" if centred else "sample")[int(centred)]
        found = self.by_parameters(op, which)
        if found is None:
            value = frame.once(source, plain)
            return value - mean if centred else value
        raw, prior, owner = found

        def noise() -> Tensor:
            like = (tuple(mean.shape), mean.dtype, mean.device)
            return frame.noise_like("normal", source, *like, per_example=False).flatten(0, 2)

        def in_one() -> Tensor:
            left = Byproduct([source], [raw], [prior], [owner])
            draw = frame.draw
            given = draw is not None and (source in draw.noises or frame.ahead(f"{source}.noise") is not None)
            if not given and (draw is None or draw.seed is None) and by_kernel(left):
                (value,) = make_weights(left, frame.draws, [centred], _earlier_noise(source, frame))
            else:
                (value,) = sample_weights(left, [frame.once(f"{source}.noise", noise)], [centred])
            if draw is not None and (torch.is_grad_enabled() or left.draws):
                draw.byproducts[source] = left
            return value

        return frame.once(key, in_one)

    def own_prior(self, source: str, fan_in: int | None) -> RawPrior | None:
        """The numbers of a Normal prior on this tensor, unless it is another layer's, which has its own prior."""
        if self.prior is None or source not in (f"{self.name}.weight", f"{self.name}.bias"):
            return None
        return raw_prior(self.prior, fan_in, self.tied_mean)

    def _by_kernel(
        self, op: Operation, which: str, frame: Frame, form: str
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """What the kernel makes in this form: the sample or the mean, and the noise, [1, *shape]."""
        posterior, mean, source, fan_in = self.tensor(op, which)
        assert posterior is not None
        cache = {} if frame.draw is None else frame.draw.cache
        key = {"noise": f"{source}.centred"}.get(form, source if form == "sample" else f"{source}.{form}")
        if key not in cache:
            prior = self.own_prior(source, fan_in)
            cache[key], cache[f"{key}.second"], sums = weight_samples.sample(
                posterior, mean, prior, form, frame
            )
            if frame.draw is not None and sums is not None:
                frame.draw.byproducts[source] = sums
        return cache[key], cache[f"{key}.second"]

    def _mean_and_noise(self, op: Operation, frame: Frame) -> tuple[Tensor, Tensor]:
        """M as the layer's product takes it, and one σ∘ε per draw, [draws, *shape]."""
        typed = weight_samples.compute_dtype(op.weight) != op.weight.dtype
        if typed and weight_samples.usable(self.weight, op.weight, frame):
            mean, noise = self._by_kernel(op, "weight", frame, "both")
            return mean.squeeze(0), noise
        return op.weight, self._per_draw(op, "weight", frame, centred=True)

    def _flipout(self, op: Operation, inputs: Inputs, frame: Frame) -> Tensor:
        joined = self._joins_bias(op, frame)
        mean, delta = self._mean_and_noise(op, frame)
        delta_bias = None
        if joined and self.bias is not None:
            delta_bias = self._per_draw(op, "bias", frame, centred=True)
        size = sum(slot.size for slot in op.input_slots)
        y = op.compute(inputs, mean, op.bias if joined else None)
        flipped = scale_inputs(op, inputs, self._signs(op, "signs_in", size, frame), frame, torch.mul)
        noise = per_draw(op, flipped, delta, delta_bias)
        y = _add_signed(y, noise, self._signs(op, "signs_out", op.output_size, frame), op.output_axis, frame)
        return y if joined else self._with_bias(op, y, frame)

    def _joins_bias(self, op: Operation, frame: Frame) -> bool:
        """Whether the bias may share the weight's noise: the same moments for no noise of its own.

        Seeded draws keep the noise that their seed has always given.
        """
        seeded = frame.draw is not None and frame.draw.seed is not None
        return op.bias is None or self.bias is None or (switches.paths.weights and not seeded)

    def _with_bias(self, op: Operation, y: Tensor, frame: Frame) -> Tensor:
        """y + b with a bias of its own for every example."""
        if op.bias is None:
            return y
        return rowwise(y, self._bias_by_example(op, frame), op.output_axis, frame, torch.add)

    def _bias_by_example(self, op: Operation, frame: Frame) -> Tensor:
        """A bias for every example, [K, S, B, C]; [1, 1, 1, C] where it is a point."""
        bias = self.bias(op.bias) if self.bias is not None else d.Delta(op.bias)
        source = self.bias_source + ".example"
        return frame.once(source, lambda: sample(bias, frame, source, True, False))

    def _local(self, op: Operation, inputs: Inputs, frame: Frame) -> Tensor:
        weight = self.weight(op.weight) if self.weight is not None else d.Delta(op.weight)
        # A bias may enter the variance where an example has one output vector, not several that share it.
        joined = inputs[0].dim() == 2 and frame.extra == 1 and op.is_matrix and self._joins_bias(op, frame)
        extra = None
        if joined and self.bias is not None and op.bias is not None:
            extra = self.bias(op.bias).scale.square()
        tied = type(self.weight) is KTiedPosterior and op.is_matrix
        if tied and weight_samples.makes_noise(op.weight, frame):
            y = self._thin_by_kernel(op, inputs[0], frame, extra, op.bias if joined else None)
            return y if joined else self._with_bias(op, y, frame)
        y = op.compute(inputs, weight.point(), op.bias if joined else None)
        shape = (frame.extra, *y.shape[1:])
        noise = frame.noise_like("normal", f"{self.name}.local", shape, y.dtype, y.device, True)
        if frame.tiled:
            noise = noise.flatten(0, 3)
        if frame.tiled and self._thin(op, inputs, weight, y):
            assert isinstance(weight, d.KTiedNormal)
            a, b = thin_factors(*op.matrix_sides(weight.u, weight.v))
            rows, x = y.reshape(-1, y.shape[-1]), inputs[0].reshape(-1, inputs[0].shape[-1])
            y = add_thin_noise(rows, x, a, b, extra, noise.reshape(rows.shape)).reshape(y.shape)
        else:
            variance = local_variance(op, inputs, weight)
            if extra is not None:
                variance = variance + extra
            # A zero variance (an input of zeros) has no finite gradient of its square root.
            stddev = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
            y = spoil_infinite(y, stddev)
            if frame.tiled:
                y = torch.addcmul(y, stddev, noise)
            else:  # mean and variance once, noise [K, S, B, extra, ...] for all draws
                one = (frame.batch, frame.extra)
                y = torch.addcmul(y.unflatten(0, one), stddev.unflatten(0, one), noise).flatten(0, 3)
                frame.tiled = True
        return y if joined else self._with_bias(op, y, frame)

    def _thin_by_kernel(
        self, op: Operation, x: Tensor, frame: Frame, extra: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        assert isinstance(self.weight, KTiedPosterior)
        a, b = thin_factors_of_logs(*op.matrix_sides(self.weight.log_u, self.weight.log_v))
        weight = op.weight
        if weight_samples.sums_mean(self.weight, weight, self.own_prior(self.weight_source, op.fan_in)):
            weight = self._by_kernel(op, "weight", frame, "mean")[0].squeeze(0)
        dtype = weight_samples.compute_dtype(weight)
        if torch.is_autocast_enabled(x.device.type) and x.dtype != dtype:
            x = x.to(dtype)  # as the product will
        # Before the product, so that compiled code can make it where it makes x (chained.py).
        t = thin_squares(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), a)
        y = op.compute((x,), weight, None)
        rows = y if y.dim() == 2 else y.reshape(-1, y.shape[-1])
        z = local_noise(rows, t, b, extra, bias, *weight_samples.seed_of(frame, y.device))[0]
        return z if y.dim() == 2 else z.reshape(y.shape)

    def _thin(self, op: Operation, inputs: Inputs, weight: d.Spread, y: Tensor) -> bool:
        """Whether the written-out backward pass applies: plain tensors of one type."""
        return (
            isinstance(weight, d.KTiedNormal)
            and op.is_matrix
            and raw_spread(self.weight, op.weight) is not None
            and inputs[0].dtype == y.dtype == weight.u.dtype
            and type(inputs[0]) is Tensor
        )

    def covered(self, seen: set[str]) -> bool:
        """Whether the KL of all its tensors is among those ``seen``."""
        weight = self.weight is None or self.weight_source in seen
        bias = self.bias is None or self.bias_source in seen
        return self.prior is None or (weight and bias)

    def kl_terms(self, op: Operation) -> Iterator[KLTerm]:
        """The pairs whose KL this layer adds."""
        if self.prior is None:
            return
        tensors = (
            (self.weight, op.weight, self.weight_source, op.fan_in),
            (self.bias, op.bias, self.bias_source, None),
        )
        for posterior, mean, source, fan_in in tensors:
            if posterior is None or mean is None:
                continue
            raw, numbers = raw_spread(posterior, mean), raw_prior(self.prior, fan_in, self.tied_mean)
            if raw is not None and numbers is not None:
                yield source, raw, numbers, "sum"
                continue
            q, p = posterior(mean), self.prior.distribution(mean, fan_in)
            if self.tied_mean:
                p = d.Normal(mean, p.scale)  # type: ignore[union-attr]
            yield source, q, p, "sum"

    def means(self, op: Operation) -> Iterator[Tensor]:
        """The means of the tensors that have a prior."""
        if self.prior is None:
            return
        if self.weight is not None:
            yield op.weight
        if self.bias is not None and op.bias is not None:
            yield op.bias


def _earlier_noise(source: str, frame: Frame) -> tuple[int, int] | None:
    """The seed and the first stream of the noise with which this draw has sampled a tensor in its other form."""
    draw = frame.draw
    if draw is None:
        return None
    forms = (source, f"{source}.centred", f"{source}.single")
    if any([form in draw.prefilled and frame.ahead(form) is None for form in forms]):
        return None  # inside activation checkpointing: what runs again takes its noise from the generator
    for left in draw.byproducts.values():
        found = left.noise_of(source) if isinstance(left, Byproduct) else None
        if found is not None:
            return found
    return None


def _add_signed(y: Tensor, noise: Tensor, signs: Tensor, axis: int, frame: Frame) -> Tensor:
    """y + signs∘noise for rows [R, ...] and signs [K, S, B, C] along the channel ``axis``."""
    shape = [1] * (y.dim() - 1)
    shape[axis if axis < 0 else axis - 1] = signs.shape[-1]
    signs = signs.to(noise.dtype).reshape(*signs.shape[:3], 1, *shape)  # [K, S, B, 1, ..., C, ...]
    rows = (frame.components, frame.samples, frame.batch, frame.extra)
    return torch.addcmul(y.unflatten(0, rows), noise.unflatten(0, rows), signs).flatten(0, 3)  # [R, ...]
