"""The small residual network of TensorFlow Probability's examples, the k-tied paper's "ResNet-18"."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.networks.initialization import he_initialize

Init = Literal["normal", "he"]


class TFPBlock(nn.Module):
    """BN-ReLU, then conv3-BN-ReLU-conv3 plus a 1x1 projection of the same BN-ReLU, equal shapes or not.

    >>> import torch
    >>> TFPBlock(64, 128, stride=2)(torch.zeros(2, 64, 8, 8)).shape
    torch.Size([2, 128, 4, 4])
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.norm1 = _batch_norm(inputs)
        self.projection = nn.Conv2d(inputs, outputs, 1, stride)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
        self.norm2 = _batch_norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        x = F.relu(self.norm1(x))
        residual: Tensor = self.conv2(F.relu(self.norm2(self.conv1(x))))
        projected: Tensor = self.projection(x)
        return projected + residual


class TFPResNet(nn.Module):
    """Stem of 64 channels and four blocks of 64, 128, 256, 512 at strides 1, 2, 2, 2: 14 kernels.

    Swiatkowski et al. (2020), https://arxiv.org/abs/2002.02655, train it on CIFAR-10. Every kernel
    has a bias. 4,901,568 weights, 2,954 biases and 7,936 BN numbers, of which half are moving
    statistics; BN has the defaults of Keras, epsilon 1e-3 and momentum 0.99 (0.01 in torch).
    ``init="normal"`` draws weights and biases from N(0, 0.1), standard deviation 0.1, as the
    example does for its posterior means; ``init="he"`` is he_normal with zero biases. Other ``widths``
    make the same network slimmer: the stem has as many channels as the first block.

    >>> import torch
    >>> network = TFPResNet(classes=10)
    >>> sum(p.numel() for p in network.parameters() if p.dim() > 1)
    4901568
    >>> network(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int = 10,
        channels: int = 3,
        init: Init = "normal",
        widths: Sequence[int] = (64, 128, 256, 512),
    ) -> None:
        super().__init__()
        if init not in ("normal", "he"):
            raise ValueError(f"init={init!r} is unknown; use 'normal' or 'he'")
        if len(widths) != 4 or min(widths) < 1:
            raise ValueError(
                f"widths={tuple(widths)} needs the channels of four blocks, as in (64, 128, 256, 512)"
            )
        first, second, third, fourth = widths
        self.init = init
        self.stem = nn.Conv2d(channels, first, 3, padding=1)
        self.block1 = TFPBlock(first, first)
        self.block2 = TFPBlock(first, second, stride=2)
        self.block3 = TFPBlock(second, third, stride=2)
        self.block4 = TFPBlock(third, fourth, stride=2)
        self.norm = _batch_norm(fourth)
        self.output = nn.Linear(fourth, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights and biases by ``init``; norms go back to identity."""
        he_initialize(self)
        if self.init == "normal":
            for module in self.modules():
                if isinstance(module, (nn.Conv2d, nn.Linear)):
                    for parameter in module.parameters():
                        nn.init.normal_(parameter, 0.0, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, channels, H, W] to logits [B, classes]."""
        x = self.block4(self.block3(self.block2(self.block1(self.stem(x)))))
        x = F.relu(self.norm(x)).mean(dim=(2, 3))  # [B, widths[-1]]
        logits: Tensor = self.output(x)
        return logits


def _batch_norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)
