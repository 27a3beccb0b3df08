"""Our class for each type of layer: a place is named here, and imported when a network holds such a layer."""

from __future__ import annotations

from importlib import import_module

from torch import nn

from slimbayes.core.layers.base import Converted
from slimbayes.sequences.kernels import Several

Layer = type[Converted] | type[Several]
Places = dict[
    type[nn.Module], Layer | str
]  # our class, or the module that holds it: BayesLinear for nn.Linear

RECURRENT = (nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell)

# What multiplies by a weight. A layer type of your own is one more line here: ``WEIGHTED[Gate] = BayesGate``.
WEIGHTED: Places = {
    nn.Linear: "slimbayes.core.layers.linear",
    nn.Conv1d: "slimbayes.core.layers.conv",
    nn.Conv2d: "slimbayes.core.layers.conv",
    nn.Conv3d: "slimbayes.core.layers.conv",
    nn.ConvTranspose1d: "slimbayes.core.layers.conv",
    nn.ConvTranspose2d: "slimbayes.core.layers.conv",
    nn.ConvTranspose3d: "slimbayes.core.layers.conv",
    nn.Bilinear: "slimbayes.core.layers.linear",
    nn.LSTM: "slimbayes.sequences.recurrent",
    nn.GRU: "slimbayes.sequences.recurrent",
    nn.RNN: "slimbayes.sequences.recurrent",
    nn.LSTMCell: "slimbayes.sequences.cells",
    nn.GRUCell: "slimbayes.sequences.cells",
    nn.RNNCell: "slimbayes.sequences.cells",
    nn.MultiheadAttention: "slimbayes.sequences.attention",
}
NORMS: Places = {
    nn.BatchNorm1d: "slimbayes.core.layers.norm",
    nn.BatchNorm2d: "slimbayes.core.layers.norm",
    nn.BatchNorm3d: "slimbayes.core.layers.norm",
    nn.LayerNorm: "slimbayes.core.layers.norm",
    nn.GroupNorm: "slimbayes.core.layers.norm",
    nn.RMSNorm: "slimbayes.core.layers.norm",
}
EMBEDDINGS: Places = {
    nn.Embedding: "slimbayes.core.layers.embedding",
    nn.EmbeddingBag: "slimbayes.core.layers.embedding",
}

# Classes derived from torch's recurrent and attention layers, whose forward pass may do anything: they have no
# converted class, and are never skipped without a word.
UNSUPPORTED: tuple[type[nn.Module], ...] = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


def layer_class(kind: type[nn.Module]) -> Layer | None:
    """Our class for exactly this type, else None.

    >>> layer_class(nn.GRU).__name__, layer_class(nn.ReLU)
    ('BayesGRU', None)
    """
    for places in (WEIGHTED, NORMS, EMBEDDINGS):
        found = places.get(kind)
        if isinstance(found, str):
            made: Layer = getattr(import_module(found), f"Bayes{kind.__name__}")
            places[kind] = made
            return made
        if found is not None:
            return found
    return None


def layer_classes(*rooms: Places) -> dict[type[nn.Module], Layer]:
    """Every type and our class for it, of these rooms or of all."""
    kinds = [kind for places in rooms or (WEIGHTED, NORMS, EMBEDDINGS) for kind in places]
    return {kind: layer for kind in kinds if (layer := layer_class(kind)) is not None}


def is_transposed_linear(kind: type[nn.Module]) -> bool:
    """Whether a type is transformers' Conv1D, recognised by name so that the core need not import it."""
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


_TRANSPOSED: dict[type[nn.Module], type[Converted]] = {}


def _transposed_class(kind: type[nn.Module]) -> type[Converted]:
    if kind not in _TRANSPOSED:
        from slimbayes.core.layers.linear import TransposedLinear

        _TRANSPOSED[kind] = type("BayesConv1D", (TransposedLinear, kind), {})
    return _TRANSPOSED[kind]


def converted_class(module: nn.Module) -> Layer | None:
    """Our class for a module of exactly a known type, else None.

    >>> converted_class(nn.Linear(2, 2)).__name__
    'BayesLinear'
    >>> converted_class(nn.ReLU()) is None
    True
    """
    kind = type(module)
    return _transposed_class(kind) if is_transposed_linear(kind) else layer_class(kind)


def is_weighted(module: nn.Module) -> bool:
    """Whether a module multiplies by a weight: what methods convert unless told otherwise."""
    return type(module) in WEIGHTED or is_transposed_linear(type(module)) or isinstance(module, UNSUPPORTED)
