"""The random weights of a small network sampled together before it runs, their noise drawn at once."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.accelerate import switches
from slimbayes.accelerate.compile.weight_samples import compiled_weights
from slimbayes.accelerate.factor_groups import on_gpu
from slimbayes.accelerate.random_weights import by_parameters
from slimbayes.accelerate.weight_kl import Byproduct, Raw, RawPrior, spread_of
from slimbayes.accelerate.weight_samples import by_kernel, make_weights, sample_weights
from slimbayes.core.context import Draw, Frame
from slimbayes.core.conversion import hooked
from slimbayes.core.noise import fresh_noise, transformed
from slimbayes.core.paths import FastPath, Layers
from slimbayes.core.rules.base import Operation, Rule, own_parameter, parameter_of
from slimbayes.core.rules.meanfield import SampledRule

MOST = (
    1 << 22
)  # numbers to sample; with more, the calls saved do not pay for the memory of all samples at once
_ALIGNED = 16  # numbers: a part of the noise starts where a vector register's worth does


class WeightGroups(FastPath):
    """The weights of a small network on the CPU: there the calls cost more than the arithmetic."""

    def on(self) -> bool:
        """By ``weights``."""
        return switches.paths.weights

    def prepare(self, model: nn.Module, layers: Layers, draw: Draw, course: Any) -> None:
        """All weights, unless a hook may change one before its layer runs."""
        if not on_gpu(layers) and (torch.compiler.is_compiling() or not hooked(model)):
            prefill_weights(layers, draw)


def prefill_weights(layers: Sequence[tuple[Rule, Operation]], draw: Draw) -> None:
    """Sample all weights of these layers, where that saves time: on the CPU.

    Without gradients and without the kernels in C only their noise is drawn at once, so that a generator's state
    gives the same draws either way.
    """
    if not switches.paths.weights or draw.noise == "mean":
        return
    if torch.compiler.is_compiling():
        if draw.seed is None and switches.paths.noise:
            compiled_weights(layers, draw, MOST)
            _draw_noise(layers, draw)
        return
    if transformed() or not (torch.is_grad_enabled() or draw.seed is None):
        return
    known, centred = _gather(layers, draw)
    draws = draw.components * draw.samples
    if not known.raws or draws * sum(raw.loc.numel() for raw in known.raws) > MOST:
        return
    if draw.seed is None and by_kernel(known):
        single = draws == 1 and not any(centred)
        values = make_weights(known, draws, centred, axis=not single)
        for source, value, alone in zip(known.sources, values, centred, strict=True):
            form = ".centred" if alone else ".single" if single else ""
            draw.prefilled[source + form] = value
            draw.prefilled[f"{source}.seed"] = known.noise_of(source)
        draw.byproducts[known.sources[0]] = known
        return
    noises = _noises(known, draws, draw)
    if not torch.is_grad_enabled():
        for source, noise in zip(known.sources, noises, strict=True):
            draw.noises[source] = noise.unflatten(0, (draw.components, draw.samples, 1))
        return
    for source, value, noise, alone in zip(
        known.sources, sample_weights(known, noises, centred), noises, centred, strict=True
    ):
        draw.prefilled[f"{source}.noise"] = noise
        draw.prefilled[f"{source}.centred" if alone else source] = value
    draw.byproducts[known.sources[0]] = known


def _draw_noise(layers: Sequence[tuple[Rule, Operation]], draw: Draw) -> None:
    """The noise of all weights at once, for compiled code: there every draw of noise is a call out of it."""
    sources: list[str] = []
    means: list[Tensor] = []
    for rule, op in layers:
        if not isinstance(rule, SampledRule) or (rule.estimator != "shared" and draw.noise == "example"):
            continue
        for which in ("weight", "bias"):
            posterior, mean, source, _ = rule.tensor(op, which)
            if mean is None or mean.device.type != "cpu" or not spread_of(posterior):
                continue
            if source in sources or source in draw.prefilled:
                continue
            if mean.dtype == torch.float32:
                sources.append(source)
                means.append(mean)
    draws = draw.components * draw.samples
    if not means or draws * sum([mean.numel() for mean in means]) > MOST:
        return
    for source, part, mean in zip(sources, _parts(means, draws), means, strict=True):
        draw.noises[source] = part.reshape(draw.components, draw.samples, 1, *mean.shape)


def _gather(layers: Sequence[tuple[Rule, Operation]], draw: Draw) -> tuple[Byproduct, list[bool]]:
    """The tensors that these layers will ask for, each once and all of one type, and which without their mean.

    What was found for these layers is used again as long as the facts that it follows from are the same.
    """
    facts = Facts(layers, (draw.noise, draw.seed is None))
    known = _FOUND.get(layers[0][0]) if layers else None
    if known is None or known.facts != facts:
        found, centred = _look(layers, draw)
        if not layers or not facts.explain(found):
            return found, centred
        known = _Found(facts, found.sources, found.raws, found.priors, centred)
        _FOUND[layers[0][0]] = known
    return Byproduct(known.sources, known.raws, known.priors, [], facts=facts), known.centred


class Facts:
    """All that decides what is gathered from these layers: objects, compared by identity, and values.

    No layer is among them: whoever keeps the facts does not keep the network.
    """

    def __init__(self, layers: Sequence[tuple[Rule, Operation]], mode: tuple[Any, ...]) -> None:
        self.mode = mode
        self.objects: list[Any] = []
        self.values: list[Any] = []
        for rule, op in layers:
            if type(rule) is not SampledRule:
                continue
            self.values += (
                id(rule), id(op), rule.estimator, rule.tied_mean, rule.name, rule.weight_source,
                rule.bias_source, op.fan_in, len(op._forward_pre_hooks),
            )  # fmt: skip
            self.objects.append(rule.prior)
            for which in ("weight", "bias"):
                mean, spread = parameter_of(op, which), rule._modules.get(which)
                self.objects += (mean, spread)
                if mean is not None:
                    self.values += (mean.dtype, mean.device)
                if spread is not None:
                    own = spread._parameters.values()
                    self.objects += (type(spread), *own)
                    self.values += (spread.__dict__.get("maximum"), *[p.dtype for p in own if p is not None])

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Facts)
            and self.mode == other.mode
            and self.values == other.values
            and len(self.objects) == len(other.objects)
            and all(map(is_, self.objects, other.objects))
        )

    __hash__ = None  # type: ignore[assignment]

    def explain(self, known: Byproduct) -> bool:
        """Whether every tensor found is among them, and no attribute or property that may change unseen."""
        seen = {id(fact) for fact in self.objects}
        return all([id(tensor) in seen for tensor in known.tensors])

    def hold(self, layers: Sequence[Any]) -> bool:
        """Whether they are those of these converted layers still."""
        return self == Facts([(layer.bayes, layer) for layer in layers], self.mode)


class _Found(NamedTuple):
    """What was gathered, and the facts that it follows from."""

    facts: Facts
    sources: list[str]
    raws: list[Raw]
    priors: list[RawPrior | None]
    centred: list[bool]


_FOUND: weakref.WeakKeyDictionary[Rule, _Found] = weakref.WeakKeyDictionary()  # by the first rule


def _look(layers: Sequence[tuple[Rule, Operation]], draw: Draw) -> tuple[Byproduct, list[bool]]:
    known = Byproduct([], [], [], [])
    centred: list[bool] = []
    for rule, op in layers:
        if type(rule) is not SampledRule or (rule.estimator == "local" and draw.noise == "example"):
            continue
        alone = rule.estimator == "flipout" and draw.noise == "example"
        # With a seed flipout's bias has noise for every example.
        for which in ("weight",) if alone and draw.seed is not None else ("weight", "bias"):
            if getattr(op, which) is None:
                continue
            source = rule.tensor(op, which)[2]
            found = None if source in known.sources else by_parameters(rule, op, which)
            if found is None or not _alike(found[0], known) or not own_parameter(op, which, found[0].loc):
                continue
            known.add(source, *found)
            centred.append(
                alone and (which == "weight" or not op.partial)
            )  # a kernel's bias is sampled whole
    return known, centred


def _alike(raw: Raw, known: Byproduct) -> bool:
    first = known.raws[0].loc if known.raws else raw.loc
    return raw.loc.device.type == "cpu" and raw.loc.dtype == first.dtype


def _noises(known: Byproduct, draws: int, draw: Draw) -> list[Tensor]:
    """ε [draws, *shape] for every tensor."""
    first = known.raws[0].loc
    if draw.seed is not None:
        # With a count of its own: a layer that has to sample for itself starts the draw's.
        frame = Frame(
            draw.components, draw.samples, draw.batch, 1, draw.noise, replace(draw, calls={}, memory=None)
        )
        return [
            frame.noise_like(
                "normal", source, tuple(raw.loc.shape), first.dtype, first.device, per_example=False
            ).flatten(0, 2)
            for source, raw in zip(known.sources, known.raws, strict=True)
        ]
    return _parts([raw.loc for raw in known.raws], draws)


def _parts(means: Sequence[Tensor], draws: int) -> list[Tensor]:
    """Fresh ε [draws, *shape] for every mean, cut from one piece."""
    sizes = [-(-draws * mean.numel() // _ALIGNED) * _ALIGNED for mean in means]
    whole = fresh_noise("normal", (sum(sizes),), means[0].dtype, means[0].device)
    parts, start = [], 0
    for mean, size in zip(means, sizes, strict=True):
        parts.append(whole[start : start + draws * mean.numel()].view(draws, *mean.shape))
        start += size
    return parts
