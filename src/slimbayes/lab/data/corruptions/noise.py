"""Noise on every value: Gaussian, Poisson, salt and pepper, speckle."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from slimbayes.lab.data.corruptions.filters import Draws, truncated, unit
from slimbayes.lab.data.corruptions.tables import Row


def gaussian_noise(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """x + σε, ε ~ N(0, 1)."""
    return truncated(draws.normal(0, *images.shape[1:]).mul_(row[0]).add_(unit(images)))


def speckle_noise(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """x + x · σε, ε ~ N(0, 1)."""
    return truncated(draws.normal(0, *images.shape[1:]).mul_(row[0]).add_(1).mul_(unit(images)))


def impulse_noise(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """A share of all values becomes 0 or 255, each with probability ½."""
    amount = row[0]
    u = draws.uniform(0, *images.shape[1:])
    # One number for both choices: below amount/2 salt, below amount pepper.
    return images.masked_fill(u < amount, 0).masked_fill(u < amount / 2, 255)


def shot_noise(images: Tensor, row: Row, draws: Draws) -> Tensor:
    """Poisson(c x)/c, by inversion: the smallest k with P(Poisson ≤ k) > u.

    A byte has 256 levels, so 256 distribution functions laid end to end, level v in [v, v + 1), are one
    sorted list, and one search finds k. Counts of c and more are white, so a list ends at k = c − 1.
    """
    photons = int(row[0])
    u = draws.uniform(0, *images.shape[1:])
    edges = _distributions(photons).to(images.device)  # [256 · c]
    found = torch.searchsorted(edges, u.double().add_(images), right=True)  # counts the edges up to v + u
    count = found - images.to(torch.int64) * photons  # less those of lower levels
    return (count.clamp_(0, photons).double().mul_(255 / photons)).add_(1e-9).to(torch.uint8)


@lru_cache(maxsize=16)
def _distributions(photons: int) -> Tensor:
    """v + P(Poisson(c v/255) ≤ k) for v = 0..255 and k = 0..c − 1, float64 [256 · c]."""
    rate = torch.arange(256, dtype=torch.float64)[:, None] * (photons / 255)  # [256, 1]
    k = torch.arange(photons, dtype=torch.float64)  # [c]
    log_mass = torch.xlogy(k, rate) - rate - torch.lgamma(k + 1)
    below = log_mass.exp().cumsum(1).clamp_(max=1 - math.ulp(0.5))  # strictly under the next level
    return (below + torch.arange(256)[:, None]).flatten()
