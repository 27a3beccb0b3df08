"""Draws with weights: every statistic of the mixture, and weights fitted on held-out data."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import nn

import slimbayes as sb
from slimbayes.decisions import Stacking, stack_components

COUNTS = torch.tensor([3, 1, 0, 4])  # weights that are the same as repeating draws


def repeated(draws):
    return draws.repeat_interleave(COUNTS, 0)


@pytest.mark.parametrize(
    ("likelihood", "shape", "targets"),
    [
        (sb.Categorical(), (4, 5, 3), torch.tensor([0, 1, 2, 0, 1])),
        (sb.Categorical(class_axis=1, temperature=2.0), (4, 5, 3, 2), torch.randint(3, (5, 2))),
        (sb.Bernoulli(), (4, 5, 1), torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])),
        (sb.Gaussian(4.0), (4, 5, 2), torch.randn(5, 2)),
        (sb.Gaussian(learn="per_example"), (4, 5, 2), torch.randn(5)),
    ],
    ids=["classes", "pixels", "yes-no", "real", "per-example"],
)
def test_weights_are_repetitions(likelihood, shape, targets):
    torch.manual_seed(0)
    draws = torch.randn(shape)
    weighted = likelihood.predictive(draws).reweighted(COUNTS)
    plain = likelihood.predictive(repeated(draws))
    for name in (
        "mean",
        "aleatoric",
        "epistemic",
        "variance",
        "entropy",
        "expected_entropy",
        "mutual_information",
    ):
        torch.testing.assert_close(getattr(weighted, name), getattr(plain, name), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weighted.log_prob(targets), plain.log_prob(targets))
    if isinstance(likelihood, sb.Gaussian):
        for mine, theirs in zip(weighted.interval(0.8), plain.interval(0.8), strict=True):
            torch.testing.assert_close(mine, theirs)
    part = weighted[1:4]
    torch.testing.assert_close(part.mean, weighted.mean[1:4])
    torch.testing.assert_close(part.weights, COUNTS / 8)
    whole = sb.Predictive.cat([weighted[:2], weighted.cpu()[2:]])
    torch.testing.assert_close(whole.log_prob(targets), weighted.log_prob(targets))
    assert "with weights" in repr(whole)
    with pytest.raises(ValueError, match="weights and keep_draws"):
        sb.Predictive.cat([weighted[:2], plain[2:]])
    same = likelihood.predictive(draws).reweighted(torch.ones(4))
    torch.testing.assert_close(same.mean, likelihood.predictive(draws).mean)
    for mine, theirs in zip(same.interval(0.7), likelihood.predictive(draws).interval(0.7), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)


def test_weighted_intervals_of_probabilities_move_to_the_heavy_draws():
    draws = torch.tensor([-2.0, 0.0, 2.0]).view(3, 1)
    pred = sb.Bernoulli().predictive(draws)
    low, high = pred.reweighted(torch.tensor([0.0, 0.0, 1.0])).interval(0.9)
    assert low == high and float(low) == pytest.approx(1 / (1 + math.exp(-2)))
    light, heavy = (pred.reweighted(torch.tensor([w, 1.0, 1.0])).interval(0.5)[0] for w in (0.1, 10.0))
    assert light > heavy >= torch.sigmoid(torch.tensor(-2.0))


def test_weighted_mixture_entropy_against_integration():
    loc, weights = torch.tensor([[-2.0], [1.0]]), torch.tensor([0.2, 0.8])

    def density(y):
        return 0.2 * stats.norm.pdf(y, -2, 0.5) + 0.8 * stats.norm.pdf(y, 1, 0.5)

    exact = integrate.quad(
        lambda y: -density(y) * np.log(density(y) + 1e-300), -8, 8, points=[-2, 1], epsabs=1e-10
    )[0]
    found = sb.Gaussian(4.0).predictive(loc).reweighted(weights).entropy
    assert float(found) == pytest.approx(exact, abs=1e-6)


def test_weighted_samples():
    pred = (
        sb.Gaussian(1e6)
        .predictive(torch.tensor([[0.0], [10.0], [20.0]]))
        .reweighted(torch.tensor([0.7, 0.3, 0.0]))
    )
    found = pred.sample(4000, generator=torch.Generator().manual_seed(0))
    assert abs((found > 5).float().mean() - 0.3) < 4 * math.sqrt(0.21 / 4000)
    assert found.max() < 11


@pytest.mark.parametrize(
    ("weights", "words"),
    [([1.0, 1.0], "do not fit 3 draws"), ([1.0, -1.0, 1.0], "at least 0"), ([0.0, 0.0, 0.0], "not all 0"),
     ([1.0, math.nan, 1.0], "finite")],
)  # fmt: skip
def test_wrong_weights(weights, words):
    with pytest.raises(ValueError, match=words):
        sb.Categorical().predictive(torch.zeros(3, 2, 2)).reweighted(torch.tensor(weights))


def test_stacking_recovers_known_weights():
    """Targets come from component 0 with probability 0.7, from component 2 with 0.3."""
    torch.manual_seed(0)
    loc = torch.tensor([-3.0, 0.0, 3.0]).repeat_interleave(2).view(6, 1).expand(6, 4000)  # two samples each
    y = torch.where(torch.rand(4000) < 0.7, -3.0, 3.0) + torch.randn(4000)
    pred = sb.Gaussian().predictive(loc)
    stacking = Stacking.of(pred, y, members=3)
    torch.testing.assert_close(stacking.weights, torch.tensor([0.7, 0.0, 0.3]), atol=0.03, rtol=0)
    assert stacking.nll < stacking.uniform_nll
    weighted = stacking(pred)
    assert -float(weighted.log_prob(y).mean()) == pytest.approx(stacking.nll, rel=1e-5)
    assert -float(pred.log_prob(y).mean()) == pytest.approx(stacking.uniform_nll, rel=1e-5)
    torch.testing.assert_close(weighted.weights, stacking.weights.repeat_interleave(2) / 2)
    with pytest.raises(ValueError, match="6 draws are no multiple of 4 members"):
        Stacking.of(pred, y, members=4)


@pytest.mark.parametrize(
    "method", [sb.Rank1(components=3), sb.EMP(components=4, init_noise=0.5), sb.MeanField(stddev_init=0.5)],
    ids=lambda method: type(method).__name__,
)  # fmt: skip
def test_from_a_model_to_weights_and_predictions(method):
    torch.manual_seed(1)
    model = sb.bayesianize(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), method)
    x, y = torch.randn(120, 4), torch.randint(3, (120,))
    apart = sb.predict(model, x, samples=4, seed=5, noise="shared").draws[-1]
    y[:90] = apart[:90].argmax(-1)  # the last draw is right more often than the others
    batches = list(zip(x.split(50), y.split(50), strict=True))
    stacking = stack_components(model, batches, samples=4, seed=5)
    members = 3 if isinstance(method, sb.Rank1) else 4
    assert stacking.weights.shape == (members,) and stacking.weights.argmax() == members - 1
    assert stacking.nll < stacking.uniform_nll
    again = stacking.predict(model, x)
    assert -float(again.log_prob(y).mean()) == pytest.approx(stacking.nll, rel=1e-4)
    torch.testing.assert_close(
        stacking.predict(model, x[30:], first_example=30).mean, again.mean[30:], atol=1e-5, rtol=1e-4
    )
    if members == 3:
        assert len(stacking.predict(model, x, samples=2).draws) == 6
    else:
        with pytest.raises(ValueError, match="the samples of the fit"):
            stacking.predict(model, x, samples=2)


def test_stacking_is_never_worse_than_equal_weights():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randn(6, 30, 3, generator=generator) * (1 + seed % 4)
        y = torch.randint(3, (30,), generator=generator)
        stacking = Stacking.of(sb.Categorical().predictive(draws), y, members=3)
        assert stacking.nll <= stacking.uniform_nll + 1e-12
        assert float(stacking.weights.sum()) == pytest.approx(1.0, abs=1e-6)
    same = torch.randn(1, 30, 3).expand(4, -1, -1)
    equal = Stacking.of(sb.Categorical().predictive(same), y, members=4)
    torch.testing.assert_close(equal.weights, torch.full((4,), 0.25))


def test_stacking_refuses():
    net = sb.bayesianize(nn.Linear(2, 2), sb.MeanField())
    with pytest.raises(ValueError, match="samples=16"):
        stack_components(net, [(torch.zeros(3, 2), torch.zeros(3, dtype=torch.long))])
    with pytest.raises(ValueError, match="no example"):
        stack_components(net, [], samples=3)
