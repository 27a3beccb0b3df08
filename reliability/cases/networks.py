"""Layers of every supported type in generated configurations, and small networks of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from reliability.cases import modules as own

ENTRIES = 5  # of every table
Draw = Callable[..., Any]


@dataclass
class Net:
    """A plain network and what it takes: the shape of one example of each input."""

    kind: str
    module: nn.Module
    shapes: tuple[tuple[int, ...], ...]
    call: dict[str, Any] = field(default_factory=dict)  # further arguments, the same for all rows
    index: bool = False  # the first input is an index
    lengths: int = 0  # above 0: a second input of lengths up to this
    shared: tuple[str, ...] = ()  # arguments that are not repeated
    norms: bool = False  # statistics of a batch: rows depend on each other in training
    dropout: bool = False  # dropout of the network's own

    def inputs(self, batch: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
        """Random inputs of so many examples."""
        made = [torch.randn(batch, *shape, dtype=torch.float64).to(dtype) for shape in self.shapes]
        if self.index:
            made[0] = torch.randint(ENTRIES, made[0].shape)
        if self.lengths:
            made.insert(1, torch.randint(1, self.lengths + 1, (batch,)))
        return tuple(made)


def _sizes(draw: Draw, count: int, least: int = 1, most: int = 4) -> list[int]:
    return [draw(st.integers(least, most)) for _ in range(count)]


@st.composite
def linear(draw: Draw) -> Net:
    """A matrix product, on vectors or on anything with leading dimensions."""
    inside, outside = _sizes(draw, 2)
    extra = draw(st.sampled_from([(), (), (2,), (3, 2)]))
    return Net("Linear", nn.Linear(inside, outside, bias=draw(st.booleans())), ((*extra, inside),))


@st.composite
def convolution(draw: Draw) -> Net:
    """Stride, padding and its modes, dilation, groups, one to three dimensions."""
    dims = draw(st.sampled_from([1, 1, 2, 2, 3]))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    a, b = (groups * n for n in _sizes(draw, 2, most=2))
    kernel = draw(st.integers(1, 3))
    padding: Any = draw(st.sampled_from([0, 0, 1, "same", "valid"]))
    stride = 1 if padding == "same" else draw(st.integers(1, 2))
    mode = draw(st.sampled_from(["zeros", "zeros", "circular", "replicate", "reflect"]))
    dilation = draw(st.integers(1, 2))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    made = getattr(nn, f"Conv{dims}d")(a, b, kernel, **options, padding_mode=mode, bias=draw(st.booleans()))
    least = dilation * (kernel - 1) + 1
    return Net(f"Conv{dims}d", made, ((a, *_sizes(draw, dims, max(least, 2), least + 2)),))


@st.composite
def transposed(draw: Draw) -> Net:
    """Transposed convolutions with output padding, or with an output size in the call."""
    dims = draw(st.sampled_from([1, 1, 2, 2, 3]))
    groups = draw(st.sampled_from([1, 1, 2]))
    a, b = (groups * n for n in _sizes(draw, 2, most=2))
    stride, kernel = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dilation = draw(st.integers(1, 2))
    more = draw(st.integers(0, max(stride, dilation) - 1))
    made = getattr(nn, f"ConvTranspose{dims}d")(
        a, b, kernel, stride=stride, padding=draw(st.integers(0, 1)) if kernel > 1 else 0, output_padding=more,
        groups=groups, dilation=dilation, bias=draw(st.booleans()),
    )  # fmt: skip
    size = _sizes(draw, dims, 2, 3)
    call = {}
    if more < stride and draw(st.booleans()):
        probe = made(torch.zeros(1, a, *size))
        call = {"output_size": list(probe.shape[2:])}
    return Net(f"ConvTranspose{dims}d", made, ((a, *size),), call)


@st.composite
def bilinear(draw: Draw) -> Net:
    """Two inputs."""
    a, b, c = _sizes(draw, 3)
    extra = draw(st.sampled_from([(), (2,)]))
    return Net("Bilinear", nn.Bilinear(a, b, c, bias=draw(st.booleans())), ((*extra, a), (*extra, b)))


@st.composite
def norm(draw: Draw) -> Net:
    """Norms of all kinds, with and without affine parameters and statistics."""
    kind = draw(st.sampled_from(["Batch1", "Batch2", "Batch3", "Layer", "Group", "RMS"]))
    size = draw(st.integers(2, 4))
    affine = draw(st.sampled_from([True, True, True, False]))
    if kind.startswith("Batch"):
        dims = int(kind[-1])
        extra = tuple(_sizes(draw, dims, 1, 3))
        options = {"track_running_stats": draw(st.sampled_from([True, True, False]))}
        options["momentum"] = draw(st.sampled_from([0.1, None, 0.7]))
        made = getattr(nn, f"BatchNorm{dims}d")(size, affine=affine, **options)
        shape = (size,) if dims == 1 and draw(st.booleans()) else (size, *extra)
        return Net(f"BatchNorm{dims}d", made, (shape,), norms=True)
    if kind == "Group":
        groups = draw(st.sampled_from([1, 2]))
        extra = tuple(_sizes(draw, draw(st.integers(0, 2)), 1, 3))
        return Net(
            "GroupNorm", nn.GroupNorm(groups, groups * size, affine=affine), ((groups * size, *extra),)
        )
    axes = draw(st.sampled_from([(size,), (size,), (2, size)]))
    shape = (*draw(st.sampled_from([(), (3,)])), *axes)
    if kind == "RMS":
        eps = draw(st.sampled_from([None, 1e-3]))
        return Net("RMSNorm", nn.RMSNorm(axes, eps=eps, elementwise_affine=affine), (shape,))
    bias = draw(st.booleans())
    return Net("LayerNorm", nn.LayerNorm(axes, elementwise_affine=affine, bias=bias), (shape,))


@st.composite
def embedding(draw: Draw) -> Net:
    """Tables and bags, with padding, weights of the sample and every reduction."""
    size = draw(st.integers(1, 3))
    padding = draw(st.sampled_from([None, None, 0, 2, -1]))
    if draw(st.booleans()):
        often = draw(st.booleans())
        shape = draw(st.sampled_from([(), (3,), (2, 2)]))
        made = nn.Embedding(ENTRIES, size, padding_idx=padding, scale_grad_by_freq=often)
        return Net("Embedding", made, (shape,), index=True)
    mode = draw(st.sampled_from(["mean", "sum", "max", "weighted"]))
    bag = nn.EmbeddingBag(ENTRIES, size, mode="sum" if mode == "weighted" else mode, padding_idx=padding)
    if mode == "weighted":
        return Net("EmbeddingBag", own.Weighted(bag), ((3,), (3,)), index=True)
    return Net("EmbeddingBag", bag, ((3,),), index=True)


@st.composite
def recurrent(draw: Draw) -> Net:
    """LSTM, GRU and RNN: layers, directions, projections, batch_first, packed, with initial states."""
    kind = draw(st.sampled_from(["LSTM", "GRU", "RNN"]))
    size, hidden = _sizes(draw, 2, 2, 3)
    layers, both = draw(st.integers(1, 2)), draw(st.booleans())
    options: dict[str, Any] = {
        "num_layers": layers, "bidirectional": both, "batch_first": draw(st.booleans()), "bias": draw(st.booleans()),
    }  # fmt: skip
    if kind == "RNN":
        options["nonlinearity"] = draw(st.sampled_from(["tanh", "relu"]))
    if kind == "LSTM" and draw(st.booleans()):
        options["proj_size"] = hidden - 1
    made = getattr(nn, kind)(size, hidden, **options)
    steps = draw(st.integers(1, 4))
    packed = draw(st.booleans())
    states = draw(st.booleans())
    shapes: list[tuple[int, ...]] = [(steps, size)]
    if states:
        count = layers * (2 if both else 1)
        shapes.append((count, options.get("proj_size", 0) or hidden))
        if kind == "LSTM":
            shapes.append((count, hidden))
    module = own.Sequences(made, packed, draw(st.booleans()))
    return Net(kind, module, tuple(shapes), lengths=steps if packed else 0)


@st.composite
def cell(draw: Draw) -> Net:
    """A cell in a loop."""
    kind = draw(st.sampled_from(["LSTMCell", "GRUCell", "RNNCell"]))
    size, hidden = _sizes(draw, 2, 1, 3)
    made = getattr(nn, kind)(size, hidden, bias=draw(st.booleans()))
    return Net(kind, own.Looped(made), ((draw(st.integers(1, 3)), size),))


@st.composite
def attention(draw: Draw) -> Net:
    """Attention with sizes of its own, masks of every kind, and keys and values that are added."""
    heads = draw(st.integers(1, 2))
    size = heads * draw(st.integers(1, 2))
    first = draw(st.booleans())
    form = draw(st.sampled_from(["self", "memory", "three"]))
    options: dict[str, Any] = {}
    if form == "three" and draw(st.booleans()):
        options = {"kdim": draw(st.integers(1, 3)), "vdim": draw(st.integers(1, 3))}
    options |= {
        "bias": draw(st.booleans()),
        "add_bias_kv": draw(st.booleans()),
        "add_zero_attn": draw(st.booleans()),
    }
    made = nn.MultiheadAttention(size, heads, batch_first=first, **options)
    targets, keys = _sizes(draw, 2, 1, 3)
    if form == "self":
        keys = targets
    mask = draw(st.sampled_from(["none", "table", "float table", "causal"]))
    padding = draw(st.sampled_from(["none", "bool", "float"]))
    table = None
    if mask != "none":
        table = torch.rand(targets, keys) < 0.4
        table[:, 0] = False
        if mask == "causal":
            table = torch.ones(targets, keys, dtype=torch.bool).triu(1)
        if mask == "float table":
            table = torch.randn(targets, keys).masked_fill(table, -torch.inf)
    module = own.Attended(made, form, table, mask == "causal", padding, draw(st.booleans()))
    shapes: list[tuple[int, ...]] = [(targets, size)]
    if form != "self":
        shapes.append((keys, options.get("kdim", size)))
    if form == "three":
        shapes.append((keys, options.get("vdim", size)))
    if padding != "none":
        shapes.append((keys,))
    return Net("MultiheadAttention", module, tuple(shapes))


@st.composite
def network(draw: Draw) -> Net:
    """Small networks: nested, tied, reused, with norms and dropout, with folded rows and several outputs."""
    kind = draw(st.sampled_from(sorted(own.NETWORKS)))
    a, b, c = _sizes(draw, 3, 2, 3)
    return own.NETWORKS[kind](a, b, c)


LAYERS: dict[str, Callable[[], st.SearchStrategy[Net]]] = {
    "linear": linear, "convolution": convolution, "transposed": transposed, "bilinear": bilinear, "norm": norm,
    "embedding": embedding, "recurrent": recurrent, "cell": cell, "attention": attention, "network": network,
}  # fmt: skip


@st.composite
def nets(draw: Draw, names: tuple[str, ...] = tuple(LAYERS), statistics: bool = False) -> Net:
    """Any of them, all parameters and statistics random: the neutral start of a norm would hide mistakes.

    ``statistics``: no norm takes those of the batch in evaluation, by which examples would depend on each other.
    """
    torch.manual_seed(draw(st.integers(0, 2**16)))
    net: Net = draw(LAYERS[draw(st.sampled_from(names))]())
    for norm_layer in net.module.modules():
        if statistics and isinstance(norm_layer, nn.modules.batchnorm._BatchNorm):
            norm_layer.track_running_stats = True
            norm_layer.running_mean = torch.zeros(norm_layer.num_features)
            norm_layer.running_var = torch.ones(norm_layer.num_features)
            norm_layer.num_batches_tracked = torch.tensor(0)
    with torch.no_grad():
        for parameter in net.module.parameters():
            parameter.normal_(0.0, 0.7)
        for name, buffer in net.module.named_buffers():
            if "running" in name:
                buffer.uniform_(0.5, 1.5)
    net.module.double().eval()
    return net
