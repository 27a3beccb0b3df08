"""Draws with a seed that must never change: their networks, filled with the same numbers everywhere, and a summary."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from helpers_matrix import CASES, METHODS, supports
from torch import Tensor, nn

import slimbayes as sb

FOLDER = Path(__file__).parent / "fixtures" / "draws"
BATCH, SEED = 4, 8
NOISES = ("example", "shared", "mean")

# Of the matrix, at most a few configurations a layer type: enough that each goes its own way through the code.
WIDE = {
    "Linear": ("plain", "no bias", "leading dims"),
    "Conv1d": ("stride, groups",),
    "Conv2d": ("plain", "stride, groups", "circular"),
    "Conv3d": ("plain",),
    "ConvTranspose1d": ("stride",),
    "ConvTranspose2d": ("plain", "dilation, groups"),
    "ConvTranspose3d": ("output_size",),
    "BatchNorm1d": ("vectors", "momentum"),
    "BatchNorm2d": ("plain", "cumulative", "no statistics"),
    "BatchNorm3d": ("plain",),
    "LayerNorm": ("plain", "several axes"),
    "GroupNorm": ("images",),
    "RMSNorm": ("plain",),
    "Embedding": ("plain",),
    "EmbeddingBag": ("mean", "weighted"),
    "Bilinear": ("plain", "leading dims"),
}
NARROW = {"Linear": ("plain", "leading dims"), "Conv2d": ("stride, groups",), "Bilinear": ("plain",)}
NORMS = {kind: WIDE[kind] for kind in ("Linear", "BatchNorm1d", "BatchNorm2d", "LayerNorm", "Embedding")}


def numbers(label: str, shape: tuple[int, ...]) -> Tensor:
    """Numbers in [-1, 1) that depend on the label alone: 23 bits of hashed integers, so exact in every type."""
    mask = 0xFFFFFFFF
    x = (torch.arange(math.prod(shape)) + zlib.crc32(label.encode())) * 0x9E3779B1 & mask
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # MurmurHash3's last step
        x = (x ^ (x >> shift)) * factor & mask
    return (((x ^ (x >> 16)) >> 8).double() / 2**23 - 1).reshape(shape)


def fill(model: nn.Module, method: sb.methods.Method | None, dtype: torch.dtype) -> nn.Module:
    """Every parameter and running statistic of a converted model by its name in the state_dict."""
    centred = (
        getattr(method, "perturbation", "") == "additive" or getattr(method, "posterior", "") == "lognormal"
    )
    for name, tensor in model.state_dict().items():
        last = name.rsplit(".", 1)[-1]
        if not tensor.is_floating_point() or (
            last == "loc" and getattr(method, "posterior", "") == "halfcauchy"
        ):
            continue  # a half-Cauchy's location is fixed
        u = numbers(name, tuple(tensor.shape))
        if last == "running_var" or (last == "loc" and not centred):
            u = 1 + 0.4 * u
        elif last == "rho":
            u = u - 2
        elif last in ("log_u", "log_v"):
            u = 0.5 * u - 1.5
        tensor.copy_(u.float().to(dtype))  # in place: float32 and float64 start from the same numbers
    return model


class Wide(nn.Module):
    """Layers side by side, each with inputs of its own; the outputs in a row."""

    def __init__(self, kinds: dict[str, tuple[str, ...]]) -> None:
        super().__init__()
        self.cases = [case for kind, labels in kinds.items() for case in CASES[kind] if case.label in labels]
        self.layers = nn.ModuleDict({str(case).replace(",", ""): case.make() for case in self.cases})

    def inputs(self) -> list[Tensor]:
        found = []
        for case in self.cases:
            for i, shape in enumerate(case.shapes):
                x = numbers(f"{case} {i}", (BATCH, *shape))
                found.append((3 * x + 3).long() if case.index and i == 0 else x)
        return found

    def forward(self, *inputs: Tensor) -> Tensor:
        left, outputs = list(inputs), []
        for case, layer in zip(self.cases, self.layers.values(), strict=True):
            own = [left.pop(0) for _ in case.shapes]
            if case.kind == "EmbeddingBag" and len(own) > 1:
                own.insert(1, None)
            outputs.append(layer(*own, **case.call).flatten(1))
        return torch.cat(outputs, 1)


class Deep(nn.Sequential):
    """Layers one after the other."""

    def __init__(self, shape: tuple[int, ...], *layers: nn.Module, words: int = 0) -> None:
        super().__init__(*layers)
        self.shape, self.words = shape, words

    def inputs(self) -> list[Tensor]:
        x = numbers("input", (BATCH, *self.shape))
        return [((x + 1) / 2 * self.words).long() if self.words else x]


class First(nn.Module):
    """A recurrent or attention layer that returns its sequence alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        inputs = (x, x, x) if isinstance(self.layer, nn.MultiheadAttention) else (x,)
        return self.layer(*inputs)[0]


class Steps(nn.Module):
    """A cell along a sequence."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state, found = None, []
        for part in x.unbind(1):
            state = self.cell(part, state)
            found.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(found, 1)


def perceptron() -> Deep:
    layers = (
        nn.Linear(20, 48, bias=False),
        nn.BatchNorm1d(48),
        nn.ReLU(),
        nn.Linear(48, 48),
        nn.ReLU(),
        nn.Linear(48, 3),
    )
    return Deep((20,), *layers)


def pictures() -> Deep:
    return Deep(
        (3, 8, 8), nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3),
    )  # fmt: skip


def recurrent() -> Deep:
    return Deep(
        (3,), nn.Embedding(9, 8), First(nn.LSTM(8, 16, num_layers=2, batch_first=True)), First(nn.GRU(16, 8,
        batch_first=True, bidirectional=True)), First(nn.RNN(16, 8, batch_first=True)), Steps(nn.LSTMCell(8, 8)),
        Steps(nn.GRUCell(8, 6)), Steps(nn.RNNCell(6, 6)), nn.Flatten(), nn.Linear(18, 3), words=9,
    )  # fmt: skip


def attention() -> Deep:
    block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    attended = First(nn.MultiheadAttention(16, 4, batch_first=True))
    return Deep((4,), nn.Embedding(9, 16), block, attended, nn.Flatten(), nn.Linear(64, 3), words=9)


DEEP: dict[str, Callable[[], Deep]] = {
    "perceptron": perceptron, "pictures": pictures, "recurrent": recurrent, "attention": attention,
}  # fmt: skip
MIXING = {"components": 3, "learn_mixing": True}
PATCHED = (nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d)
VARIANTS = {
    "Rank1 random input": sb.Rank1.paper(components=3, random="input"),
    "Rank1 random output": sb.Rank1.paper(components=3, random="output"),
    "Rank1 factors input": sb.Rank1.paper(components=3, factors="input"),
    "Rank1 factors output": sb.Rank1.paper(components=3, factors="output"),
    "Rank1 additive": sb.Rank1.paper(components=3, perturbation="additive"),
    "Rank1 cauchy": sb.Rank1.paper(components=2, posterior="cauchy"),
    "Rank1 cauchy additive": sb.Rank1.paper(components=2, posterior="cauchy", perturbation="additive"),
    "Rank1 lognormal": sb.Rank1.paper(components=2, posterior="lognormal"),
    "Rank1 halfcauchy": sb.Rank1.paper(components=2, posterior="halfcauchy"),
    "Rank1 delta": sb.Rank1.paper(components=2, posterior="delta"),
    "Rank1 some components": sb.Rank1.paper(components=4, components_per_step=2),
    "Rank1 mean KL": sb.Rank1.paper(components=3, kl_reduction="mean"),
    "Rank1 factors alone": sb.Rank1.paper(components=3, train_base=False),
    "Rank1 wide prior": sb.Rank1.paper(components=3, prior=sb.Normal(0.5, 2.0)),
    "MeanField tied mean": sb.MeanField.paper(tied_mean=True),
    "MeanField no biases": sb.MeanField.paper(biases=False, stddev_max=0.1),
    "MeanField He": sb.MeanField.paper(prior=sb.HeNormal()),
    "KTied rank 1": sb.KTied.paper(rank=1, biases=False),
    "EMP mixing": sb.EMP.paper(**MIXING, patch=PATCHED),
    "EMP precision": sb.EMP.paper(components=3, prior_precision=2.0, patch=PATCHED),
    "EMP own statistics": sb.EMP.paper(**MIXING, patch=("norm",), own_statistics=True),
    "ECMP mixing": sb.ECMP.paper(**MIXING, patch=PATCHED),
    "ECMP precision": sb.ECMP.paper(components=3, prior_precision=2.0, patch=PATCHED),
    "MCDropout channels": sb.MCDropout(rate=0.3, granularity="channel"),
}


@dataclass(frozen=True)
class Snapshot:
    """One method on one network."""

    method: str
    network: str

    def __str__(self) -> str:
        return f"{self.method}-{self.network}".replace(" ", "_")

    def build(self, dtype: torch.dtype) -> tuple[nn.Module, list[Tensor]]:
        """The converted model and its inputs."""
        method = {**METHODS, **VARIANTS}[self.method]
        if self.network in DEEP:
            network: Wide | Deep = DEEP[self.network]()
            include = None
        else:
            kinds = {"wide": WIDE, "narrow": NARROW, "norms": NORMS}[self.network]
            network = Wide({kind: labels for kind, labels in kinds.items() if supports(method, kind)})
            include = _inside if self.network != "norms" else None  # there the patch chooses
        inputs = [x.to(dtype) if x.is_floating_point() else x for x in network.inputs()]
        include = None if isinstance(method, sb.DeepEnsemble) else include
        model = fill(sb.bayesianize(network.to(dtype), method, include=include), method, dtype)
        return model.train(), inputs


def _inside(name: str, module: nn.Module) -> bool:
    return name.count(".") == 1  # the layers of ``Wide``


def snapshots() -> Iterator[Snapshot]:
    for method in METHODS:
        yield Snapshot(method, "wide")
        for network in DEEP:
            if network == "recurrent" and method.endswith("local"):
                continue  # a sequence would meet another weight at every step: refused
            yield Snapshot(method, network)
    for method in VARIANTS:
        yield Snapshot(method, "norms" if method.startswith(("EMP", "ECMP")) else "narrow")
        if "mixing" in method or "own" in method or "additive" in method or "some" in method:
            yield Snapshot(method, "perceptron")


def checksum(tensor: Tensor) -> tuple[float, float]:
    """Σ wᵢ xᵢ with irrational weights between 0.5 and 1.5, and Σ |wᵢ xᵢ|, the scale of its rounding."""
    x = tensor.detach().double().flatten()
    weights = 0.5 + torch.arange(1, len(x) + 1, dtype=torch.float64) * 0.6180339887498949 % 1
    return float((weights * x).sum()), float((weights * x).abs().sum())


def summary(snapshot: Snapshot, noise: str, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """By name, a number and its scale: of one training step, and of predictions."""
    model, inputs = snapshot.build(dtype)
    draws = sb.draw(model, *inputs, samples=1 if noise == "mean" else 3, noise=noise, seed=SEED)
    targets = numbers("targets", tuple(draws.shape[1:])).to(dtype)
    scored = sb.elbo(draws, targets, model, num_data=50, likelihood=sb.Gaussian())
    scored.loss.backward()
    found = {"outputs": checksum(draws), "first": checksum(draws[0, 0]), "last": checksum(draws[-1, -1])}
    found |= {name: checksum(getattr(scored, name)) for name in ("loss", "kl")}
    gradients = {name: checksum(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    floor = 1e-2 * max(scale for _, scale in gradients.values())  # some are zero but for rounding
    found |= {f"gradient of {name}": (value, max(scale, floor)) for name, (value, scale) in gradients.items()}
    found |= {name: checksum(buffer) for name, buffer in model.named_buffers() if "running" in name}
    with torch.no_grad():
        model.eval()
        options = {"samples": 3, "noise": noise, "seed": SEED + 1}
        found["later draws"] = checksum(sb.draw(model, *inputs, first_example=5, first_sample=2, **options))
        predicted = sb.predict(model, *inputs, likelihood=sb.Gaussian(precision=1.0), chunk=8, **options)
        found["predicted mean"], found["predicted spread"] = map(
            checksum, (predicted.mean, predicted.variance)
        )
    return dict(sorted(found.items()))
