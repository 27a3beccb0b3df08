"""Where uncertainty fails, measured: between the data, far from them, under shift, and with few draws."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb
from reliability.mcmc import hmc
from reliability.simulated import F64, fit, penalty

HIDDEN = 50
GAP_NOISE = 0.1
REGIONS = {"data": (0.75, 2.0), "gap": (0.0, 0.5), "outside": (3.0, 4.0)}  # of |x|
_HEAD = sb.Normal(0.0, math.sqrt(2 / HIDDEN))


def gap_methods() -> dict[str, Any]:
    """Those compared on the line with a gap; weights have the prior of the exact answers where there is a KL."""

    def layers(kind: Any, **options: Any) -> list[tuple[str, Any]]:
        first = kind(prior=sb.Normal(0.0, 1.0), stddev_init=0.05, estimator="local", **options)
        return [("0", first), ("2", kind(prior=_HEAD, stddev_init=0.05, estimator="local", **options))]

    return {
        "MeanField": layers(sb.MeanField.paper),
        "KTied(rank=2)": layers(sb.KTied.paper, rank=2),
        **_others(),
    }


def _others() -> dict[str, Any]:
    return {
        "Rank1(K=4)": sb.Rank1.paper(components=4),
        "Rank1(K=4), KL averaged": sb.Rank1.paper(components=4, kl_reduction="mean"),
        "BatchEnsemble(K=4)": sb.BatchEnsemble(components=4),
        "MCDropout(0.1)": sb.MCDropout(rate=0.1),
        "DropConnect(0.1)": sb.DropConnect(rate=0.1),
        "DeepEnsemble(4)": sb.DeepEnsemble(members=4),
    }


def gap_data() -> tuple[Tensor, Tensor]:
    """40 points of sin 2x with noise, none of them in |x| < 0.75."""
    generator = torch.Generator().manual_seed(0)
    side = torch.arange(40) % 2 * 2 - 1
    x = side * (0.75 + 1.25 * torch.rand(40, generator=generator, dtype=F64))
    y = (2 * x).sin() + GAP_NOISE * torch.randn(40, generator=generator, dtype=F64)
    return x.unsqueeze(1), y.unsqueeze(1)


def gap(steps: int = 3000, seeds: int = 3, draws: int = 1000) -> dict[str, Any]:
    """The standard deviation of f(x) at the data, in the gap and outside, of every method and of the exact answers."""
    x, y = gap_data()
    grid = torch.linspace(-4, 4, 161, dtype=F64).unsqueeze(1)
    rows: dict[str, Any] = {}
    for name, method in gap_methods().items():
        torch.manual_seed(0)
        nets = [
            nn.Sequential(nn.Linear(1, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)).double()
            for _ in range(seeds)
        ]
        models = [sb.bayesianize(net, method) for net in nets]
        likelihood = sb.Gaussian(precision=GAP_NOISE**-2)
        fit(
            models,
            [(x, y)] * seeds,
            likelihood,
            steps=steps,
            lr=0.01,
            samples=2,
            l2=penalty(method, 0.5 / len(x)),
        )
        found = []
        for model in models:
            count = 200 // sb.draw(model, x[:1]).shape[0]
            prediction = sb.predict(model, grid, samples=count, noise="shared", seed=0, likelihood=likelihood)
            found.append(_regions(grid, prediction.mean, prediction.epistemic.sqrt()))
        rows[name] = {key: sum(one[key] for one in found) / seeds for key in found[0]}
    mean, sd = gap_process(x, y, grid)
    rows["exact, infinitely wide"] = _regions(grid, mean, sd)
    rows["HMC, the same network"] = gap_hmc(x, y, grid, draws)
    return rows


def _regions(grid: Tensor, mean: Tensor, sd: Tensor) -> dict[str, float]:
    found = {}
    for name, (low, high) in REGIONS.items():
        inside = (grid.abs() >= low) & (grid.abs() <= high)
        found[name] = float(sd.reshape(grid.shape)[inside].mean())
        if name == "data":
            error = mean.reshape(grid.shape) - (2 * grid).sin()
            found["rmse"] = float(error[inside].square().mean().sqrt())
    return found


def gap_process(x: Tensor, y: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """The exact posterior of the network at infinite width: a Gaussian process with the arc-cosine kernel."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        a, b = (torch.cat((each, torch.ones_like(each)), 1) for each in (a, b))
        norms = a.norm(dim=1, keepdim=True) * b.norm(dim=1)
        angle = ((a @ b.T) / norms).clamp(-1, 1).acos()
        wave = (angle.sin() + (math.pi - angle) * angle.cos()) / math.pi
        return norms * wave + 2 / HIDDEN  # 2 E[relu relu], and the bias

    inside = kernel(x, x) + GAP_NOISE**2 * torch.eye(len(x), dtype=F64)
    across = kernel(grid, x)
    mean = across @ torch.linalg.solve(inside, y)
    variance = kernel(grid, grid).diagonal() - (across @ torch.linalg.solve(inside, across.T)).diagonal()
    return mean, variance.clamp_min(0.0).sqrt()


def gap_hmc(x: Tensor, y: Tensor, grid: Tensor, draws: int) -> dict[str, float]:
    """The exact posterior of the same network, by chains that are judged by their functions."""

    def outputs(theta: Tensor, points: Tensor) -> Tensor:
        weight, bias, head, last = theta.split([HIDDEN, HIDDEN, HIDDEN, 1], 1)  # of standard Normals
        hidden = (points.T.unsqueeze(2) * weight.unsqueeze(1) + bias.unsqueeze(1)).relu()  # [C, N, H]
        return _HEAD.scale * (torch.einsum("cnh,ch->cn", hidden, head) + last)

    def log_density(theta: Tensor) -> Tensor:
        error = (outputs(theta, x) - y.T) / GAP_NOISE
        return -0.5 * error.square().sum(1) - 0.5 * theta.square().sum(1)

    generator = torch.Generator().manual_seed(0)
    start = torch.randn(8, 3 * HIDDEN + 1, generator=generator, dtype=F64)
    chains = hmc(log_density, start, draws, warmup=draws, leapfrogs=60)
    functions = torch.stack([outputs(chain, grid) for chain in chains.draws])  # [C, draws, grid]
    near = functions[..., (grid.abs() <= 2).squeeze(1)]
    flat = functions.flatten(0, 1)
    return {**_regions(grid, flat.mean(0), flat.std(0)), "rhat": chains.rhat(near), "ess": chains.ess(near)}


def moons(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two half circles with noise, as scikit-learn draws them."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.arange(count) % 2
    angle = math.pi * torch.rand(count, generator=generator, dtype=F64)
    upper = torch.stack((angle.cos(), angle.sin()), 1)
    lower = torch.stack((1 - angle.cos(), 0.5 - angle.sin()), 1)
    x = torch.where(label[:, None] == 0, upper, lower) - torch.tensor([0.5, 0.25], dtype=F64)
    return x + 0.2 * torch.randn(count, 2, generator=generator, dtype=F64), label


def classifiers(steps: int = 800, seeds: int = 3) -> dict[str, list[nn.Module]]:
    """Networks of every method, trained on 200 points of two moons."""
    sampled: dict[str, Any] = {"prior": sb.HeNormal(), "stddev_init": 0.05, "estimator": "local"}
    methods = {
        "MeanField": sb.MeanField.paper(**sampled),
        "KTied(rank=2)": sb.KTied.paper(rank=2, **sampled),
        **_others(),
        "Deterministic": sb.Deterministic(),
    }
    data = moons(200, seed=0)
    found = {}
    for name, method in methods.items():
        torch.manual_seed(0)
        layers = [
            [nn.Linear(2, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2)]
            for _ in range(seeds)
        ]
        models = [sb.bayesianize(nn.Sequential(*own).double(), method) for own in layers]
        fit(
            models,
            [data] * seeds,
            sb.Categorical(),
            steps=steps,
            lr=0.01,
            samples=2,
            l2=penalty(method, 1e-4),
        )
        found[name] = models
    return found


def shifted(trained: dict[str, list[nn.Module]]) -> dict[str, dict[str, float]]:
    """Confidence at inputs 1, 10 and 100 times as far out; calibration of rotated inputs and of noisy labels."""
    x, y = moons(1000, seed=1)
    generator = torch.Generator().manual_seed(2)
    flipped = torch.where(torch.rand(len(y), generator=generator) < 0.2, 1 - y, y)
    quarter = math.pi / 4
    turn = torch.tensor(
        [[math.cos(quarter), math.sin(quarter)], [-math.sin(quarter), math.cos(quarter)]], dtype=F64
    )
    rows = {}
    for name, models in trained.items():
        found = []
        for model in models:
            count = 64 // sb.draw(model, x[:1]).shape[0]
            at = {
                scale: sb.predict(model, scale * x, samples=count, noise="shared", seed=0)
                for scale in (1, 10, 100)
            }
            turned = sb.predict(model, x @ turn, samples=count, noise="shared", seed=0).mean
            row = {f"confidence_{scale}": float(p.mean.max(-1).values.mean()) for scale, p in at.items()}
            row["information_auroc"] = sb.metrics.ood_scores(
                at[1].mutual_information, at[100].mutual_information
            ).auroc
            for case, p, labels in (
                ("clean", at[1].mean, y), ("rotated", turned, y), ("noisy", at[1].mean, flipped),
            ):  # fmt: skip
                row[f"accuracy_{case}"] = sb.metrics.accuracy(p, labels)
                row[f"ece_{case}"] = sb.metrics.ece(p, labels)
            found.append(row)
        rows[name] = {key: sum(row[key] for row in found) / len(found) for key in found[0]}
    return rows


def few_draws(
    model: nn.Module, repeats: int = 32, sizes: tuple[int, ...] = (1, 4, 16, 64, 256)
) -> list[dict[str, float]]:
    """The Monte-Carlo error of a probability with S draws: σ_d/√S by the formula, and over repeated predictions."""
    x, _ = moons(200, seed=3)
    many = sb.predict(model, x, samples=2000, noise="shared", seed=10_000)
    deviation = many.draws.softmax(-1)[..., 1].std(0)  # [N]: of one draw's probability
    rows = []
    for size in sizes:
        seen = [sb.predict(model, x, samples=size, noise="shared", seed=seed) for seed in range(repeats)]
        means = torch.stack([each.mean[:, 1] for each in seen])  # [repeats, N]
        information = torch.stack([each.mutual_information for each in seen])
        rows.append(
            {
                "draws": size,
                "formula": float((deviation.square().mean() / size).sqrt()),
                "measured": float(means.var(0).mean().sqrt()),
                "bound": 0.5 / math.sqrt(size),
                "information": float(information.mean() / many.mutual_information.mean()),
            }
        )
    return rows
