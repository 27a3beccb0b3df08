"""Hamiltonian Monte Carlo in a page, with its diagnostics: what a posterior is when nobody approximates it.

All chains step together, each with its own momentum; step size and masses are found while warming up, and kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

LogDensity = Callable[[Tensor], Tensor]  # θ [chains, d] to log p(θ, data) [chains], up to a constant


@dataclass
class Chains:
    """What was drawn, [chains, draws, d], and the share of accepted proposals."""

    draws: Tensor
    acceptance: float

    def rhat(self, of: Tensor | None = None) -> float:
        """The largest split R̂ over parameters, or over columns of ``of`` [chains, draws, m]."""
        values = (self.draws if of is None else of).numpy()
        return max(split_rhat(values[..., j]) for j in range(values.shape[-1]))

    def ess(self, of: Tensor | None = None) -> float:
        """The least effective sample size over parameters, or over columns of ``of``."""
        values = (self.draws if of is None else of).numpy()
        return min(effective_size(values[..., j]) for j in range(values.shape[-1]))


def hmc(
    log_density: LogDensity, start: Tensor, draws: int, warmup: int, leapfrogs: int = 16, seed: int = 0
) -> Chains:
    """Chains of ``draws`` after ``warmup``: 1 to ``leapfrogs`` steps each, proposals accepted by Metropolis' rule."""
    generator = torch.Generator().manual_seed(seed)
    theta, log_p, gradient = _at(log_density, start)
    scale = torch.ones_like(theta[0])  # standard deviations: inverse square roots of masses
    rate = DualAveraging(0.1)
    kept: list[Tensor] = []
    early: list[Tensor] = []
    accepted = 0.0
    for step in range(warmup + draws):
        size = rate.size if step < warmup else rate.final
        momentum = torch.randn(theta.shape, generator=generator, dtype=theta.dtype)
        energy = -log_p + 0.5 * momentum.square().sum(1)
        new, new_log_p, new_gradient, p = theta, log_p, gradient, momentum
        count = int(torch.randint(1, leapfrogs + 1, (), generator=generator))
        for _ in range(count):
            p = p + 0.5 * size * scale * new_gradient
            new, new_log_p, new_gradient = _at(log_density, new + size * scale * p)
            p = p + 0.5 * size * scale * new_gradient
        change = energy - (-new_log_p + 0.5 * p.square().sum(1))
        chance = change.nan_to_num(-math.inf).clamp_max(0.0).exp()
        taken = torch.rand(len(theta), generator=generator, dtype=theta.dtype) < chance
        theta = torch.where(taken[:, None], new, theta)
        gradient = torch.where(taken[:, None], new_gradient, gradient)
        log_p = torch.where(taken, new_log_p, log_p)
        if step < warmup:
            rate.update(float(chance.mean()))
            early.append(theta)
            if step in (warmup // 4, warmup // 2):  # masses from the later half of what there is
                recent = torch.stack(early[len(early) // 2 :]).flatten(0, 1)
                scale = recent.std(0).clamp_min(1e-6)
                rate = DualAveraging(rate.final)
        else:
            kept.append(theta)
            accepted += float(chance.mean()) / draws
    return Chains(torch.stack(kept, 1), accepted)


class DualAveraging:
    """The step size that accepts 80 % (Hoffman and Gelman 2014, with their constants)."""

    def __init__(self, size: float, target: float = 0.8) -> None:
        self.size = self.final = size
        self._centre, self._target, self._sum, self._count, self._log_final = (
            math.log(10 * size), target, 0.0, 0, 0.0,
        )  # fmt: skip

    def update(self, chance: float) -> None:
        """Take a mean probability of acceptance into account."""
        self._count += 1
        count = self._count
        self._sum += self._target - chance
        log_size = self._centre - math.sqrt(count) / 0.05 * self._sum / (count + 10)
        weight = count**-0.75
        self._log_final = weight * log_size + (1 - weight) * self._log_final
        self.size, self.final = math.exp(log_size), math.exp(self._log_final)


def _at(log_density: LogDensity, theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    theta = theta.detach().requires_grad_()
    log_p = log_density(theta)
    (gradient,) = torch.autograd.grad(log_p.sum(), theta)
    return theta.detach(), log_p.detach(), gradient


def _split(values: np.ndarray) -> np.ndarray:
    """Chains [C, n] as halves [2C, n/2]."""
    half = values.shape[1] // 2
    return np.concatenate((values[:, :half], values[:, half : 2 * half]))


def split_rhat(values: np.ndarray) -> float:
    """R̂ of halves of chains [C, n]: sqrt((W (n − 1)/n + B/n) / W), 1 where all halves say the same."""
    halves = _split(values)
    n = halves.shape[1]
    within, between = halves.var(1, ddof=1).mean(), n * halves.mean(1).var(ddof=1)
    return float(np.sqrt((within * (n - 1) / n + between / n) / within))


def effective_size(values: np.ndarray) -> float:
    """Draws worth as much if they were independent: Cn / (1 + 2 Σ ρ_t), by Geyer's initial monotone sequence."""
    halves = _split(values)
    chains, n = halves.shape
    centred = halves - halves.mean(1, keepdims=True)
    spectrum = np.abs(np.fft.rfft(centred, 2 * n, axis=1)) ** 2
    covariance = np.fft.irfft(spectrum, axis=1)[:, :n] / n  # [C, lags]
    within = covariance[:, 0].mean() * n / (n - 1)
    total = within * (n - 1) / n + halves.mean(1).var(ddof=1)
    rho = 1 - (within - covariance.mean(0) * n / (n - 1)) / total
    rho[0] = 1.0
    pairs = rho[: n - n % 2].reshape(-1, 2).sum(1)
    last = int(np.argmax(pairs <= 0)) if (pairs <= 0).any() else len(pairs)
    monotone = np.minimum.accumulate(pairs[:last])
    return float(chains * n / max(2 * monotone.sum() - 1, 1e-9))
