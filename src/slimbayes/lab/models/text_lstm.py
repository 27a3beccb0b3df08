"""The LSTM of the k-tied paper."""

import torch
from torch import Tensor, nn

from slimbayes.lab.models._recurrent import keras_initialize


class TextLSTM(nn.Module):
    """Embedding of 128, LSTM of 128 and a dense layer on its last output: Keras's example for IMDB.

    Swiatkowski et al. (2020), https://arxiv.org/abs/2002.02655, train it without dropout on reviews of 80 tokens,
    padded at the front, and tie the spreads of the two kernels of 128 × 512. Padding is a token like others. Keras's
    start: embedding U(−0.05, 0.05), Glorot-uniform kernel and head, orthogonal recurrent kernel, forget bias 1.

    Args:
        words: size of the vocabulary, with padding, start and unknown.
        embedding: size of a word's vector.
        hidden: units of the LSTM.
        outputs: 1 with the Bernoulli likelihood, as in the paper; 2 with the categorical one.
        single_bias: one bias per gate, as Keras has it: torch's second one is 0 and not trained.

    >>> network = TextLSTM()
    >>> sum(p.numel() for p in network.parameters() if p.requires_grad) - 129  # without the head
    2691584
    >>> network(torch.zeros(2, 80, dtype=torch.long)).shape
    torch.Size([2, 1])
    """

    def __init__(
        self,
        words: int = 20_000,
        embedding: int = 128,
        hidden: int = 128,
        outputs: int = 1,
        single_bias: bool = True,
    ) -> None:
        super().__init__()
        self.single_bias = single_bias
        self.embedding = nn.Embedding(words, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.output = nn.Linear(hidden, outputs)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new weights as Keras does."""
        self.embedding.weight.uniform_(-0.05, 0.05)
        keras_initialize(self.lstm, self.single_bias)
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids [B, length] to [B, outputs]."""
        states, _ = self.lstm(self.embedding(tokens))  # [B, length, hidden]
        outputs: Tensor = self.output(states[:, -1])
        return outputs
