"""Simulation-based calibration (Talts et al. 2018) where a method's posterior family contains the truth.

Parameters θ* come from the prior, data from the model with θ*, and slimbayes fits the posterior by its own objective.
If that posterior is right, the rank of θ* among L draws of it is uniform on 0 .. L. The model is linear regression with
known noise and an orthogonal design, whose exact posterior is a diagonal Normal: every family below can hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

import slimbayes as sb

ROWS, INPUTS = 16, 7  # of the design
NOISE = 2.0  # standard deviation: the data are worth 1 to 16 times the prior, by parameter
DRAWS = 99  # ranks from 0 to 99
BINS = 20
F64 = torch.float64


@dataclass(frozen=True)
class Family:
    """A method, and the prior of the linear model's weights in it; ``kl_weight`` other than 1 breaks it on purpose."""

    name: str
    method: Any
    loc: float = 0.0
    scale: float = 1.0
    outputs: int = 1
    bias: bool = True
    kl_weight: float = 1.0
    start: float = 0.0  # of the weights: of rank-1 factors they are the constant that is multiplied

    def network(self, inputs: int = INPUTS) -> nn.Module:
        """The linear layer, converted."""
        net = nn.Linear(inputs, self.outputs, bias=self.bias, dtype=F64)
        nn.init.constant_(net.weight, self.start)
        if self.bias:
            nn.init.zeros_(net.bias)
        return sb.bayesianize(net, self.method)


def _factors(components: int, reduction: str = "mean") -> sb.Rank1:
    """Factors s of y = Σ x_i s_i, the weights being ones that do not train."""
    return sb.Rank1.paper(
        components=components, factors="input", prior=sb.Normal(1.0, 1.0), dropout_rate=0.1, train_base=False,
        kl_reduction=reduction,
    )  # fmt: skip


_RANK1: dict[str, Any] = {"loc": 1.0, "bias": False, "start": 1.0}
_MEAN_FIELD: dict[str, Any] = {"prior": sb.Normal(0.0, 1.0), "stddev_init": 0.3}

CONTAINED = (
    Family("MeanField, shared", sb.MeanField.paper(**_MEAN_FIELD)),
    Family("MeanField, flipout", sb.MeanField.paper(**_MEAN_FIELD, estimator="flipout")),
    Family("MeanField, local", sb.MeanField.paper(**_MEAN_FIELD, estimator="local")),
    Family("KTied, rank 2, two outputs", sb.KTied.paper(rank=2, **_MEAN_FIELD, estimator="local"), outputs=2),
    Family("Rank1, one component", _factors(1), **_RANK1),
    Family("Rank1, four components, KL averaged", _factors(4), **_RANK1),
)
BROKEN = (
    Family("MeanField, KL times 4", sb.MeanField.paper(**_MEAN_FIELD, estimator="local"), kl_weight=4.0),
    Family(
        "MeanField, prior half as wide as the truth's",
        sb.MeanField.paper(prior=sb.Normal(0.0, 0.5), stddev_init=0.3, estimator="local"),
    ),
    Family("Rank1, four components, KL summed (the default)", _factors(4, "sum"), **_RANK1),
)


@dataclass
class Calibration:
    """Ranks [replications, parameters] and how near the fitted posteriors are to the exact ones."""

    family: str
    ranks: np.ndarray[Any, Any]
    mean_error: float  # of the posterior means, in exact standard deviations, root mean square
    sd_ratio: list[float] = field(default_factory=list)  # fitted over exact, by parameter

    def p_values(self) -> dict[str, float]:
        """Of uniform ranks by χ² and by Kolmogorov and Smirnov, the least over parameters times their number."""
        return uniformity(self.ranks)


def uniformity(ranks: np.ndarray[Any, Any], draws: int = DRAWS, bins: int = BINS) -> dict[str, float]:
    """Bonferroni-corrected p-values of ranks [N, P] on 0 .. draws being uniform.

    For Kolmogorov and Smirnov's test a rank is spread over its own cell, (rank + u)/(draws + 1) with u uniform, which
    is exactly uniform where ranks are.
    """
    parameters = ranks.shape[1]
    if (draws + 1) % bins:
        raise ValueError(f"{draws + 1} ranks do not fall into {bins} equal bins: take a divisor")
    inside = np.random.default_rng(0).random(ranks.shape)
    spread = (ranks + inside) / (draws + 1)
    table = [np.bincount(column * bins // (draws + 1), minlength=bins) for column in ranks.T]
    chi = [stats.chisquare(counts).pvalue for counts in table]
    kolmogorov = [stats.kstest(column, "uniform").pvalue for column in spread.T]
    return {
        "chi_square": min(1.0, parameters * float(min(chi))),
        "kolmogorov": min(1.0, parameters * float(min(kolmogorov))),
    }


def design(rows: int = ROWS, inputs: int = INPUTS, seed: int = 0) -> Tensor:
    """Columns that are orthogonal to each other and to a constant, with mean squares from 1/4 to 4."""
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(rows, inputs, generator=generator, dtype=F64)
    q, _ = torch.linalg.qr(torch.cat((torch.ones(rows, 1, dtype=F64), random), 1))
    return q[:, 1:] * rows**0.5 * 2.0 ** torch.linspace(-1, 1, inputs, dtype=F64)


def fit(
    models: Sequence[nn.Module],
    data: Sequence[tuple[Tensor, Tensor]],
    likelihood: Any,
    kl_weight: float = 1.0,
    steps: int = 600,
    lr: float = 0.1,
    samples: int = 4,
    **settings: Any,
) -> None:
    """All posteriors at once, each by sb.elbo on all its rows, with a rate that falls to 0."""
    sb.fit_many(
        models, data, likelihood=likelihood, seeds=list(range(len(models))), epochs=steps, lr=lr, optimizer="adam",
        kl_weight=kl_weight, kl_annealing=0.0, batch_size=len(data[0][0]), samples=samples, log_every=steps,
        progress=False, **{"precision": "64-true", **settings},
    )  # fmt: skip


def penalty(method: Any, l2: float) -> float:
    """l2 · Σw² for every member: the loss is the mean over members, so that each has 1/K of it, and of the penalty."""
    return l2 / method.members if isinstance(method, sb.DeepEnsemble) else l2


@torch.no_grad()
def parameters_of(
    model: nn.Module, inputs: int, bias: bool, draws: int, seed: int, noise: str = "shared"
) -> Tensor:
    """Draws [draws, parameters] of a linear model's weights (and bias), read off its outputs at 0 and unit vectors."""
    points = torch.cat((torch.zeros(1, inputs, dtype=F64), torch.eye(inputs, dtype=F64)))
    outputs = sb.draw(model, points, samples=draws, noise=noise, seed=seed)  # [D, 1 + inputs, outputs]
    weights = (outputs[:, 1:] - outputs[:, :1]).flatten(1)
    return torch.cat((weights, outputs[:, 0]), 1) if bias else weights


def calibrate(family: Family, replications: int = 1000, seed: int = 0, steps: int = 600) -> Calibration:
    """Truths from the prior, data from the truths, posteriors from slimbayes, ranks of the truths among draws."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64)

    x = design()
    weights = family.loc + family.scale * normal(replications, INPUTS, family.outputs)
    biases = family.scale * normal(replications, 1, family.outputs) * family.bias
    targets = x @ weights + biases + NOISE * normal(replications, ROWS, family.outputs)
    torch.manual_seed(seed)
    models = [family.network() for _ in range(replications)]
    fit(models, [(x, y) for y in targets], sb.Gaussian(precision=NOISE**-2), family.kl_weight, steps)

    truth = torch.cat((weights.flatten(1), biases.flatten(1)), 1) if family.bias else weights.flatten(1)
    each = -(-DRAWS // getattr(family.method, "components", 1))
    drawn = torch.stack(
        [parameters_of(model, INPUTS, family.bias, each, seed=i)[:DRAWS] for i, model in enumerate(models)]
    )  # [N, L, P]
    middle = torch.stack([parameters_of(m, INPUTS, family.bias, 1, 0, "mean").mean(0) for m in models])
    mean, sd = exact(family, x, targets)
    ratio = (drawn.var(1).mean(0).sqrt() / sd).tolist()
    error = float(((middle - mean) / sd).square().mean().sqrt())
    return Calibration(family.name, (drawn < truth.unsqueeze(1)).sum(1).numpy(), error, ratio)


def exact(family: Family, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Means [N, P] and standard deviations [P] of the exact posterior, by the normal equations."""
    columns = torch.cat((x, torch.ones(len(x), 1, dtype=F64)), 1) if family.bias else x
    prior_mean = torch.full((columns.shape[1], 1), family.loc, dtype=F64)
    if family.bias:
        prior_mean[-1] = 0.0
    information = columns.T @ columns / NOISE**2 + torch.eye(columns.shape[1], dtype=F64) / family.scale**2
    right = columns.T @ targets / NOISE**2 + prior_mean / family.scale**2  # [N, P, outputs]
    mean = torch.linalg.solve(information, right)
    sd = torch.linalg.inv(information).diagonal().sqrt().unsqueeze(1).expand(-1, family.outputs)
    weights = slice(0, x.shape[1])
    if not family.bias:
        return mean.flatten(1), sd.flatten()
    return (
        torch.cat((mean[:, weights].flatten(1), mean[:, -1]), 1),
        torch.cat((sd[weights].flatten(), sd[-1])),
    )
