"""Quantiles of draws, and quantiles and entropies of Gaussian mixtures Σ_d w_d N(μ_d, σ_d²), by default w_d = 1/D."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

BUDGET = 1 << 22  # elements of the largest temporary of the entropy integral


@torch.no_grad()
def mixture_quantile(q: float, loc: Tensor, scale: Tensor, weights: Tensor | None = None) -> Tensor:
    """The y with Σ_d w_d Φ((y − μ_d)/σ_d) = q, by bisection, for mixtures [D, ...] with weights [D].

    >>> round(float(mixture_quantile(0.5, torch.tensor([[-1.0], [1.0]]), torch.ones(2, 1))), 5)
    0.0
    """
    from statistics import NormalDist  # takes a while

    if weights is not None:
        loc, scale, weights = loc[weights > 0], scale[weights > 0], weights[weights > 0].to(loc)
    ends = loc + NormalDist().inv_cdf(q) * scale  # [D, B, ...]
    low, high = ends.amin(0), ends.amax(0)  # the mixture's quantile lies among its components'
    spread = max(((high - low) / scale.amin(0)).flatten().tolist(), default=0.0)
    for _ in range(math.ceil(math.log2(spread + 1)) + 30):
        middle = (low + high) / 2
        parts = torch.special.ndtr((middle - loc) / scale)
        below = (parts.mean(0) if weights is None else torch.tensordot(weights, parts, dims=1)) < q
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def mixture_entropy(loc: Tensor, scale: Tensor, weights: Tensor | None = None) -> Tensor:
    """−∫ p log p dy of mixtures [D, E] with weights [D], in bounded memory.

    >>> mixture_entropy(torch.zeros(3, 1), torch.ones(3, 1))
    tensor([1.4189])
    """
    width = max(1, BUDGET // (64 * loc.shape[0]))
    chunks = zip(loc.split(width, 1), scale.split(width, 1), strict=True)
    shares = loc.new_full((len(loc),), 1 / len(loc)) if weights is None else weights.to(loc)
    return torch.cat([_integrate(*chunk, shares) for chunk in chunks])


def _integrate(loc: Tensor, scale: Tensor, shares: Tensor) -> Tensor:
    """−∫ p log p of mixtures [D, E], by Gauss–Legendre quadrature in the cells of ``_mesh``."""
    edges = _mesh(loc, scale)  # [cells + 1, E]
    half = edges.diff(dim=0) / 2
    nodes, weights = (torch.as_tensor(each).to(loc) for each in np.polynomial.legendre.leggauss(8))
    points = (edges[:-1] + half * (1 + nodes[:, None, None])).flatten(0, 1)  # [8 * cells, E]
    measure = (half * weights[:, None, None]).flatten(0, 1)
    loc, rate = loc.unsqueeze(1), scale.reciprocal().unsqueeze(1)  # [D, 1, E]
    height = shares.view(-1, 1, 1) * rate / math.sqrt(2 * math.pi)
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


def tails(level: float) -> tuple[float, float]:
    """The two quantiles between which the central share ``level`` lies.

    >>> tails(0.5)
    (0.25, 0.75)
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"interval got level={level}: pass a number between 0 and 1, such as 0.9 for 90 %")
    return (1 - level) / 2, (1 + level) / 2


def central(values: Tensor, level: float, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Both ends of the central ``level`` of values [D, ...] along their first axis, with weights [D].

    >>> central(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]), 0.5)
    (tensor(1.), tensor(3.))
    """
    if weights is not None:
        return _by_weight(values, level, weights)
    ordered = values.sort(0).values  # torch.quantile refuses large tensors
    lower, upper = (divmod(q * (len(ordered) - 1), 1) for q in tails(level))
    return (
        torch.lerp(ordered[int(lower[0])], ordered[math.ceil(sum(lower))], lower[1]),
        torch.lerp(ordered[int(upper[0])], ordered[math.ceil(sum(upper))], upper[1]),
    )


def _by_weight(values: Tensor, level: float, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Linear between the draws, each at the middle of its weight; with equal weights on D − 1 steps as ``central``.

    Draw i of the sorted ones stands at (Σ_{j<i} w_j + w_i/2 − w_1/2) / (1 − (w_1 + w_D)/2), from 0 to 1.
    """
    kept = weights > 0
    values, weights = values[kept], weights[kept].double()
    ordered, order = values.sort(0)
    if len(ordered) == 1:
        return ordered[0], ordered[0]
    w = weights.to(values.device)[order]  # [D, ...]
    middle = w.cumsum(0) - w / 2
    place = (middle - middle[0]) / (middle[-1] - middle[0])
    ends = []
    for q in tails(level):
        right = (place < q).sum(0, keepdim=True).clamp(1, len(place) - 1)
        low, high = place.gather(0, right - 1), place.gather(0, right)
        share = ((q - low) / (high - low)).to(values.dtype)
        ends.append(torch.lerp(ordered.gather(0, right - 1), ordered.gather(0, right), share).squeeze(0))
    return ends[0], ends[1]
