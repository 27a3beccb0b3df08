"""The rank-1 rule: W ∘ r sᵀ applied to the rows, never to the weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from slimbayes import context
from slimbayes import distributions as d
from slimbayes.apply.base import Inputs, KLTerm, Operation, Rule, rowwise, sample, scale_inputs
from slimbayes.context import Frame
from slimbayes.posteriors import Posterior
from slimbayes.priors import Prior


class Factor(nn.Module):
    """One vector per component, r or s: its location and the spread around it."""

    def __init__(self, loc: Tensor, spread: Posterior, prior: Prior, trainable: bool = True) -> None:
        super().__init__()
        if trainable:
            self.loc = nn.Parameter(loc)
        else:
            self.register_buffer("loc", loc)
        self.spread = spread
        self.prior = prior

    def forward(self) -> d.Spread:
        """The distribution of the [K, d] factor."""
        spread: d.Spread = self.spread(self.loc)
        return spread


class Rank1Rule(Rule):
    """y = r ∘ op(s ∘ x, W) + b_k, or op(s + x, W) + r + b_k when additive, one (r, s, b) per component."""

    def __init__(
        self,
        name: str,
        components: int,
        output_factor: Factor | None,
        input_factor: Factor | None,
        additive: bool,
        clip: float | None,
        reduction: str,
    ) -> None:
        super().__init__()
        self.name = name
        self.components = components
        self.r = output_factor
        self.s = input_factor
        self.additive = additive
        self.clip = clip
        self.reduction = reduction

    def _factor(self, factor: Factor, which: str, frame: Frame) -> Tensor:
        def make() -> Tensor:
            value = sample(
                _picked(factor, frame), frame, f"{self.name}.{which}", frame.noise == "example", True
            )
            if self.clip is None or frame.noise == "mean":  # samples are clipped, means are not
                return value
            return value.clamp(-self.clip, self.clip)

        return frame.once(f"{self.name}.{which}", make)

    def forward(self, op: Operation, inputs: Inputs) -> Tensor:
        """The layer's output for these inputs."""
        frame = context.frame(self.name, inputs[0].shape[0], self.components)
        combine = torch.add if self.additive else torch.mul
        if self.s is not None:
            inputs = scale_inputs(op, inputs, self._factor(self.s, "s", frame), frame, combine)
        y = op.compute(inputs, op.weight, None)
        if self.r is not None:
            y = rowwise(y, self._factor(self.r, "r", frame), op.output_axis, frame, combine)
        if op.bias is not None:
            bias = frame.pick(op.bias)[:, None, None]  # [K, 1, 1, C]
            y = rowwise(y, bias, op.output_axis, frame, torch.add)
        return y

    def kl_terms(self, op: Operation) -> Iterator[KLTerm]:
        """The pairs whose KL this layer adds."""
        for which, factor in (("r", self.r), ("s", self.s)):
            if factor is not None:
                q = factor()
                if not isinstance(q, d.Delta):
                    yield f"{self.name}.{which}", q, factor.prior.distribution(q.loc), self.reduction

    def means(self, op: Operation) -> Iterator[Tensor]:
        """None: the shared weight and the biases are point estimates under weight decay."""
        return iter(())


def _picked(factor: Factor, frame: Frame) -> d.Spread:
    spread: d.Spread = factor()
    if frame.draw is None or frame.draw.component_ids is None:
        return spread
    spread.loc = frame.pick(spread.loc)
    if isinstance(spread, (d.Normal, d.Cauchy, d.LogNormal, d.HalfCauchy)):
        spread.scale = frame.pick(spread.scale)
    return spread
