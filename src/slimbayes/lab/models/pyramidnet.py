"""PyramidNet with additive widening, Han et al. (2017), as the EMP paper trains it."""

from itertools import accumulate, pairwise, repeat

from torch import Tensor, nn
from torch.nn import functional as F


class PyramidBlock(nn.Module):
    """BN-conv3-BN-ReLU-conv3-BN plus a shortcut without parameters.

    The shortcut is average-pooled when the stride is 2 and gets zero channels at its end.

    >>> import torch
    >>> PyramidBlock(16, 21, stride=2)(torch.zeros(2, 16, 8, 8)).shape
    torch.Size([2, 21, 4, 4])
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.stride = stride
        self.extra = outputs - inputs
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, inputs, H, W] to [B, outputs, H / stride, W / stride]."""
        residual: Tensor = self.conv1(self.norm1(x))
        residual = self.norm3(self.conv2(F.relu(self.norm2(residual))))
        if self.stride != 1:
            # ceil_mode keeps odd sizes equal to those of the strided convolution.
            x = F.avg_pool2d(x, self.stride, ceil_mode=True)
        return residual + F.pad(x, (0, 0, 0, 0, 0, self.extra))  # [B, outputs, H / stride, W / stride]


class PyramidNet(nn.Module):
    """PyramidNet without bottlenecks: every block is alpha / (number of blocks) channels wider.

    Block i of 3n, n = (depth - 2) / 6, has round(16 + i * alpha / 3n) channels; the stem has a norm
    but no ReLU; stages two and three begin with stride 2. Kernels are N(0, 2 / fan_out). Chang et
    al. (2019), https://arxiv.org/abs/1905.09453, take depth 110 and alpha 270 for CIFAR-100:
    16, 21, ..., 286 channels and 28,511,307 parameters, of which 28,432,809 in convolutions,
    49,798 in 164 norms and 28,700 in the dense layer.

    >>> import torch
    >>> with torch.device("meta"):
    ...     network = PyramidNet(depth=110, alpha=270, classes=100)
    >>> sum(p.numel() for p in network.parameters())
    28511307
    >>> PyramidNet(depth=8, alpha=12)(torch.zeros(2, 3, 16, 16)).shape
    torch.Size([2, 100])
    """

    def __init__(self, depth: int = 110, alpha: float = 270, classes: int = 100, channels: int = 3) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6 != 0:
            raise ValueError(f"depth={depth} is not 6n + 2 with n >= 1; use 8, 14, 20, ..., 110, ...")
        if alpha < 0:
            raise ValueError(f"alpha={alpha} would narrow the network; use alpha >= 0")
        n = (depth - 2) // 6
        widths = pyramid_widths(3 * n, alpha)
        blocks = [
            PyramidBlock(inputs, outputs, stride=2 if i in (n, 2 * n) else 1)
            for i, (inputs, outputs) in enumerate(pairwise(widths))
        ]
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        self.group1 = nn.Sequential(*blocks[:n])
        self.group2 = nn.Sequential(*blocks[n : 2 * n])
        self.group3 = nn.Sequential(*blocks[2 * n :])
        self.norm = nn.BatchNorm2d(widths[-1])
        self.output = nn.Linear(widths[-1], classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new N(0, 2 / fan_out) convolutions and torch's default dense layer."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, (nn.BatchNorm2d, nn.Linear)):
                module.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, channels, H, W] to logits [B, classes]."""
        x = self.stem_norm(self.stem(x))
        x = self.group3(self.group2(self.group1(x)))
        x = F.relu(self.norm(x)).mean(dim=(2, 3))  # [B, widths[-1]]
        logits: Tensor = self.output(x)
        return logits


def pyramid_widths(blocks: int, alpha: float) -> list[int]:
    """Channels of the stem and after every block: a running sum of alpha / blocks, rounded.

    The unrounded sum is carried along, as in the authors' code.

    >>> pyramid_widths(54, 270)[:3], pyramid_widths(54, 270)[-1]
    ([16, 21, 26], 286)
    >>> pyramid_widths(3, 4)
    [16, 17, 19, 20]
    """
    return [round(width) for width in accumulate(repeat(alpha / blocks, blocks), initial=16.0)]
