"""Quantiles and entropies of one-dimensional Gaussian mixtures: (1/D) Σ_d N(μ_d, σ_d²)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

BUDGET = 1 << 22  # elements of the largest temporary of the entropy integral


@torch.no_grad()
def mixture_quantile(q: float, loc: Tensor, scale: Tensor) -> Tensor:
    """The y with (1/D) Σ_d Φ((y − μ_d)/σ_d) = q, by bisection, for mixtures [D, ...].

    >>> round(float(mixture_quantile(0.5, torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1))), 5)
    0.0
    """
    from statistics import NormalDist  # takes a while

    ends = loc + NormalDist().inv_cdf(q) * scale  # [D, B, ...]
    low, high = ends.amin(0), ends.amax(0)  # the mixture's quantile lies among its components'
    spread = max(((high - low) / scale.amin(0)).flatten().tolist(), default=0.0)
    for _ in range(math.ceil(math.log2(spread + 1)) + 30):
        middle = (low + high) / 2
        below = torch.special.ndtr((middle - loc) / scale).mean(0) < q
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def mixture_entropy(loc: Tensor, scale: Tensor) -> Tensor:
    """−∫ p log p dy of mixtures [D, E], in bounded memory.

    >>> mixture_entropy(torch.zeros(3, 1), torch.ones(3, 1))
    tensor([1.4189])
    """
    width = max(1, BUDGET // (64 * loc.shape[0]))
    chunks = zip(loc.split(width, 1), scale.split(width, 1), strict=True)
    return torch.cat([_integrate(*chunk) for chunk in chunks])


def _integrate(loc: Tensor, scale: Tensor) -> Tensor:
    """−∫ p log p of mixtures [D, E], by Gauss–Legendre quadrature in the cells of ``_mesh``."""
    edges = _mesh(loc, scale)  # [cells + 1, E]
    half = edges.diff(dim=0) / 2
    nodes, weights = (torch.as_tensor(each).to(loc) for each in np.polynomial.legendre.leggauss(8))
    points = (edges[:-1] + half * (1 + nodes[:, None, None])).flatten(0, 1)  # [8 * cells, E]
    measure = (half * weights[:, None, None]).flatten(0, 1)
    loc, rate = loc.unsqueeze(1), scale.reciprocal().unsqueeze(1)  # [D, 1, E]
    height = rate / (len(loc) * math.sqrt(2 * math.pi))
    rows = max(1, BUDGET // max(1, loc.numel()))
    total = torch.zeros_like(half[0])
    for y, dy in zip(points.split(rows), measure.split(rows), strict=True):
        p = (height * (-0.5 * ((y - loc) * rate).square()).exp()).sum(0)  # [rows, E]
        p = p.clamp_min(torch.finfo(p.dtype).tiny)  # p log p has no derivative at 0
        total = total + (dy * torch.special.entr(p)).sum(0)
    return total


@torch.no_grad()
def _mesh(loc: Tensor, scale: Tensor) -> Tensor:
    """Edges [cells + 1, E] of cells at most 2σ wide within ±8σ of any component; gaps are skipped."""
    ends, order = torch.cat((loc - 8 * scale, loc + 8 * scale)).sort(dim=0)  # [2D, E]
    octave = scale.log2().floor()  # [D, E]
    density = torch.zeros_like(ends)  # cells per unit of y from each end to the next
    for level in octave.unique().tolist():
        here = (octave == level).int()
        covered = torch.cat((here, -here)).gather(0, order).cumsum(0) > 0
        density = torch.where(covered, density.clamp_min(0.5 * 2.0**-level), density)
    position = torch.zeros_like(ends)  # of each end, counted in cells
    position[1:] = (density[:-1] * ends.diff(dim=0)).cumsum(0)
    cells = math.ceil(max(position[-1].tolist(), default=1.0))
    steps = torch.linspace(0, 1, cells + 1, dtype=ends.dtype, device=ends.device)
    ticks = steps[:, None] * position[-1]  # [cells + 1, E]
    right = torch.searchsorted(position.T.contiguous(), ticks.T.contiguous()).T.clamp(1, len(ends) - 1)
    low, high = position.gather(0, right - 1), position.gather(0, right)
    weight = ((ticks - low) / (high - low).clamp_min(torch.finfo(ends.dtype).tiny)).clamp(0, 1)
    return torch.lerp(ends.gather(0, right - 1), ends.gather(0, right), weight)
