"""What the corruptions share: keyed draws, bytes and back, linear filters with borders, and look-ups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from slimbayes.core.keyed_noise import keyed_noise

# A byte that went through floating point may come back a rounding error too low, and the cast truncates.
_SLACK = 1e-3

LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Draws:
    """Random numbers of some images: a function of the key, the image's index and the stream alone."""

    key: tuple[int, int]
    ids: Tensor  # int64 [N], the images' indices in the whole data set
    table: str

    def uniform(self, stream: int, *shape: int) -> Tensor:
        """Uniform on (0, 1), float32 [N, *shape]."""
        return self._noise("uniform", stream, shape)

    def normal(self, stream: int, *shape: int) -> Tensor:
        """Standard normal, float32 [N, *shape]."""
        return self._noise("normal", stream, shape)

    def _noise(self, kind: str, stream: int, shape: tuple[int, ...]) -> Tensor:
        noise = keyed_noise(
            kind, self.key, stream, None, None, self.ids, shape, torch.float32, self.ids.device
        )
        return noise[0, 0]  # [N, *shape]


def unit(images: Tensor) -> Tensor:
    """Bytes as float32 in [0, 1]."""
    return images.float().div_(255)


def truncated(values: Tensor) -> Tensor:
    """Values in [0, 1], clipped, as bytes: rounded down."""
    return (values.clamp(0, 1).mul_(255)).add_(_SLACK).to(torch.uint8)


def rounded(values: Tensor) -> Tensor:
    """Values in [0, 255], clipped, as bytes: rounded to the nearest."""
    return (values.clamp(0, 255)).add_(0.5 + _SLACK / 255).to(torch.uint8)


def luma(values: Tensor) -> Tensor:
    """Brightness of colours [N, C, ...] as [N, 1, ...]; a single channel is itself."""
    if values.shape[1] == 1:
        return values
    red, green, blue = LUMA
    return red * values[:, 0:1] + green * values[:, 1:2] + blue * values[:, 2:3]


def fold(index: Tensor, size: int, border: str) -> Tensor:
    """Positions outside 0..size−1 brought back inside.

    "nearest" repeats the edge (aaa|abc), "reflect" mirrors with it (ba|abc), "mirror" without it (cb|abc).

    >>> [fold(torch.arange(-2, 5), 3, border).tolist() for border in ("nearest", "reflect", "mirror")]
    [[0, 0, 0, 1, 2, 2, 2], [1, 0, 0, 1, 2, 2, 1], [2, 1, 0, 1, 2, 1, 0]]
    """
    if border == "nearest":
        return index.clamp(0, size - 1)
    period = max(2 * size - 2, 1) if border == "mirror" else 2 * size
    index = index % period
    return torch.minimum(index, period - (0 if border == "mirror" else 1) - index).clamp_(min=0)


@lru_cache(maxsize=256)
def band(size: int, weights: tuple[float, ...], border: str) -> Tensor:
    """The matrix [size, size] that correlates a line of pixels with an odd number of weights.

    >>> band(3, (0.25, 0.5, 0.25), "nearest")
    tensor([[0.7500, 0.2500, 0.0000],
            [0.2500, 0.5000, 0.2500],
            [0.0000, 0.2500, 0.7500]], dtype=torch.float64)
    """
    radius = len(weights) // 2
    rows = torch.arange(size)[:, None].expand(size, len(weights))
    columns = fold(rows + torch.arange(-radius, radius + 1), size, border)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    taps = torch.tensor(weights, dtype=torch.float64).expand(size, -1)
    return matrix.index_put_((rows, columns), taps, accumulate=True)


@lru_cache(maxsize=256)
def gaussian_weights(sd: float, truncate: float) -> tuple[float, ...]:
    """Normalised exp(−k²/2σ²) for |k| ≤ ⌊truncate · σ + ½⌋."""
    radius = int(truncate * sd + 0.5)
    weights = [math.exp(-0.5 * (k / sd) ** 2) for k in range(-radius, radius + 1)]
    return tuple(weight / math.fsum(weights) for weight in weights)


def separable(values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows · values · columnsᵀ on the last two axes, worked out in float64.

    Products in float64 escape TensorFloat-32 and give the same bytes however the images are batched.
    """
    rows, columns = rows.to(values.device), columns.to(values.device)
    # Two plain products of tall matrices, in place of one product for each image.
    across = (values.double() @ columns.T).mT.contiguous()  # [..., W, H]
    return (across @ rows.T).mT.to(values.dtype, memory_format=torch.contiguous_format)


def gaussian(values: Tensor, sd: float, border: str = "nearest", truncate: float = 4.0) -> Tensor:
    """Gaussian blur of the last two axes, as scipy.ndimage.gaussian_filter.

    >>> gaussian(torch.eye(3)[None], 0.5)[0, 1]
    tensor([0.1791, 0.6415, 0.1791])
    """
    weights = gaussian_weights(sd, truncate)
    if len(weights) == 1:
        return values
    height, width = values.shape[-2:]
    return separable(values, band(height, weights, border), band(width, weights, border))


def bilinear(values: Tensor, y: Tensor, x: Tensor, border: str) -> Tensor:
    """values [N, C, H, W] read between pixels, at rows y and columns x [N, H', W']."""
    height, width = values.shape[-2:]
    y, x = y.clamp(-1e6, 1e6), x.clamp(-1e6, 1e6)  # a degenerate map may send a pixel to infinity
    top, left = y.floor(), x.floor()
    down, right = (y - top)[:, None].to(values.dtype), (x - left)[:, None].to(values.dtype)
    rows = [fold(top.long() + k, height, border) for k in (0, 1)]
    columns = [fold(left.long() + k, width, border) for k in (0, 1)]
    upper = torch.lerp(at(values, rows[0], columns[0]), at(values, rows[0], columns[1]), right)
    lower = torch.lerp(at(values, rows[1], columns[0]), at(values, rows[1], columns[1]), right)
    return torch.lerp(upper, lower, down)


def at(values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """values [N, C, H, W] at integer rows and columns, each broadcastable to [N, H', W']: [N, C, H', W']."""
    count, channels, _, width = values.shape
    flat = rows * width + columns  # [N, H', W']
    index = flat.flatten(1)[:, None].expand(count, channels, -1)  # [N, C, H'·W']
    return values.flatten(2).gather(2, index).view(count, channels, *flat.shape[1:])
