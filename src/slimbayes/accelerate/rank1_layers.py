"""A rank-1 layer in fewer sweeps: by kernels in C, by GPU kernels, or with factors folded into the weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slimbayes.accelerate import factor_folding, switches
from slimbayes.accelerate.cpu import factor_sweep, product_sweep
from slimbayes.accelerate.gpu import factor_convolution
from slimbayes.core.context import Frame
from slimbayes.core.paths import FastPath
from slimbayes.core.posteriors import DeltaPosterior
from slimbayes.core.rules.base import Inputs, Operation, Rule, rowwise, scale_inputs
from slimbayes.core.rules.rank1 import Factor, Rank1Rule


class Rank1Layers(FastPath):
    """y = r ∘ op(s ∘ x, W) + b_k by the cheapest way for the layer's shape."""

    def on(self) -> bool:
        """By ``rows``, ``folded`` or ``factors``."""
        return switches.paths.rows or switches.paths.folded or switches.paths.factors

    def factor(self, rule: Rule, factor: nn.Module, which: str, frame: Frame) -> Tensor | None:
        """A factor's samples as the kernels make them, which may take another call of this layer."""
        assert isinstance(rule, Rank1Rule) and isinstance(factor, Factor)
        make = factor_sweep.sampled(factor, ("r", "s").index(which), rule.clip, frame, rule.name)
        return None if make is None else frame.derived(f"{rule.name}.{which}", make)

    def output(self, rule: Rule, op: Operation, inputs: Inputs, frame: Frame) -> Tensor | None:
        """The output of a multiplicative rank-1 layer."""
        if type(rule) is not Rank1Rule or rule.additive:
            return None
        if factor_sweep.usable(op, inputs[0], frame):
            made = _by_kernels(rule, op, inputs, frame)
            if made is not None:
                return made
        return _by_torch(rule, op, inputs, frame) if frame.tiled else None


def _by_torch(rule: Rank1Rule, op: Operation, inputs: Inputs, frame: Frame) -> Tensor | None:
    """By a GPU kernel, or with factors in the weight; None where rows are scaled one after the other."""
    s = None if rule.s is None else rule.sample_factor(rule.s, "s", frame)  # [K, S, B or 1, C]
    r = None if rule.r is None else rule.sample_factor(rule.r, "r", frame)
    bias = None if op.bias is None else frame.pick(op.bias)  # [K, C]
    choice = factor_folding.choose(op, inputs, r, s, frame)
    if choice.outer:
        if s is not None and not choice.inner:
            inputs = scale_inputs(op, inputs, s, frame, torch.mul, private=True)
        return factor_folding.apply(op, inputs, r, s if choice.inner else None, bias, frame)
    if choice.inner:
        y = factor_folding.apply(op, inputs, None, s, None, frame)
        y = y if r is None else rowwise(y, r, op.output_axis, frame, torch.mul)
    elif factor_convolution.usable(op, inputs[0], s, r, frame):
        y = factor_convolution.convolved(op, inputs[0], s, r)
    else:
        return None
    return y if bias is None else rowwise(y, bias[:, None, None], op.output_axis, frame, torch.add)


def _by_kernels(rule: Rank1Rule, op: Operation, inputs: Inputs, frame: Frame) -> Tensor | None:
    """By CPU kernels; None where they do not do it, or other ways take less time."""
    x, (r, s) = inputs[0], (rule._modules.get("r"), rule._modules.get("s"))
    if frame.tiled and (frame.noise == "shared" or not (_noisy(s) or _noisy(r))):
        if not op.is_matrix or x.numel() > factor_sweep.MANY:
            choice = factor_folding.choose_shared(op, inputs, r is not None, s is not None, frame)
            if choice.outer or (choice.inner and not op.is_matrix):
                return None
    elif not frame.tiled and s is None:
        return None
    slots = op.input_slots
    if not op.is_matrix and (len(slots) != 1 or slots[0].position != 0):
        return None
    outer, inner = (_factor(rule, which, frame) for which in ("r", "s"))
    if (outer is None) != (r is None) or (inner is None) != (s is None):
        return None
    bias = factor_sweep.held(op, "bias")
    if bias is not None:
        bias = frame.pick(bias).contiguous()  # [K, C]
        if outer is not None and len(outer.loc) > len(bias):
            bias = bias.repeat_interleave(len(outer.loc) // len(bias), 0)
    if op.is_matrix:
        return product_sweep.multiplied(op, x.contiguous(), inner, outer, bias, frame)
    if inner is not None:
        draws = 1 if frame.tiled else frame.draws
        changed = factor_sweep.scaled(x, inner, None, slots[0].axis, draws, private=True)
        if changed is None:
            return None
        x = changed
    y = op.compute((x, *inputs[1:]), op.weight, None)
    if outer is None:
        frame.tiled = True
        return y if bias is None else rowwise(y, bias[:, None, None], op.output_axis, frame, torch.add)
    done = factor_sweep.scaled(y, outer, bias, op.output_axis, own=True)
    return (
        factor_sweep.scaled(y.contiguous(), outer, bias, op.output_axis, own=True) if done is None else done
    )


def _factor(rule: Rank1Rule, which: str, frame: Frame) -> factor_sweep.Seeded | None:
    """A factor as the kernels take it: with noise that they make, or in numbers."""
    factor = rule._modules.get(which)
    if factor is None:
        return None
    assert isinstance(factor, Factor)
    made = factor_sweep.seeded(factor, ("r", "s").index(which), rule.clip, frame, rule.name)
    return factor_sweep.given(rule.sample_factor(factor, which, frame), frame) if made is None else made


def _noisy(factor: nn.Module | None) -> bool:
    return factor is not None and type(factor._modules["spread"]) is not DeltaPosterior
