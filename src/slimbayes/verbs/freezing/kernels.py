"""Layers with several weights, frozen: what every kernel is in a draw, put into torch's own parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.context import Frame
from slimbayes.core.rules.fixed import Drop
from slimbayes.core.rules.kernel_map import Mapped, expand_groups
from slimbayes.sequences.attention import BayesMultiheadAttention
from slimbayes.sequences.kernels import Several
from slimbayes.verbs.freezing import plain
from slimbayes.verbs.freezing.layers import FrozenLayer, Mask
from slimbayes.verbs.freezing.sequences import Attention, Cell, MaskedRecurrent, Recurrent

_PARTS = ("q", "k", "v")
MakeMask = Callable[[Drop], Mask]


def freeze_several(layer: Several, frame: Frame, mask: MakeMask) -> FrozenLayer | None:
    """The plain form of a recurrent layer, a cell or an attention layer, if all its kernels have one."""
    maps = {kernel.key: kernel.bayes.mapped(kernel, frame) for kernel in layer.kernels}
    if any(not one.by_group and one.shift is None for one in maps.values()):
        return None
    known = {kernel.key: kernel.bayes.fixed(kernel, frame) for kernel in layer.kernels}
    if None in known.values():
        return None
    masks = {key: mask(known[key].drops[0]) for key, one in maps.items() if one.before is not None}  # type: ignore[union-attr]
    if isinstance(layer, BayesMultiheadAttention):
        return _attention(layer, maps, masks, frame.draws, mask)
    groups = max(one.groups for one in maps.values())
    tensors = _parameters(layer, maps, groups)
    if isinstance(layer, nn.RNNCellBase):
        return Cell([plain.recurrent(layer, own) for own in tensors], masks.get("ih"))
    base: Any = layer
    drops = layer.kernels[0].bayes.drops and base.dropout > 0 and base.num_layers > 1
    if not masks and not drops:
        return Recurrent([plain.recurrent(layer, own) for own in tensors])
    return _masked(base, tensors, masks, drops, mask)


def _parameters(layer: Several, maps: dict[str, Mapped], groups: int) -> list[dict[str, Tensor]]:
    """The layer's parameters under torch's names, for every group of rows."""
    biased = any(one.bias is not None for one in maps.values())
    columns: dict[str, Sequence[Tensor]] = {}
    for kernel in layer.kernels:
        one = maps[kernel.key]
        assert kernel.names["weight"] is not None
        columns[kernel.names["weight"]] = _apart(one.weight, groups)
        if kernel.key.startswith("hr"):
            if one.bias is not None:
                raise ValueError(
                    f"layer {layer.source!r} adds to its projected state, for which torch's LSTM has no parameter; "
                    f"freeze it without proj_size, or with multiplicative factors"
                )
        elif biased:
            zero = one.weight.new_zeros(1, one.weight.shape[1])
            name = kernel.names["bias"] or kernel.names["weight"].replace("weight", "bias")
            columns[name] = _apart(zero if one.bias is None else one.bias, groups)
    return [dict(zip(columns, own, strict=True)) for own in zip(*columns.values(), strict=True)]


def _apart(value: Tensor, groups: int) -> Sequence[Tensor]:
    if value.shape[0] == 1:
        return [value.squeeze(0)] * groups
    return expand_groups(value, groups).unbind(0)


def _masked(
    layer: Any, tensors: list[dict[str, Tensor]], masks: dict[str, Mask], drops: bool, mask: MakeMask
) -> FrozenLayer:
    """One recurrent layer for every layer and direction, so that masks find a place before each."""
    directions = 2 if layer.bidirectional else 1
    parts: list[Recurrent] = []
    own_masks: list[nn.Module] = []
    state = layer.proj_size or layer.hidden_size
    for place in range(layer.num_layers * directions):
        end = f"_l{place // directions}" + ("_reverse" if place % directions else "")
        size = layer.input_size if place < directions else state * directions
        options = {"input_size": size, "num_layers": 1, "bidirectional": False, "batch_first": True}
        members = [
            plain.recurrent(
                layer,
                {n.removesuffix(end) + "_l0": v for n, v in group.items() if n.endswith(end)},
                **options,
            )
            for group in tensors
        ]
        parts.append(Recurrent(members))
        own_masks.append(masks.get(f"ih{end}", nn.Identity()))
    between: list[nn.Module] = [
        mask(Drop(f"{layer.source}.between_l{i}", layer.dropout, None)) if drops else nn.Identity()
        for i in range(layer.num_layers - 1)
    ]
    return MaskedRecurrent(layer, parts, own_masks, between)


def _attention(
    layer: BayesMultiheadAttention,
    maps: dict[str, Mapped],
    masks: dict[str, Mask],
    draws: int,
    mask: MakeMask,
) -> FrozenLayer:
    kernels: dict[str, tuple[Tensor, Tensor | None]] = {}
    for key, one in maps.items():
        if key in _PARTS:  # each with its third of the bias, which "q" holds
            one = layer._part(maps, _PARTS.index(key))
        bias = one.bias
        if one.shift is not None:
            bias = one.shift if bias is None else one.shift + expand_groups(bias, draws)
        groups = max(len(one.weight), 1 if bias is None else len(bias))
        weight = torch.stack(list(_apart(one.weight, groups)))
        kernels[key] = weight, None if bias is None else torch.stack(list(_apart(bias, groups)))
    made: Any = plain.shell(layer)
    made.__class__ = BayesMultiheadAttention  # for its forms of inputs and masks; it has no rule any more
    made._modules.clear()
    for name, value in made._parameters.items():
        made._parameters[name] = plain.own(value) if name in ("bias_k", "bias_v") else None
    if layer.in_proj_bias is not None:
        made._parameters["in_proj_bias"] = plain.own(
            layer.kernels[0].bias[:0]
        )  # only whether there is one counts
    rate = layer.dropout if layer.kernels[0].bayes.drops else 0.0
    weights = mask(Drop(f"{layer.source}.weights", rate, None)) if rate > 0 else None
    return Attention(made, kernels, masks, draws, weights)
