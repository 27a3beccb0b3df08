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

from slimbayes.lab.experiments.outcome import Outcome, Table, check, curve, mean
from slimbayes.lab.experiments.rank1_scores import (
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
from slimbayes.lab.experiments.session import Session
from slimbayes.training import mixed_seed

SIZES = (0.3, 0.1, 0.03, 0.01, 0.001)  # ε
_NETWORKS = {"smoke": 1, "desk": 3, "gpu": 3, "paper": 3}
_DRAWS = {"smoke": 400, "desk": 2_000, "gpu": 2_000, "paper": 8_000}  # pairs δ, −δ
_CHUNK = 500
_S, _W, _PRINTED, _ALONE = "s", "W", "W, Σ_jk as printed", "W, elements independent"
_RATIO, _ERROR, _BEYOND = "samples", "their standard error", "first order exact: ratio − 1"
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
    table = Table("exact", "By derivatives, for ε = 1", (_S, _W, _PRINTED, _ALONE), over="networks")
    sizes = {
        q: Table(
            q.replace(" ", "-"),
            f"{q.capitalize()}: s over W, by ε",
            (_RATIO, _ERROR, _BEYOND),
            over="networks",
        )
        for q in QUANTITIES
    }
    steepest = 0.0
    for seed in range(networks):
        problem = trained(seed)
        steepest = max(steepest, float(gradients(problem, problem.weights.unsqueeze(0)).abs().max()))
        known, full = exact(problem), problem.covariance()
        sides = {_S: exact_factors(problem), _W: known.of(full), _PRINTED: known.of(problem.covariance("jk"))}
        sides[_ALONE] = known.of(torch.diag_embed(full.diagonal(dim1=1, dim2=2)))
        for q in QUANTITIES:
            table.add(q, {column: side[q] for column, side in sides.items()}, {})
        for epsilon in SIZES:
            s, w = (measured(problem, known, side, epsilon, number, seed) for side in ("s", "W"))
            for q, values in _ratios(s, w).items():
                sizes[q].add(f"ε = {epsilon:g}", values, {})
    checks = [check("∇F at the minimum, largest element", steepest < 1e-8, steepest, "< 1e-8")]
    checks += _exact_checks(table) + _limit_checks(sizes)
    lines = [(q, list(SIZES), _by_network(sizes[q])) for q in QUANTITIES]
    title = "How far perturbations of s and of W move the network apart"
    drawn = curve("sizes", title, "ε", "|s / W − 1|", lines, log_x=True, log_y=True)
    return Outcome([table, *sizes.values()], [drawn], checks=checks, deviations=_WORDS)


_WORDS = [
    f"The network, its data and Σ are ours, as the theorem holds for any: {DEPTH} tanh layers of width {WIDTH} without "
    f"biases, {EXAMPLES} examples with noisy targets, f_n = ½ (y_n − output)², a random Σ per layer.",
    "The score is taken in both senses: f_n itself, as the paper's formal version has it, and the gradient of the "
    "log-likelihood.",
    "The covariance W_ij Σ_jl W_kl has the rank of Σ, so that a Gaussian perturbation of W with it is one of s. The "
    "sampled W has another law with that covariance: uniform along its eigenvectors.",
    "Two ratios of s to W stand in the tables by ε: of plain means over samples, with their standard error, and of "
    "means in which the first order is exact and the samples give what is beyond it.",
]


def _ratios(s: Measured, w: Measured) -> dict[str, dict[str, float]]:
    """A row of each table by ε."""
    found = {}
    for q in QUANTITIES:
        ratio = s.plain[q] / w.plain[q]
        error = ratio * math.hypot(s.errors[q] / s.plain[q], w.errors[q] / w.plain[q])
        found[q] = {_RATIO: ratio, _ERROR: error, _BEYOND: s.controlled[q] / w.controlled[q] - 1}
    return found


def _by_network(table: Table) -> list[list[float]]:
    """|ratio − 1| by ε, for each network."""
    rows = [[abs(value) for value in row.values[_BEYOND]] for row in table.rows.values()]
    return [list(one) for one in zip(*rows, strict=True)]


def _exact_checks(table: Table) -> list[dict[str, Any]]:
    """s and W agree in every network and quantity; other covariances of W differ from s in every network."""
    rows = {q: row.values for q, row in table.rows.items()}
    away = {
        column: [[abs(w / s - 1) for w, s in zip(row[column], row[_S], strict=True)] for row in rows.values()]
        for column in table.columns[1:]
    }  # by quantity and network
    found = []
    for q, gaps in zip(rows, away[_W], strict=True):
        words = f"{q.capitalize()}: s against W, by derivatives; largest relative difference"
        found.append(check(words, max(gaps) < 1e-9, max(gaps), "< 1e-9"))
    for column in (_PRINTED, _ALONE):
        nearest = min(max(one) for one in zip(*away[column], strict=True))
        words = f"{column}: not s in any network; relative difference, the largest of three quantities"
        found.append(check(words, nearest > 0.01, nearest, "> 0.01"))
    return found


def _limit_checks(sizes: Mapping[str, Table]) -> list[dict[str, Any]]:
    found = []
    for q, table in sizes.items():
        away = [mean([abs(value) for value in row.values[_BEYOND]]) for row in table.rows.values()]
        falls = all(after < before for before, after in itertools.pairwise(away))
        words = (
            f"{q.capitalize()}: s / W comes closer to 1 with every smaller ε; distance at ε = {SIZES[-1]:g}"
        )
        found.append(check(words, falls and away[-1] < 1e-3, away[-1], "< 0.001, and falling"))
        last = table.rows[f"ε = {SIZES[-1]:g}"].values
        errors = max(abs(ratio - 1) / error for ratio, error in zip(last[_RATIO], last[_ERROR], strict=True))
        words = f"{q.capitalize()}: s / W of samples at ε = {SIZES[-1]:g} is 1, in standard errors"
        found.append(check(words, errors < 4, errors, "< 4"))
    return found
