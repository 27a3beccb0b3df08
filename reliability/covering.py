"""Do 90 % intervals hold 90 %? Averaged over the prior, where the model is right; and where it is not.

A function of one variable is a sum of cosines whose coefficients come from the prior: f(x) = b + Σ_k w_k √2 cos(kπx).
At the design's equally spaced points the cosines are orthogonal, so that the exact posterior is a diagonal Normal,
which every family here can hold. Test points lie anywhere in [0, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import slimbayes as sb
from reliability.simulated import F64, fit

ROWS, TERMS = 32, 7
LEVELS = (0.5, 0.9, 0.99)
SAMPLES = 128  # draws of a prediction


class Cosines(nn.Module):
    """x [B, 1] to √2 cos(kπx), k = 1 .. terms."""

    def __init__(self, terms: int) -> None:
        super().__init__()
        self.terms = terms

    def forward(self, x: Tensor) -> Tensor:
        """[B, terms]."""
        k = torch.arange(1, self.terms + 1, dtype=x.dtype, device=x.device)
        return math.sqrt(2) * torch.cos(math.pi * k * x)


@dataclass(frozen=True)
class World:
    """What the data come from, and what the model takes them to come from; both agree unless said otherwise."""

    name: str
    method: Any = sb.MeanField.paper(stddev_init=0.3, estimator="local")
    loc: float = 0.0  # of the truth's coefficients
    start: float = 0.0  # of the model's weights
    bias: bool = True
    terms: int = TERMS  # of the truth; the model has TERMS
    noise: float = 1.0  # of the truth, in training and test; the model takes 1
    test_noise: float | None = None
    tails: float | None = None  # degrees of freedom of Student noise of the same variance
    learn_noise: bool = False
    kl_weight: float = 1.0
    samples: int = SAMPLES


def _prior(scale: float) -> sb.MeanField:
    return sb.MeanField.paper(prior=sb.Normal(0.0, scale), stddev_init=0.3, estimator="local")


_FACTORS = sb.Rank1.paper(
    components=4, factors="input", prior=sb.Normal(1.0, 1.0), dropout_rate=0.1, train_base=False, kl_reduction="mean"
)  # fmt: skip
_RANK1: dict[str, Any] = {"loc": 1.0, "start": 1.0, "bias": False, "samples": SAMPLES // 4}

RIGHT = (  # the truth is in the family
    World("MeanField"),
    World(
        "KTied, rank 1", sb.KTied.paper(rank=1, prior=sb.Normal(0.0, 1.0), stddev_init=0.3, estimator="local")
    ),
    World("Rank1, four components, KL averaged", _FACTORS, **_RANK1),
)
LEARNED = World("noise learned", learn_noise=True)
WRONG = (
    World("KL times 0.1", kl_weight=0.1),
    World("KL times 4", kl_weight=4.0),
    World("KL times 32", kl_weight=32.0),
    World("prior 10 times as narrow", _prior(0.1)),
    World("prior 10 times as wide", _prior(10.0)),
    World("noise twice what the model takes it for", noise=2.0),
    World("noise half what the model takes it for", noise=0.5),
    World("noise twice as large in new data only", test_noise=2.0),
    World("noise with heavy tails (t, 3 degrees)", tails=3.0),
    World("seven more cosines than the model has", terms=2 * TERMS),
    World("two draws per prediction", samples=2),
)


def network(world: World) -> nn.Module:
    """Cosines and a linear layer, converted."""
    layer = nn.Linear(TERMS, 1, bias=world.bias, dtype=F64)
    nn.init.constant_(layer.weight, world.start)
    if world.bias:
        nn.init.zeros_(layer.bias)
    return sb.bayesianize(nn.Sequential(Cosines(TERMS), layer), world.method)


def cover(
    world: World, sets: int = 1000, points: int = 16, seed: int = 0, steps: int = 600
) -> dict[str, float]:
    """The share of new targets inside the central intervals, over data sets from the prior; the mean width at 90 %."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64)

    def noise(scale: float, *shape: int) -> Tensor:
        if world.tails is None:
            return scale * normal(*shape)
        wide = normal(*shape, int(world.tails)).square().mean(-1).sqrt()
        return scale * normal(*shape) / wide * math.sqrt((world.tails - 2) / world.tails)

    x = ((torch.arange(ROWS, dtype=F64) + 0.5) / ROWS).unsqueeze(1)
    new = torch.rand(sets, points, 1, generator=generator, dtype=F64)
    weights, bias = world.loc + normal(sets, world.terms, 1), normal(sets, 1, 1) * world.bias
    features = Cosines(world.terms)
    targets = features(x) @ weights + bias + noise(world.noise, sets, ROWS, 1)
    test_noise = world.noise if world.test_noise is None else world.test_noise
    truth = features(new) @ weights + bias + noise(test_noise, sets, points, 1)

    torch.manual_seed(seed)
    models = [network(world) for _ in range(sets)]
    likelihoods = [sb.Gaussian(learn="global" if world.learn_noise else "fixed") for _ in range(sets)]
    fit(models, [(x, y) for y in targets], likelihoods, world.kl_weight, steps)
    inside, width = dict.fromkeys(LEVELS, 0.0), 0.0
    reader = models[
        0
    ]  # one model for all posteriors: the first prediction of a model takes longer than later ones
    states = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    for i, (state, likelihood) in enumerate(zip(states, likelihoods, strict=True)):
        reader.load_state_dict(state)
        prediction = sb.predict(
            reader, new[i], samples=world.samples, noise="shared", seed=i, likelihood=likelihood
        )
        for level in LEVELS:
            lower, upper = prediction.interval(level)
            inside[level] += sb.metrics.coverage(lower, upper, truth[i]) / sets
            if level == 0.9:
                width += sb.metrics.interval_width(lower, upper) / sets
    return {
        **{f"coverage_{round(100 * level)}": share for level, share in inside.items()},
        "width_90": width,
        "points": float(sets * points),
    }
