"""Weather: snow, frost and fog."""

from __future__ import annotations

import torch
from torch import Tensor

from slimbayes.lab.data.corruptions.blur import along_line, clipped_zoom
from slimbayes.lab.data.corruptions.filters import Draws, luma, rounded, truncated, unit
from slimbayes.lab.data.corruptions.tables import Row
from slimbayes.lab.data.corruptions.textures import frost_textures


def snow(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """Flakes from thresholded, enlarged noise, blurred as they fall, over a whitened image.

    mix · x + (1 − mix) · max(x, 1.5 · grey + ½) + flakes + flakes turned by 180°, falling at U(−135°, −45°).
    """
    mean, sd, zoom, threshold, radius, blur, mix = row
    layer = clipped_zoom(draws.normal(0, 1, *images.shape[2:]).mul_(sd).add_(mean), zoom)
    layer = layer.masked_fill(layer < threshold, 0)
    angle = draws.uniform(1, 1)[:, 0].double().mul_(90).sub_(135)
    layer = unit(rounded(along_line(truncated(layer).float(), radius, blur, angle)))  # [N, 1, H, W]
    x = unit(images)
    x = mix * x + (1 - mix) * torch.maximum(x, luma(x) * 1.5 + 0.5)
    return truncated(x + layer + layer.flip((2, 3)))


def frost(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """a · x + b · f, with f a random piece of one of five frost textures.

    For the small images of the CIFAR table the textures shrink to every fifth pixel, as in CIFAR-10-C.
    """
    channels, height, width = images.shape[1:]
    textures = frost_textures(5 if draws.table == "cifar" else 1).to(images.device)  # [5, 3, S, S]
    textures = luma(textures) if channels == 1 else textures
    size = textures.shape[-1]
    u = draws.uniform(0, 3)  # which texture, and where
    which, y, x = (u * u.new_tensor([len(textures), size, size])).long().unbind(1)  # [N] each
    rows = (y[:, None] + torch.arange(height, device=y.device)) % size  # [N, H]
    columns = (x[:, None] + torch.arange(width, device=x.device)) % size  # [N, W]
    places = (which[:, None, None], rows[:, :, None], columns[:, None, :])
    piece = textures.movedim(1, -1)[places].movedim(-1, 1)  # [N, C, H, W]
    return truncated((row[0] * images.float() + row[1] * piece) / 255)


def fog(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """(x + c · plasma) · m/(m + c), with m the image's largest value."""
    amount, decay = row
    height, width = images.shape[2:]
    size = 1 << (max(height, width) - 1).bit_length()
    x = unit(images)
    largest = x.amax((1, 2, 3), keepdim=True)
    haze = plasma(draws.uniform(0, max(size * size - 1, 1)), size, decay)[:, None, :height, :width]
    return truncated((x + amount * haze) * (largest / (largest + amount)))


def plasma(uniform: Tensor, size: int, decay: float) -> Tensor:
    """Clouds in [0, 1] by the diamond-square algorithm on a torus, [N, size, size] from [N, size² − 1] draws.

    The middle of each square, then of each edge, is the mean of its four neighbours plus w · U(−w, w); the
    grid halves and w shrinks by ``decay`` until every pixel has a value. w starts at 100.
    """
    clouds = uniform.new_zeros(len(uniform), size, size)
    used, step, wibble = 0, size, 100.0
    while step >= 2:
        half, cells = step // 2, (size // step) ** 2
        noise = (uniform[:, used : used + 3 * cells] * 2 - 1) * wibble**2
        # [N, 3, cells down, cells across]: centres, top edges, left edges
        centre, top, left = noise.unflatten(1, (3, size // step, size // step)).unbind(1)
        corner = clouds[:, ::step, ::step]
        down, right = corner.roll(-1, 1), corner.roll(-1, 2)
        middle = (corner + down + right + down.roll(-1, 2)) / 4 + centre
        clouds[:, half::step, half::step] = middle
        clouds[:, ::step, half::step] = (middle + middle.roll(1, 1) + corner + right) / 4 + top
        clouds[:, half::step, ::step] = (middle + middle.roll(1, 2) + corner + down) / 4 + left
        used, step, wibble = used + 3 * cells, half, wibble / decay
    clouds -= clouds.amin((1, 2), keepdim=True)
    return clouds / clouds.amax((1, 2), keepdim=True).clamp_(min=1e-12)
