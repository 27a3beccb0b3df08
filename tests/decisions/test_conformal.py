"""Conformal sets and intervals: the promise is tested against its exact law over many replications."""

import math

import pytest
import torch
from scipy import stats

import slimbayes as sb
from slimbayes.decisions.binomial import at_most, coverage_quantile, upper_bound
from slimbayes.decisions.conformal import conformal_rank

D = torch.float64


def labelled(count, generator, classes=6, sharpness=1.5):
    """Probabilities of a poor model, and classes drawn from other ones: the promise does not ask for a good model."""
    logits = sharpness * torch.randn(count, classes, generator=generator, dtype=D)
    truth = (0.5 * logits + 0.3).softmax(-1)
    y = torch.multinomial(truth, 1, generator=generator).squeeze(1)
    return logits.softmax(-1), y


def test_binomial_against_scipy():
    for errors, count, rate in ((0, 7, 0.2), (3, 50, 0.01), (40, 60, 0.9), (900, 1000, 0.9)):
        assert at_most(errors, count, rate) == pytest.approx(stats.binom.cdf(errors, count, rate), rel=1e-10)
        exact = stats.beta.ppf(0.95, errors + 1, count - errors)
        assert upper_bound(errors, count, 0.05) == pytest.approx(exact, abs=1e-10)
    assert coverage_quantile(0.025, 451, 500) == pytest.approx(stats.beta.ppf(0.025, 451, 50), abs=1e-10)
    low, high = sb.decisions.coverage_range(500, alpha=0.1)
    assert low == pytest.approx(stats.beta.ppf(0.025, 451, 50)) and high > 0.9 > low
    assert at_most(5, 5, 0.3) == 1.0 and at_most(-1, 5, 0.3) == 0.0


def test_the_quantile_is_the_right_order_statistic():
    scores = torch.randperm(99, generator=torch.Generator().manual_seed(0)).double()
    assert sb.decisions.conformal_quantile(scores, 0.1) == 89.0  # the 90th smallest of 0..98
    for n, alpha in ((9, 0.1), (19, 0.05), (99, 0.01), (3, 0.25)):  # the least numbers: the largest score
        assert conformal_rank(n, alpha) == n
        with pytest.raises(
            ValueError, match=rf"{n - 1} calibration points are too few for alpha={alpha}.*at least {n}"
        ):
            sb.decisions.conformal_quantile(torch.zeros(n - 1), alpha)
    with pytest.raises(ValueError, match=r"alpha=1\.5: pass a number strictly between 0 and 1"):
        sb.decisions.conformal_quantile(scores, 1.5)


@pytest.mark.parametrize("method", ["lac", "aps", "raps"])
def test_coverage_of_sets_follows_its_exact_law(method):
    """Of m new points a Beta-binomial number is covered: mean and variance over replications, in standard errors."""
    n, m, alpha, times = 80, 100, 0.15, 300
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)  # the random part
    found = []
    for _ in range(times):
        p, y = labelled(n + m, generator)
        sets = sb.decisions.ConformalSets(method, alpha, penalty=0.05, free=1, allow_empty=True)
        sets.fit(p[:n], y[:n])
        found.append(sb.decisions.set_coverage(sets(p[n:]), y[n:]))
    rank = conformal_rank(n, alpha)
    law = stats.betabinom(m, rank, n + 1 - rank)
    found = torch.tensor(found, dtype=D) * m
    assert abs(found.mean() - law.mean()) < 3.5 * law.std() / math.sqrt(times)
    assert 0.8 < found.std() / law.std() < 1.25
    assert 1 - alpha <= law.mean() / m <= 1 - alpha + 1 / (n + 1)


def test_scores_by_hand():
    p = torch.tensor([[0.2, 0.5, 0.3]], dtype=D)
    aps = sb.decisions.ConformalSets("aps", randomized=False).scores(p)
    torch.testing.assert_close(aps, torch.tensor([[1.0, 0.5, 0.8]], dtype=D))
    raps = sb.decisions.ConformalSets("raps", randomized=False, penalty=0.1, free=1).scores(p)
    torch.testing.assert_close(raps, torch.tensor([[1.2, 0.5, 0.9]], dtype=D))
    random = sb.decisions.ConformalSets("aps").scores(p, seed=3)
    u = torch.rand(1, dtype=D, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(random, torch.stack((0.8 + 0.2 * u, 0.5 * u, 0.5 + 0.3 * u), 1))
    ties = sb.decisions.ConformalSets("aps", randomized=False).scores(torch.full((1, 4), 0.25))
    torch.testing.assert_close(ties, torch.tensor([[0.25, 0.5, 0.75, 1.0]], dtype=D))


def test_every_class_by_itself():
    generator = torch.Generator().manual_seed(2)
    p, y = labelled(6000, generator, classes=3, sharpness=2.5)
    y = p.argmax(1) % 2  # easy but for what is hidden
    hidden = torch.rand(6000, generator=generator) < 0.15  # of class 2, whatever the model says
    y = torch.where(hidden, 2, y)
    together = sb.decisions.ConformalSets("lac", 0.1).fit(p[:3000], y[:3000])
    apart = sb.decisions.ConformalSets("lac", 0.1, by_class=True).fit(p[:3000], y[:3000])

    def coverages(sets):
        return [
            sb.decisions.set_coverage(sets(p[3000:][y[3000:] == c]), y[3000:][y[3000:] == c])
            for c in range(3)
        ]

    assert min(coverages(apart)) > 0.87 > 0.85 > min(coverages(together))
    assert apart.threshold == float(apart.thresholds.max())
    with pytest.raises(ValueError, match="3 classes, and these predictions have 2"):
        apart(torch.tensor([[0.5, 0.5]]))
    rare = torch.cat((torch.zeros(50), torch.ones(50), torch.full((4,), 2))).long()
    with pytest.raises(ValueError, match=r"4 calibration points of class 2 are too few.*leave by_class out"):
        sb.decisions.ConformalSets("lac", 0.1, by_class=True).fit(p[:104], rare)


def test_sets_repeat_themselves_and_are_never_empty():
    generator = torch.Generator().manual_seed(3)
    p, y = labelled(500, generator, sharpness=6.0)
    sets = sb.decisions.ConformalSets("aps", 0.4).fit(p, y, seed=0)
    again = sb.decisions.ConformalSets("aps", 0.4).fit(p, y, seed=0)
    assert sets.threshold == again.threshold and torch.equal(sets(p, seed=1), sets(p, seed=1))
    assert not torch.equal(sets(p, seed=1), sets(p, seed=2))
    assert sets(p, seed=1).any(1).all()
    sets.allow_empty = True
    bare = sets(p, seed=1)
    assert not bare.any(1).all()
    filled = torch.zeros_like(bare)
    filled[torch.arange(500), p.argmax(1)] = True
    sets.allow_empty = False
    assert torch.equal(sets(p, seed=1), torch.where(bare.any(1, keepdim=True), bare, filled))
    assert sb.decisions.set_size(bare) < sb.decisions.set_size(sets(p, seed=1))


def test_sets_take_predictives_and_refuse():
    draws = torch.randn(4, 30, 3)
    pred, y = sb.Categorical().predictive(draws), torch.randint(3, (30,))
    sets = sb.decisions.ConformalSets("lac").fit(pred, y)
    assert torch.equal(sets(pred), sets(pred.mean)) and "threshold" in repr(sets)
    two = sb.Bernoulli().predictive(torch.randn(4, 30, 1))
    assert sb.decisions.ConformalSets("lac").fit(two, y % 2)(two).shape == (30, 2)
    with pytest.raises(ValueError, match="not calibrated"):
        sb.decisions.ConformalSets()(pred)
    with pytest.raises(ValueError, match="method='lab' is unknown"):
        sb.decisions.ConformalSets("lab")
    with pytest.raises(ValueError, match="penalty=-1"):
        sb.decisions.ConformalSets("raps", penalty=-1)
    with pytest.raises(ValueError, match=r"free=1\.5"):
        sb.decisions.ConformalSets("raps", free=1.5)
    with pytest.raises(TypeError, match="Gaussian predicts no classes"):
        sets(sb.Gaussian().predictive(draws))
    with pytest.raises(ValueError, match="one decision per example needs"):
        sets(sb.Categorical().predictive(torch.randn(2, 5, 7, 3)))
    with pytest.raises(ValueError, match="one decision per example needs"):
        sets(sb.Bernoulli().predictive(torch.randn(2, 5, 7)))
    with pytest.raises(TypeError, match="bool tensor"):
        sb.decisions.set_size(draws)
    with pytest.raises(ValueError, match="too few"):
        sb.decisions.coverage_range(5, 0.1)


@pytest.mark.parametrize("method", ["absolute", "normalized", "quantile"])
def test_coverage_of_intervals_follows_its_exact_law(method):
    n, m, alpha, times = 60, 100, 0.2, 250
    generator = torch.Generator().manual_seed(4)
    covered = []
    for _ in range(times):
        mean = torch.randn(n + m, 2, generator=generator, dtype=D)
        scale = 0.2 + mean.abs()  # what the model believes; the noise has heavier tails
        y = mean + scale * torch.randn(n + m, 2, generator=generator, dtype=D) ** 3
        given = {"absolute": mean, "normalized": (mean, scale), "quantile": (mean - scale, mean + scale)}[
            method
        ]

        def part(rows, given=given):
            return given[rows] if isinstance(given, torch.Tensor) else tuple(each[rows] for each in given)

        intervals = sb.decisions.ConformalIntervals(method, alpha).fit(part(slice(n)), y[:n])
        lower, upper = intervals(part(slice(n, None)))
        covered.append(((lower <= y[n:]) & (y[n:] <= upper)).double().sum(0))
    covered = torch.stack(covered).flatten()
    rank = conformal_rank(n, alpha)
    law = stats.betabinom(m, rank, n + 1 - rank)
    assert abs(covered.mean() - law.mean()) < 3.5 * law.std() / math.sqrt(2 * times)
    assert 0.8 < covered.std() / law.std() < 1.25


def test_intervals_of_predictives():
    torch.manual_seed(5)
    x = torch.randn(400, 1)
    draws = torch.cat((x + 0.1 * torch.randn(8, 400, 1), torch.full((8, 400, 1), 2.0)), -1)
    pred = sb.Gaussian(learn="per_example").predictive(draws)
    y = x + 2 * torch.randn(400, 1)  # the model is overconfident
    widths = {}
    for method in ("absolute", "normalized", "quantile"):
        intervals = sb.decisions.ConformalIntervals(method).fit(pred[:200], y[:200])
        lower, upper = intervals(pred[200:])
        assert lower.shape == (200, 1) and lower.dtype == torch.float32
        assert sb.metrics.coverage(lower, upper, y[200:]) > 0.84
        widths[method] = (upper - lower).squeeze(1)
    narrow, wide = pred[200:].interval(0.9)
    assert sb.metrics.coverage(narrow, wide, y[200:]) < 0.5
    assert widths["absolute"].std() < 1e-5
    sigma = pred[200:].variance.sqrt().squeeze(1)
    assert (widths["normalized"] / sigma).std() < 1e-4 < sigma.std()
    added = widths["quantile"] - (wide - narrow).squeeze(1)  # 2q for every example
    assert added.std() < 1e-5 < added[0]
    crossing = sb.decisions.ConformalIntervals("quantile", 0.2)
    crossing.fit((torch.full((9,), -5.0), torch.full((9,), 5.0)), torch.zeros(9))
    low, high = crossing((torch.tensor([-1.0]), torch.tensor([3.0])))
    assert low == high == 1.0


def test_intervals_refuse():
    y = torch.zeros(20)
    with pytest.raises(ValueError, match="not calibrated"):
        sb.decisions.ConformalIntervals()(y)
    with pytest.raises(TypeError, match=r"a pair \(mean, stddev\)"):
        sb.decisions.ConformalIntervals("normalized").fit(y, y)
    with pytest.raises(ValueError, match="must be positive"):
        sb.decisions.ConformalIntervals("normalized").fit((y, y), y)
    with pytest.raises(ValueError, match="swap the two"):
        sb.decisions.ConformalIntervals("quantile").fit((y + 1, y), y)
    with pytest.raises(TypeError, match="for classes use ConformalSets"):
        sb.decisions.ConformalIntervals().fit(sb.Categorical().predictive(torch.zeros(1, 20, 3)), y)
    with pytest.raises(ValueError, match="shapes"):
        sb.decisions.ConformalIntervals("absolute").fit(y, torch.zeros(20, 2))
    with pytest.raises(ValueError, match="method='cqr' is unknown"):
        sb.decisions.ConformalIntervals("cqr")
    fitted = sb.decisions.ConformalIntervals("absolute").fit(y, y)
    with pytest.raises(ValueError, match="calibrated on 1 targets, and these predictions have 2"):
        fitted(torch.zeros(3, 2))


@pytest.mark.parametrize("by_class", [False, True])
def test_sets_are_for_the_classes_that_they_were_calibrated_on(by_class):
    p = torch.full((40, 2), 0.5)
    sets = sb.decisions.ConformalSets("lac", by_class=by_class).fit(p, torch.arange(40) % 2)
    with pytest.raises(ValueError, match="calibrated on 2 classes, and these predictions have 3"):
        sets(torch.full((5, 3), 1 / 3))
