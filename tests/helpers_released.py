"""Networks, data and outputs of the files in ``tests/fixtures``, which released versions wrote.

Nothing here may change once a release has files made with it: add another network, another method, another kind.
"""

import torch
from torch import Tensor, nn

import slimbayes as sb


def values(*shape: int, start: int = 0) -> Tensor:
    """Numbers in [−1, 1) that are the same in every version of torch: no generator and no function rounds them."""
    count = torch.Size(shape).numel()
    return ((torch.arange(start, start + count) * 37 % 64).float() / 32 - 1).reshape(shape)


def images() -> nn.Module:
    """A convolution, a norm, a dropout and a head."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(8, 3)
    )


class Words(nn.Module):
    """An embedding, a recurrent layer, attention and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.steps = nn.LSTM(4, 4, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """[B, T] to [B, 2]."""
        rows = self.steps(self.table(tokens))[0]
        rows = rows + self.attention(rows, rows, rows, need_weights=False)[0]
        return self.head(self.norm(rows).mean(1))


def rows() -> nn.Module:
    """Two Linear layers and a norm."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


NETWORKS = {"images": images, "words": Words, "rows": rows}
INPUTS = {
    "images": values(5, 1, 4, 4),
    "words": torch.arange(20).reshape(5, 4) * 3 % 7,
    "rows": values(5, 3),
}
# Every method, and the options that change which tensors a file holds; with the papers' values, which were the defaults
# when the first of these files were written.
METHODS = {
    "rank1": sb.Rank1.paper(components=2),
    "rank1-cauchy": sb.Rank1.paper(components=2, posterior="cauchy", prior=sb.Cauchy(1.0, 0.01)),
    "rank1-lognormal": sb.Rank1.paper(components=2, posterior="lognormal"),
    "rank1-halfcauchy": sb.Rank1.paper(components=2, posterior="halfcauchy", factors="input"),
    "rank1-random-input": sb.Rank1.paper(components=2, random="input"),
    "batch-ensemble": sb.BatchEnsemble(components=2),
    "mean-field": sb.MeanField.paper(prior=sb.HeNormal()),
    "mean-field-tied": sb.MeanField.paper(estimator="flipout", tied_mean=True, biases=False),
    "ktied": sb.KTied.paper(rank=2),
    "ktied-local": sb.KTied.paper(rank=1, estimator="local"),
    "ktied-tempered": sb.KTied.paper(rank=1, prior=sb.EmpiricalNormal(), temperature=0.1),
    "emp": sb.EMP.paper(components=3),
    "emp-learned": sb.EMP.paper(components=3, learn_mixing=True, prior_precision=0.5),
    "ecmp": sb.ECMP.paper(components=3),
    "mc-dropout": sb.MCDropout(rate=0.3),
    "drop-connect": sb.DropConnect(rate=0.3),
    "deep-ensemble": sb.DeepEnsemble(members=2),
    "deterministic": sb.Deterministic(),
}
SEQUENCES = (
    "rank1",
    "ktied",
    "mc-dropout",
    "deep-ensemble",
)  # those that are written with the words network too
TRAINING = {"epochs": 4, "batch_size": 8, "lr": 0.05, "log_every": 2, "validation": 0.25, "early_stopping": 3,
            "progress": False, "accelerator": "cpu", "seed": 5}  # fmt: skip
MANY = {"steps": 8, "batch_size": 8, "lr": 0.05, "log_every": 2, "progress": False, "accelerator": "cpu",
        "seeds": [1, 2], "likelihood": sb.Gaussian()}  # fmt: skip


def filled(model: nn.Module) -> nn.Module:
    """The model with every parameter moved, by amounts that no generator gives."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(values(*parameter.shape, start=number).to(parameter) / 8)
    return model


def outputs(model: nn.Module, network: str) -> dict[str, Tensor]:
    """What a model must still say: without noise, with the noise of a seed, and its KL."""
    x = INPUTS[network]
    with torch.no_grad():
        found = {
            noise: sb.draw(model.eval(), x, samples=2, noise=noise, seed=3)
            for noise in ("mean", "shared", "example")
        }
        return {**found, "kl": sb.kl(model)}


def table() -> tuple[Tensor, Tensor]:
    """Data for the training of ``rows``: 24 rows of two classes."""
    x = values(24, 3, start=11)
    return x, (x[:, 0] + x[:, 1] > 0).long()


def trained(folder: object, callback: object = None) -> dict[str, Tensor]:
    """A run of ``fit`` in a folder, stopped by the callback or taken up from there; its weights."""
    torch.manual_seed(0)
    model = filled(sb.bayesianize(rows(), sb.Rank1.paper(components=2)))
    sb.fit(model, table(), folder=folder, resume=True, callback=callback, **TRAINING)
    return model.state_dict()


def trained_many(folder: object, callback: object = None) -> dict[str, Tensor]:
    """The same for ``fit_many``."""
    torch.manual_seed(0)
    models = [filled(sb.bayesianize(nn.Linear(3, 1), sb.KTied.paper(rank=1))) for _ in range(2)]
    x, y = table()
    sb.fit_many(models, (x, y[:, None].float()), folder=folder, callback=callback, **MANY)
    return {
        f"{i}.{name}": value for i, model in enumerate(models) for name, value in model.state_dict().items()
    }
