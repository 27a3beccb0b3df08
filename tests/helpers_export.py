"""Networks for freezing and exporting, and every method with all its posteriors."""

import torch
from torch import nn

import slimbayes as sb


def everything(name, module):
    return not name.endswith("dropout")


POSTERIORS = ("normal", "cauchy", "lognormal", "halfcauchy", "delta")
METHODS = {
    **{f"Rank1 {p}": sb.Rank1(components=2, posterior=p) for p in POSTERIORS},
    "Rank1 additive": sb.Rank1(components=2, perturbation="additive"),
    "Rank1 input": sb.Rank1(components=2, factors="input"),
    "Rank1 random output": sb.Rank1(components=2, random="output"),
    "BatchEnsemble": sb.BatchEnsemble(components=2),
    **{f"MeanField {e}": sb.MeanField(estimator=e, stddev_init=0.1) for e in ("shared", "flipout", "local")},
    **{f"KTied {e}": sb.KTied(estimator=e, stddev_init=0.1) for e in ("shared", "flipout", "local")},
    "EMP": sb.EMP(components=3, patch=(everything,), init_noise=0.2),
    "ECMP": sb.ECMP(components=3, patch=(everything,), init_noise=0.2),
    "MCDropout": sb.MCDropout(0.3),
    "MCDropout channel": sb.MCDropout(0.3, granularity="channel"),
    "DropConnect": sb.DropConnect(0.3),
    "DeepEnsemble": sb.DeepEnsemble(members=2),
    "Deterministic": sb.Deterministic(),
}  # fmt: skip


class Images(nn.Module):
    """Convolution, every norm, a dropout of its own, Linear."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.batch = nn.BatchNorm2d(4)
        self.group = nn.GroupNorm(2, 4)
        self.dropout = nn.Dropout(0.2)
        self.layer = nn.LayerNorm(36)
        self.head = nn.Linear(36, 3)
        with torch.no_grad():
            self.batch.running_mean.normal_()
            self.batch.running_var.uniform_(0.5, 2.0)

    def forward(self, image):
        x = self.group(self.batch(self.conv(image))).relu()
        return self.head(self.layer(self.dropout(x).flatten(1)))


class Words(nn.Module):
    """Embedding, LSTM in both directions, Linear."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.lstm = nn.LSTM(3, 4, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 2)

    def forward(self, tokens):
        return self.head(self.lstm(self.table(tokens))[0].mean(1))


class Attended(nn.Module):
    """A transformer's layer: attention, LayerNorm, Linear."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer(x).mean(1))


NETWORKS = {"images": Images, "words": Words, "attended": Attended}


def inputs(kind, batch=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if kind == "words":
        return torch.randint(7, (batch, 3), generator=generator)
    return torch.randn(batch, *{"images": (2, 3, 3), "attended": (3, 4)}[kind], generator=generator)


def make(kind, name):
    """The converted network, in evaluation mode; an estimator that samples outputs cannot have recurrent layers."""
    torch.manual_seed(0)
    exclude = "lstm" if name.endswith("local") and kind == "words" else None
    return sb.bayesianize(NETWORKS[kind](), METHODS[name], exclude=exclude).eval()
