"""Spatter: drops of water or mud on the lens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from slimbayes.lab.data.corruptions.filters import Draws, fold, gaussian, luma, truncated, unit
from slimbayes.lab.data.corruptions.tables import Row

_WATER = (175, 238, 238)
_MUD = (63, 42, 20)
_STRAIGHT, _DIAGONAL, _KNIGHT = 1.0, 1.4, 2.1969  # lengths of the steps of OpenCV's 5×5 distance mask
_FARTHEST = 20.0


def spatter(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """Blurred noise above a threshold is liquid: pale water with lit edges, or opaque mud."""
    mean, sd, blur, threshold, strength, mud = row
    liquid = draws.normal(0, *images.shape[2:]).mul_(sd).add_(mean)  # [N, H, W]
    liquid = gaussian(liquid, blur)
    liquid = liquid.masked_fill(liquid < threshold, 0)
    x = unit(images)
    tint = x.new_tensor(_MUD if mud else _WATER).view(1, 3, 1, 1) / 255
    tint = luma(tint) if images.shape[1] == 1 else tint
    if mud:
        cover = gaussian((liquid > threshold).to(x.dtype), strength)[:, None]
        cover = cover.masked_fill(cover < 0.8, 0)
        return truncated(x * (1 - cover) + tint * cover)
    light = _lit_edges((liquid * 255).clamp_(0, 255).floor_())
    light = light / light.amax((1, 2), keepdim=True).clamp_(min=1e-6) * strength
    return truncated(x + light[:, None] * tint)


def _lit_edges(liquid: Tensor) -> Tensor:
    """Liquid [N, H, W] in whole numbers times a relief of the distance to its outline."""
    distance = chamfer(canny(liquid, 50, 150))
    relief = _equalised(_box(distance).floor_())
    relief = _correlate(relief, ((-2, -1, 0), (-1, 1, 1), (0, 1, 2))).clamp_(0, 255)
    return liquid * (_box(relief) + 0.5).floor_()


def canny(picture: Tensor, low: float, high: float) -> Tensor:
    """Edges of [N, H, W]: local maxima of |∂x| + |∂y| above ``low`` and linked to one above ``high``.

    Citation: Canny, "A computational approach to edge detection", 1986. Gradients are by Sobel's masks and
    directions fall in four sectors, as in OpenCV.
    """
    dx, dy = _sobel(picture)
    size = dx.abs() + dy.abs()
    padded = functional.pad(size, (1, 1, 1, 1))
    height, width = size.shape[-2:]

    def beside(down: int, right: int) -> Tensor:
        return padded[:, 1 + down : 1 + down + height, 1 + right : 1 + right + width]

    flat = dy.abs() < dx.abs() * _TAN_22
    steep = dy.abs() > dx.abs() * (_TAN_22 + 2)
    along = (size > beside(0, -1)) & (size >= beside(0, 1))
    upright = (size > beside(-1, 0)) & (size >= beside(1, 0))
    falling = (size > beside(-1, -1)) & (size > beside(1, 1))
    rising = (size > beside(-1, 1)) & (size > beside(1, -1))
    slanted = torch.where((dx < 0) != (dy < 0), rising, falling)
    weak = torch.where(flat, along, torch.where(steep, upright, slanted)) & (size > low)
    return _linked(weak & (size > high), weak)


_TAN_22 = 13573 / 32768  # tan 22.5° in OpenCV's fixed point


def _sobel(picture: Tensor) -> tuple[Tensor, Tensor]:
    padded = torch.cat((picture[:, :1], picture, picture[:, -1:]), 1)
    padded = torch.cat((padded[:, :, :1], padded, padded[:, :, -1:]), 2)  # [N, H + 2, W + 2]
    down = padded[:, :-2] + 2 * padded[:, 1:-1] + padded[:, 2:]  # [N, H, W + 2]
    across = padded[:, :, :-2] + 2 * padded[:, :, 1:-1] + padded[:, :, 2:]  # [N, H + 2, W]
    return down[:, :, 2:] - down[:, :, :-2], across[:, 2:] - across[:, :-2]


def _linked(strong: Tensor, weak: Tensor) -> Tensor:
    """Weak pixels that a path of weak pixels joins to a strong one."""
    grown = strong
    while True:
        before = grown
        for _ in range(8):  # looking at the result waits for the device: not after every step
            tall = grown.clone()
            tall[:, 1:] |= grown[:, :-1]
            tall[:, :-1] |= grown[:, 1:]
            grown = tall & weak  # the middle column of each 3×3 neighbourhood
            grown[:, :, 1:] |= tall[:, :, :-1]
            grown[:, :, :-1] |= tall[:, :, 1:]
            grown &= weak
        if torch.equal(before, grown):
            return grown


def chamfer(edges: Tensor) -> Tensor:
    """Distance from the nearest edge in steps of 1, 1.4 (diagonal) and 2.1969 (knight's move), at most 20.

    Citation: Borgefors, "Distance transformations in digital images", 1986.
    """
    distance = torch.where(edges, 0.0, _FARTHEST).float()
    least = torch.minimum
    for _ in range(int(_FARTHEST)):  # no path of length 20 has more steps
        wide = functional.pad(distance, (2, 2, 2, 2), value=_FARTHEST)  # [N, H + 4, W + 4]
        beside = least(wide[:, :, 1:-3], wide[:, :, 3:-1])  # one column away, [N, H + 4, W]
        middle = wide[:, :, 2:-2]
        straight = least(beside[:, 2:-2], least(middle[:, 1:-3], middle[:, 3:-1]))
        diagonal = least(beside[:, 1:-3], beside[:, 3:-1])
        farther = least(wide[:, :, :-4], wide[:, :, 4:])  # two columns away
        knight = least(least(farther[:, 1:-3], farther[:, 3:-1]), least(beside[:, :-4], beside[:, 4:]))
        near = least(least(straight + _STRAIGHT, diagonal + _DIAGONAL), least(knight + _KNIGHT, distance))
        if torch.equal(near, distance):
            break
        distance = near
    return distance


def _equalised(levels: Tensor) -> Tensor:
    """Whole numbers 0..20 [N, H, W] spread over 0..255 by their rank, as OpenCV's equalizeHist."""
    count = torch.stack([(levels == level).sum((1, 2)) for level in range(int(_FARTHEST) + 1)], 1)  # [N, 21]
    total = count.sum(1, keepdim=True)
    first = (count > 0).long().argmax(1, keepdim=True)  # the darkest level there is goes to 0
    base = count.gather(1, first)
    scale = 255 / (total - base).clamp(min=1).double()
    spread = ((count.cumsum(1) - base).clamp(min=0) * scale).round()
    spread = torch.where(base == total, first.double(), spread)  # one level only: kept
    flat = spread.float().gather(1, levels.long().flatten(1))  # [N, H·W]
    return flat.view_as(levels)


def _box(picture: Tensor) -> Tensor:
    return _correlate(picture, ((1, 1, 1),) * 3) / 9


def _correlate(picture: Tensor, mask: tuple[tuple[int, int, int], ...]) -> Tensor:
    """Correlation of [N, H, W] with a 3×3 mask, mirrored at the border."""
    height, width = picture.shape[-2:]
    device = picture.device
    rows = fold(torch.arange(-1, height + 1, device=device), height, "mirror")
    columns = fold(torch.arange(-1, width + 1, device=device), width, "mirror")
    wide = picture.index_select(1, rows).index_select(2, columns)  # [N, H + 2, W + 2]
    total = torch.zeros_like(picture)
    for dy, line in enumerate(mask):
        for dx, weight in enumerate(line):
            if weight:
                total += weight * wide[:, dy : dy + height, dx : dx + width]
    return total
