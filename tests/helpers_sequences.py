"""Recurrent networks that keep the batch outermost, whatever the layer inside does."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

LAYERS = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn_tanh": (nn.RNN, {}),
    "rnn_relu": (nn.RNN, {"nonlinearity": "relu"}),
}
CELLS = {
    "lstm": (nn.LSTMCell, {}),
    "gru": (nn.GRUCell, {}),
    "rnn_tanh": (nn.RNNCell, {}),
    "rnn_relu": (nn.RNNCell, {"nonlinearity": "relu"}),
}
LENGTHS = torch.tensor([3, 5, 1, 4])
SIZE, HIDDEN, STEPS, BATCH = 3, 4, 5, 4


class Sequences(nn.Module):
    """Outputs [R, T, H] and last states [R, layers·directions, ·]; with lengths the sequences are packed."""

    def __init__(self, kind="lstm", states=False, **options):
        super().__init__()
        make, own = LAYERS[kind]
        self.rnn = make(SIZE, HIDDEN, **own, **options)
        self.states = states

    def forward(self, x, lengths=None, *hx):
        first = self.rnn.batch_first
        if lengths is not None:
            given = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        else:
            given = x if first else x.transpose(0, 1)
        hx = tuple(h.transpose(0, 1) for h in hx)
        y, last = self.rnn(given, None if not hx else hx if len(hx) > 1 else hx[0])
        if lengths is not None:
            y, _ = pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])
        elif not first:
            y = y.transpose(0, 1)
        last = last if isinstance(last, tuple) else (last,)
        return (y, *(h.transpose(0, 1) for h in last)) if self.states else y


class Looped(nn.Module):
    """A cell in a loop: outputs [R, T, H]."""

    def __init__(self, kind="lstm", **options):
        super().__init__()
        make, own = CELLS[kind]
        self.cell = make(SIZE, HIDDEN, **own, **options)

    def forward(self, x):
        state, found = None, []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            found.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(found, 1)


def inputs(batch=BATCH, steps=STEPS, dtype=torch.float64, seed=0):
    return torch.randn(batch, steps, SIZE, dtype=dtype, generator=torch.Generator().manual_seed(seed))
