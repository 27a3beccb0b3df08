"""The LeNet of the k-tied paper."""

from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.networks.initialization import he_initialize


class LeNet(nn.Module):
    """Two convolutions of 32 and 64 filters, each with ReLU and 2x2 max-pool, then dense 512 and classes.

    Swiatkowski et al. (2020), https://arxiv.org/abs/2002.02655, print kernels of 3x3, but their
    count of 4,405k (mean and spread for each of 2,202,660 parameters) needs 5x5 with padding
    "same", so that 64 * 8 * 8 = 4,096 numbers enter the first dense layer of a 32x32 image.
    he_normal kernels, zero biases.

    >>> import torch
    >>> network = LeNet(classes=100)
    >>> 2 * sum(p.numel() for p in network.parameters())
    4405320
    >>> network(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 100])
    """

    def __init__(
        self, classes: int = 100, channels: int = 3, image_size: int = 32, kernel_size: int = 5
    ) -> None:
        super().__init__()
        if image_size < 4:
            raise ValueError(f"image_size={image_size} vanishes in two 2x2 pools; use 4 or more")
        self.conv1 = nn.Conv2d(channels, 32, kernel_size, padding="same")
        self.conv2 = nn.Conv2d(32, 64, kernel_size, padding="same")
        self.dense = nn.Linear(64 * (image_size // 4) ** 2, 512)
        self.output = nn.Linear(512, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new he_normal kernels and set the biases to zero."""
        he_initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, channels, image_size, image_size] to logits [B, classes]."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)  # [B, 32, image_size / 2, image_size / 2]
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # [B, 64, image_size / 4, image_size / 4]
        x = F.relu(self.dense(x.flatten(1)))  # [B, 512]
        logits: Tensor = self.output(x)
        return logits
