"""The pairs of data and network, half of them to choose defaults on, half of them looked at once, at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from slimbayes.lab.suite import data, networks


@dataclass(frozen=True)
class Pair:
    """Data, a network, and the loop that somebody would write for it."""

    name: str
    half: str  # "choosing" or "judging"
    data: data.Data
    network: networks.Network
    epochs: int
    lr: float
    batch: int = 64
    optimizer: str = "adamw"


CHOOSING = (
    Pair("mnist-cnn", "choosing", data.of(data.images, "mnist", 2000, 1000), networks.cnn(None), 8, 2e-3),
    Pair("cifar-cnn-bn", "choosing", data.of(data.images, "cifar10", 2000, 1000), networks.cnn("batch"), 12, 0.05, optimizer="sgd"),
    Pair("mnist-wide", "choosing", data.of(data.images, "mnist", 600, 1000), networks.mlp(512, 2), 30, 1e-3, 32),
    Pair("concrete-mlp", "choosing", data.of(data.table, "uci/concrete", 830, 200), networks.mlp(), 80, 2e-3),
    Pair("power-mlp", "choosing", data.of(data.table, "uci/power", 8000, 1500), networks.mlp(), 8, 2e-3, 128),
    Pair("adult-mlp", "choosing", data.of(data.table, "adult", 5000, 3000), networks.mlp(), 8, 2e-3),
    Pair("breast-mlp", "choosing", data.of(data.table, "breast_cancer", 400, 169), networks.mlp(50, 1), 60, 0.05, 32, "sgd"),
    Pair("physionet-gru", "choosing", data.of(data.stays, 2000, 1500), networks.recurrent(nn.GRU, 32), 6, 3e-3),
    Pair("newsgroups-transformer", "choosing", data.of(data.texts, "newsgroups", 3000, 1000, 40, 4000), networks.transformer(), 6, 2e-3),
)  # fmt: skip
JUDGING = (
    Pair("cifar-cnn-gn", "judging", data.of(data.images, "cifar10", 20_000, 1000), networks.cnn("group"), 3, 2e-3, 128),
    Pair("cifar-resnet", "judging", data.of(data.images, "cifar10", 2000, 1000), networks.resnet(), 15, 0.05, optimizer="sgd"),
    Pair("mnist-cnn-bn", "judging", data.of(data.images, "mnist", 2000, 1000), networks.cnn("batch"), 6, 2e-3),
    Pair("digits-mlp", "judging", data.of(data.table, "digits", 1200, 500), networks.mlp(), 40, 2e-3),
    Pair("kin8nm-mlp", "judging", data.of(data.table, "uci/kin8nm", 7000, 1000), networks.mlp(), 15, 0.02, optimizer="sgd"),
    Pair("diamonds-mlp", "judging", data.of(data.table, "diamonds", 50_000, 3000), networks.mlp(), 2, 2e-3, 128),
    Pair("energy-mlp", "judging", data.of(data.table, "uci/energy", 600, 160), networks.mlp(50, 1), 100, 2e-3, 32),
    Pair("wine-mlp", "judging", data.of(data.table, "wine", 120, 58), networks.mlp(32, 2), 60, 2e-3, 16),
    Pair("imdb-lstm", "judging", data.of(data.reviews, 4000, 1500, 60, 5000), networks.recurrent(nn.LSTM, 48), 4, 3e-3),
    Pair("headlines-transformer", "judging", data.of(data.texts, "headlines", 6000, 1500, 20, 6000), networks.transformer(), 3, 1e-3),
)  # fmt: skip
PAIRS = {pair.name: pair for pair in (*CHOOSING, *JUDGING)}
