"""The random weights of a small network sampled together before it runs, by one call of the kernels in C."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from slimbayes.accelerate import switches
from slimbayes.accelerate.compile.weight_samples import compiled_weights
from slimbayes.accelerate.factor_groups import on_gpu
from slimbayes.accelerate.random_weights import by_parameters
from slimbayes.accelerate.situation import by_pointers
from slimbayes.accelerate.weight_kl import Byproduct, LayerFacts, Raw, RawPrior
from slimbayes.accelerate.weight_samples import by_kernel, make_weights
from slimbayes.core.context import Draw
from slimbayes.core.conversion import hooked
from slimbayes.core.paths import FastPath, Layers
from slimbayes.core.rules.base import Operation, Rule, own_parameter
from slimbayes.core.rules.meanfield import SampledRule

MOST = 1 << 22  # numbers; with more, the calls saved do not pay for the memory of all samples at once


class WeightGroups(FastPath):
    """The weights of a small network on the CPU: there the calls cost more than the arithmetic."""

    def on(self) -> bool:
        """By ``weights``."""
        return switches.paths.weights

    def prepare(self, model: nn.Module, layers: Layers, draw: Draw, course: Any) -> None:
        """All weights, unless a hook may change one before its layer runs."""
        if on_gpu(layers) or not any([isinstance(rule, SampledRule) for rule, _ in layers]):
            return
        if torch.compiler.is_compiling() or not hooked(model):
            prefill_weights(layers, draw)


def prefill_weights(layers: Sequence[tuple[Rule, Operation]], draw: Draw) -> None:
    """Sample all weights of these layers, where that saves time: on the CPU, without a seed of the user's."""
    if draw.noise == "mean" or draw.seed is not None:
        return
    if torch.compiler.is_compiling():
        if switches.paths.noise:
            compiled_weights(layers, draw, MOST)
        return
    if not by_pointers():
        return
    known, centred = _gather(layers, draw)
    draws = draw.components * draw.samples
    if draws * sum([raw.loc.numel() for raw in known.raws]) > MOST or not by_kernel(known):
        return
    single = draws == 1 and not any(centred)
    values = make_weights(known, draws, centred, axis=not single)
    for source, value, alone in zip(known.sources, values, centred, strict=True):
        form = ".centred" if alone else ".single" if single else ""
        draw.prefilled[source + form] = value
        draw.prefilled[f"{source}.seed"] = known.noise_of(source)
    if known.total is not None:
        draw.byproducts[known.sources[0]] = known


def _gather(layers: Sequence[tuple[Rule, Operation]], draw: Draw) -> tuple[Byproduct, list[bool]]:
    """The tensors that these layers will ask for, each once and all of one type, and which without their mean.

    What was found for these layers is used again as long as the facts that it follows from are the same.
    """
    facts = LayerFacts(layers, draw.noise)
    known = _FOUND.get(layers[0][0]) if layers else None
    if known is None or known.facts != facts:
        known = _look(layers, draw, facts)
        if not layers or not facts.explain(known.raws):
            return Byproduct(known.sources, known.raws, known.priors), known.centred
        _FOUND[layers[0][0]] = known
    return Byproduct(known.sources, known.raws, known.priors, facts), known.centred


class _Found(NamedTuple):
    """What was gathered, and the facts that it follows from."""

    facts: LayerFacts
    sources: list[str]
    raws: list[Raw]
    priors: list[RawPrior | None]
    centred: list[bool]


_FOUND: weakref.WeakKeyDictionary[Rule, _Found] = weakref.WeakKeyDictionary()  # by the first rule


def _look(layers: Sequence[tuple[Rule, Operation]], draw: Draw, facts: LayerFacts) -> _Found:
    known = _Found(facts, [], [], [], [])
    for rule, op in layers:
        if type(rule) is not SampledRule or (rule.estimator == "local" and draw.noise == "example"):
            continue
        alone = rule.estimator == "flipout" and draw.noise == "example"
        for which in ("weight", "bias"):
            if getattr(op, which) is None:
                continue
            source = rule.tensor(op, which)[2]
            found = None if source in known.sources else by_parameters(rule, op, which)
            if found is None or not found[0].loc.is_cpu or not own_parameter(op, which, found[0].loc):
                continue
            known.sources.append(source)
            known.raws.append(found[0])
            known.priors.append(found[1])
            # A kernel's bias is sampled whole.
            known.centred.append(alone and (which == "weight" or not op.partial))
    return known
