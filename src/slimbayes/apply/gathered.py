"""The random weights of a small network sampled together before it runs, their noise drawn at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from slimbayes import fast
from slimbayes.apply.base import Operation, Rule
from slimbayes.apply.sampled import SampledRule
from slimbayes.apply.weights import sample_weights
from slimbayes.context import Draw, Frame
from slimbayes.noise import fresh_noise, transformed
from slimbayes.weightkl import Byproduct, Raw, spread_of

MOST = (
    1 << 22
)  # numbers to sample; with more, the calls saved do not pay for the memory of all samples at once
_ALIGNED = 16  # numbers: a part of the noise starts where a vector register's worth does


def prefill_weights(layers: Sequence[tuple[Rule, Operation]], draw: Draw) -> None:
    """Sample all weights of these layers, where that saves time: for gradients, on the CPU.

    Without gradients only their noise is drawn at once, so that a generator's state gives the same draws either way.
    """
    if not fast.paths.weights or draw.noise == "mean":
        return
    if torch.compiler.is_compiling():
        _draw_noise(layers, draw)
        return
    if transformed() or not (torch.is_grad_enabled() or draw.seed is None):
        return
    known, centred = _gather(layers, draw)
    draws = draw.components * draw.samples
    if not known.raws or draws * sum(raw.loc.numel() for raw in known.raws) > MOST:
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


def _own_parameter(op: Operation, which: str, tensor: Tensor) -> bool:
    """Whether a layer's tensor is what it will be when the layer runs: its own parameter, which no hook sets."""
    return op._parameters.get(which) is tensor and not op._forward_pre_hooks


def _draw_noise(layers: Sequence[tuple[Rule, Operation]], draw: Draw) -> None:
    """The noise of all weights at once, for compiled code: there every draw of noise is a call out of it."""
    if draw.seed is not None or not fast.paths.noise:
        return
    sources: list[str] = []
    means: list[Tensor] = []
    for rule, op in layers:
        if not isinstance(rule, SampledRule) or (rule.estimator != "shared" and draw.noise == "example"):
            continue
        for which in ("weight", "bias"):
            posterior, mean, source, _ = rule.tensor(op, which)
            if mean is None or mean.device.type != "cpu" or not spread_of(posterior) or source in sources:
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
    """The tensors that these layers will ask for, each once and all of one type, and which without their mean."""
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
            found = None if source in known.sources else rule.by_parameters(op, which)
            if found is None or not _alike(found[0], known) or not _own_parameter(op, which, found[0].loc):
                continue
            known.add(source, *found)
            centred.append(alone)
    return known, centred


def _alike(raw: Raw, known: Byproduct) -> bool:
    first = known.raws[0].loc if known.raws else raw.loc
    return raw.loc.device.type == "cpu" and raw.loc.dtype == first.dtype


def _noises(known: Byproduct, draws: int, draw: Draw) -> list[Tensor]:
    """ε [draws, *shape] for every tensor."""
    first = known.raws[0].loc
    if draw.seed is not None:
        # With a count of its own: a layer that has to sample for itself starts the draw's.
        frame = Frame(draw.components, draw.samples, draw.batch, 1, draw.noise, replace(draw, calls={}))
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
