"""Blurs: defocus, glass, motion, zoom and Gaussian."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from slimbayes.lab.data.corruptions.filters import (
    Draws,
    at,
    band,
    gaussian,
    rounded,
    separable,
    truncated,
    unit,
)
from slimbayes.lab.data.corruptions.tables import Row


def gaussian_blur(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """Gaussian filter of standard deviation σ pixels; the edge pixel continues outside."""
    return truncated(gaussian(unit(images), row[0]))


def defocus_blur(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """Correlation with a disk whose rim is softened: Σ_r A_r x B_rᵀ over the ranks r of the kernel."""
    x = unit(images)
    height, width = x.shape[-2:]
    total = torch.zeros_like(x)
    for down, across in _disk_factors(row[0], row[1]):
        total += separable(x, band(height, down, "mirror"), band(width, across, "mirror"))
    return truncated(total)


def disk(radius: float, alias: float) -> Tensor:
    """The defocus kernel: a disk of this radius on the pixel grid, blurred by a few taps of a Gaussian.

    >>> disk(1, 0.2).sum()
    tensor(1.0000, dtype=torch.float64)
    """
    half, taps = (8, 3) if radius <= 8 else (int(radius), 5)
    line = torch.arange(-half, half + 1, dtype=torch.float64)
    inside = (line[:, None] ** 2 + line**2 <= radius**2).double()
    weights = [math.exp(-((k - taps // 2) ** 2) / (2 * alias**2)) for k in range(taps)]
    blur = band(2 * half + 1, tuple(weight / math.fsum(weights) for weight in weights), "mirror")
    return separable(inside / inside.sum(), blur, blur)


@lru_cache(maxsize=32)
def _disk_factors(radius: float, alias: float) -> tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]:
    """The kernel as a sum of products of a column and a row; equal rows of a disk keep the ranks few."""
    u, s, v = torch.linalg.svd(disk(radius, alias))
    ranks = int((s > 1e-12 * s[0]).sum())
    return tuple((tuple((u[:, r] * s[r]).tolist()), tuple(v[r].tolist())) for r in range(ranks))


def motion_blur(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """Blur along a line at an angle of U(−45°, 45°)."""
    angle = draws.uniform(0, 1)[:, 0].double().mul_(90).sub_(45)
    return rounded(along_line(images.float(), row[0], row[1], angle))


def along_line(values: Tensor, radius: float, sd: float, angle: Tensor) -> Tensor:
    """ImageMagick's motion blur of [N, C, H, W], one angle in degrees each.

    Pixel i of 2 · radius + 1 on the line lies at (⌈i sin a − ½⌉, ⌈i cos a − ½⌉) and weighs
    exp(−i²/2σ²), normalised; outside the image the nearest edge pixel counts.
    """
    height, width = values.shape[-2:]
    reach = 2 * math.ceil(radius) + 1
    weights = [math.exp(-(i**2) / (2 * sd**2)) for i in range(reach)]
    total, norm = torch.zeros_like(values), math.fsum(weights)
    sine, cosine = angle.deg2rad().sin(), angle.deg2rad().cos()
    y = torch.arange(height, device=values.device)[None, :, None]
    x = torch.arange(width, device=values.device)[None, None, :]
    for i, weight in enumerate(weights):
        dy = (i * sine - 0.5).ceil().long()[:, None, None]
        dx = (i * cosine - 0.5).ceil().long()[:, None, None]
        shifted = at(values, (y + dy).clamp_(0, height - 1), (x + dx).clamp_(0, width - 1))
        total.add_(shifted, alpha=weight / norm)
    return total


def zoom_blur(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """The mean of the image and of its enlargements by 1, 1 + step, … up to the largest."""
    x = unit(images)
    # Rounding lets some of these ranges run one step further, here as in the originals.
    factors = np.arange(1, round(row[0] + 0.01, 2), row[1])
    total = x.clone()
    for factor in factors.tolist():
        total += clipped_zoom(x, factor)
    return truncated(total / (len(factors) + 1))


def clipped_zoom(values: Tensor, factor: float) -> Tensor:
    """The middle of [..., H, W] enlarged to the same size, linear between pixels, corners on corners."""
    for axis in (-2, -1):
        lower, upper, share = _zoom_line(values.shape[axis], factor)
        shape = (-1, 1) if axis == -2 else (-1,)
        weight = share.to(values.device, values.dtype).reshape(shape)
        low = values.index_select(axis, lower.to(values.device))
        values = torch.lerp(low, values.index_select(axis, upper.to(values.device)), weight)
    return values


@lru_cache(maxsize=256)
def _zoom_line(size: int, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """For each pixel of the enlarged line its two sources and the share of the second."""
    kept = math.ceil(size / factor)
    start, enlarged = (size - kept) // 2, round(kept * factor)
    pixel = (enlarged - size) // 2 + torch.arange(size, dtype=torch.float64)
    place = pixel * ((kept - 1) / max(enlarged - 1, 1))
    lower = place.floor().long().clamp_(0, kept - 1)
    return start + lower, start + (lower + 1).clamp_(max=kept - 1), place - lower


def glass_blur(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """Blur, replace each pixel by one nearby, and blur again.

    The original sweeps from the last pixel to the first and *copies*, so a pixel holds what its source held
    at that time. If the source came earlier in the sweep, that is what it had copied itself. Following
    sources until one that comes later, or is the pixel itself, gives the same image in a few parallel jumps.
    """
    sd, shift, rounds = row[0], int(row[1]), int(row[2])
    x = truncated(gaussian(unit(images), sd))
    height, width = x.shape[-2:]
    for sweep in range(rounds):
        offsets = (draws.uniform(sweep, 2, height, width) * (2 * shift)).floor_().long() - shift
        source = sweep_sources(offsets.clamp_(max=shift - 1), shift)  # [N, H, W]
        x = at(x, source // width, source % width)
    return truncated(gaussian(unit(x), sd))


def sweep_sources(offsets: Tensor, shift: int) -> Tensor:
    """Which pixel each one shows after one sweep with offsets (dx, dy) [N, 2, H, W]: flat indices [N, H, W].

    >>> sweep_sources(torch.zeros(1, 2, 2, 2, dtype=torch.long), 1)
    tensor([[[0, 1],
             [2, 3]]])
    """
    height, width = offsets.shape[-2:]
    pixels = height * width
    here = torch.arange(pixels, device=offsets.device)
    y, x = here // width, here % width
    swept = (y > shift) & (y <= height - shift) & (x > shift) & (x <= width - shift)  # [H·W]
    dx, dy = offsets.flatten(2).unbind(1)  # [N, H·W]
    source = torch.where(swept, (y + dy) * width + x + dx, here)
    # The second half of the nodes stands for pixels as they were before the sweep: there a path ends.
    earlier = (source > here) & swept[source.clamp(0, pixels - 1)]
    follow = torch.cat((torch.where(earlier, source, source + pixels), (here + pixels).expand_as(source)), 1)
    for _ in range(pixels.bit_length()):  # each jump doubles the length of path followed
        jumped = follow.gather(1, follow)
        if torch.equal(jumped, follow):
            break
        follow = jumped
    return (follow[:, :pixels] - pixels).view(-1, height, width)
