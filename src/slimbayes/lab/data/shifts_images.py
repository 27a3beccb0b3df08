"""Shifts for tiny images (8×8 digits, MNIST), as functions of raw uint8 images, a severity and a key."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from slimbayes.core.keyed_noise import keyed_noise, layer_key

DEGREES = (10.0, 20.0, 30.0, 40.0, 50.0)
NOISE = (0.1, 0.2, 0.3, 0.4, 0.5)  # of the range 0..255
BLUR = (0.05, 0.07, 0.09, 0.11, 0.13)  # standard deviation, of the image's height
CONTRAST = (0.75, 0.6, 0.45, 0.3, 0.15)
OCCLUSION = (1 / 8, 2 / 8, 3 / 8, 4 / 8, 5 / 8)  # side of the square, of the image's


def keyed(
    kind: str, name: str, seed: int, first: int, count: int, shape: tuple[int, ...], like: Tensor
) -> Tensor:
    """[count, *shape] of noise, each row a function of (seed, name, its index from ``first`` on)."""
    ids = torch.arange(first, first + count)
    key = layer_key(seed, f"shift.{name}")
    return keyed_noise(kind, key, 0, None, None, ids, shape, torch.float32, like.device)[0, 0]


def rotate(images: Tensor, severity: int, seed: int, first: int) -> Tensor:
    """Rotate by ±10, 20, … 50 degrees about the centre, bilinear, the sign drawn per image; zero outside."""
    sign = keyed("sign", "rotation", seed, first, len(images), (1,), images)[:, 0]
    return rotated(images, sign * DEGREES[severity - 1])


def rotated(images: Tensor, degrees: Tensor) -> Tensor:
    """Rotate image i by degrees[i], counter-clockwise as displayed.

    >>> image = torch.tensor([[[[9, 0], [0, 0]]]], dtype=torch.uint8)
    >>> rotated(image, torch.tensor([90.0])).flatten().tolist()
    [0, 0, 9, 0]
    """
    height, width = images.shape[-2:]
    angle = degrees.to(images.device).double() * math.pi / 180
    cos, sin = angle.cos(), angle.sin()
    zero = torch.zeros_like(cos)
    # In grid_sample's units an axis spans [−1, 1] whatever its length: the ratio keeps the rotation rigid.
    ratio = height / width
    matrix = torch.stack([cos, -sin * ratio, zero, sin / ratio, cos, zero], 1).view(-1, 2, 3)  # [N, 2, 3]
    grid = F.affine_grid(matrix.float(), list(images.shape), align_corners=False)
    return _bytes(F.grid_sample(images.float(), grid, mode="bilinear", align_corners=False))


def noise(images: Tensor, severity: int, seed: int, first: int) -> Tensor:
    """Add Gaussian noise of 10, 20, … 50 % of the range."""
    normal = keyed("normal", "noise", seed, first, len(images), tuple(images.shape[1:]), images)
    return _bytes(images.float() + 255 * NOISE[severity - 1] * normal)


def blur(images: Tensor, severity: int, seed: int, first: int) -> Tensor:
    """Gaussian blur with a standard deviation of 5 to 13 % of the height, edges repeated."""
    sigma = BLUR[severity - 1] * images.shape[-2]
    radius = max(1, math.ceil(3 * sigma))
    taps = torch.arange(-radius, radius + 1, dtype=torch.float32, device=images.device)
    kernel = torch.exp(-(taps**2) / (2 * sigma**2))
    kernel = kernel / kernel.sum()
    flat = images.float().flatten(0, 1)[:, None]  # [N·C, 1, H, W]
    padded = F.pad(flat, (radius, radius, radius, radius), mode="replicate")
    rows = F.conv2d(padded, kernel.view(1, 1, -1, 1))
    return _bytes(F.conv2d(rows, kernel.view(1, 1, 1, -1)).view(images.shape))


def contrast(images: Tensor, severity: int, seed: int, first: int) -> Tensor:
    """Pull every pixel towards the image's mean: mean + c · (x − mean), c from 0.75 to 0.15."""
    values = images.float()
    mean = values.mean((1, 2, 3), keepdim=True)
    return _bytes(mean + CONTRAST[severity - 1] * (values - mean))


def occlude(images: Tensor, severity: int, seed: int, first: int) -> Tensor:
    """Blacken a square of 1/8 to 5/8 of the side, at a random place inside the image."""
    count, _, height, width = images.shape
    place = keyed("uniform", "occlusion", seed, first, count, (2,), images)  # [N, 2]
    masks = []
    for axis, size in enumerate((height, width)):
        side = round(OCCLUSION[severity - 1] * size)
        start = (place[:, axis] * (size - side + 1)).long().clamp(max=size - side)[:, None]  # [N, 1]
        steps = torch.arange(size, device=images.device)
        masks.append((steps >= start) & (steps < start + side))  # [N, size]
    covered = masks[0][:, None, :, None] & masks[1][:, None, None]  # [N, 1, H, W]
    return images.masked_fill(covered, 0)


def _bytes(values: Tensor) -> Tensor:
    return values.round().clamp(0, 255).to(torch.uint8)


Function = Callable[[Tensor, int, int, int], Tensor]

TINY: dict[str, tuple[str, Function]] = {
    "rotation": ("rotated by ±10 to ±50 degrees", rotate),
    "noise": ("Gaussian noise of 10 to 50 % of the range", noise),
    "blur": ("Gaussian blur, standard deviation 5 to 13 % of the height", blur),
    "contrast": ("contrast reduced to 75 down to 15 %", contrast),
    "occlusion": ("a black square of 1/8 to 5/8 of the side", occlude),
}
