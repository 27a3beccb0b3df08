"""Posteriors of linear models beside exact ones: correlated linear regression, and logistic regression by long HMC.

Inputs are correlated, so that the exact posterior is too, and no family of slimbayes contains it. What theory says of
the difference is asked for: of a Normal target with precision Λ the mean-field optimum has variances 1/Λ_ii, never
above the marginal Σ_ii. The rest is reported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb
from reliability.mcmc import hmc
from reliability.simulated import F64, fit, parameters_of, penalty

INPUTS, ROWS = 4, 60
CORRELATION = 0.9
READ = 4000  # draws of a posterior


def methods() -> dict[str, Any]:
    """Those compared; a prior N(0, 1) of the weights is in the KL, or else in the penalty."""
    prior = sb.Normal(0.0, 1.0)
    return {
        "MeanField": sb.MeanField.paper(prior=prior, stddev_init=0.3),
        "KTied(rank=1)": sb.KTied.paper(rank=1, prior=prior, stddev_init=0.3),
        "Rank1(K=4)": sb.Rank1.paper(components=4),
        "Rank1(K=4), KL averaged": sb.Rank1.paper(components=4, kl_reduction="mean"),
        "MCDropout(0.1)": sb.MCDropout(rate=0.1),
        "DropConnect(0.1)": sb.DropConnect(rate=0.1),
        "DeepEnsemble(4)": sb.DeepEnsemble(members=4),
        "Deterministic": sb.Deterministic(),
    }


def inputs(rows: int, seed: int) -> Tensor:
    """Standard Normal inputs whose neighbours have the given correlation."""
    place = torch.arange(INPUTS, dtype=F64)
    covariance = CORRELATION ** (place[:, None] - place[None, :]).abs()
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, INPUTS, generator=generator, dtype=F64)
    return normal @ torch.linalg.cholesky(covariance).T


def linear(steps: int = 1500) -> dict[str, Any]:
    """Mean-field beside the exact posterior of linear regression, N(0, 1) prior and unit noise."""
    x = inputs(ROWS, seed=0)
    generator = torch.Generator().manual_seed(1)
    y = x @ torch.randn(INPUTS, 1, generator=generator, dtype=F64)
    y = y + torch.randn(ROWS, 1, generator=generator, dtype=F64)
    columns = torch.cat((x, torch.ones(ROWS, 1, dtype=F64)), 1)
    information = columns.T @ columns + torch.eye(INPUTS + 1, dtype=F64)
    covariance = torch.linalg.inv(information)
    mean = (covariance @ columns.T @ y).squeeze(1)
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Linear(INPUTS, 1, dtype=F64), methods()["MeanField"])
    fit([model], [(x, y)], sb.Gaussian(), steps=steps, lr=0.05, samples=64)
    drawn = parameters_of(model, INPUTS, True, READ, seed=0)
    middle = parameters_of(model, INPUTS, True, 1, 0, "mean")[0]
    marginal = covariance.diagonal().sqrt()
    return {
        "mean_error": float(((middle - mean) / marginal).abs().max()),
        "sd": drawn.std(0).tolist(),
        "conditional_sd": information.diagonal().rsqrt().tolist(),  # 1/√Λ_ii
        "marginal_sd": marginal.tolist(),  # √Σ_ii
    }


def logistic(steps: int = 1500, draws: int = 4000, test: int = 1000) -> dict[str, Any]:
    """Every method beside HMC on one data set: means, standard deviations, probabilities of new inputs."""
    x, new = inputs(ROWS, seed=2), inputs(test, seed=3)
    generator = torch.Generator().manual_seed(4)
    weights = torch.randn(INPUTS, 1, generator=generator, dtype=F64)
    y = torch.rand(ROWS, 1, generator=generator, dtype=F64).lt((x @ weights).sigmoid()).to(F64)
    columns = torch.cat((x, torch.ones(ROWS, 1, dtype=F64)), 1)

    def log_density(theta: Tensor) -> Tensor:
        logits = theta @ columns.T  # [C, N]
        likelihood = -nn.functional.binary_cross_entropy_with_logits(
            logits, y.T.expand_as(logits), reduction="none"
        )
        return likelihood.sum(1) - 0.5 * theta.square().sum(1)

    start = torch.randn(8, INPUTS + 1, generator=generator, dtype=F64)
    chains = hmc(log_density, start, draws, warmup=draws // 4)
    sample = chains.draws.flatten(0, 1)
    at_new = torch.cat((new, torch.ones(test, 1, dtype=F64)), 1)
    exact = torch.cat([(part @ at_new.T).sigmoid() for part in sample.split(2000)]).mean(0)
    found = {
        "rhat": chains.rhat(),
        "ess": chains.ess(),
        "acceptance": chains.acceptance,
        "draws": len(sample),
        "mean": sample.mean(0).tolist(),
        "sd": sample.std(0).tolist(),
    }
    return {"hmc": found, "methods": _fitted(x, y, new, steps, sample, exact)}


def _fitted(x: Tensor, y: Tensor, new: Tensor, steps: int, sample: Tensor, exact: Tensor) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, method in methods().items():
        torch.manual_seed(0)
        model = sb.bayesianize(nn.Linear(INPUTS, 1, dtype=F64), method)
        # ½ w² of the prior is l2 = 1/(2N) per example; what has a KL of its own is not decayed.
        fit(
            [model],
            [(x, y)],
            sb.Bernoulli(),
            steps=steps,
            lr=0.05,
            samples=16,
            l2=penalty(method, 0.5 / ROWS),
        )
        components = sb.draw(model, x[:1]).shape[0]
        drawn = parameters_of(model, INPUTS, True, max(1, READ // components), seed=0)
        probability = sb.predict(
            model, new, samples=1000 // components, noise="shared", seed=0, likelihood=sb.Bernoulli()
        ).mean.flatten()
        sd = drawn.std(0, correction=0) / sample.std(0)
        rows[name] = {
            "mean_error": float(((drawn.mean(0) - sample.mean(0)) / sample.std(0)).abs().mean()),
            "sd_ratio": sd.tolist(),
            "probability_error": float((probability - exact).abs().mean()),
            "probability_worst": float((probability - exact).abs().max()),
            "confidence": float(torch.maximum(probability, 1 - probability).mean()),
        }
    rows["HMC"] = {"confidence": float(torch.maximum(exact, 1 - exact).mean())}
    return rows
