"""The LSTM of the k-tied paper."""

import torch
from torch import Tensor, nn


class TextLSTM(nn.Module):
    """Words to vectors, one LSTM over them, and a dense layer on its last state.

    Swiatkowski et al. (2020), https://arxiv.org/abs/2002.02655: 20,000 words, vectors and states of 128. Initialised as
    in Keras: glorot_uniform kernel, orthogonal recurrent kernel, a forget bias of 1, and one bias: ``bias_hh`` stays 0
    and is not trained.

    >>> network = TextLSTM()
    >>> sum(p.numel() for n, p in network.named_parameters() if p.requires_grad and not n.startswith("output"))
    2691584
    >>> network(torch.zeros(2, 80, dtype=torch.long)).shape
    torch.Size([2, 1])
    """

    def __init__(self, words: int = 20_000, size: int = 128, hidden: int = 128, outputs: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, size)
        self.lstm = nn.LSTM(size, hidden, batch_first=True)
        self.output = nn.Linear(hidden, outputs)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)
        hidden, own = self.lstm.hidden_size, dict(self.lstm.named_parameters())
        nn.init.xavier_uniform_(own["weight_ih_l0"])
        nn.init.orthogonal_(own["weight_hh_l0"])
        nn.init.zeros_(own["bias_hh_l0"]).requires_grad_(False)
        with torch.no_grad():
            own["bias_ih_l0"].zero_()[hidden : 2 * hidden] = 1.0
        nn.init.xavier_uniform_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def forward(self, words: Tensor) -> Tensor:
        """Map words [B, T] to outputs [B, outputs]."""
        states, _ = self.lstm(self.embedding(words))  # [B, T, hidden]
        logits: Tensor = self.output(states[:, -1])
        return logits
