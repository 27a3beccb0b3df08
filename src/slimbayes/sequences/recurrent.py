"""LSTM, GRU and RNN: by torch's own kernels where the rows of a draw share their weights, else step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from slimbayes.core.context import Frame
from slimbayes.core.paths import ASKED, first
from slimbayes.core.rules.dropout import dropped
from slimbayes.core.rules.kernel_map import Mapped, expand_groups
from slimbayes.sequences.kernels import KernelNames, Several, on_its_way, repeat_axis

if TYPE_CHECKING:
    from slimbayes.sequences.steps import State

_VF: Any = torch._VF
_RUN = {"LSTM": _VF.lstm, "GRU": _VF.gru, "RNN_TANH": _VF.rnn_tanh, "RNN_RELU": _VF.rnn_relu}
Maps = dict[str, Mapped]


class _Recurrent(Several):
    """Kernels of layer n: "ih_ln" of its input, "hh_ln" of its state, "hr_ln" of the projection; "_reverse" backwards.

    Inside, time comes first: x [T, R, in], states [layers·directions, R, ·].
    """

    recurrent = True
    mode: str
    bias: bool
    num_layers: int
    hidden_size: int
    proj_size: int
    bidirectional: bool
    batch_first: bool
    dropout: float

    def kernel_names(self) -> Iterator[KernelNames]:
        """Two for every layer and direction, three with a projection."""
        for end in self._ends():
            for side in ("ih", "hh"):
                bias = f"bias_{side}_{end}" if self.bias else None
                yield KernelNames(f"{side}_{end}", f"weight_{side}_{end}", bias, side == "hh")
            if self.proj_size > 0:
                yield KernelNames(f"hr_{end}", f"weight_hr_{end}", None, True)

    def _ends(self) -> list[str]:
        directions = ("", "_reverse") if self.bidirectional else ("",)
        return [f"l{layer}{suffix}" for layer in range(self.num_layers) for suffix in directions]

    def flatten_parameters(self) -> None:
        """Nothing: every draw has weights of its own."""

    def forward(self, input: Any, hx: Any = None) -> Any:
        """The outputs and the last states, in the forms of torch's own layer; no compiler looks inside."""
        return (_untraced if torch.compiler.is_compiling() else _Recurrent._forward)(self, input, hx)

    def _forward(self, input: Any, hx: Any) -> Any:
        given = None if hx is None else (tuple(hx) if self.mode == "LSTM" else (hx,))
        if isinstance(input, PackedSequence):
            packed, states = self._run_packed(input, given)
            return on_its_way((packed, states if self.mode == "LSTM" else states[0]))
        if input.dim() not in (2, 3):
            raise ValueError(
                f"layer {self.source!r} ({self.title}) takes an input of 2 or 3 dimensions, got {tuple(input.shape)}"
            )
        single = input.dim() == 2
        if input.shape[1 if self.batch_first and not single else 0] == 0:
            raise ValueError(
                f"layer {self.source!r} ({self.title}) got sequences without steps: {tuple(input.shape)}"
            )
        axis = 0 if self.batch_first else 1
        if given is not None and any([state.dim() != input.dim() for state in given]):
            raise RuntimeError(
                f"layer {self.source!r} ({self.title}): for an input of {input.dim()} dimensions the initial states "
                f"have as many, got {[tuple(state.shape) for state in given]}"
            )
        x = input.unsqueeze(axis) if single else input
        if single and given is not None:
            given = tuple([state.unsqueeze(1) for state in given])
        self._check(x, given)
        output, states = self._run(x.transpose(0, 1) if self.batch_first else x, given)
        output = output.transpose(0, 1) if self.batch_first else output
        if single and output.shape[axis] == 1:
            output, states = output.squeeze(axis), tuple([state.squeeze(1) for state in states])
        return on_its_way((output, states if self.mode == "LSTM" else states[0]))

    def _check(self, x: Tensor, states: State | None, sizes: Tensor | None = None) -> None:
        base: Any = self
        if states is None:
            base.check_input(x, sizes)
        else:
            base.check_forward_args(x, states if self.mode == "LSTM" else states[0], sizes)

    def _zeros(self, x: Tensor, rows: int) -> State:
        count = len(self._ends())
        sizes = [self.proj_size or self.hidden_size, *([self.hidden_size] if self.mode == "LSTM" else [])]
        return tuple([x.new_zeros(count, rows, size) for size in sizes])

    def _run(self, x: Tensor, states: State | None) -> tuple[Tensor, State]:
        rows = x.shape[1]
        frame = self._frame(rows)
        maps = first(ASKED.kernels, self, x, states or (), frame) or self._mapped(frame)
        plain = self._by_group(maps, frame)
        groups = max([one.groups for one in maps.values()])
        if not frame.tiled and not (plain and groups == frame.draws):
            if plain or any([one.before is not None for one in maps.values()]):
                x = repeat_axis(x, 1, frame.draws)
            states = repeat_axis(self._zeros(x, rows) if states is None else states, 1, frame.draws)
            frame.tiled = True
        states = self._zeros(x, rows) if states is None else states
        if not plain:
            return self._by_layer(x, states, maps, frame, None)
        if not frame.tiled:  # every group has the same rows
            return self._joined([self._call(x, states, flat) for flat in self._flat(maps, groups)])
        if groups == 1:
            return self._call(x, states, self._flat(maps, 1)[0])
        parts = zip(x.chunk(groups, 1), *[state.chunk(groups, 1) for state in states], strict=True)
        return self._joined(
            [
                self._call(own, tuple(s), flat)
                for (own, *s), flat in zip(parts, self._flat(maps, groups), strict=True)
            ]
        )

    def _run_packed(self, packed: PackedSequence, states: State | None) -> tuple[PackedSequence, State]:
        """The same for sequences of several lengths: packed where all rows share their weights, else padded."""
        data, sizes, order, back = packed
        rows = int(sizes[0])
        frame = self._frame(rows)
        if not frame.tiled:  # their order mixes the draws
            raise RuntimeError("packed sequences are repeated before the network, not within it")
        self._check(data, states, sizes)
        states = self._zeros(data, rows) if states is None else states
        maps = self._mapped(frame)
        plain = self._by_group(maps, frame)
        groups = max([one.groups for one in maps.values()])
        if plain and groups == 1:
            states = states if order is None else tuple([s.index_select(1, order) for s in states])
            made, states = self._call(data, states, self._flat(maps, 1)[0], sizes)
            states = states if back is None else tuple([s.index_select(1, back) for s in states])
            return PackedSequence(made, sizes, order, back), states
        x, lengths = pad_packed_sequence(packed)  # [T, R, in], rows as they came
        if not plain:
            made, states = self._by_layer(x, states, maps, frame, lengths)
        else:
            parts = zip(
                x.chunk(groups, 1), lengths.chunk(groups), *[s.chunk(groups, 1) for s in states], strict=True
            )
            made, states = self._joined(
                [
                    self._call_packed(own, length, tuple(s), flat)
                    for (own, length, *s), flat in zip(parts, self._flat(maps, groups), strict=True)
                ]
            )
        return _repacked(made, lengths, packed), states

    def _call_packed(
        self, x: Tensor, lengths: Tensor, states: State, flat: list[Tensor]
    ) -> tuple[Tensor, State]:
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        order, back = packed.sorted_indices, packed.unsorted_indices
        assert order is not None and back is not None
        sorted_states = tuple([s.index_select(1, order) for s in states])
        made, last = self._call(packed.data, sorted_states, flat, packed.batch_sizes)
        output, _ = pad_packed_sequence(packed._replace(data=made), total_length=x.shape[0])
        return output, tuple([s.index_select(1, back) for s in last])

    def _call(
        self, x: Tensor, states: State, flat: list[Tensor], sizes: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """torch's kernel on all layers with these weights; ``sizes`` of packed sequences."""
        whole = tuple([state.contiguous() for state in states])  # as cuDNN wants them
        hx = whole if self.mode == "LSTM" else whole[0]
        biased = len(flat) > (2 + (self.proj_size > 0)) * len(self._ends())
        own = 0.0 if self._drops() else self.dropout
        options = (hx, flat, biased, self.num_layers, own, self.training, self.bidirectional)
        run = _RUN[self.mode]
        made = run(x, *options, False) if sizes is None else run(x, sizes, *options)
        return made[0], tuple(made[1:])

    def _flat(self, maps: Maps, groups: int) -> list[list[Tensor]]:
        """The weights of every group, in the order that torch's kernels want."""
        biased = any([one.bias is not None for one in maps.values()])
        columns: list[Sequence[Tensor]] = []
        for end in self._ends():
            sides = [maps[f"{side}_{end}"] for side in ("ih", "hh")]
            columns += [_apart(one.weight, groups) for one in sides]
            if biased:
                zero = sides[0].weight.new_zeros(1, sides[0].weight.shape[1])
                columns += [_apart(zero if one.bias is None else one.bias, groups) for one in sides]
            if self.proj_size > 0:
                columns.append(_apart(maps[f"hr_{end}"].weight, groups))
        return [list(flat) for flat in zip(*columns, strict=True)]

    @staticmethod
    def _joined(parts: list[tuple[Tensor, State]]) -> tuple[Tensor, State]:
        output = torch.cat([part[0] for part in parts], 1)
        return output, tuple([torch.cat(own, 1) for own in zip(*[part[1] for part in parts], strict=True)])

    def _drops(self) -> bool:
        """Whether the layer's own dropout follows the draw."""
        return self.kernels[0].bayes.drops

    def _by_group(self, maps: Maps, frame: Frame) -> bool:
        """Whether torch's kernels can run the whole layer, once for every group of rows."""
        between = self._drops() and self.num_layers > 1 and self.dropout > 0 and frame.noise != "mean"
        projected = [one.bias is None for key, one in maps.items() if key.startswith("hr")]
        alike = [one.by_group and one.before is None for one in maps.values()]
        return all(alike) and all(projected) and not between

    def _by_layer(
        self, x: Tensor, states: State, maps: Maps, frame: Frame, lengths: Tensor | None
    ) -> tuple[Tensor, State]:
        from slimbayes.sequences.steps import unroll

        mask = None
        if lengths is not None:
            steps = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
            mask = (steps < lengths.to(x.device)).unsqueeze(2)  # [T, R, 1]
        directions = 2 if self.bidirectional else 1
        last: list[State] = []
        for layer in range(self.num_layers):
            outputs = []
            for place in range(layer * directions, (layer + 1) * directions):
                end = self._ends()[place]
                ih, hh, hr = maps[f"ih_{end}"], maps[f"hh_{end}"], maps.get(f"hr_{end}")
                own = x if ih.before is None else ih.before(x.transpose(0, 1)).transpose(0, 1)
                start = tuple([state[place] for state in states])
                output, state = unroll(self.mode, own, start, ih, hh, hr, mask, end.endswith("reverse"))
                outputs.append(output)
                last.append(state)
            x = outputs[0] if directions == 1 else torch.cat(outputs, 2)
            if layer < self.num_layers - 1:
                x = self._between(x, layer, frame)
        return x, tuple([torch.stack(own) for own in zip(*last, strict=True)])

    def _between(self, x: Tensor, layer: int, frame: Frame) -> Tensor:
        """The layer's own dropout on what one of its layers hands to the next."""
        if not self._drops():
            return F.dropout(x, self.dropout, self.training)
        if self.dropout == 0 or frame.noise == "mean":
            return x
        rows = x.transpose(0, 1)
        return dropped(rows, frame, f"{self.source}.between_l{layer}", self.dropout, None).transpose(0, 1)


@_disable_dynamo  # torch.compiler.disable would import the compiler here and now
def _untraced(layer: _Recurrent, input: Any, hx: Any) -> Any:
    return layer._forward(input, hx)


def _apart(value: Tensor, groups: int) -> Sequence[Tensor]:
    """One tensor for every group; not value[i], whose backward pass fills zeros."""
    if value.shape[0] == 1:
        return [value.squeeze(0)] * groups
    return expand_groups(value, groups).unbind(0)


def _repacked(output: Tensor, lengths: Tensor, like: PackedSequence) -> PackedSequence:
    """Outputs [T, R, H] packed in the order of what came in."""
    if like.sorted_indices is not None:
        output = output.index_select(1, like.sorted_indices)
        lengths = lengths.index_select(0, like.sorted_indices.cpu())
    return like._replace(data=pack_padded_sequence(output, lengths).data)


class BayesLSTM(_Recurrent, nn.LSTM):
    """Long short-term memory, with or without a projection of its state."""

    title = "LSTM"


class BayesGRU(_Recurrent, nn.GRU):
    """Gated recurrent unit."""

    title = "GRU"


class BayesRNN(_Recurrent, nn.RNN):
    """Elman network with tanh or ReLU."""

    title = "RNN"
