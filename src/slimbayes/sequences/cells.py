"""LSTMCell, GRUCell and RNNCell: a loop of one's own. Within a draw every step has the same noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slimbayes.core.context import Frame
from slimbayes.core.rules.kernel_map import Mapped
from slimbayes.sequences.kernels import KernelNames, Several, on_its_way, repeat_axis

if TYPE_CHECKING:
    from slimbayes.sequences.steps import State

_VF: Any = torch._VF
_RUN = {
    "LSTM": _VF.lstm_cell,
    "GRU": _VF.gru_cell,
    "RNN_TANH": _VF.rnn_tanh_cell,
    "RNN_RELU": _VF.rnn_relu_cell,
}


class _Cell(Several):
    """Kernels "ih" of the input and "hh" of the state."""

    recurrent = True
    bias: bool
    hidden_size: int

    def kernel_names(self) -> Iterator[KernelNames]:
        """Both."""
        for side in ("ih", "hh"):
            yield KernelNames(side, f"weight_{side}", f"bias_{side}" if self.bias else None, side == "hh")

    def _mode(self) -> str:
        if isinstance(self, nn.RNNCell):
            return f"RNN_{self.nonlinearity.upper()}"
        return "LSTM" if isinstance(self, nn.LSTMCell) else "GRU"

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """The next state, in the form of torch's own cell."""
        mode = self._mode()
        given: State | None = None if hx is None else (tuple(hx) if mode == "LSTM" else (hx,))
        if input.dim() not in (1, 2) or (given is not None and any([s.dim() != input.dim() for s in given])):
            shapes = [tuple(t.shape) for t in (input, *(given or ()))]
            raise ValueError(
                f"layer {self.source!r} ({self.title}) takes an input and states of 1 or 2 dimensions, got {shapes}"
            )
        single = input.dim() == 1
        x = input.unsqueeze(0) if single else input
        if single and given is not None:
            given = tuple([state.unsqueeze(0) for state in given])
        state = self._run(mode, x, given)
        if single and state[0].shape[0] == 1:
            state = tuple([own.squeeze(0) for own in state])
        return on_its_way(state if mode == "LSTM" else state[0])

    def _run(self, mode: str, x: Tensor, state: State | None) -> State:
        frame = self._frame(x.shape[0])
        x, state = self._tiled(x, state, frame)
        if state is None:
            zeros = x.new_zeros(x.shape[0], self.hidden_size)
            state = (zeros, zeros) if mode == "LSTM" else (zeros,)
        maps = self._mapped(frame)
        ih, hh = maps["ih"], maps["hh"]
        if ih.before is not None:
            x = ih.before(x)
        if not (_alone(ih) and _alone(hh) and (ih.bias is None) == (hh.bias is None)):
            from slimbayes.sequences.steps import cell

            return cell(mode, x, state, ih, hh)
        tensors = [None if t is None else t.squeeze(0) for t in (ih.weight, hh.weight, ih.bias, hh.bias)]
        made = _RUN[mode](x, state if mode == "LSTM" else state[0], *tensors)
        return tuple(made) if mode == "LSTM" else (made,)

    def _tiled(self, x: Tensor, state: State | None, frame: Frame) -> tuple[Tensor, State | None]:
        """Rows for all draws; the state of an earlier step has them already."""
        if frame.tiled:
            return x, state
        if state is not None and state[0].shape[0] == x.shape[0]:
            state = repeat_axis(state, 0, frame.draws)
        frame.tiled = True
        return repeat_axis(x, 0, frame.draws), state


def _alone(one: Mapped) -> bool:
    return one.by_group and one.groups == 1


class BayesLSTMCell(_Cell, nn.LSTMCell):
    """One step of an LSTM."""

    title = "LSTMCell"


class BayesGRUCell(_Cell, nn.GRUCell):
    """One step of a GRU."""

    title = "GRUCell"


class BayesRNNCell(_Cell, nn.RNNCell):
    """One step of an Elman network."""

    title = "RNNCell"
