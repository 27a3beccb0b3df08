"""Changes of colour: brightness, contrast, saturation."""

from __future__ import annotations

import torch
from torch import Tensor

from slimbayes.lab.data.corruptions.filters import Draws, truncated, unit
from slimbayes.lab.data.corruptions.tables import Row


def brightness(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """HSV value V = max(R, G, B) raised by c, hue and saturation kept: x · V′/V."""
    x = unit(images)
    value = x.amax(1, keepdim=True)
    raised = (value + row[0]).clamp_(max=1)
    return truncated(torch.where(value > 0, x * (raised / value), raised))


def saturate(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """HSV saturation S = (V − min)/V replaced by S′ = aS + b: V − V S′ (V − x)/(V − min).

    A grey pixel has hue 0: when S′ > 0 it turns red. An image with one channel has no saturation and stays.
    """
    if images.shape[1] == 1:
        return images.clone()
    factor, offset = row
    x = unit(images)
    value = x.amax(1, keepdim=True)
    spread = value - x.amin(1, keepdim=True)
    saturation = (spread / value.clamp(min=1e-6) * factor + offset).clamp_(0, 1)
    red_hue = x.new_tensor([0.0, 1.0, 1.0]).view(1, 3, 1, 1).expand_as(x)
    distance = torch.where(spread > 0, (value - x) / spread.clamp(min=1e-6), red_hue)
    return truncated(value * (1 - saturation * distance))


def contrast(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """(x − x̄)c + x̄, with the mean x̄ of each channel of each image."""
    x = unit(images)
    # In float64, for a mean that is the same in whatever batch the image comes.
    mean = images.double().mean((2, 3), keepdim=True).div_(255).float()
    return truncated((x - mean) * row[0] + mean)
