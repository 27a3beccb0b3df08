"""Common corruptions of images in batches: 15 standard and 4 extra ones at 5 severities.

The corruptions and their severities are those of Hendrycks and Dietterich, "Benchmarking neural network
robustness to common corruptions and perturbations" (2019), arXiv:1903.12261. ``docs/corruptions.md`` says how
they are worked out and what differs from the originals.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from slimbayes.containers.datasets import DataError
from slimbayes.core.keyed_noise import layer_key
from slimbayes.lab.data.corruptions import blur, colour, digital, jpeg, noise, spatter, weather
from slimbayes.lab.data.corruptions.filters import Draws
from slimbayes.lab.data.corruptions.official import load_official
from slimbayes.lab.data.corruptions.tables import CORRUPTIONS, EXTRA, SEVERITIES, TABLES, Row, place

__all__ = ["CORRUPTIONS", "EXTRA", "SEVERITIES", "TABLES", "corrupt", "load_official", "parameters"]

_FUNCTIONS: dict[str, Callable[[Tensor, Row, Draws], Tensor]] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": colour.brightness,
    "contrast": colour.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": jpeg.jpeg_compression,
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "spatter": spatter.spatter,
    "saturate": colour.saturate,
}
_SMALL = 64  # pixels a side, up to which the CIFAR table is the default
# Values worked on at a time: on a CPU few enough to stay in its cache, elsewhere enough to keep it busy.
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 25
_MOST = 1 << 15  # images at a time, however small: some kernels of CUDA take no more than 65,535


def corrupt(
    images: Tensor,
    name: str,
    severity: int,
    seed: int = 0,
    table: str | None = None,
    first: int = 0,
    chunk: int | None = None,
) -> Tensor:
    """Corrupted copies of images, on their device.

    The noise of an image is a function of (seed, corruption, severity, its index) alone. With ``first`` the
    index of the first image, a slice gives the same as slicing the corrupted whole:

        corrupt(x[a:b], …, first=a) = corrupt(x, …)[a:b]

    Args:
        images: uint8 [N, C, H, W], with one channel or three (red, green, blue).
        name: one of ``CORRUPTIONS`` or ``EXTRA``.
        severity: 1 to 5.
        seed: any integer.
        table: "cifar" or "imagenet" severities; by default "cifar" up to 64 pixels a side.
        first: index of the first image, when these are part of a larger set.
        chunk: images worked on at a time; bounds the memory and changes nothing else.

    >>> images = torch.arange(2 * 3 * 32 * 32).view(2, 3, 32, 32).remainder(256).to(torch.uint8)
    >>> foggy = corrupt(images, "fog", severity=3, seed=1)
    >>> foggy.shape, foggy.dtype
    (torch.Size([2, 3, 32, 32]), torch.uint8)
    >>> torch.equal(corrupt(images[1:], "fog", severity=3, seed=1, first=1), foggy[1:])
    True
    """
    _check(images, first, chunk)
    if table is None:
        table = "cifar" if max(images.shape[2:]) <= _SMALL else "imagenet"
    row = parameters(name, severity, table)
    if chunk is None:
        budget = _CPU_CHUNK if images.device.type == "cpu" else _DEVICE_CHUNK
        chunk = min(max(1, budget // max(1, math.prod(images.shape[1:]))), _MOST)
    key = layer_key(seed, f"corruption {name} {int(severity)}")
    ids = torch.arange(first, first + len(images), device=images.device)
    corrupted = torch.empty(images.shape, dtype=torch.uint8, device=images.device)
    with torch.no_grad():
        for start in range(0, len(images), chunk):
            part = slice(start, start + chunk)
            corrupted[part] = _FUNCTIONS[name](images[part], row, Draws(key, ids[part], table))
    return corrupted


def parameters(name: str, severity: int, table: str) -> Row:
    """The numbers of one corruption at one severity, as in the tables of ``docs/corruptions.md``.

    >>> parameters("gaussian_noise", 3, "cifar"), parameters("fog", 1, "imagenet")
    ((0.08,), (1.5, 2))
    """
    if table not in TABLES:
        raise DataError(f"table={table!r} is not known: choose 'cifar' or 'imagenet', or leave it out")
    index = place(name, severity)
    return TABLES[table][name][index]


def _check(images: Tensor, first: int, chunk: int | None) -> None:
    if not isinstance(images, Tensor) or images.dtype != torch.uint8:
        kind = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise DataError(f"images are {kind}: give raw images as a torch.uint8 tensor with values 0 to 255")
    if images.ndim != 4 or images.shape[1] not in (1, 3) or 0 in images.shape[2:]:
        raise DataError(f"images are {list(images.shape)}: give [N, C, H, W] with 1 or 3 channels")
    if first < 0 or first + len(images) > 1 << 32:
        raise DataError(f"first={first}: indices of images must lie from 0 to 2^32 - 1")
    if chunk is not None and chunk < 1:
        raise DataError(f"chunk={chunk}: work on at least one image at a time")
