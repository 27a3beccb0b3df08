"""The pairs of data and network, half of them to choose defaults on, half of them looked at once, at the end."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from slimbayes.lab.suite.data import ENCODER, Data, encoded, images, of, reviews, stays, table, texts
from slimbayes.lab.suite.networks import Network, adapter, cnn, mlp, recurrent, resnet, transformer


@dataclass(frozen=True)
class Pair:
    """Data, a network, and the loop that somebody would write for it."""

    name: str
    data: Data
    network: Network
    epochs: int
    lr: float
    batch: int = 64
    optimizer: str = "adamw"
    half: str = "choosing"  # or "judging"
    needs: str = ""  # a package beside those of this one


_CHOOSING = (
    Pair("mnist-cnn", of(images, "mnist", 2000, 1000), cnn(None), 8, 2e-3),
    Pair("cifar-cnn-bn", of(images, "cifar10", 2000, 1000), cnn("batch"), 12, 0.05, 64, "sgd"),
    Pair("mnist-wide", of(images, "mnist", 600, 1000), mlp(512, 2), 30, 1e-3, 32),
    Pair("concrete-mlp", of(table, "uci/concrete", 830, 200), mlp(), 80, 2e-3),
    Pair("power-mlp", of(table, "uci/power", 8000, 1500), mlp(), 8, 2e-3, 128),
    Pair("energy-mlp", of(table, "uci/energy", 600, 160), mlp(50, 1), 100, 2e-3, 32),
    Pair("adult-mlp", of(table, "adult", 5000, 3000), mlp(), 8, 2e-3),
    Pair("breast-mlp", of(table, "breast_cancer", 400, 169), mlp(50, 1), 60, 0.05, 32, "sgd"),
    Pair("physionet-gru", of(stays, 2000, 1500), recurrent(nn.GRU, 32), 6, 3e-3),
    Pair("newsgroups-transformer", of(texts, "newsgroups", 3000, 1000, 40, 4000), transformer(), 6, 2e-3),
    Pair("cifar-cnn-gn", of(images, "cifar10", 20_000, 1000), cnn("group"), 3, 2e-3, 128),
    Pair("cifar-resnet", of(images, "cifar10", 2000, 1000), resnet(), 15, 0.05, 64, "sgd"),
    Pair("mnist-cnn-bn", of(images, "mnist", 2000, 1000), cnn("batch"), 6, 2e-3),
    Pair("digits-mlp", of(table, "digits", 1200, 500), mlp(), 40, 2e-3),
    Pair("kin8nm-mlp", of(table, "uci/kin8nm", 7000, 1000), mlp(), 15, 0.02, 64, "sgd"),
    Pair("diamonds-mlp", of(table, "diamonds", 50_000, 3000), mlp(), 2, 2e-3, 128),
    Pair("protein-mlp", of(table, "uci/protein", 5000, 1500), mlp(), 12, 2e-3),
    Pair("wine-mlp", of(table, "wine", 120, 58), mlp(32, 2), 60, 2e-3, 16),
    Pair("imdb-lstm", of(reviews, 4000, 1500, 60, 5000), recurrent(nn.LSTM, 48), 4, 3e-3),
    Pair("headlines-transformer", of(texts, "headlines", 6000, 1500, 20, 6000), transformer(), 3, 1e-3),
    Pair("headlines-adapter", of(encoded, "headlines", 2000, 1500), adapter(), 10, 1e-3, needs=ENCODER),
)  # fmt: skip
_JUDGING = (
    Pair("cifar100-resnet", of(images, "cifar100", 3000, 1000), resnet(), 8, 2e-3),
    Pair("digits-cnn", of(images, "digits", 1200, 350), cnn("batch"), 20, 0.05, 64, "sgd"),
    Pair("mnist-deep", of(images, "mnist", 5000, 1000), mlp(128, 4), 5, 1e-3),
    Pair("boston-mlp", of(table, "uci/boston", 400, 100), mlp(50, 1), 80, 0.01, 32, "sgd"),
    Pair("naval-mlp", of(table, "uci/naval", 8000, 1500), mlp(), 10, 1e-3, 128),
    Pair("red-wine-mlp", of(table, "uci/wine", 1300, 290), mlp(), 40, 2e-3),
    Pair("yacht-mlp", of(table, "uci/yacht", 240, 60), mlp(50, 1), 100, 5e-3, 32),
    Pair("diabetes-mlp", of(table, "diabetes", 342, 100), mlp(32, 2), 40, 2e-3, 32),
    Pair("adult-deep", of(table, "adult", 20_000, 3000), mlp(128, 3), 3, 0.05, 128, "sgd"),
    Pair("imdb-gru", of(reviews, 6000, 1500, 80, 8000), recurrent(nn.GRU, 32), 3, 1e-3),
    Pair("boolq-transformer", of(texts, "boolq", 3000, 1500, 40, 6000), transformer(), 3, 1e-3),
    Pair("newsgroups-adapter", of(encoded, "newsgroups", 3000, 1000), adapter(), 6, 3e-3, needs=ENCODER),
)  # fmt: skip
PAIRS = {pair.name: pair for pair in (*_CHOOSING, *(replace(pair, half="judging") for pair in _JUDGING))}
