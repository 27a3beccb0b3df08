"""Modules around layers that keep the batch outermost, and small networks of several layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

if TYPE_CHECKING:
    from reliability.cases.networks import Net


class Weighted(nn.Module):
    """A bag with weights of its entries."""

    def __init__(self, bag: nn.EmbeddingBag) -> None:
        super().__init__()
        self.bag = bag

    def forward(self, index: Tensor, weights: Tensor) -> Tensor:
        """[B, size]."""
        return self.bag(index, None, weights)


class Sequences(nn.Module):
    """A recurrent layer: outputs [R, T, ·], and the last states [R, layers, ·] if asked for."""

    def __init__(self, rnn: nn.RNNBase, packed: bool, states: bool) -> None:
        super().__init__()
        self.rnn, self.packed, self.states = rnn, packed, states

    def forward(self, x: Tensor, *rest: Tensor) -> Any:
        """``rest``: lengths if packed, then initial states."""
        lengths, given = (rest[0], rest[1:]) if self.packed else (None, rest)
        first = self.rnn.batch_first
        if lengths is None:
            sequence: Any = x if first else x.transpose(0, 1)
        else:
            sequence = pack_padded_sequence(
                x if first else x.transpose(0, 1), lengths, batch_first=first, enforce_sorted=False
            )
        hx = tuple(h.transpose(0, 1).contiguous() for h in given)
        y, last = self.rnn(sequence, None if not hx else hx if len(hx) > 1 else hx[0])
        if lengths is not None:
            y, _ = pad_packed_sequence(y, batch_first=first, total_length=x.shape[1])
        y = y if first else y.transpose(0, 1)
        last = last if isinstance(last, tuple) else (last,)
        return (y, *(h.transpose(0, 1) for h in last)) if self.states else y


class Looped(nn.Module):
    """A cell in a loop: [R, T, H]."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        """Every step's state."""
        state, found = None, []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            found.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(found, 1)


class Attended(nn.Module):
    """One attention layer; ``form``: "self", "memory" (key is value) or "three"."""

    def __init__(
        self,
        attention: nn.MultiheadAttention,
        form: str,
        table: Tensor | None,
        causal: bool,
        padding: str,
        weights: bool,
    ) -> None:
        super().__init__()
        self.attention, self.form, self.causal, self.padding, self.weights = (
            attention,
            form,
            causal,
            padding,
            weights,
        )
        self.register_buffer("table", table)

    def forward(self, query: Tensor, *rest: Tensor) -> Any:
        """``rest``: what else there is of key, value, and numbers that say which keys are padding."""
        given = [query, *rest[: {"self": 0, "memory": 1, "three": 2}[self.form]]]
        padding = None
        if self.padding != "none":
            padding = rest[-1] > 0.5
            padding = padding & (torch.arange(padding.shape[1], device=padding.device) > 0)
            if self.padding == "float":
                padding = rest[-1].clamp(-3, 3).masked_fill(padding, -torch.inf)
        if not self.attention.batch_first:
            given = [x.transpose(0, 1) for x in given]
        while len(given) < 3:
            given.append(given[-1])
        table = self.table
        y, weights = self.attention(
            *given,
            key_padding_mask=padding,
            attn_mask=table,
            is_causal=self.causal,
            need_weights=self.weights,
        )
        y = y if self.attention.batch_first else y.transpose(0, 1)
        return (y, weights) if self.weights else y


class Block(nn.Module):
    """Convolutions around a norm, with a way past them."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(size)
        self.convs = nn.ModuleDict(
            {"a": nn.Conv2d(size, size, 3, padding=1, bias=False), "b": nn.Conv2d(size, size, 1)}
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W]."""
        return x + self.convs["b"](torch.relu(self.convs["a"](torch.relu(self.norm(x)))))


class Tied(nn.Module):
    """Words, a layer, and an output with the words' table as its weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.words = nn.Embedding(5, size)
        self.middle = nn.Linear(size, size)
        self.output = nn.Linear(size, 5)
        self.output.weight = self.words.weight

    def forward(self, index: Tensor) -> Tensor:
        """[B, T, 5]."""
        return self.output(torch.tanh(self.middle(self.words(index))))


class Twins(nn.Module):
    """Two layers with one weight and biases of their own."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """[B, size]."""
        return self.second(torch.tanh(self.first(x)))


class Reused(nn.Module):
    """One layer, used twice, under two names."""

    def __init__(self, size: int, outputs: int) -> None:
        super().__init__()
        self.step = nn.Linear(size, size)
        self.again = self.step
        self.head = nn.Linear(size, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, outputs]."""
        return self.head(torch.tanh(self.again(torch.tanh(self.step(x)))))


class Folded(nn.Module):
    """Steps folded into the rows before the layers, and unfolded after them."""

    def __init__(self, size: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(size, 3), nn.Tanh(), nn.Linear(3, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, outputs] of [B, T, size]."""
        return self.body(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Outputs(nn.Module):
    """A dict of two outputs, of two inputs."""

    def __init__(self, a: int, b: int, c: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(a, c), nn.Linear(b, c)
        self.head = nn.Linear(c, 2)

    def forward(self, x: Tensor, z: Tensor) -> dict[str, Any]:
        """Logits, and what they are made of."""
        both = torch.tanh(self.left(x)) + self.right(z)
        return {"logits": self.head(both), "parts": (both, None)}


def _net(kind: str, module: nn.Module, *shapes: tuple[int, ...], **options: Any) -> Net:
    from reliability.cases.networks import Net

    return Net(kind, module, shapes, **options)


def _mlp(a: int, b: int, c: int) -> Net:
    layers = nn.Sequential(
        nn.Linear(a, b),
        nn.LayerNorm(b),
        nn.Tanh(),
        nn.Sequential(nn.Linear(b, b), nn.Tanh()),
        nn.Linear(b, c),
    )
    return _net("network: mlp", layers, (a,))


def _normed(a: int, b: int, c: int) -> Net:
    layers = nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Linear(b, c))
    return _net("network: batch norm", layers, (a,), norms=True)


def _images(a: int, b: int, c: int) -> Net:
    body = nn.Sequential(
        nn.Conv2d(a, b, 3, padding=1), Block(b), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(b, c)
    )
    return _net("network: images", body, (a, 4, 3), norms=True)


def _dropped(a: int, b: int, c: int) -> Net:
    layers = nn.Sequential(nn.Linear(a, b), nn.Dropout(0.4), nn.Linear(b, c))
    return _net("network: dropout", layers, (a,), dropout=True)


def _transformer(a: int, b: int, c: int) -> Net:
    layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=3, dropout=0.0, batch_first=True)
    return _net("network: transformer", nn.Sequential(layer, nn.Linear(4, c)), (a, 4))


NETWORKS = {
    "batch norm": _normed,
    "dropout": _dropped,
    "folded": lambda a, b, c: _net("network: folded", Folded(a, c), (b, a)),
    "images": _images,
    "mlp": _mlp,
    "outputs": lambda a, b, c: _net("network: outputs", Outputs(a, b, c), (a,), (b,)),
    "reused": lambda a, b, c: _net("network: reused", Reused(a, c), (a,)),
    "tied": lambda a, b, c: _net("network: tied", Tied(a), (b,), index=True),
    "transformer": _transformer,
    "twins": lambda a, b, c: _net("network: twins", Twins(a), (a,)),
}
