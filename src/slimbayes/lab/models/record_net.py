"""The network of the rank-1 paper for medical records."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.lab.models._recurrent import keras_initialize
from slimbayes.networks.initialization import he_normal_

Combine = Literal["mean", "sum"]


class RecordNet(nn.Module):
    """Embedded events in time bags, an LSTM over the bags, and two dense layers on its last output and the context.

    Dusenberry et al. (2020), https://arxiv.org/abs/2005.07186, Section 4.4 and Table 7. In bag t, with w_e how often
    event e occurred in it:

        x_t = [Σ w_e C[code_e] / Σ w_e,  Σ w_e V[level_e] / Σ w_e,  log(1 + age_t)]

    The second mean is over events with a value. "sum" leaves the division out. Then h = LSTM(x₁ … x_T)_T and
    output = A₂ relu6(A₁ [h, context]).

    Code vectors have round(multiplier · ⌈6 · codes^¼⌉) numbers: the default sizes that the paper multiplies are not
    published, and the fourth root is the usual rule for them.

    Args:
        codes: how many codes there are, with 0 for padding.
        levels: how many levels of values, with 0 for "no value".
        context: columns of what is known of the whole record.
        multiplier: the paper's embedding multiplier.
        dense: size of the value vectors, the paper's dense embedding.
        hidden: units of the LSTM.
        dense_hidden: of the affine layer; 0 leaves it out.
        outputs: 1 with the Bernoulli likelihood; 2 with the categorical one.
        combine: "mean" or "sum" of the vectors in a bag.
        layers: LSTMs on top of each other.
        single_bias: one bias per gate, as Keras has it.

    >>> network = RecordNet(codes=38, levels=300, context=10)
    >>> codes, ages = torch.ones(2, 6, dtype=torch.long), torch.zeros(2, 3)
    >>> network(codes, codes, torch.ones(2, 6), codes, ages, torch.tensor([2, 3]), torch.zeros(2, 10)).shape
    torch.Size([2, 1])
    """

    def __init__(
        self,
        codes: int,
        levels: int,
        context: int,
        multiplier: float = 0.85827,
        dense: int = 32,
        hidden: int = 512,
        dense_hidden: int = 512,
        outputs: int = 1,
        combine: Combine = "mean",
        layers: int = 1,
        single_bias: bool = True,
    ) -> None:
        super().__init__()
        if combine not in ("mean", "sum"):
            raise ValueError(f"combine={combine!r} is unknown; use 'mean' or 'sum'")
        self.combine, self.single_bias = combine, single_bias
        self.codes = nn.Embedding(codes, embedding_size(codes, multiplier))
        self.values = nn.Embedding(levels, dense)
        self.lstm = nn.LSTM(self.codes.embedding_dim + dense + 1, hidden, layers, batch_first=True)
        self.hidden = nn.Linear(hidden + context, dense_hidden) if dense_hidden else None
        self.output = nn.Linear(dense_hidden or hidden + context, outputs)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights: embeddings U(−0.05, 0.05), the LSTM as Keras does, he_normal dense kernels."""
        for table in (self.codes, self.values):
            table.weight.uniform_(-0.05, 0.05)
        keras_initialize(self.lstm, self.single_bias)
        for layer in (self.hidden, self.output):
            if layer is not None:
                he_normal_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(
        self,
        codes: Tensor,
        levels: Tensor,
        weights: Tensor,
        bags: Tensor,
        ages: Tensor,
        lengths: Tensor,
        context: Tensor,
    ) -> Tensor:
        """Map a batch of ``slimbayes.data.Events`` to [B, outputs]."""
        within = bags.unsqueeze(1) == torch.arange(ages.shape[1], device=bags.device)[:, None]  # [B, T, E]
        shares = within * weights.unsqueeze(1)  # [B, T, E]
        valued = shares * (levels > 0).unsqueeze(1)
        means = self._bagged(shares, self.codes(codes)), self._bagged(valued, self.values(levels))
        steps = torch.cat([*means, torch.log1p(ages).unsqueeze(-1)], -1)  # [B, T, features]
        states, _ = self.lstm(steps)  # [B, T, hidden]
        last = (lengths - 1)[:, None, None].expand(-1, 1, states.shape[-1])
        x = torch.cat([states.gather(1, last)[:, 0], context], -1)  # [B, hidden + context]
        if self.hidden is not None:
            x = F.relu6(self.hidden(x))
        outputs: Tensor = self.output(x)
        return outputs

    def _bagged(self, shares: Tensor, vectors: Tensor) -> Tensor:
        shares = shares.to(vectors.dtype)
        total = torch.bmm(shares, vectors)  # [B, T, size]
        if self.combine == "sum":
            return total
        weight = shares.sum(-1, keepdim=True)  # [B, T, 1]
        return total / torch.where(weight > 0, weight, 1.0)  # an empty bag is 0


def embedding_size(codes: int, multiplier: float = 1.0) -> int:
    """Numbers of a code's vector: round(multiplier · ⌈6 · codes^¼⌉), at least 1.

    >>> embedding_size(10_000), embedding_size(10_000, 0.85827)
    (60, 51)
    """
    size = -int(-6 * codes**0.25 // 1)
    return max(1, round(multiplier * size))
