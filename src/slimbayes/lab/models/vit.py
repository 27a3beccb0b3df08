"""The vision transformer, Dosovitskiy et al. (2021), https://arxiv.org/abs/2010.11929."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Multi-head self-attention, softmax(QKᵀ/√d) V, from two dense layers that any method can convert.

    >>> Attention(16, 4)(torch.zeros(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width={width} does not split into heads={heads}; use a divisor")
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, width] to [B, T, width]."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, heads, T, width / heads]
            for part in self.inputs(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))  # [B, T, width]
        return output


class TransformerBlock(nn.Module):
    """Pre-norm attention and a GELU network of four times the width, each added to its input.

    >>> TransformerBlock(16, 4)(torch.zeros(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, width] to [B, T, width]."""
        x = x + self.attention(self.norm1(x))
        residual: Tensor = self.narrow(F.gelu(self.wide(self.norm2(x))))
        return x + residual


class VisionTransformer(nn.Module):
    """ViT for square images: patches to tokens by a convolution, a class token, learned positions.

    The default is ViT-B/16 for 224x224 images: 86,567,656 parameters with 1,000 classes.

    >>> with torch.device("meta"):
    ...     network = VisionTransformer()
    >>> sum(p.numel() for p in network.parameters())
    86567656
    >>> VisionTransformer(10, 32, 8, depth=2, width=16, heads=4)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        classes: int = 1000,
        image_size: int = 224,
        patch: int = 16,
        depth: int = 12,
        width: int = 768,
        heads: int = 12,
    ) -> None:
        super().__init__()
        if image_size % patch:
            raise ValueError(f"image_size={image_size} does not split into patches of {patch}; use a divisor")
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (image_size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.output = nn.Linear(width, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Positions and dense kernels N(0, 0.02) cut at two standard deviations, biases and the token zero."""
        nn.init.trunc_normal_(self.positions, std=0.02, a=-0.04, b=0.04)
        nn.init.zeros_(self.token)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
                nn.init.zeros_(module.bias)
            elif isinstance(module, (nn.Conv2d, nn.LayerNorm)):
                module.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map images [B, 3, image_size, image_size] to logits [B, classes]."""
        x = self.patches(x).flatten(2).transpose(1, 2)  # [B, T - 1, width]
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions  # [B, T, width]
        logits: Tensor = self.output(self.norm(self.blocks(x))[:, 0])
        return logits
