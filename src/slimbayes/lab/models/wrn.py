"""Wide residual networks, Zagoruyko & Komodakis (2016), as the rank-1 paper trains them."""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.networks.initialization import he_initialize

Shortcut = Literal["raw", "activated"]


class WideBlock(nn.Module):
    """BN-ReLU-conv3-BN-ReLU-conv3 plus a shortcut, projected by a 1x1 convolution if the shape changes.

    >>> import torch
    >>> WideBlock(16, 32, stride=2)(torch.zeros(2, 16, 8, 8)).shape
    torch.Size([2, 32, 4, 4])
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1, shortcut: Shortcut = "raw") -> None:
        super().__init__()
        self.shortcut = shortcut
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.projection: nn.Conv2d | None = None
        if stride != 1 or inputs != outputs:
            self.projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        activated = F.relu(self.norm1(x))
        residual: Tensor = self.conv2(F.relu(self.norm2(self.conv1(activated))))
        if self.projection is None:
            return x + residual
        projected: Tensor = self.projection(x if self.shortcut == "raw" else activated)
        return projected + residual


class WideResNet(nn.Module):
    """WRN-depth-width for small images: three groups of (depth - 4) / 6 pre-activation blocks.

    Stem of 16 channels with no norm after it; widths 16w, 32w, 64w at strides 1, 2, 2; he_normal
    kernels, the dense one included; BN with epsilon 1e-5 and momentum 0.1. Dusenberry et al. (2020),
    https://arxiv.org/abs/2005.07186, train WRN-28-10: 36,479,194 parameters for 10 classes,
    36,536,884 for 100; WRN-28-5 has 9,132,634. Their code projects the raw block input;
    ``shortcut="activated"`` projects its BN-ReLU instead, as most PyTorch versions do.

    >>> import torch
    >>> with torch.device("meta"):
    ...     network = WideResNet(depth=28, width=10, classes=10)
    >>> sum(p.numel() for p in network.parameters())
    36479194
    >>> WideResNet(depth=10, width=1)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        depth: int = 28,
        width: int = 10,
        classes: int = 10,
        shortcut: Shortcut = "raw",
        channels: int = 3,
    ) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6 != 0:
            raise ValueError(f"depth={depth} is not 6n + 4 with n >= 1; use 10, 16, 22, 28, 34, 40, ...")
        if shortcut not in ("raw", "activated"):
            raise ValueError(f"shortcut={shortcut!r} is unknown; use 'raw' or 'activated'")
        blocks = (depth - 4) // 6
        self.stem = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.group1 = _group(16, 16 * width, blocks, 1, shortcut)
        self.group2 = _group(16 * width, 32 * width, blocks, 2, shortcut)
        self.group3 = _group(32 * width, 64 * width, blocks, 2, shortcut)
        self.norm = nn.BatchNorm2d(64 * width)
        self.output = nn.Linear(64 * width, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new he_normal kernels; norms and the bias go back to identity and zero."""
        he_initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, channels, H, W] to logits [B, classes]."""
        x = self.group3(self.group2(self.group1(self.stem(x))))
        x = F.relu(self.norm(x)).mean(dim=(2, 3))  # [B, 64 * width]
        logits: Tensor = self.output(x)
        return logits


def wrn28_10(classes: int = 10, shortcut: Shortcut = "raw") -> WideResNet:
    """WRN-28-10, the CIFAR network of the rank-1 paper.

    >>> import torch
    >>> with torch.device("meta"):
    ...     network = wrn28_10(classes=100)
    >>> sum(p.numel() for p in network.parameters())
    36536884
    """
    return WideResNet(28, 10, classes, shortcut)


def _group(inputs: int, outputs: int, blocks: int, stride: int, shortcut: Shortcut) -> nn.Sequential:
    rest = (WideBlock(outputs, outputs, 1, shortcut) for _ in range(blocks - 1))
    return nn.Sequential(WideBlock(inputs, outputs, stride, shortcut), *rest)
