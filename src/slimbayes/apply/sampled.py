"""Random weights: one sample per draw, flipout, and local reparameterisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from slimbayes import context
from slimbayes import distributions as d
from slimbayes.apply.base import Inputs, KLTerm, Operation, Rule, per_draw, rowwise, sample, scale_inputs
from slimbayes.context import Frame
from slimbayes.posteriors import Posterior
from slimbayes.priors import Prior


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

    def _spreads(self, op: Operation) -> tuple[d.Spread, d.Spread | None]:
        weight = self.weight(op.weight) if self.weight is not None else d.Delta(op.weight)
        if op.bias is None:
            return weight, None
        return weight, self.bias(op.bias) if self.bias is not None else d.Delta(op.bias)

    def forward(self, op: Operation, inputs: Inputs) -> Tensor:
        """The layer's output for these inputs."""
        frame = context.frame(self.name, inputs[0].shape[0])
        weight, bias = self._spreads(op)
        if frame.noise == "mean":
            return op.compute(inputs, weight.point(), None if bias is None else bias.point())
        if self.estimator == "flipout" and frame.noise == "example":
            return self._flipout(op, inputs, frame, weight, bias)
        if self.estimator == "local" and frame.noise == "example":
            return self._local(op, inputs, frame, weight, bias)
        return self._shared(op, inputs, frame, weight, bias)

    def _per_draw(self, spread: d.Spread, source: str, frame: Frame) -> Tensor:
        def make() -> Tensor:
            value = sample(spread, frame, source, per_example=False, component_axis=False)
            value = value.expand(frame.components, frame.samples, *value.shape[2:])
            return value.flatten(0, 2)  # [draws, *shape]

        return frame.once(source, make)

    def _shared(
        self, op: Operation, inputs: Inputs, frame: Frame, weight: d.Spread, bias: d.Spread | None
    ) -> Tensor:
        w = self._per_draw(weight, self.weight_source, frame)
        b = None if bias is None else self._per_draw(bias, self.bias_source, frame)
        return per_draw(op, inputs, w, b)

    def _flipout(
        self, op: Operation, inputs: Inputs, frame: Frame, weight: d.Spread, bias: d.Spread | None
    ) -> Tensor:
        y = op.compute(inputs, weight.point(), None)
        delta = self._per_draw(weight, self.weight_source, frame) - weight.point()
        size = sum(slot.size for slot in op.input_slots)
        like = (weight.loc.dtype, weight.loc.device)

        def signs(which: str, channels: int) -> Tensor:
            source = f"{self.name}.{which}"
            return frame.once(source, lambda: frame.noise_like("sign", source, (channels,), *like, True))

        flipped = scale_inputs(op, inputs, signs("signs_in", size), frame, torch.mul)
        noise = per_draw(op, flipped, delta, None)
        y = y + rowwise(noise, signs("signs_out", op.output_size), op.output_axis, frame, torch.mul)
        if bias is None:
            return y
        return rowwise(y, self._bias_per_example(bias, frame), op.output_axis, frame, torch.add)

    def _bias_per_example(self, bias: d.Spread, frame: Frame) -> Tensor:
        source = self.bias_source + ".example"
        return frame.once(source, lambda: sample(bias, frame, source, True, False))

    def _local(
        self, op: Operation, inputs: Inputs, frame: Frame, weight: d.Spread, bias: d.Spread | None
    ) -> Tensor:
        y = op.compute(inputs, weight.point(), None)
        variance = local_variance(op, inputs, weight)
        # A zero variance (an input of zeros) has no finite gradient of its square root.
        stddev = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
        shape = (frame.extra, *y.shape[1:])
        noise = frame.noise_like("normal", f"{self.name}.local", shape, y.dtype, y.device, True)
        y = torch.addcmul(y, stddev, noise.flatten(0, 3))
        if bias is None:
            return y
        return rowwise(y, self._bias_per_example(bias, frame), op.output_axis, frame, torch.add)

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
            q = posterior(mean)
            p = self.prior.distribution(mean, fan_in)
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


def local_variance(op: Operation, inputs: Inputs, weight: d.Spread) -> Tensor:
    """Var[y | x] = op(x², σ²); for a k-tied matrix by k(k+1)/2 thin products instead of one m×n.

    With σ_ij = Σ_a u_ia v_ja: Var[y_j | x] = Σ_{a ≤ b} c_ab (Σ_i x_i² u_ia u_ib) v_ja v_jb, c = 1 on the
    diagonal and 2 off it.
    """
    squares = list(inputs)
    for slot in op.input_slots:
        squares[slot.position] = inputs[slot.position].square()
    if isinstance(weight, d.KTiedNormal) and op.is_matrix:
        u, v = op.matrix_sides(weight.u, weight.v)  # [in, k], [out, k]
        a, b = torch.triu_indices(u.shape[1], u.shape[1], device=u.device).unbind()
        counts = torch.where(a == b, 1.0, 2.0).to(u.dtype)
        thin = torch.nn.functional.linear(squares[0], (u[:, a] * u[:, b]).t())  # [..., k(k+1)/2]
        return torch.nn.functional.linear(thin, v[:, a] * v[:, b] * counts)
    return op.compute(tuple(squares), weight.scale.square(), None)  # type: ignore[union-attr]
