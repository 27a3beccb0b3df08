"""One class per torch operation, none per method; the table from torch type to ours."""

from __future__ import annotations

from torch import nn

from slimbayes.core.layers.base import Converted
from slimbayes.core.layers.conv import (
    BayesConv1d,
    BayesConv2d,
    BayesConv3d,
    BayesConvTranspose1d,
    BayesConvTranspose2d,
    BayesConvTranspose3d,
)
from slimbayes.core.layers.embedding import BayesEmbedding, BayesEmbeddingBag
from slimbayes.core.layers.linear import BayesBilinear, BayesLinear, TransposedLinear
from slimbayes.core.layers.norm import (
    BayesBatchNorm1d,
    BayesBatchNorm2d,
    BayesBatchNorm3d,
    BayesGroupNorm,
    BayesLayerNorm,
    BayesRMSNorm,
)
from slimbayes.sequences.attention import BayesMultiheadAttention
from slimbayes.sequences.cells import BayesGRUCell, BayesLSTMCell, BayesRNNCell
from slimbayes.sequences.kernels import Several
from slimbayes.sequences.recurrent import BayesGRU, BayesLSTM, BayesRNN

Layer = type[Converted] | type[Several]

RECURRENT: dict[type[nn.Module], Layer] = {
    nn.LSTM: BayesLSTM,
    nn.GRU: BayesGRU,
    nn.RNN: BayesRNN,
    nn.LSTMCell: BayesLSTMCell,
    nn.GRUCell: BayesGRUCell,
    nn.RNNCell: BayesRNNCell,
}
WEIGHTED: dict[type[nn.Module], Layer] = {
    nn.Linear: BayesLinear,
    nn.Conv1d: BayesConv1d,
    nn.Conv2d: BayesConv2d,
    nn.Conv3d: BayesConv3d,
    nn.ConvTranspose1d: BayesConvTranspose1d,
    nn.ConvTranspose2d: BayesConvTranspose2d,
    nn.ConvTranspose3d: BayesConvTranspose3d,
    nn.Bilinear: BayesBilinear,
    **RECURRENT,
    nn.MultiheadAttention: BayesMultiheadAttention,
}
NORMS: dict[type[nn.Module], Layer] = {
    nn.BatchNorm1d: BayesBatchNorm1d,
    nn.BatchNorm2d: BayesBatchNorm2d,
    nn.BatchNorm3d: BayesBatchNorm3d,
    nn.LayerNorm: BayesLayerNorm,
    nn.GroupNorm: BayesGroupNorm,
    nn.RMSNorm: BayesRMSNorm,
}
EMBEDDINGS: dict[type[nn.Module], Layer] = {
    nn.Embedding: BayesEmbedding,
    nn.EmbeddingBag: BayesEmbeddingBag,
}
TABLE: dict[type[nn.Module], Layer] = {**WEIGHTED, **NORMS, **EMBEDDINGS}

# Classes derived from torch's recurrent and attention layers, whose forward pass may do anything: they have no
# converted class, and are never skipped without a word.
UNSUPPORTED: tuple[type[nn.Module], ...] = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


def is_transposed_linear(kind: type[nn.Module]) -> bool:
    """Whether a type is transformers' Conv1D, recognised by name so that the core need not import it."""
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


_TRANSPOSED: dict[type[nn.Module], type[Converted]] = {}


def _transposed_class(kind: type[nn.Module]) -> type[Converted]:
    if kind not in _TRANSPOSED:
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
    if is_transposed_linear(kind):
        return _transposed_class(kind)
    return TABLE.get(kind)


def is_weighted(module: nn.Module) -> bool:
    """Whether a module multiplies by a weight: what methods convert unless told otherwise."""
    return type(module) in WEIGHTED or is_transposed_linear(type(module)) or isinstance(module, UNSUPPORTED)
