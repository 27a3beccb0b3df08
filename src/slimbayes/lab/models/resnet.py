"""Residual networks for ImageNet, He et al. (2016), under torchvision's parameter names."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.networks.initialization import he_initialize

Norm = Literal["batch", "group"]
NormLayer = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, the first with the stride (ResNet-18 and -34).

    >>> import torch
    >>> BasicBlock(64, 128, stride=2)(torch.zeros(2, 64, 8, 8)).shape
    torch.Size([2, 128, 4, 4])
    """

    expansion = 1

    def __init__(
        self, inputs: int, width: int, stride: int = 1, norm_layer: NormLayer = nn.BatchNorm2d
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = norm_layer(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = norm_layer(width)
        self.downsample = _downsample(inputs, width, stride, norm_layer)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, width, H / stride, W / stride]."""
        residual = F.relu(self.bn1(self.conv1(x)))
        residual = self.bn2(self.conv2(residual))
        return F.relu(residual + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions with the stride in the 3x3 ("v1.5"; ResNet-50 and deeper).

    >>> import torch
    >>> Bottleneck(64, 32, stride=2)(torch.zeros(2, 64, 8, 8)).shape
    torch.Size([2, 128, 4, 4])
    """

    expansion = 4

    def __init__(
        self, inputs: int, width: int, stride: int = 1, norm_layer: NormLayer = nn.BatchNorm2d
    ) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = norm_layer(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = norm_layer(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = norm_layer(outputs)
        self.downsample = _downsample(inputs, outputs, stride, norm_layer)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, 4 * width, H / stride, W / stride]."""
        residual = F.relu(self.bn1(self.conv1(x)))
        residual = F.relu(self.bn2(self.conv2(residual)))
        residual = self.bn3(self.conv3(residual))
        return F.relu(residual + (x if self.downsample is None else self.downsample(x)))


Block = type[BasicBlock] | type[Bottleneck]

_DEPTHS: dict[int, tuple[Block, tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


class ResNet(nn.Module):
    """ResNet of a given depth; a torchvision ``state_dict`` loads into it.

    Stem 7x7/2 and max-pool 3x3/2, four stages of widths 64 to 512, global average pool, dense.
    Kernels are he_normal, the dense one N(0, 0.01), no gamma starts at zero: the reference of
    Dusenberry et al. (2020), https://arxiv.org/abs/2005.07186, for its ResNet-50 of 25,557,032
    parameters. ResNet-18 has 11,689,512 (Chang et al., 2019, https://arxiv.org/abs/1905.09453).
    ``norm="group"`` puts GroupNorm with 32 groups (Wu & He, 2018) under the same names.

    >>> import torch
    >>> with torch.device("meta"):
    ...     network = ResNet(depth=50)
    >>> sum(p.numel() for p in network.parameters())
    25557032
    """

    def __init__(self, depth: int, classes: int = 1000, norm: Norm = "batch") -> None:
        super().__init__()
        if depth not in _DEPTHS:
            raise ValueError(f"depth={depth} is not a ResNet of the paper; use one of {sorted(_DEPTHS)}")
        block, counts = _DEPTHS[depth]
        norm_layer = _norm_layer(norm)
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = norm_layer(64)
        self.layer1 = _stage(block, 64, 64, counts[0], 1, norm_layer)
        self.layer2 = _stage(block, 64 * block.expansion, 128, counts[1], 2, norm_layer)
        self.layer3 = _stage(block, 128 * block.expansion, 256, counts[2], 2, norm_layer)
        self.layer4 = _stage(block, 256 * block.expansion, 512, counts[3], 2, norm_layer)
        self.fc = nn.Linear(512 * block.expansion, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new he_normal convolutions and a N(0, 0.01) dense kernel."""
        he_initialize(self)
        nn.init.normal_(self.fc.weight, 0.0, 0.01)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 3, H, W] to logits [B, classes]."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(x, 3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


def resnet18(classes: int = 1000, norm: Norm = "batch") -> ResNet:
    """ResNet-18, the ImageNet network of the EMP paper.

    >>> import torch
    >>> with torch.device("meta"):
    ...     network = resnet18()
    >>> sum(p.numel() for p in network.parameters())
    11689512
    """
    return ResNet(18, classes, norm)


def resnet50(classes: int = 1000, norm: Norm = "batch") -> ResNet:
    """ResNet-50 v1.5, the ImageNet network of the rank-1 paper.

    >>> import torch
    >>> resnet50(classes=7, norm="group")(torch.zeros(1, 3, 32, 32)).shape
    torch.Size([1, 7])
    """
    return ResNet(50, classes, norm)


def _norm_layer(norm: Norm) -> NormLayer:
    layers: dict[str, NormLayer] = {"batch": nn.BatchNorm2d, "group": partial(nn.GroupNorm, 32)}
    if norm not in layers:
        raise ValueError(f"norm={norm!r} is unknown; use 'batch' or 'group'")
    return layers[norm]


def _downsample(inputs: int, outputs: int, stride: int, norm_layer: NormLayer) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm_layer(outputs))


def _stage(
    block: Block, inputs: int, width: int, count: int, stride: int, norm_layer: NormLayer
) -> nn.Sequential:
    blocks: Sequence[nn.Module] = [
        block(width * block.expansion if i else inputs, width, 1 if i else stride, norm_layer)
        for i in range(count)
    ]
    return nn.Sequential(*blocks)
