"""Embeddings: the input is an index, so only the table can be random."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.core.layers.base import Converted, unbatched
from slimbayes.core.rules.base import Inputs, Slot
from slimbayes.core.rules.groups import one_by_one


class _Table(Converted):
    """One sample of the whole table per draw: a token means the same thing wherever it stands."""

    output_axis = -1
    linear = False
    float_input = False
    matrix_weight = True
    is_matrix = False
    input_slots: tuple[Slot, ...] = ()
    bias = None
    embedding_dim: int
    padding_idx: int | None

    @property
    def output_size(self) -> int:
        """Size of one row of the table."""
        return self.embedding_dim

    @property
    def fan_in(self) -> int:
        """An index chooses one row."""
        return 1

    def matrix_sides(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Not a matrix product on float inputs."""
        raise TypeError("an embedding has no float input")


class BayesEmbedding(_Table, nn.Embedding):
    """Rows of a random table; the padding row, if any, stays fixed."""

    title = "Embedding"

    def compute(self, inputs: Inputs, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """torch's kernel."""
        assert weight is not None
        y = F.embedding(inputs[0], weight, self.padding_idx, scale_grad_by_freq=self.scale_grad_by_freq)
        return self._fixed_padding(inputs[0], y)

    def grouped(self, inputs: Inputs, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One lookup in the tables laid end to end; gradients are scaled by frequencies within a group."""
        groups, entries, size = weight.shape
        index = inputs[0].unflatten(0, (groups, -1))
        start = torch.arange(groups, device=index.device) * entries
        shifted = index + start.reshape(groups, *[1] * (index.dim() - 1))
        tables = weight.reshape(groups * entries, size)
        y = F.embedding(shifted, tables, scale_grad_by_freq=self.scale_grad_by_freq).flatten(0, 1)
        return self._fixed_padding(inputs[0], y)

    def _fixed_padding(self, index: Tensor, y: Tensor) -> Tensor:
        if self.padding_idx is None:
            return y
        row = self.weight.detach()[..., self.padding_idx, :]
        if row.dim() > 1:  # one per component; they start equal and get no gradient
            row = row[0]
        return torch.where((index == self.padding_idx).unsqueeze(-1), row.to(y.dtype), y)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer's rule."""
        return unbatched(self._apply_rule, input, 1)


class BayesEmbeddingBag(_Table, nn.EmbeddingBag):
    """Sums, means or maxima of table rows; bags are the rows of a 2-D input."""

    title = "EmbeddingBag"

    def compute(self, inputs: Inputs, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """torch's kernel."""
        index, offsets, per_sample_weights = inputs
        assert weight is not None
        return F.embedding_bag(
            index,
            weight,
            offsets,
            None,
            2.0,
            self.scale_grad_by_freq,
            self.mode,
            False,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
        )

    def grouped(self, inputs: Inputs, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Group by group."""
        if inputs[0].dim() != 2:
            raise ValueError(
                f"EmbeddingBag layer {self.bayes.name!r} got a flat input with offsets, whose bags cannot be "
                f"split among {weight.shape[0]} draws; pass a 2-D input [batch, bag size] instead"
            )
        return one_by_one(self, inputs, weight, bias)

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Apply the layer's rule."""
        return self._apply_rule(input, offsets, per_sample_weights)
