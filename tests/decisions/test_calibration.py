"""Temperature and variance scale: against closed forms, grids, and what likelihoods make of them."""

import math

import pytest
import torch
from scipy import optimize

import slimbayes as sb
from slimbayes.decisions import Temperature, VarianceScale

D = torch.float64


def mixture_nll(draws, y, t):
    p = (draws.double() / t).softmax(-1).mean(0)
    return -float(p.gather(1, y.unsqueeze(1)).log().mean())


@pytest.fixture(scope="module")
def classified():
    """Draws five times too sharp for their targets."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(600, 4, generator=generator)
    y = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
    return 5 * (logits + 0.3 * torch.randn(6, 600, 4, generator=generator)), y


def test_temperature_minimises_the_mixtures_nll(classified):
    draws, y = classified
    fitted = Temperature().fit(draws, y)
    best = optimize.minimize_scalar(lambda t: mixture_nll(draws, y, t), bounds=(0.1, 50), method="bounded",
                                    options={"xatol": 1e-9})  # fmt: skip
    assert fitted.value == pytest.approx(best.x, rel=1e-5)
    assert 4 < fitted.value < 7
    of_mean_logits = Temperature().fit(draws.mean(0, keepdim=True), y)
    assert abs(of_mean_logits.value - fitted.value) > 0.05  # another problem: draws soften by themselves
    assert Temperature().fit(draws.log_softmax(-1).bfloat16().float(), y).value == pytest.approx(
        fitted.value, rel=1e-2
    )


@pytest.mark.parametrize("seed", [7, 40])  # the lower of two minima is the first, and the last
def test_temperature_finds_the_lower_of_two_minima(seed):
    """A mixture of sharp and dull draws: its nll in T has two dips."""
    generator = torch.Generator().manual_seed(seed)
    sharpness = torch.tensor([20.0, 0.3], dtype=D).view(2, 1, 1)
    draws = torch.randn(2, 6, 2, generator=generator, dtype=D) * sharpness
    y = torch.randint(2, (6,), generator=generator)
    losses = [mixture_nll(draws, y, math.exp(-4.6 + 9.2 * i / 400)) for i in range(401)]
    dips = [i for i in range(1, 400) if losses[i] < min(losses[i - 1], losses[i + 1])]
    assert len(dips) == 2
    found = Temperature().fit(draws, y)
    assert mixture_nll(draws, y, found.value) <= min(losses)


def test_temperature_goes_into_predictions(classified):
    draws, y = classified
    fitted = Temperature().fit(sb.Categorical().predictive(draws), y)
    divided = sb.Categorical().predictive(fitted(draws))
    by_likelihood = fitted.likelihood.predictive(draws)
    by_call = fitted(sb.Categorical(temperature=3.0).predictive(draws))  # in place of another one
    bounded = fitted.likelihood.predictive(fitted.likelihood.moments(draws))
    for other in (by_likelihood, by_call, bounded):
        torch.testing.assert_close(other.mean, divided.mean)
        torch.testing.assert_close(other.entropy, divided.entropy)
        torch.testing.assert_close(other.log_prob(y), divided.log_prob(y), atol=1e-5, rtol=1e-4)
    assert -float(by_call.log_prob(y).mean()) == pytest.approx(mixture_nll(draws, y, fitted.value), rel=1e-5)
    assert repr(fitted.likelihood).endswith(f"temperature={fitted.value:.6g})")
    net = sb.bayesianize(torch.nn.Linear(3, 4), sb.MeanField(stddev_init=0.5))
    x, labels = torch.randn(40, 3), torch.randint(4, (40,))
    cool, hot = (
        sb.evaluate(net, [(x, labels)], 4, 0, sb.Categorical(temperature=t))["entropy"] for t in (0.2, 5.0)
    )
    assert hot > cool
    same = sb.predict(net, x, samples=4, seed=0, likelihood=sb.Categorical(temperature=5.0), keep_draws=False)
    kept = sb.predict(net, x, samples=4, seed=0, likelihood=sb.Categorical(temperature=5.0))
    torch.testing.assert_close(same.log_prob(labels), kept.log_prob(labels))


def test_temperature_of_yes_or_no():
    logits = torch.full((2, 8, 1), 4.0)
    y = torch.tensor([1.0] * 6 + [0.0] * 2)
    fitted = Temperature(likelihood=sb.Bernoulli()).fit(logits, y)
    assert fitted.value == pytest.approx(4 / math.log(3), rel=1e-5)
    pred = fitted(sb.Bernoulli().predictive(logits))
    torch.testing.assert_close(pred.mean, torch.full((8, 1), 0.75))
    bounded = fitted.likelihood.predictive(fitted.likelihood.moments(logits))
    torch.testing.assert_close(bounded.log_prob(y), pred.log_prob(y))
    assert repr(fitted.likelihood) == f"Bernoulli(temperature={fitted.value:.6g})"


def test_temperature_of_weighted_draws(classified):
    draws, y = classified
    weights = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    weighted = Temperature().fit(sb.Categorical().predictive(draws).reweighted(weights), y)
    assert weighted.value == pytest.approx(Temperature().fit(draws[:1], y).value, rel=1e-5)
    applied = weighted(sb.Categorical().predictive(draws).reweighted(weights))
    torch.testing.assert_close(applied.mean, (draws[0] / weighted.value).softmax(-1))


def test_temperature_refuses_and_warns(classified):
    draws, _ = classified
    right = draws.mean(0).argmax(-1)
    with pytest.warns(UserWarning, match="all right or all wrong"):
        Temperature().fit(draws.mean(0, keepdim=True), right)
    with pytest.raises(TypeError, match=r"VarianceScale"):
        Temperature(likelihood=sb.Gaussian())
    for wrong in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match="positive finite"):
            Temperature(wrong)
        with pytest.raises(ValueError, match="positive finite"):
            VarianceScale(wrong)
    with pytest.raises(ValueError, match="out of range"):
        Temperature().fit(draws, torch.full((600,), 9))
    with pytest.raises(TypeError, match=r"Temperature"):
        VarianceScale().fit(sb.Categorical().predictive(draws), right)


@pytest.mark.parametrize("learn", ["fixed", "global", "per_example"])
def test_variance_scale(learn):
    torch.manual_seed(1)
    loc = torch.randn(5, 800, 1)
    y = loc.mean(0) + 3 * torch.randn(800, 1)
    draws = torch.cat((loc, torch.randn(5, 800, 1)), -1) if learn == "per_example" else loc
    likelihood = sb.Gaussian(learn="per_example") if learn == "per_example" else sb.Gaussian(2.0, learn=learn)
    pred = likelihood.predictive(draws)
    scale = VarianceScale().fit(pred, y)
    wide = scale(pred)
    torch.testing.assert_close(wide.mean, pred.mean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(wide.variance, pred.variance * scale.value**2)
    torch.testing.assert_close(wide.epistemic, pred.epistemic * scale.value**2)
    nlls = [-float(VarianceScale(s * scale.value)(pred).log_prob(y).mean()) for s in (0.97, 1.0, 1.03)]
    assert nlls[1] == min(nlls) < -pred.log_prob(y).mean().item()
    low, high = wide.interval(0.9)
    assert 0.86 < sb.metrics.coverage(low, high, y) < 0.94


def test_a_variance_scale_keeps_the_noise_of_every_output():
    torch.manual_seed(0)
    likelihood = sb.Gaussian(learn="global", outputs=2)
    likelihood.log_precision.data = torch.tensor([0.0, math.log(100.0)])
    targets = 2 * torch.randn(4000, 2) * torch.tensor([1.0, 0.1])  # twice the noise that is claimed
    predictive = likelihood.predictive(torch.zeros(1, 4000, 2))
    scale = sb.decisions.VarianceScale().fit(predictive, targets)
    assert scale.value == pytest.approx(2.0, rel=0.03)
    assert scale(predictive).variance[0].tolist() == pytest.approx(
        [scale.value**2, scale.value**2 / 100], rel=1e-4
    )
