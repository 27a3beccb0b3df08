"""Frost made by rule: five tileable textures in place of the photographs that the originals use.

The plane falls into shards of ice, the cells around random points. Each shard carries needles in a direction of
its own and a bright rim; clouds of several octaves lie over them, so that the correlation of two pixels falls
with the logarithm of their distance, as it does in the photographs. Mean and spread of every colour are those of
the photographs; no pixel of them is used.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from slimbayes.core.keyed_noise import keyed_noise, layer_key

SIZE = 480  # pixels a side

# Mean and standard deviation of red, green and blue; shares of large shards, small shards, clouds and grain.
_LOOKS = (
    ((78, 149, 166), (27, 17, 15), (0.35, 0.35, 1.2, 0.45)),
    ((201, 205, 214), (21, 22, 23), (0.5, 0.5, 1.0, 0.4)),
    ((201, 205, 214), (21, 22, 23), (0.7, 0.3, 1.0, 0.4)),
    ((138, 153, 165), (29, 29, 30), (0.4, 0.65, 0.8, 0.35)),
    ((112, 123, 135), (44, 43, 42), (0.5, 0.5, 1.0, 0.35)),
)
_STRIPES = 64  # values of the profile of needles across a shard


def frost_textures(shrink: int = 1) -> Tensor:
    """Five textures float32 [5, 3, S, S] in 0..255, S = 480/shrink; made once, the same everywhere.

    >>> frost_textures(5).shape
    torch.Size([5, 3, 96, 96])
    """
    middle = shrink // 2
    return _textures()[:, :, middle::shrink, middle::shrink]


@lru_cache(maxsize=1)
def _textures() -> Tensor:
    return torch.stack([_texture(index) for index in range(len(_LOOKS))])


def _texture(index: int) -> Tensor:
    means, spreads, (large, small, clouds, grain) = _LOOKS[index]
    ice = large * _shards(index, 60, 3.0) + small * _shards(index, 20, 1.6)
    ice = ice + clouds * _clouds(index, 0, (3, 6, 12, 24, 48))
    ice = _standard(ice + grain * _noise("normal", index, 2, SIZE, SIZE))
    layers = []
    for channel, (mean, spread) in enumerate(zip(means, spreads, strict=True)):
        tint = _clouds(index, 8 * (channel + 1), (3, 6))  # a slight cast that varies over the pane
        layers.append(mean + spread * _standard(ice + 0.05 * tint))
    return torch.stack(layers).clamp_(0, 255)


def _standard(values: Tensor) -> Tensor:
    return (values - values.mean()) / values.std()


def _noise(kind: str, index: int, stream: int, *shape: int) -> Tensor:
    key = layer_key(0, f"frost texture {index}")
    noise = keyed_noise(kind, key, stream, None, None, None, shape, torch.float32, torch.device("cpu"))
    return noise[0, 0, 0]


def _clouds(index: int, stream: int, octaves: tuple[int, ...]) -> Tensor:
    """Smooth periodic noise with this many cells a side, octaves added up with strength 1/√k."""
    total = torch.zeros(SIZE, SIZE)
    for octave, cells in enumerate(octaves):
        grid = _noise("normal", index, 64 + stream + octave, cells, cells)
        wrapped = functional.pad(grid[None, None], (2, 2, 2, 2), mode="circular")
        step = SIZE // cells
        smooth = functional.interpolate(wrapped, scale_factor=float(step), mode="bicubic")[0, 0]
        smooth = smooth[2 * step : 2 * step + SIZE, 2 * step : 2 * step + SIZE]
        total += _standard(smooth) / math.sqrt(octave + 1)
    return _standard(total)


def _shards(index: int, cell: int, needle: float) -> Tensor:
    """Needles ``needle`` pixels apart, one direction in each cell of jittered points, and the cells' rims."""
    cells = SIZE // cell
    py, px, turn = _noise("uniform", index, 1024 + cell, 3, cells * cells)  # row, column, direction
    cosine, sine = (math.pi * turn).cos(), (math.pi * turn).sin()
    line = torch.arange(SIZE)
    first, second = torch.full((2, SIZE, SIZE), torch.inf)
    owner, across = torch.zeros(SIZE, SIZE, dtype=torch.long), torch.zeros(SIZE, SIZE)
    for dy in (-1, 0, 1):
        for dx in (-1, 0, 1):
            row, column = line // cell + dy, line // cell + dx
            which = (row % cells * cells)[:, None] + column % cells  # [SIZE, SIZE]
            down = (line - row * cell)[:, None] - (py * cell)[which]
            right = (line - column * cell) - (px * cell)[which]
            side = down * cosine[which] - right * sine[which]
            # Cells are longer along their needles than across them.
            distance = torch.sqrt(down**2 + right**2 + 2 * side**2)
            nearer = distance < first
            second = torch.where(nearer, first, torch.minimum(second, distance))
            first = torch.where(nearer, distance, first)
            owner, across = torch.where(nearer, which, owner), torch.where(nearer, side, across)
    place = (across / needle) % _STRIPES
    low = place.long().clamp_(max=_STRIPES - 1)
    profile = _noise("normal", index, 2048 + cell, cells * cells, _STRIPES).flatten()
    needles = torch.lerp(
        profile[owner * _STRIPES + low], profile[owner * _STRIPES + (low + 1) % _STRIPES], place - low
    )
    tone = _noise("normal", index, 3072 + cell, cells * cells)[owner]  # of the whole shard
    return _standard(needles + 0.6 * tone + 2 * torch.exp((first - second) / (0.05 * cell)))
