"""The rank-1 paper's Theorem 1, measured: perturbations of s and of W that move a trained network alike.

The three quantities of ``rank1_scores`` are sampled at W* ± ε δ and divided by ε². The covariance W_ij Σ_jl W_kl has
the rank of Σ, so that a Gaussian W' would be W* diag(s) itself: the sampled W' has another law with that covariance,
uniform along its eigenvectors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimbayes.experiments.outcome import Outcome, Table, check, curve, mean
from slimbayes.experiments.rank1_scores import (
    DEPTH,
    EXAMPLES,
    QUANTITIES,
    WIDTH,
    Exact,
    Problem,
    exact,
    exact_factors,
    gradients,
    random,
    trained,
)
from slimbayes.experiments.session import Session
from slimbayes.training import mixed_seed

SIZES = (0.3, 0.1, 0.03, 0.01, 0.001)  # ε
_NETWORKS = {"smoke": 1, "desk": 3, "gpu": 3, "paper": 3}
_DRAWS = {"smoke": 400, "desk": 2_000, "gpu": 2_000, "paper": 20_000}  # pairs δ, −δ
_CHUNK = 500
_GROUPS = 20  # of draws, for standard errors


def perturbations(problem: Problem, side: str, number: int, seed: int) -> Tensor:
    """δ for ε = 1, [number, layers, M, M]: W* diag(s − 1) with Gaussian s, or uniform along the eigenvectors of C.

    >>> problem = trained(0)
    >>> delta = perturbations(problem, "W", 20_000, seed=0)[:, 0].flatten(1)
    >>> gap = delta.T @ delta / 20_000 - problem.covariance()[0]
    >>> bool(gap.abs().max() < 0.05 * problem.covariance()[0].abs().max())
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mixed_seed(seed, 11 if side == "s" else 13))
        if side == "s":
            noise = torch.einsum(
                "hjl,dhl->dhj", torch.linalg.cholesky(problem.sigma), random(number, DEPTH, WIDTH)
            )
            return problem.weights * noise.unsqueeze(-2)
        values, vectors = torch.linalg.eigh(problem.covariance())  # [layers, M²], [layers, M², M²]
        uniform = math.sqrt(12) * (torch.rand(number, DEPTH, WIDTH**2, dtype=torch.float64) - 0.5)
        noise = torch.einsum("hpq,dhq->dhp", vectors, values.clamp_min(0).sqrt() * uniform)
        return noise.reshape(number, DEPTH, WIDTH, WIDTH)


@dataclass(frozen=True)
class Measured:
    """Each quantity over ε² from samples, its standard error, and the same with the first order taken exactly."""

    plain: dict[str, float]
    errors: dict[str, float]
    controlled: dict[str, float]


def measured(
    problem: Problem, known: Exact, side: str, epsilon: float, number: int, seed: int = 0
) -> Measured:
    """The three quantities over pairs ε δ and −ε δ, divided by ε².

    ``controlled`` is the exact first-order value plus the mean of what the samples have beyond their own first order:
    the same expectation, and no noise in the limit.

    >>> problem = trained(0)
    >>> known = exact(problem)
    >>> found = measured(problem, known, "s", 1e-3, 100).controlled["curvature"]
    >>> abs(found / known.of(problem.covariance())["curvature"] - 1) < 1e-4
    True
    """
    delta = perturbations(problem, side, number, seed)
    parts = [_moved(problem, part, epsilon) for part in delta.split(_CHUNK)]
    losses, scores = (
        torch.cat([part[i] for part in parts], 1) for i in (0, 1)
    )  # [2, draws, N], [2, draws, P]
    flat = delta.flatten(1)  # [draws, P]
    second = flat @ known.second
    found = torch.stack(
        [losses.mean(0).sum(1) / epsilon**2, _spread(losses / epsilon), _spread(scores / epsilon)], 1
    )
    linear = torch.stack(
        [0.5 * (second * flat).sum(1), (flat @ known.first.T).square().sum(1), second.square().sum(1)], 1
    )  # [draws, 3]
    wanted = torch.tensor(list(known.of(problem.covariance()).values()), dtype=torch.float64)
    groups = torch.stack([group.mean(0) for group in found.chunk(_GROUPS)])
    rows = found.mean(0), groups.std(0) / len(groups) ** 0.5, wanted + (found - linear).mean(0)
    return Measured(*(dict(zip(QUANTITIES, row.tolist(), strict=True)) for row in rows))


def _spread(values: Tensor) -> Tensor:
    """Squared distances from the mean over signs and draws, [draws], of values [2, draws, any]."""
    return (values - values.mean((0, 1))).square().mean(0).sum(1)


def _moved(problem: Problem, delta: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Changes of f_n and of ∇F at ε δ and −ε δ, [2, draws, N] and [2, draws, P]."""
    base, score = problem.losses(problem.weights), gradients(problem, problem.weights.unsqueeze(0))
    losses, scores = [], []
    for sign in (1.0, -1.0):
        weights = (problem.weights + sign * epsilon * delta).requires_grad_()
        values = problem.losses(weights)
        (slope,) = torch.autograd.grad(values.sum(), weights)
        losses.append(values.detach() - base)
        scores.append(slope.flatten(1) - score)
    return torch.stack(losses), torch.stack(scores)


def theorem1(session: Session, setting: str) -> Outcome:
    """Theorem 1: the three quantities, exact and by size of the perturbation."""
    number, networks = _DRAWS[session.scale], session.seeds or _NETWORKS[session.scale]
    columns = ("s", "W", "W, Σ_jk as printed", "W, elements independent")
    table = Table("exact", "By derivatives, for ε = 1", columns, over="networks")
    sizes = {
        q: Table(
            q.replace(" ", "-"), f"s over W: {q}, by ε", ("sampled", "beyond first order"), over="networks"
        )
        for q in QUANTITIES
    }
    steepest, gaps, distances = 0.0, dict.fromkeys(QUANTITIES, 0.0), dict.fromkeys(QUANTITIES, 0.0)
    for seed in range(networks):
        problem = trained(seed)
        known, thin, full = exact(problem), exact_factors(problem), problem.covariance()
        steepest = max(steepest, float(gradients(problem, problem.weights.unsqueeze(0)).abs().max()))
        sides = [thin, known.of(full), known.of(problem.covariance("jk")), known.of(_alone(full))]
        for q in QUANTITIES:
            table.add(q, dict(zip(columns, (side[q] for side in sides), strict=True)), {})
            gaps[q] = max(gaps[q], abs(thin[q] / sides[1][q] - 1))
        for epsilon in SIZES:
            s, w = (measured(problem, known, side, epsilon, number, seed) for side in ("s", "W"))
            for q in QUANTITIES:
                ratio, error = (
                    s.plain[q] / w.plain[q],
                    math.hypot(s.errors[q] / s.plain[q], w.errors[q] / w.plain[q]),
                )
                values = {"sampled": ratio, "beyond first order": s.controlled[q] / w.controlled[q]}
                sizes[q].add(f"ε = {epsilon:g}", values, {"sampled": ratio * error})
                if epsilon == SIZES[-1]:
                    distances[q] = max(distances[q], abs(ratio - 1) / (ratio * error))
    checks = [check("∇F at the minimum, largest element", steepest < 1e-8, steepest, "< 1e-8")]
    checks += _exact_checks(table, gaps) + _limit_checks(sizes, distances)
    lines = [(q, list(SIZES), _by_network(sizes[q])) for q in QUANTITIES]
    drawn = curve("sizes", "Perturbations of s over those of W", "ε", "ratio", lines, log_x=True)
    return Outcome([table, *sizes.values()], [drawn], checks=checks, deviations=_WORDS)


_WORDS = [
    f"The network, its data and Σ are ours, as the theorem holds for any: {DEPTH} tanh layers of width {WIDTH} without "
    f"biases, {EXAMPLES} examples with noisy targets, f_n = ½ (y_n − output)², a random Σ per layer.",
    "The score is taken in both senses: f_n itself, as the paper's formal version has it, and the gradient of the "
    "log-likelihood.",
    "The covariance W_ij Σ_jl W_kl has the rank of Σ, so that a Gaussian perturbation of W with it is one of s. The "
    "sampled W has another law with that covariance: uniform along its eigenvectors.",
]


def _alone(covariance: Tensor) -> Tensor:
    """The same variances, and no covariance between elements of W."""
    return torch.diag_embed(covariance.diagonal(dim1=1, dim2=2))


def _by_network(table: Table) -> list[list[float]]:
    rows = [row.values["beyond first order"] for row in table.rows.values()]
    return [list(one) for one in zip(*rows, strict=True)]


def _exact_checks(table: Table, gaps: Mapping[str, float]) -> list[dict[str, Any]]:
    found = []
    for q, gap in gaps.items():
        words = f"{q}: s against W, by derivatives; largest relative difference"
        found.append(check(words, gap < 1e-9, gap, "< 1e-9"))
    for column in table.columns[2:]:
        rows = [row.values for row in table.rows.values()]
        away = [abs(w / s - 1) for row in rows for w, s in zip(row[column], row["s"], strict=True)]
        words = f"{column}: no quantity of any network is that of s; smallest relative difference"
        found.append(check(words, min(away) > 0.01, min(away), "> 0.01"))
    return found


def _limit_checks(sizes: Mapping[str, Table], distances: Mapping[str, float]) -> list[dict[str, Any]]:
    found = []
    for q, table in sizes.items():
        away = [mean([abs(r - 1) for r in row.values["beyond first order"]]) for row in table.rows.values()]
        falls = all(after < before for before, after in itertools.pairwise(away))
        words = (
            f"{q}: the ratio of s to W comes closer to 1 with every smaller ε; distance at ε = {SIZES[-1]:g}"
        )
        found.append(check(words, falls and away[-1] < 1e-3, away[-1], "< 0.001"))
        words = f"{q}: the sampled ratio at ε = {SIZES[-1]:g} is 1, in standard errors"
        found.append(check(words, distances[q] < 4, distances[q], "< 4"))
    return found
