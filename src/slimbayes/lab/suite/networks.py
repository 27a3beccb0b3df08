"""The networks of the suite: plain modules as people write them, small enough for a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from slimbayes.lab.suite.data import Task

Network = Callable[[Task], nn.Module]


def mlp(width: int = 64, depth: int = 2) -> Network:
    """Dense layers with ReLU."""

    def make(task: Task) -> nn.Module:
        sizes = [task.train.inputs[0].numel(), *[width] * depth]
        layers = [part for i in range(depth) for part in (nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, task.outputs))

    return make


class _Adapter(nn.Module):
    def __init__(self, size: int, width: int, outputs: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(size, width), nn.Linear(width, size)
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.up(torch.relu(self.down(x)))))  # type: ignore[no-any-return]


def adapter(width: int = 32) -> Network:
    """A bottleneck beside what a frozen encoder gives, and a head (Houlsby et al. 2019)."""
    return lambda task: _Adapter(task.train.inputs.shape[1], width, task.outputs)


def cnn(norm: str | None, width: int = 8) -> Network:
    """Three convolutions, without norms or with BatchNorm or GroupNorm, then a mean over the image."""

    def make(task: Task) -> nn.Module:
        channels = [task.train.inputs.shape[1], width, 2 * width, 4 * width]
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(channels):
            layers.append(nn.Conv2d(before, after, 3, padding=1, bias=norm is None))
            if norm is not None:
                layers.append(nn.BatchNorm2d(after) if norm == "batch" else nn.GroupNorm(4, after))
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], task.outputs)
        )

    return make


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(y + self.skip(x))


def resnet(width: int = 8) -> Network:
    """Three residual blocks of two convolutions with BatchNorm."""

    def make(task: Task) -> nn.Module:
        stem = nn.Conv2d(task.train.inputs.shape[1], width, 3, 2, 1, bias=False)
        blocks = [_Block(width, width, 1), _Block(width, 2 * width, 2), _Block(2 * width, 4 * width, 2)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, task.outputs)]
        return nn.Sequential(stem, nn.BatchNorm2d(width), nn.ReLU(), *blocks, *head)

    return make


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.GRU] | type[nn.LSTM], task: Task, width: int) -> None:
        super().__init__()
        size = width if task.words else task.train.inputs.shape[-1]
        self.embedding = nn.Embedding(task.words, width) if task.words else nn.Identity()
        self.body = kind(size, width, batch_first=True)
        self.head = nn.Linear(width, task.outputs)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.body(self.embedding(x))
        return self.head(states[:, -1])  # type: ignore[no-any-return]


def recurrent(kind: type[nn.GRU] | type[nn.LSTM], width: int = 48) -> Network:
    """One recurrent layer, of tokens through an embedding, and a dense layer on its last state."""
    return lambda task: _Recurrent(kind, task, width)


class _Transformer(nn.Module):
    def __init__(self, task: Task, width: int, depth: int) -> None:
        super().__init__()
        length = task.train.inputs.shape[1]
        self.words = nn.Embedding(task.words, width, padding_idx=0)
        self.places = nn.Embedding(length, width)
        self.register_buffer("place", torch.arange(length), persistent=False)
        layers = [
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        ]
        self.blocks = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, task.outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        x = self.words(tokens) + self.places(self.place)
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padding)
        there = (~padding).unsqueeze(-1).to(x.dtype)
        return self.head(self.norm((x * there).sum(1) / there.sum(1)))  # type: ignore[no-any-return]


def transformer(width: int = 48, depth: int = 2) -> Network:
    """Encoder blocks of torch, then the mean over words."""
    return lambda task: _Transformer(task, width, depth)
