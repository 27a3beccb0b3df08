"""Sequences of several lengths: a rank-1 LSTM counts words, and doubts more where the count is close."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import slimbayes as sb


def sentences(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Words 0 and 1, the lengths, which of them is more frequent, and by how much."""
    words, lengths = torch.randint(2, (n, 15)), torch.randint(5, 16, (n,))
    said = torch.arange(15) < lengths.unsqueeze(1)
    lead = ((2 * words - 1) * said).sum(1)
    return words, lengths, (lead > 0).long(), lead.abs()


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(2, 8)
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 2)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][0])  # the last state of every sequence


def main(steps: int = 300) -> dict[str, float]:
    torch.manual_seed(0)
    model = sb.bayesianize(Counter(), sb.Rank1(components=2, random_sign_init=1.0, kl_reduction="mean"))
    optimizer = torch.optim.Adam(sb.parameter_groups(model, lr=1e-2, weight_decay=0.0))
    for _ in range(steps):
        words, lengths, y, _ = sentences(64)
        optimizer.zero_grad()
        sb.elbo(sb.draw(model, words, lengths), y, model, num_data=10_000).loss.backward()
        optimizer.step()
    words, lengths, y, lead = sentences(500)
    found = sb.predict(model, words, lengths, samples=8, seed=0)
    accuracy = (found.mean.argmax(-1) == y).float().mean().item()
    close, clear = (found.entropy[rows].mean().item() for rows in (lead <= 1, lead >= 4))
    print(
        f"accuracy {accuracy:.3f}; entropy {close:.3f} nats where the count is close, {clear:.3f} elsewhere"
    )
    return {"accuracy": accuracy, "close": close, "clear": clear}


if __name__ == "__main__":
    main()
