"""The patches of a whole network at once: one operation chooses among the versions of all its small tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.accelerate import switches
from slimbayes.accelerate.factor_groups import on_gpu
from slimbayes.accelerate.gpu.patches import choose_patches
from slimbayes.accelerate.patch_versions import settles
from slimbayes.core.context import Draw
from slimbayes.core.noise import transformed
from slimbayes.core.paths import FastPath, Layers
from slimbayes.core.rules.base import Operation, Rule
from slimbayes.core.rules.patching import IndexedRule

# Elements of one version: what is larger is chosen where it is used, without a copy of all versions.
_LARGEST = 1 << 14


class PatchIndices(FastPath):
    """A compiler would else repeat index and gather for every pixel that reads a norm's weight."""

    def on(self) -> bool:
        """By ``factors``."""
        return switches.paths.factors

    def prepare(self, model: nn.Module, layers: Layers, draw: Draw, course: Any) -> None:
        """All small patches, on a GPU."""
        if on_gpu(layers):
            prefill_patches(layers, draw)


def prefill_patches(layers: Iterable[tuple[Rule, Operation]], draw: Draw) -> None:
    """Choose all small patches with fixed mixing probabilities before the network runs.

    A compiler would else repeat index and gather for every pixel that reads a norm's weight, and eager code start
    a handful of kernels for each.
    """
    if (
        not switches.paths.factors
        or draw.seed is not None
        or draw.noise == "mean"
        or draw.component_ids is not None
    ):
        return
    if not torch.compiler.is_compiling() and transformed():
        return
    found: dict[str, list[tuple[str, Tensor, int]]] = {}
    sources: set[str] = set()
    mixings: dict[str, int] = {}
    for rule, op in layers:
        if not isinstance(rule, IndexedRule) or not settles(rule):
            continue  # statistics need the index itself, and so do weights of several sizes
        group = -1 if rule.per_element else mixings.setdefault(rule.mixing.name, len(mixings))
        for source, points in ((rule.weight_source, op.weight), (rule.bias_source, op.bias)):
            if points is None or source in sources or points.numel() > _LARGEST * points.shape[0]:
                continue
            if group >= 0 and op.weight.numel() > _LARGEST * points.shape[0]:
                continue  # the weight's own index is drawn elsewhere
            sources.add(source)
            place = f"{points.device.type}:{points.device.index} {points.dtype} {points.shape[0]}"
            found.setdefault(place, []).append((source, points, group))
    draws = draw.components * draw.samples
    for members in found.values():
        seed = torch.randint(0, 2**62, (1,), device=members[0][1].device)
        chosen = choose_patches([each[1] for each in members], [each[2] for each in members], seed, draws)
        for (source, _, _), value in zip(members, chosen, strict=True):
            draw.prefilled[f"{source} chosen"] = value
