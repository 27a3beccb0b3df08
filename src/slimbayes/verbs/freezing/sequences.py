"""Frozen layers with several weights: recurrent layers and cells as torch's own modules, attention by its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from slimbayes.core.context import Draw, Frame
from slimbayes.sequences.attention import BayesMultiheadAttention
from slimbayes.sequences.kernels import repeat_axis
from slimbayes.sequences.scores import attend_by_weights, join_masks
from slimbayes.verbs.freezing.layers import FrozenLayer, Mask, product
from slimbayes.verbs.freezing.network import repeat_rows

State = tuple[Tensor, ...]


class Recurrent(FrozenLayer):
    """An LSTM, GRU or RNN for every group of rows: plain torch layers, with time first or as the network has it."""

    def __init__(self, members: Sequence[nn.RNNBase]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Outputs and last states in the forms of torch's own layer."""
        if isinstance(input, PackedSequence):
            return self._packed(input, hx)
        axis = 0 if self.batch_first else 1
        if self.repeats > 1:
            input = repeat_axis(input, axis, self.repeats)
            hx = None if hx is None else repeat_axis(hx, 1, self.repeats)
        if len(self.members) == 1:
            return self.members[0](input, hx)
        count = len(self.members)
        states = split_states(hx, count)
        made = [
            member(own, state)
            for member, own, state in zip(self.members, split(input, count, axis), states, strict=True)
        ]
        return torch.cat([output for output, _ in made], axis), join_states([state for _, state in made])

    def _packed(self, packed: PackedSequence, hx: Any) -> Any:
        """Sequences of several lengths: unpacked, cut into groups of rows, and packed again for each."""
        if len(self.members) == 1:
            return self.members[0](packed, hx)
        count = len(self.members)
        x, lengths = pad_packed_sequence(packed)  # [T, R, in], rows as they came
        outputs, states = [], []
        for member, own, long, state in zip(
            self.members, split(x, count, 1), lengths.chunk(count), split_states(hx, count), strict=True
        ):
            made, last = member(pack_padded_sequence(own, long, enforce_sorted=False), state)
            outputs.append(pad_packed_sequence(made, total_length=x.shape[0])[0])
            states.append(last)
        return repacked(torch.cat(outputs, 1).transpose(0, 1), lengths, packed), join_states(states)


class MaskedRecurrent(FrozenLayer):
    """MCDropout inside sequences: masks on what every layer and direction reads, and between layers.

    ``parts`` are recurrent layers of one layer and direction each, rows first, in the order of their states.
    """

    def __init__(
        self,
        layer: nn.RNNBase,
        parts: Sequence[Recurrent],
        masks: Sequence[nn.Module],
        between: Sequence[nn.Module],
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(parts)
        self.masks = nn.ModuleList(masks)
        self.between = nn.ModuleList(between)
        self.mode, self.batch_first, self.bidirectional = layer.mode, layer.batch_first, layer.bidirectional
        self.num_layers, self.hidden_size = layer.num_layers, layer.hidden_size

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Outputs and last states in the forms of torch's own layer."""
        if isinstance(input, PackedSequence):
            x, lengths = pad_packed_sequence(input, batch_first=True)
            output, states = self._layers(x, hx, lengths)
            return repacked(output, lengths, input), states
        x = input if self.batch_first else input.transpose(0, 1)  # [R, T, in]
        if self.repeats > 1:
            x = repeat_axis(x, 0, self.repeats)
            hx = None if hx is None else repeat_axis(hx, 1, self.repeats)
        output, states = self._layers(x, hx, None)
        return output if self.batch_first else output.transpose(0, 1), states

    def _layers(self, x: Tensor, hx: Any, lengths: Tensor | None) -> tuple[Tensor, Any]:
        lstm, directions = self.mode == "LSTM", 2 if self.bidirectional else 1
        last: list[Any] = []
        for layer in range(self.num_layers):
            outputs = []
            for place in range(layer * directions, (layer + 1) * directions):
                backwards = directions == 2 and place % 2 == 1
                own = self.masks[place](x)
                start: Any = None
                if hx is not None:
                    start = tuple(s[place : place + 1] for s in hx) if lstm else hx[place : place + 1]
                made, state = self._part(place, reverse(own, lengths) if backwards else own, start, lengths)
                outputs.append(reverse(made, lengths) if backwards else made)
                last.append(state)
            x = outputs[0] if directions == 1 else torch.cat(outputs, 2)
            if layer < self.num_layers - 1:
                x = self.between[layer](x)
        if lstm:
            return x, tuple(torch.cat(own) for own in zip(*last, strict=True))
        return x, torch.cat(last)

    def _part(self, place: int, x: Tensor, start: Any, lengths: Tensor | None) -> tuple[Tensor, Any]:
        if lengths is None:
            made, state = self.members[place](x, start)
            return made, state
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        made, state = self.members[place](packed, start)
        return pad_packed_sequence(made, batch_first=True, total_length=x.shape[1])[0], state


def reverse(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Sequences [R, T, ...] from their ends; what lies behind an end stays."""
    if lengths is None:
        return x.flip(1)
    steps = torch.arange(x.shape[1], device=x.device)
    ends = lengths.to(x.device).unsqueeze(1)
    index = torch.where(steps < ends, ends - 1 - steps, steps)  # [R, T]
    return x.gather(1, index.unsqueeze(2).expand(-1, -1, x.shape[2]))


def repacked(output: Tensor, lengths: Tensor, like: PackedSequence) -> PackedSequence:
    """Outputs [R, T, ...] packed in the order of what came in."""
    if like.sorted_indices is not None:
        output = output.index_select(0, like.sorted_indices)
        lengths = lengths.index_select(0, like.sorted_indices.cpu())
    return like._replace(data=pack_padded_sequence(output, lengths, batch_first=True).data)


class Cell(FrozenLayer):
    """An LSTMCell, GRUCell or RNNCell for every group of rows; ``mask`` drops elements of the input."""

    def __init__(self, members: Sequence[nn.RNNCellBase], mask: Mask | None) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.mask = mask

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """The next state, in the form of torch's own cell."""
        if self.repeats > 1:
            first = hx[0] if isinstance(hx, tuple) else hx
            if first is not None and first.shape[0] == input.shape[0]:
                hx = repeat_axis(hx, 0, self.repeats)
            input = repeat_axis(input, 0, self.repeats)
        x = input if self.mask is None else self.mask(input)
        if len(self.members) == 1:
            return self.members[0](x, hx)
        count = len(self.members)
        states = split_states(hx, count, 0)
        made = [
            member(own, state)
            for member, own, state in zip(self.members, split(x, count, 0), states, strict=True)
        ]
        return join_states(made, 0)


class Attention(FrozenLayer):
    """softmax(q kᵀ/√d) v with projections of every draw; ``kernels`` are torch-like weights and biases by group.

    ``layer`` is the converted layer without its parameters and rules: it knows the forms of inputs and masks.
    """

    def __init__(
        self,
        layer: BayesMultiheadAttention,
        kernels: dict[str, tuple[Tensor, Tensor | None]],
        masks: dict[str, Mask],
        draws: int,
        weights_mask: Mask | None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.keys = tuple(kernels)
        for key, (weight, bias) in kernels.items():
            self.register_buffer(f"{key}_weight", weight)
            self.register_buffer(f"{key}_bias", bias)
        self.masks = nn.ModuleDict(masks)
        self.draws = draws
        self.weights_mask = weights_mask

    def _project(self, key: str, x: Tensor, rows: Any, part: slice = slice(None)) -> Tensor:
        """Some rows of a projection, for x [R, T, in], or for the rows of one draw, which then stand for all."""
        if x.shape[0] != rows:
            x = repeat_rows(x, self.draws)
        if key in self.masks:
            x = self.masks[key](x)
        bias = getattr(self, f"{key}_bias")
        return product(x, getattr(self, f"{key}_weight")[:, part], None if bias is None else bias[:, part])

    def _projected(self, q: Tensor, k: Tensor, v: Tensor, rows: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, by as few products as there are inputs: so many masks are drawn."""
        if "q" in self.keys:
            return self._project("q", q, rows), self._project("k", k, rows), self._project("v", v, rows)
        size = self.layer.embed_dim
        if q is k and k is v:
            one, two, three = self._project("qkv", q, rows).chunk(3, -1)
            return one, two, three
        if k is v:  # first, as the converted layer does it
            two, three = self._project("qkv", k, rows, slice(size, 3 * size)).chunk(2, -1)
            return self._project("qkv", q, rows, slice(size)), two, three
        first = self._project("qkv", q, rows, slice(size))
        second = self._project("qkv", k, rows, slice(size, 2 * size))
        return first, second, self._project("qkv", v, rows, slice(2 * size, 3 * size))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs and weights in the forms of torch's own layer."""
        layer = self.layer
        if layer._check_inputs(query, key, value):
            raise ValueError(
                f"a frozen attention layer takes batches [batch, steps, features], got {list(query.shape)}"
            )
        rows = query.shape[0 if layer.batch_first else 1] * self.repeats
        frame = Frame(self.draws, 1, rows // self.draws, 1, "shared", Draw(self.draws, 1, 1, "shared"))
        sources = layer._rows_first(query, key, value, False)
        size = sources[0].shape[1], sources[1].shape[1]
        causal = is_causal and key_padding_mask is None and not need_weights
        attention = None if causal else layer._attention_mask(attn_mask, query.dtype, size, frame)
        padding = layer._padding_mask(key_padding_mask, query.dtype, size[1], False, frame)
        q, k, v = layer._extended(self._projected(*sources, rows))
        mask = join_masks(attention, padding, k.shape[1] - size[1])
        q, k, v = (layer._heads(x) for x in (q, k, v))
        weights = None
        if need_weights or self.weights_mask is not None:
            mixed, weights = attend_by_weights(q, k, v, mask, self.weights_mask, causal)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal)
        output = self._project("out", mixed.transpose(1, 2).flatten(2), rows)
        if weights is not None:
            weights = None if not need_weights else weights.mean(1) if average_attn_weights else weights
        return output if layer.batch_first else output.transpose(0, 1), weights


def split(x: Tensor, count: int, axis: int) -> tuple[Tensor, ...]:
    """Equal groups of rows, in order."""
    groups: tuple[Tensor, ...] = x.unflatten(axis, (count, -1)).unbind(axis)
    return groups


def split_states(hx: Any, count: int, axis: int = 1) -> list[Any]:
    """The states of every group: of LSTMs pairs, of others tensors; None where none are given."""
    if hx is None:
        return [None] * count
    if isinstance(hx, Tensor):
        return list(split(hx, count, axis))
    return list(zip(*[split(state, count, axis) for state in hx], strict=True))


def join_states(states: Sequence[Any], axis: int = 1) -> Any:
    """The states of all groups again."""
    if isinstance(states[0], Tensor):
        return torch.cat(list(states), axis)
    return tuple(torch.cat(own, axis) for own in zip(*states, strict=True))
