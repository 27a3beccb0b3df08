"""Random weights in few sweeps: samples with their gradients written out, noise by kernels, thin local noise."""

from __future__ import annotations

import torch
from torch import Tensor

from slimbayes.accelerate import switches
from slimbayes.accelerate.cpu import weights as kernels
from slimbayes.accelerate.gpu import weight_samples as gpu
from slimbayes.accelerate.gpu.local import local_noise, thin_squares
from slimbayes.accelerate.gpu.noise import packed_signs
from slimbayes.accelerate.thin_noise import add_thin_noise
from slimbayes.accelerate.weight_kl import Byproduct, LayerFacts, Raw, RawPrior, raw_prior, raw_spread
from slimbayes.accelerate.weight_samples import by_kernel, make_weights
from slimbayes.core.context import Frame
from slimbayes.core.paths import FastPath
from slimbayes.core.posteriors import KTiedPosterior
from slimbayes.core.rules.base import Inputs, Operation, Rule
from slimbayes.core.rules.local import thin_factors, thin_factors_of_logs
from slimbayes.core.rules.meanfield import SampledRule


class RandomWeights(FastPath):
    """Samples of MeanField and KTied weights, with their KL as a by-product, and flipout's and local noise."""

    def on(self) -> bool:
        """By ``weights``."""
        return switches.paths.weights

    def weight(self, rule: Rule, op: Operation, which: str, frame: Frame, centred: bool) -> Tensor | None:
        """A sample per draw, by a kernel or by one operation."""
        assert isinstance(rule, SampledRule)
        posterior, mean, source, _ = rule.tensor(op, which)
        if gpu.usable(posterior, mean, frame):
            return _by_gpu(rule, op, which, frame, "noise" if centred else "sample")[int(centred)]
        found = None if frame.draw is None or frame.draw.seed is not None else by_parameters(rule, op, which)
        if found is None or not by_kernel(Byproduct([source], [found[0]], [found[1]])):
            return None

        def make() -> Tensor:
            return _by_kernel(rule, op, source, *found, frame, centred)

        made: Tensor = frame.once(f"{source}.centred" if centred else source, make)
        return made

    def mean_and_noise(self, rule: Rule, op: Operation, frame: Frame) -> tuple[Tensor, Tensor] | None:
        """M in the type of the layer's product and σ∘ε of one draw, by one GPU kernel under autocast."""
        assert isinstance(rule, SampledRule)
        if gpu.compute_dtype(op.weight) == op.weight.dtype or not gpu.usable(rule.weight, op.weight, frame):
            return None
        mean, noise = _by_gpu(rule, op, "weight", frame, "both")
        return mean.squeeze(0), noise

    def signs(self, channels: int, dtype: torch.dtype, device: torch.device, frame: Frame) -> Tensor | None:
        """Bits that compiled code unpacks where it uses them."""
        if not gpu.packs_signs(device, frame):
            return None
        made: Tensor = packed_signs((frame.components, frame.samples, frame.batch, channels), dtype, device)
        return made

    def output(self, rule: Rule, op: Operation, inputs: Inputs, frame: Frame) -> Tensor | None:
        """A k-tied matrix product under local reparameterisation."""
        if not (isinstance(rule, SampledRule) and type(rule.weight) is KTiedPosterior and op.is_matrix):
            return None
        if not frame.tiled:
            return None
        if gpu.makes_noise(op.weight, frame):
            joined, extra = rule.joined_bias(op, inputs, frame)
            y = _thin_by_gpu(rule, op, inputs[0], frame, extra, op.bias if joined else None)
            return y if joined else rule.with_bias(op, y, frame)
        x, weight = inputs[0], rule.weight(op.weight)
        typed = x.dtype == weight.u.dtype and not torch.is_autocast_enabled(x.device.type)
        if raw_spread(rule.weight, op.weight) is None or not typed or type(x) is not Tensor:
            return None
        joined, extra = rule.joined_bias(op, inputs, frame)
        y = op.compute(inputs, weight.point(), op.bias if joined else None)
        shape = (frame.extra, *y.shape[1:])
        noise = frame.noise_like("normal", f"{rule.name}.local", shape, y.dtype, y.device, True)
        a, b = thin_factors(*op.matrix_sides(weight.u, weight.v))
        rows, flat = y.reshape(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        y = add_thin_noise(rows, flat, a, b, extra, noise.reshape(rows.shape)).reshape(y.shape)
        return y if joined else rule.with_bias(op, y, frame)


def by_parameters(rule: SampledRule, op: Operation, which: str) -> tuple[Raw, RawPrior | None] | None:
    """A tensor as it is sampled here: its parameters, and the prior if it is its own."""
    posterior, mean, source, fan_in = rule.tensor(op, which)
    raw = raw_spread(posterior, mean)
    return None if raw is None else (raw, own_prior(rule, source, fan_in, True))


def own_prior(rule: SampledRule, source: str, fan_in: int | None, following: bool = False) -> RawPrior | None:
    """The numbers of a Normal prior on the whole tensor, unless it is another layer's, with a prior of its own.

    One that follows its tensor is only for those who make the KL of the sums in Python: ``following``.
    """
    if rule.prior is None or source not in (f"{rule.name}.weight", f"{rule.name}.bias"):
        return None
    if rule.constant_row is not None and source == rule.weight_source:
        return None  # the sample has the whole table, the KL only a part of it
    found = raw_prior(rule.prior, fan_in, rule.tied_mean)
    return None if found is not None and found.follows is not None and not following else found


def _by_kernel(
    rule: SampledRule,
    op: Operation,
    source: str,
    raw: Raw,
    prior: RawPrior | None,
    frame: Frame,
    centred: bool,
) -> Tensor:
    """A sample by the kernels in C, and the KL that comes with it."""
    facts = LayerFacts([(rule, op)])
    left = Byproduct([source], [raw], [prior], facts if facts.explain([raw]) else None)
    # The noise of both forms of a tensor, with its mean and without.
    noise: tuple[int, int] = frame.once(f"{source}.seed", lambda: (kernels.new_seed(), 0))
    (value,) = make_weights(left, frame.draws, [centred], noise)
    if frame.draw is not None and left.total is not None:
        frame.draw.byproducts[source] = left
    return value


def _by_gpu(rule: SampledRule, op: Operation, which: str, frame: Frame, form: str) -> tuple[Tensor, Tensor]:
    """What the kernel makes in this form: the sample or the mean, and the noise, [1, *shape]."""
    posterior, mean, source, fan_in = rule.tensor(op, which)
    assert posterior is not None
    spread = posterior

    def make() -> tuple[Tensor, Tensor]:
        prior = own_prior(rule, source, fan_in)
        value, noise, sums = gpu.sample(spread, mean, prior, form, frame, source)
        if frame.draw is not None and sums is not None:
            frame.draw.byproducts[source] = sums
        return value, noise

    made: tuple[Tensor, Tensor] = frame.once(f"{source} by the kernel, {form}", make)
    return made


def _thin_by_gpu(
    rule: SampledRule, op: Operation, x: Tensor, frame: Frame, extra: Tensor | None, bias: Tensor | None
) -> Tensor:
    assert isinstance(rule.weight, KTiedPosterior)
    a, b = thin_factors_of_logs(*op.matrix_sides(rule.weight.log_u, rule.weight.log_v))
    weight = op.weight
    if gpu.sums_mean(rule.weight, weight, own_prior(rule, rule.weight_source, op.fan_in)):
        weight = _by_gpu(rule, op, "weight", frame, "mean")[0].squeeze(0)
    dtype = gpu.compute_dtype(weight)
    if torch.is_autocast_enabled(x.device.type) and x.dtype != dtype:
        x = x.to(dtype)  # as the product will
    # Before the product, so that compiled code can make it where it makes x (``compile.local_chain``).
    t = thin_squares(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), a)
    y = op.compute((x,), weight, None)
    rows = y if y.dim() == 2 else y.reshape(-1, y.shape[-1])
    z: Tensor = local_noise(rows, t, b, extra, bias, *gpu.seed_of(frame, y.device))[0]
    return z if y.dim() == 2 else z.reshape(y.shape)
