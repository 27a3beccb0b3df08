"""The point factors of all convolutions (BatchEnsemble) at once, repeated for every row, for compiled code on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from slimbayes.accelerate import switches
from slimbayes.accelerate.factor_groups import on_gpu
from slimbayes.accelerate.gpu.factors import sample_flat
from slimbayes.accelerate.gpu.joint_parameters import join
from slimbayes.core.context import Draw
from slimbayes.core.paths import FastPath, Layers
from slimbayes.core.posteriors import DeltaPosterior
from slimbayes.core.rules.base import Operation, Rule
from slimbayes.core.rules.rank1 import Factor, Rank1Rule

_CONVOLUTION = 4  # axes of a weight: smaller ones may take their factors in, which needs them unrepeated


class PointFactors(FastPath):
    """Left alone, each point factor costs two small kernels, and two backward."""

    def on(self) -> bool:
        """By ``factors``."""
        return switches.paths.factors

    def prepare(self, model: nn.Module, layers: Layers, draw: Draw, course: Any) -> None:
        """All point factors of convolutions, on a GPU."""
        if on_gpu(layers):
            prefill_points(layers, draw)


def prefill_points(layers: Iterable[tuple[Rule, Operation]], draw: Draw) -> None:
    """Repeat all point factors before the network runs."""
    if not (switches.paths.factors and torch.compiler.is_compiling()) or draw.noise == "mean":
        return
    if draw.component_ids is not None:
        return
    known: set[str] = set()
    sources: list[str] = []
    factors: list[Factor] = []
    clips: list[float | None] = []
    for rule, op in layers:
        if not isinstance(rule, Rank1Rule) or rule.additive or op.weight.dim() < _CONVOLUTION:
            continue
        for which, factor in (("r", rule.r), ("s", rule.s)):
            source = f"{rule.name}.{which}"
            if factor is None or type(factor.spread) is not DeltaPosterior or source in known:
                continue
            loc, clip = factor.loc, rule.clip
            if loc.shape[0] != draw.components or (clips and clip != clips[0]):
                continue
            if factors and (loc.dtype != factors[0].loc.dtype or loc.device != factors[0].loc.device):
                continue
            known.add(source)
            sources.append(source)
            factors.append(factor)
            clips.append(clip)
    if not factors:
        return
    first = factors[0].loc
    kind, dtype = first.device.type, first.dtype
    if torch.is_autocast_enabled(kind) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
    flat = join([factor.loc for factor in factors])
    widths = [factor.loc.shape[1] for factor in factors]
    seed = torch.zeros(1, dtype=torch.int64, device=first.device)  # nothing random in it
    values = sample_flat(
        flat, flat.detach(), widths, seed, draw.samples, draw.batch, "delta", clips[0], dtype
    )
    for source, value in zip(sources, values, strict=True):
        draw.prefilled[source] = value
