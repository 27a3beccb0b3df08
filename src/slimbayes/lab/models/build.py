"""Networks by name, sized for the data at hand: what the command line and ``compare`` build."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from slimbayes.lab.models.lenet import LeNet
from slimbayes.lab.models.pyramidnet import PyramidNet
from slimbayes.lab.models.record_net import Combine, RecordNet
from slimbayes.lab.models.resnet import ResNet
from slimbayes.lab.models.text_lstm import TextLSTM
from slimbayes.lab.models.tfp_resnet import TFPResNet
from slimbayes.lab.models.wrn import WideResNet
from slimbayes.networks.dense import MLP, RegressionNet

Shape = tuple[int, ...]
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


class DenseNet(nn.Module):
    """Dense layers with LayerNorm and an activation between them; any input is flattened.

    The network of small tables and tiny images. LayerNorm, unlike BatchNorm, does the same in training and in
    prediction, and gives EMP something to patch. ``norm=False`` leaves it out, as one-dimensional fits need.

    >>> DenseNet((1, 8, 8), 10)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self, shape: Shape, outputs: int, hidden: Sequence[int] = (128, 128), activation: str = "relu",
        norm: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation={activation!r} is unknown; use one of {', '.join(_ACTIVATIONS)}")
        sizes = (math.prod(shape), *hidden)
        blocks: list[nn.Module] = []
        for inputs, width in pairwise(sizes):
            blocks += [
                nn.Linear(inputs, width),
                *([nn.LayerNorm(width)] if norm else []),
                _ACTIVATIONS[activation](),
            ]
        self.hidden = nn.Sequential(*blocks)
        self.output = nn.Linear(sizes[-1], outputs)

    def reset_parameters(self) -> None:
        """Draw new weights as torch does by default."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                module.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, *shape] to [B, outputs]."""
        if not x.is_floating_point():
            raise TypeError(f"network 'dense' takes real numbers, got {x.dtype}: use 'lstm' for tokens")
        outputs: Tensor = self.output(self.hidden(x.flatten(1)))
        return outputs


def _mlp(shape: Shape, outputs: int, hidden: Sequence[int] = (400, 400)) -> nn.Module:
    return MLP((math.prod(shape), *hidden, outputs))


def _lenet(shape: Shape, outputs: int, kernel_size: int = 5) -> nn.Module:
    return LeNet(outputs, channels=shape[0], image_size=shape[-1], kernel_size=kernel_size)


def _wrn(shape: Shape, outputs: int, depth: int = 16, width: int = 4) -> nn.Module:
    return WideResNet(depth, width, outputs, channels=shape[0])


def _resnet(depth: int) -> Callable[..., nn.Module]:
    def build(shape: Shape, outputs: int, norm: str = "batch") -> nn.Module:
        if shape[0] != 3:
            raise ValueError(
                f"resnet{depth} takes images of 3 channels, these have {shape[0]}: use wrn or lenet"
            )
        return ResNet(depth, outputs, norm)  # type: ignore[arg-type]

    return build


def _pyramidnet(shape: Shape, outputs: int, depth: int = 110, alpha: float = 270) -> nn.Module:
    return PyramidNet(depth, alpha, outputs, channels=shape[0])


def _tfp_resnet(
    shape: Shape, outputs: int, widths: Sequence[int] = (64, 128, 256, 512), init: str = "normal"
) -> nn.Module:
    return TFPResNet(outputs, channels=shape[0], init=init, widths=widths)  # type: ignore[arg-type]


def _regression(shape: Shape, outputs: int, hidden: int = 50, normalization: str = "batch") -> nn.Module:
    return RegressionNet(math.prod(shape), outputs, hidden, normalization)  # type: ignore[arg-type]


def _lstm(
    shape: Shape,
    outputs: int,
    words: int = 20_000,
    embedding: int = 128,
    hidden: int = 128,
    single_bias: bool = True,
) -> nn.Module:
    if len(shape) != 1:
        raise ValueError(f"network 'lstm' takes rows of token ids, these inputs have shape {list(shape)}")
    return TextLSTM(words, embedding, hidden, outputs, single_bias)


def _records(
    shape: Shape, outputs: int, multiplier: float = 0.85827, dense: int = 32, hidden: int = 512,
    dense_hidden: int = 512, combine: Combine = "mean", layers: int = 1, single_bias: bool = True,
) -> nn.Module:  # fmt: skip
    if len(shape) != 3:
        raise ValueError(
            f"network 'records' takes the shape (codes, levels, context columns) of records, got {list(shape)}"
        )
    return RecordNet(*shape, multiplier, dense, hidden, dense_hidden, outputs, combine, layers, single_bias)


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "dense": DenseNet,
    "mlp": _mlp,
    "lenet": _lenet,
    "wrn": _wrn,
    "resnet18": _resnet(18),
    "resnet50": _resnet(50),
    "pyramidnet": _pyramidnet,
    "tfp_resnet": _tfp_resnet,
    "regression": _regression,
    "lstm": _lstm,
    "records": _records,
}
_FOR_IMAGES = ("lenet", "wrn", "resnet18", "resnet50", "pyramidnet", "tfp_resnet")


def default_network(shape: Shape) -> str:
    """The network that suits inputs of this shape, as ``build`` takes it.

    >>> default_network((1, 8, 8)), default_network((3, 32, 32)), default_network((30,)), default_network((1,))
    ('dense', 'wrn', 'dense', 'dense(hidden=(100, 100), norm=False)')
    """
    if len(shape) == 3 and shape[-1] >= 64:
        return "resnet18" if shape[0] == 3 else "wrn"
    if len(shape) == 3 and shape[0] == 3 and shape[-1] >= 16:
        return "wrn"
    return "dense" if math.prod(shape) > 2 else "dense(hidden=(100, 100), norm=False)"


def build(name: str, shape: Shape, outputs: int, **options: object) -> nn.Module:
    """A new network by name for inputs [B, *shape] and so many outputs.

    >>> sum(p.numel() for p in build("wrn", (3, 32, 32), 10, depth=10, width=1).parameters())
    77850
    """
    if name not in NETWORKS:
        raise ValueError(f"unknown network {name!r}; use one of {', '.join(NETWORKS)}")
    if name in _FOR_IMAGES and len(shape) != 3:
        raise ValueError(f"network {name!r} takes images, these inputs have shape {list(shape)}: use 'dense'")
    try:
        with torch.no_grad():
            return NETWORKS[name](shape, outputs, **options)
    except TypeError as error:
        raise ValueError(f"network {name!r} cannot be built with {options}: {error}") from error
