"""The rank-1 rule: W ∘ r sᵀ, applied to the rows, or to the weight where a draw has one factor for all rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from slimbayes.core import context
from slimbayes.core import distributions as d
from slimbayes.core.context import Frame
from slimbayes.core.distributions import with_parameters
from slimbayes.core.paths import ASKED, first
from slimbayes.core.posteriors import DeltaPosterior, Posterior
from slimbayes.core.priors import Prior
from slimbayes.core.rules.base import (
    Inputs,
    Operation,
    Rule,
    affine,
    rowwise,
    sample,
    scale_inputs,
)
from slimbayes.core.rules.fixed import Fixed, alone
from slimbayes.core.rules.kernel_map import Mapped, by_draw, by_row, expand_groups
from slimbayes.core.sampling import RandomTensor


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
        self.untiled_noise = () if additive or input_factor is None else ("example",)

    def quick(self, op: Operation) -> Iterator[nn.Parameter]:
        """The scales of the factors."""
        for factor in (self.r, self.s):
            if factor is not None:
                yield from factor.spread.parameters()

    def sample_factor(self, factor: Factor, which: str, frame: Frame) -> Tensor:
        """Samples [K, S, B or 1, C] of the factor "r" or "s", one for all uses in a draw."""
        source = f"{self.name}.{which}"
        if frame.noise == "example" and frame.draw is not None and frame.batch != frame.draw.batch:
            source = f"{source} of {frame.batch} rows"  # of graphs, where the layers before saw nodes
        known = frame.ahead(source)
        if known is not None:
            return known
        if self.clip is None and type(factor.spread) is DeltaPosterior:
            point = frame.pick(factor.loc)
            return point.reshape(point.shape[0], 1, 1, -1)

        if frame.noise != "mean":
            made: Tensor | None = first(ASKED.factor, self, factor, which, frame)
            if made is not None:
                return made

        def make() -> Tensor:
            value = sample(picked(factor, frame), frame, source, frame.noise == "example", True)
            if self.clip is None or frame.noise == "mean":  # samples are clipped, means are not
                return value
            return value.clamp(-self.clip, self.clip)

        return frame.once(source, make)

    def forward(self, op: Operation, inputs: Inputs, untiled: bool = False) -> Tensor:
        """The layer's output for these inputs."""
        frame = context.frame(self.name, inputs[0].shape[0], self.components, untiled)
        if ASKED.output:
            made: Tensor | None = first(ASKED.output, self, op, inputs, frame)
            if made is not None:
                return made
        s = None if self.s is None else self.sample_factor(self.s, "s", frame)  # [K, S, B or 1, C]
        r = None if self.r is None else self.sample_factor(self.r, "r", frame)
        combine = torch.add if self.additive else torch.mul
        if s is not None:
            inputs = scale_inputs(op, inputs, s, frame, combine, private=not self.additive)
            frame.tiled = True  # the rows of all draws, if they were those of one
        y, bias = op.compute(inputs, op.weight, None), op.bias
        bias = None if bias is None else frame.pick(bias)  # [K, C]
        if r is not None and bias is not None and frame.tiled and not self.additive and not ASKED.scaled:
            return affine(y, r, bias, op.output_axis, frame)
        if r is not None:
            y = rowwise(y, r, op.output_axis, frame, combine)
        return y if bias is None else rowwise(y, bias[:, None, None], op.output_axis, frame, torch.add)

    def mapped(self, op: Operation, frame: Frame) -> Mapped:
        """Factors for every row, or in the weight where all rows of a draw share them."""
        s = None if self.s is None else self.sample_factor(self.s, "s", frame)  # [K, S, B or 1, C]
        r = None if self.r is None else self.sample_factor(self.r, "r", frame)
        bias = None if op.bias is None else frame.pick(op.bias)  # [K, C]
        weight = op.weight.unsqueeze(0)
        if self.additive:  # W (x + s) + r = W x + (W s + r)
            parts = [
                t for t in (r, None if s is None else nn.functional.linear(s, op.weight)) if t is not None
            ]
            shift = parts[0] if len(parts) == 1 else parts[0] + parts[1]
            # A bias may be that of several kernels, and longer than this one's output.
            if shift.shape[2] > 1 or (bias is not None and bias.shape[-1] != shift.shape[-1]):
                return Mapped(weight, bias, shift=by_row(shift, frame))
            own = by_draw(shift)
            return Mapped(weight, own if bias is None else own + expand_groups(bias, own.shape[0]))
        if all([f is None or f.shape[2] == 1 for f in (r, s)]):
            return Mapped(frame.derived(f"{self.name}.folded", lambda: _into(op.weight, r, s)), bias)
        inner, outer = (None if f is None else by_row(f, frame) for f in (s, r))
        return Mapped(weight, bias, inner, outer)

    def fixed(self, op: Operation, frame: Frame) -> Fixed:
        """Vectors for every draw beside the one weight."""
        factors = {
            which: by_draw(self.sample_factor(factor, which, frame)) for which, factor in self.rank1_factors()
        }
        bias = None if op.bias is None else frame.pick(op.bias)
        return Fixed(alone(op.weight), bias, factors.get("s"), factors.get("r"), self.additive)

    def rank1_factors(self) -> tuple[tuple[str, Factor], ...]:
        """Those that it has."""
        return tuple([(which, f) for which, f in (("r", self.r), ("s", self.s)) if f is not None])

    def covered(self, seen: set[str]) -> bool:
        """Whether the KL of its factors is among those ``seen``: both are done together."""
        return f"{self.name}.r" in seen or f"{self.name}.s" in seen

    def random(self, op: Operation) -> Iterator[RandomTensor]:
        """Its factors, but for points."""
        for which, factor in (("r", self.r), ("s", self.s)):
            spread = None if factor is None else factor.spread
            if factor is not None and spread is not None and type(spread) is not DeltaPosterior:
                yield RandomTensor(
                    f"{self.name}.{which}", spread, factor.loc, factor.prior,
                    None, True, self.clip, self.reduction,
                )  # fmt: skip

    def samples_whole(self, noise: str) -> bool:
        """Always, unless a path makes them when the layer runs."""
        return not ASKED.factor


def _into(weight: Tensor, r: Tensor | None, s: Tensor | None) -> Tensor:
    """W ∘ r sᵀ [G, out, in] for factors [K, S or 1, 1, C], of which one may be a point with S = 1."""
    column = None if r is None else by_draw(r).unsqueeze(2)
    row = None if s is None else by_draw(s).unsqueeze(1)
    if column is None or row is None:
        alone = row if column is None else column
        assert alone is not None
        return weight * alone
    groups = max(len(column), len(row))
    product = expand_groups(column, groups) * expand_groups(row, groups)
    return weight * product if torch.is_grad_enabled() else product.mul_(weight)


def picked(factor: Factor, frame: Frame) -> d.Spread:
    """The factor's spread over the components that take part in this draw."""
    spread: d.Spread = factor()
    if frame.draw is None or frame.draw.component_ids is None:
        return spread
    return with_parameters(spread, frame.pick)
