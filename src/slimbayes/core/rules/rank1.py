"""The rank-1 rule: W ∘ r sᵀ, applied to the rows, or to the weight where a draw has one factor for all rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from slimbayes.accelerate import factor_folding, factor_product, row_factors, switches
from slimbayes.accelerate.cpu import factor_sweep, product_sweep
from slimbayes.accelerate.factor_noise import sample_factor
from slimbayes.accelerate.gpu import factor_convolution
from slimbayes.core import context
from slimbayes.core import distributions as d
from slimbayes.core.context import Frame
from slimbayes.core.posteriors import DeltaPosterior, Posterior
from slimbayes.core.priors import Prior
from slimbayes.core.rules.base import (
    Inputs,
    KLTerm,
    Operation,
    Rule,
    rowwise,
    sample,
    scale_inputs,
    with_parameters,
)
from slimbayes.core.rules.kernel_map import Mapped, by_draw, by_row, expand_groups


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

    def _factor(self, factor: Factor, which: str, frame: Frame) -> Tensor:
        source = f"{self.name}.{which}"
        known = frame.ahead(source)
        if known is not None:
            return known
        if self.clip is None and type(factor.spread) is DeltaPosterior:
            point = frame.pick(factor.loc)
            return point.reshape(point.shape[0], 1, 1, -1)

        def make() -> Tensor:
            spread = _picked(factor, frame)
            if switches.paths.factors and frame.noise != "mean":
                known = factor_sweep.sampled(factor, ("r", "s").index(which), self.clip, frame, self.name)
                if known is not None:  # as the kernels make it, which may take another call of this layer
                    return known
                return sample_factor(spread, frame, source, self.clip)
            value = sample(spread, frame, source, frame.noise == "example", True)
            if self.clip is None or frame.noise == "mean":  # samples are clipped, means are not
                return value
            return value.clamp(-self.clip, self.clip)

        return frame.once(source, make)

    def forward(self, op: Operation, inputs: Inputs, untiled: bool = False) -> Tensor:
        """The layer's output for these inputs."""
        frame = context.frame(self.name, inputs[0].shape[0], self.components, untiled)
        if not self.additive and factor_sweep.usable(op, inputs[0], frame):
            made = self._swept(op, inputs, frame)
            if made is not None:
                return made
        s = None if self.s is None else self._factor(self.s, "s", frame)  # [K, S, B or 1, C]
        r = None if self.r is None else self._factor(self.r, "r", frame)
        bias = None if op.bias is None else frame.pick(op.bias)  # [K, C]
        if self.additive:
            return _added(op, inputs, r, s, bias, frame)
        if untiled and s is not None:
            inputs, s = scale_inputs(op, inputs, s, frame, torch.mul), None  # to the rows of all draws
            frame.tiled = True
        choice = factor_folding.choose(op, inputs, r, s, frame)
        if (
            choice is factor_folding.ROWS
            and not untiled
            and factor_convolution.usable(op, inputs[0], s, r, frame)
        ):
            y = factor_convolution.convolved(op, inputs[0], s, r)
            return y if bias is None else row_factors.affine(y, None, bias, op.output_axis, frame)
        if not choice.outer and factor_product.usable(op, inputs[0], s, r):
            return factor_product.factored(op, inputs[0], s, r, bias, frame, by_draw=choice.inner)
        if s is not None and not choice.inner:
            inputs = scale_inputs(op, inputs, s, frame, torch.mul, private=True)
        if choice.outer:  # then whatever there is of s is in the weight too
            return factor_folding.apply(op, inputs, r, s, bias, frame)
        y = (
            factor_folding.apply(op, inputs, None, s, None, frame)
            if choice.inner
            else op.compute(inputs, op.weight, None)
        )
        if switches.paths.rows:
            return row_factors.affine(y, r, bias, op.output_axis, frame)
        if r is not None:
            y = rowwise(y, r, op.output_axis, frame, torch.mul)
        return y if bias is None else rowwise(y, bias[:, None, None], op.output_axis, frame, torch.add)

    def mapped(self, op: Operation, frame: Frame) -> Mapped:
        """Factors for every row, or in the weight where all rows of a draw share them."""
        s = None if self.s is None else self._factor(self.s, "s", frame)  # [K, S, B or 1, C]
        r = None if self.r is None else self._factor(self.r, "r", frame)
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
            return Mapped(frame.once(f"{self.name}.folded", lambda: _into(op.weight, r, s)), bias)
        inner, outer = (None if f is None else by_row(f, frame) for f in (s, r))
        return Mapped(weight, bias, inner, outer)

    def by_lines(self, op: Operation, frame: Frame) -> Mapped | None:
        """Factors that the rows of a draw share, as they are."""
        if self.additive:
            return None
        s, r = (None if f is None else self._factor(f, n, frame) for f, n in ((self.s, "s"), (self.r, "r")))
        if any([f is not None and f.shape[2] != 1 for f in (r, s)]):
            return None
        draws = frame.components, frame.samples, 1
        inner, outer = (None if f is None else by_draw(f.expand(*draws, f.shape[-1])) for f in (s, r))
        return Mapped(op.weight.unsqueeze(0), None if op.bias is None else frame.pick(op.bias), inner, outer)

    def _swept(self, op: Operation, inputs: Inputs, frame: Frame) -> Tensor | None:
        """The output by CPU kernels; None where they do not do it, or other ways take less time."""
        x, (r, s) = inputs[0], (self._modules.get("r"), self._modules.get("s"))
        if frame.tiled and (frame.noise == "shared" or not (_noisy(s) or _noisy(r))):
            if not op.is_matrix or x.numel() > factor_sweep.MANY:
                choice = factor_folding.choose_shared(op, inputs, r is not None, s is not None, frame)
                if choice.outer or (choice.inner and not op.is_matrix):
                    return None
        elif not frame.tiled and s is None:
            return None
        outer, inner = (
            None if f is None else factor_sweep.seeded(f, stream, self.clip, frame, self.name)  # type: ignore[arg-type]
            for stream, f in enumerate((r, s))
        )
        if (outer is None) != (r is None) or (inner is None) != (s is None):
            return None
        bias = factor_sweep.held(op, "bias")
        if bias is not None:
            bias = frame.pick(bias).contiguous()  # [K, C]
        if op.is_matrix:
            return product_sweep.multiplied(op, x.contiguous(), inner, outer, bias, frame)
        slots = op.input_slots
        if len(slots) != 1 or slots[0].position != 0:
            return None
        if inner is not None:
            draws = 1 if frame.tiled else frame.draws
            changed = factor_sweep.scaled(x, inner, None, slots[0].axis, draws, private=True)
            if changed is None:
                return None
            x = changed
        y = op.compute((x, *inputs[1:]), op.weight, None)
        if outer is None:
            frame.tiled = True
            return row_factors.affine(y, None, bias, op.output_axis, frame)
        done = factor_sweep.scaled(y, outer, bias, op.output_axis, own=True)
        return (
            factor_sweep.scaled(y.contiguous(), outer, bias, op.output_axis, own=True)
            if done is None
            else done
        )

    def covered(self, seen: set[str]) -> bool:
        """Whether the KL of its factors is among those ``seen``: both are done together."""
        return f"{self.name}.r" in seen or f"{self.name}.s" in seen

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


def _noisy(factor: nn.Module | None) -> bool:
    return factor is not None and type(factor._modules["spread"]) is not DeltaPosterior


def _added(
    op: Operation, inputs: Inputs, r: Tensor | None, s: Tensor | None, bias: Tensor | None, frame: Frame
) -> Tensor:
    """op(s + x, W) + r + b."""
    if s is not None:
        inputs = scale_inputs(op, inputs, s, frame, torch.add)
    y = op.compute(inputs, op.weight, None)
    for term in (r, None if bias is None else bias[:, None, None]):
        if term is not None:
            y = rowwise(y, term, op.output_axis, frame, torch.add)
    return y


def _picked(factor: Factor, frame: Frame) -> d.Spread:
    spread: d.Spread = factor()
    if frame.draw is None or frame.draw.component_ids is None:
        return spread
    return with_parameters(spread, frame.pick)
