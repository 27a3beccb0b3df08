"""JPEG compression in batches: every step of the codec that changes a pixel, none of the entropy coding.

The steps and their rounding are those of libjpeg as Pillow calls it: YCbCr, colour at half resolution
(4:2:0), 8×8 discrete cosine transform, the standard tables of ITU-T T.81 Annex K scaled by the quality, and
back, with the triangle filter that enlarges the colour.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from slimbayes.lab.data.corruptions.filters import Draws
from slimbayes.lab.data.corruptions.tables import Row

_LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMINANCE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8,) * 4,
)
_ONE = 1 << 16  # the codec's fixed point for colours


def jpeg_compression(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """Coded at a quality of 1 to 100 and decoded again."""
    quality = int(row[0])
    height, width = images.shape[2:]
    if images.shape[1] == 1:
        return _coded(images[:, 0].int(), quality, chroma=False)[:, None].to(torch.uint8)
    luminance, *colours = _to_ycc(images.int())
    luminance = _coded(luminance, quality, chroma=False)
    half = (height + 1) // 2, (width + 1) // 2
    smaller = (_coded(_halved(plane), quality, chroma=True)[:, : half[0], : half[1]] for plane in colours)
    blue, red = (_enlarged(plane)[:, :height, :width] - 128 for plane in smaller)
    return _to_rgb(luminance, blue, red)


def quantisation(quality: int, chroma: bool = False) -> Tensor:
    """The table of divisors: the standard one times 50/quality below 50, (100 − quality)/50 from 50 on.

    >>> quantisation(50)[0, :4]
    tensor([16, 11, 10, 16])
    """
    percent = 5000 // quality if quality < 50 else 200 - 2 * quality
    base = torch.tensor(_CHROMINANCE if chroma else _LUMINANCE)
    return ((base * percent + 50) // 100).clamp_(1, 255)


def _to_ycc(rgb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    red, green, blue = rgb.unbind(1)

    def mixed(r: float, g: float, b: float, offset: int) -> Tensor:
        return (_fixed(r) * red + _fixed(g) * green + _fixed(b) * blue + offset) >> 16

    centre = (128 << 16) + _ONE // 2 - 1
    return (
        mixed(0.29900, 0.58700, 0.11400, _ONE // 2),
        mixed(-0.16874, -0.33126, 0.50000, centre),
        mixed(0.50000, -0.41869, -0.08131, centre),
    )


def _to_rgb(luminance: Tensor, blue: Tensor, red: Tensor) -> Tensor:
    half = _ONE // 2
    r = luminance + ((_fixed(1.40200) * red + half) >> 16)
    g = luminance + ((_fixed(-0.34414) * blue + _fixed(-0.71414) * red + half) >> 16)
    b = luminance + ((_fixed(1.77200) * blue + half) >> 16)
    return torch.stack((r, g, b), 1).clamp_(0, 255).to(torch.uint8)


def _fixed(number: float) -> int:
    return round(number * _ONE)


def _coded(plane: Tensor, quality: int, chroma: bool) -> Tensor:
    """One plane [N, H, W] through transform, quantisation and back."""
    height, width = plane.shape[1:]
    plane = _padded(plane, -height % 8, -width % 8)
    count, tall, wide = plane.shape
    blocks = plane.view(count, tall // 8, 8, wide // 8, 8).transpose(2, 3)  # [N, rows, columns, 8, 8]
    cosine = _cosine().to(plane.device)
    divisor = 8.0 * quantisation(quality, chroma).to(plane.device).T
    rows = _product((blocks - 128).double(), cosine.T, 11)
    eightfold = _product(rows.mT, cosine.T, 15)  # eight times the coefficients, transposed
    level = eightfold.sign() * ((eightfold.abs() + divisor / 2) / divisor).floor_()  # halves away from zero
    columns = _product(level * (divisor / 8), cosine, 11)
    pixels = (_product(columns.mT, cosine, 18) + 128).clamp_(0, 255).int()
    return pixels.transpose(2, 3).reshape(count, tall, wide)[:, :height, :width]


def _product(blocks: Tensor, matrix: Tensor, bits: int) -> Tensor:
    """Whole numbers in float64 times a matrix, divided by 2^bits, halves rounded up."""
    return (blocks.contiguous() @ matrix).mul_(2.0**-bits).add_(0.5).floor_()


@lru_cache(maxsize=1)
def _cosine() -> Tensor:
    """√8 times the discrete cosine transform in whole multiples of 2⁻¹³, [8 frequencies, 8 pixels].

    A row has four numbers, mirrored: with the same sign at even frequencies, the opposite one at odd ones.
    They are not the rounded cosines but sums of the rounded constants of the fast algorithm that the codec
    uses (Loeffler, Ligtenberg and Moschytz, 1989), which may differ in the last digit. Products with
    whole numbers this small are exact in float64.
    """
    halves = (
        (8192, 8192, 8192, 8192),
        (11363, 9633, 6437, 2260),
        (10703, 4433, -4433, -10703),
        (9633, -2259, -11362, -6436),
        (8192, -8192, -8192, 8192),
        (6437, -11362, 2261, 9633),
        (4433, -10704, 10704, -4433),
        (2260, -6436, 9633, -11363),
    )
    full = [[*row, *((-1) ** k * part for part in row[::-1])] for k, row in enumerate(halves)]
    return torch.tensor(full, dtype=torch.float64)


def _padded(plane: Tensor, below: int, right: int) -> Tensor:
    """Rows and columns added by repeating the last."""
    plane = torch.cat((plane, plane[:, :, -1:].expand(-1, -1, right)), 2)
    return torch.cat((plane, plane[:, -1:].expand(-1, below, -1)), 1)


def _halved(plane: Tensor) -> Tensor:
    """Means over 2×2 pixels, halves rounded down and up in turn; columns padded to whole blocks first."""
    plane = _padded(plane, plane.shape[1] % 2, -plane.shape[2] % 16)
    total = plane[:, ::2, ::2] + plane[:, ::2, 1::2] + plane[:, 1::2, ::2] + plane[:, 1::2, 1::2]
    bias = 1 + torch.arange(total.shape[2], device=plane.device, dtype=plane.dtype) % 2
    return (total + bias) >> 2


def _enlarged(plane: Tensor) -> Tensor:
    """Twice the size: ¾ of the nearer sample and ¼ of the farther, along both axes."""
    if plane.shape[2] <= 2:
        return plane.repeat_interleave(2, 1).repeat_interleave(2, 2)
    tall = torch.cat((plane[:, :1], plane, plane[:, -1:]), 1)  # [N, h + 2, w]
    near = 3 * tall[:, 1:-1]
    rows = torch.stack((near + tall[:, :-2], near + tall[:, 2:]), 2).flatten(1, 2)  # [N, 2h, w]
    before = torch.cat((rows[:, :, :1], rows[:, :, :-1]), 2)
    after = torch.cat((rows[:, :, 1:], rows[:, :, -1:]), 2)
    pair = torch.stack(((3 * rows + before + 8) >> 4, (3 * rows + after + 7) >> 4), 3)  # [N, 2h, w, 2]
    return pair.flatten(2)  # [N, 2h, 2w]
