"""Digital processing: elastic deformation and pixelation."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from slimbayes.lab.data.corruptions.filters import Draws, bilinear, gaussian, truncated, unit
from slimbayes.lab.data.corruptions.tables import Row

# The ImageNet numbers are multiples of 244, for images of 224.
_SCALE = {"cifar": 1.0, "imagenet": 244 / 224}
_BITS = 22  # Pillow's fixed point


def elastic_transform(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """An affine map that moves three points at random, then a smooth random displacement of every pixel."""
    height, width = images.shape[2:]
    size = height * _SCALE[draws.table]
    strength, smoothing, jitter = (part * size for part in row)
    x = unit(images)
    columns = torch.arange(width, device=x.device, dtype=torch.float64)[None, None, :]
    rows = torch.arange(height, device=x.device, dtype=torch.float64)[None, :, None]
    moved = (draws.uniform(0, 3, 2).double() * 2 - 1) * jitter  # [N, 3 points, (x, y)]
    y_from, x_from = affine_sources(moved, rows, columns)
    # OpenCV, which the original calls, reads at multiples of 1/32 of a pixel.
    x = bilinear(x, (y_from * 32).round() / 32, (x_from * 32).round() / 32, "mirror")
    if strength > 0:
        shift = draws.uniform(1, 2, height, width).mul_(2).sub_(1)  # [N, (x, y), H, W]
        shift = gaussian(shift, smoothing, "reflect", 3.0).double() * strength
        x = bilinear(x, rows + shift[:, 1], columns + shift[:, 0], "reflect")
    return truncated(x)


def affine_sources(moved: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns [N, H, W] where the affine image takes its pixels.

    The map sends points p₀, p₁, p₂, a right angle around the centre, to q_k = p_k + ``moved``_k. Backwards,
    with q − q₁ = a(q₀ − q₁) + b(q₂ − q₁), it is p₁ + a(p₀ − p₁) + b(p₂ − p₁).
    """
    height, width = rows.shape[1], columns.shape[2]
    side = min(height, width) // 3
    # The original writes (height, width) for (x, y), the same thing on the square images it is made for.
    centre = moved.new_tensor([width // 2, height // 2])
    points = centre + moved.new_tensor([[side, side], [side, -side], [-side, -side]])  # [3, (x, y)]
    q0, q1, q2 = (points + moved)[..., None, None].unbind(1)  # [N, (x, y), 1, 1] each
    ux, uy = (q0 - q1).unbind(1)
    vx, vy = (q2 - q1).unbind(1)
    x, y = columns - q1[:, 0], rows - q1[:, 1]
    area = ux * vy - uy * vx
    area = torch.where(area.abs() < 1e-6, torch.full_like(area, 1e-6), area)
    a, b = (x * vy - y * vx) / area, (ux * y - uy * x) / area
    return points[1, 1] + 2 * side * a, points[1, 0] - 2 * side * b


def pixelate(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """Shrunk to a share c of its sides by the mean over boxes, and enlarged again, exactly as Pillow does."""
    height, width = images.shape[2:]
    small = _shrunk(images, 3, max(1, int(width * row[0])))
    small = _shrunk(small, 2, max(1, int(height * row[0])))
    for axis, size in ((2, height), (3, width)):
        source = _nearest(small.shape[axis], size).to(images.device)
        small = small.index_select(axis, source)
    return small


def _shrunk(images: Tensor, axis: int, size: int) -> Tensor:
    """Bytes resampled along one axis by Pillow's box filter, rounded to bytes."""
    if images.shape[axis] == size:
        return images
    total = torch.full((), 1 << (_BITS - 1), dtype=torch.int32, device=images.device)
    shape = [1, 1, 1, 1]
    shape[axis] = size
    for source, weight in _box_taps(images.shape[axis], size):
        picked = images.index_select(axis, source.to(images.device))
        total = total + picked.to(torch.int32) * weight.to(images.device).view(shape)
    return (total >> _BITS).clamp_(0, 255).to(torch.uint8)


@lru_cache(maxsize=64)
def _box_taps(size: int, smaller: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """For each tap of the box filter the source pixels and their weights in units of 2⁻²²."""
    scale = size / smaller
    centre = (torch.arange(smaller, dtype=torch.float64) + 0.5) * scale
    first = (centre - scale / 2 + 0.5).long().clamp_(min=0)
    last = (centre + scale / 2 + 0.5).long().clamp_(max=size)  # exclusive
    reach = int((last - first).max())
    pixel = first + torch.arange(reach)[:, None]  # [taps, smaller]
    place = (pixel - centre + 0.5) / scale
    inside = ((place > -0.5) & (place <= 0.5) & (pixel < last)).double()
    weight = (inside / inside.sum(0) * (1 << _BITS) + 0.5).to(torch.int32)
    return tuple(zip(pixel.clamp_(max=size - 1).unbind(), weight.unbind(), strict=True))


@lru_cache(maxsize=64)
def _nearest(small: int, size: int) -> Tensor:
    return ((torch.arange(size, dtype=torch.float64) + 0.5) * (small / size)).long().clamp_(max=small - 1)
