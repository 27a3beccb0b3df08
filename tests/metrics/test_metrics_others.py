"""Diversity, corruption errors, regression scores and gradient SNR: by hand and by brute force."""

import itertools
import math

import numpy as np
import pytest
import sklearn.metrics as reference
import torch
from helpers_metrics import close, problem

import slimbayes as sb
from slimbayes import metrics
from slimbayes.containers.datasets import Scaling
from slimbayes.lab.data.corruptions import CORRUPTIONS


def test_disagreement_against_brute_force():
    p, y = problem(rows=40, draws=4)
    pairs = list(itertools.combinations(range(4), 2))
    raw = np.mean([float((p[j].argmax(-1) != p[k].argmax(-1)).double().mean()) for j, k in pairs])
    assert 0 < raw < 1
    close(metrics.disagreement(p), raw)
    close(metrics.disagreement(p, y, normalize=False), raw)
    error = 1 - metrics.accuracy(p.mean(0), y)
    close(metrics.disagreement(p, y), raw / (error + 1e-7))
    close(
        metrics.disagreement(p, y, samples=2),
        metrics.disagreement(torch.stack((p[:2].mean(0), p[2:].mean(0))), y),
    )
    ordered = list(itertools.permutations(range(4), 2))
    close(
        metrics.pairwise_kl(p),
        np.mean([float((p[j] * (p[j] / p[k]).log()).sum(-1).mean()) for j, k in ordered]),
    )
    cosine = torch.nn.functional.cosine_similarity
    close(metrics.pairwise_cosine(p), np.mean([float(cosine(p[j], p[k], -1).mean()) for j, k in pairs]))


def test_members_that_agree():
    p, y = problem(rows=10)
    same = torch.stack([p, p, p])
    close(metrics.disagreement(same, y), 0.0)
    close(metrics.pairwise_kl(same), 0.0)
    close(metrics.pairwise_cosine(same), 1.0)
    with pytest.raises(ValueError, match="at least 2"):
        metrics.disagreement(p[None], y)
    with pytest.raises(ValueError, match="samples=2 does not divide 3 draws"):
        metrics.disagreement(same, y, samples=2)


def test_mean_corruption_error_of_both_papers():
    names = list(metrics.ALEXNET)
    assert tuple(names) == CORRUPTIONS
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.rand(15, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    errors, vanilla = (
        dict(zip(names, ours.tolist(), strict=True)),
        dict(zip(names, theirs.tolist(), strict=True)),
    )
    divisor = torch.tensor(list(metrics.ALEXNET.values()), dtype=torch.float64)
    close(metrics.mean_corruption_error(errors), 100 * float((ours.mean(1) / divisor).mean()))
    close(metrics.mean_corruption_error(errors, "alexnet"), metrics.mean_corruption_error(ours.numpy()))
    emp = 100 * float((ours.sum(1) / theirs.sum(1)).mean())
    close(metrics.mean_corruption_error(errors, vanilla), emp)
    close(metrics.mean_corruption_error(ours, theirs), emp)
    close(metrics.mean_corruption_error(vanilla, vanilla), 100.0)
    close(metrics.corruption_errors(errors, vanilla)["fog"], 100 * sum(errors["fog"]) / sum(vanilla["fog"]))
    relative = (ours.sum(1) - 5 * 0.01) / (theirs.sum(1) - 5 * 0.02)
    close(metrics.relative_mean_corruption_error(errors, 0.01, vanilla, 0.02), 100 * float(relative.mean()))
    close(
        metrics.relative_corruption_errors(errors, 0.01, vanilla, 0.02)["snow"],
        100 * float(relative[names.index("snow")]),
    )
    close(metrics.relative_mean_corruption_error(vanilla, 0.02, vanilla, 0.02), 100.0)
    absolute = (ours.mean(1) - 0.01) / (divisor - 0.4)
    close(metrics.relative_mean_corruption_error(errors, 0.01, "alexnet", 0.4), 100 * float(absolute.mean()))


def test_the_baseline_itself_has_one_hundred():
    close(
        metrics.mean_corruption_error({name: [error] * 5 for name, error in metrics.ALEXNET.items()}), 100.0
    )


@pytest.mark.parametrize(
    ("errors", "baseline", "says"),
    [
        ({"fog": [20.0, 40.0]}, "alexnet", "divide percentages by 100"),
        ({"speckle_noise": [0.2]}, "alexnet", "no error for speckle_noise"),
        ({"fog": [0.2]}, "resnet", "baseline='resnet'"),
        ({"fog": [0.2, 0.3]}, {"fog": [0.2]}, "severities"),
        ({"fog": [0.2]}, {"fog": [0.0]}, "needs a positive one"),
        ({}, "alexnet", "non-empty dict"),
        ({"fog": [math.nan]}, "alexnet", "NaN"),
    ],
)
def test_wrong_corruption_errors(errors, baseline, says):
    with pytest.raises((TypeError, ValueError), match=says):
        metrics.mean_corruption_error(errors, baseline)


def test_regression_errors():
    mean, y = torch.randn(30, 2, dtype=torch.float64), torch.randn(30, 2, dtype=torch.float64)
    close(metrics.rmse(mean, y), math.sqrt(reference.mean_squared_error(y, mean)))
    close(metrics.mae(mean, y), reference.mean_absolute_error(y, mean))
    with pytest.raises(ValueError, match=r"\[30\] and \[30, 1\]"):
        metrics.rmse(mean[:, 0], y[:, :1])  # would broadcast to 900 errors
    with pytest.raises(ValueError, match="targets are empty"):
        metrics.rmse(mean, y[:0])


def test_log_predictive_density_in_original_units():
    """The density of raw targets under the mixture moved to raw units, against scipy's normal."""
    from scipy.stats import norm

    draws, y = torch.randn(6, 20, 2, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)
    scaling = Scaling(mean=(1.0, -3.0), std=(2.0, 10.0))
    predictive = sb.Gaussian(precision=4.0).predictive(draws)
    shift, scale = np.array(scaling.mean), np.array(scaling.std)
    raw = norm.logpdf(y.numpy() * scale + shift, draws.numpy() * scale + shift, 0.5 * scale).sum(
        -1
    )  # [6, 20]
    expected = float(np.mean(np.log(np.mean(np.exp(raw), 0)))) / 2
    close(metrics.log_predictive_density(predictive, y, scaling), expected, 1e-9)
    close(
        metrics.log_predictive_density(predictive, y),
        expected + float(np.log(scale).mean()),
        1e-9,
    )
    close(
        metrics.log_predictive_density(predictive.log_prob(y)),
        2 * metrics.log_predictive_density(predictive, y),
    )
    with pytest.raises(ValueError, match="1 columns"):
        metrics.log_predictive_density(predictive, y, Scaling((0.0,), (1.0,)))
    with pytest.raises(TypeError, match="needs targets"):
        metrics.log_predictive_density(predictive)
    with pytest.raises(TypeError, match="alone"):
        metrics.log_predictive_density([0.1], [0.2])


def test_intervals():
    lower, upper, y = (
        torch.tensor([0.0, 1.0, 2.0]),
        torch.tensor([1.0, 3.0, 2.0]),
        torch.tensor([1.0, 4.0, 2.0]),
    )
    close(metrics.coverage(lower, upper, y), 2 / 3)
    close(metrics.interval_width(lower, upper), 1.0)
    with pytest.raises(ValueError, match="lower end"):
        metrics.coverage(upper, lower, y)


def test_coverage_curve_of_a_calibrated_prediction():
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(1, 4000, 1, generator=generator)
    y = draws[0, :, 0] + 0.5 * torch.randn(4000, generator=generator)
    curve = metrics.coverage_curve(sb.Gaussian(precision=4.0).predictive(draws), y)
    assert len(curve.level) == 19
    assert np.abs(np.array(curve.level) - np.array(curve.coverage)).max() < 0.03  # 4 standard errors
    wide = metrics.coverage_curve(sb.Gaussian(precision=1.0).predictive(draws), y, [0.5])
    assert wide.coverage[0] > 0.7


def test_crps_against_brute_force():
    x, y = torch.randn(9, 5, 2, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    pairs = (x[:, None] - x[None]).abs().mean((0, 1))
    close(metrics.crps(x, y), float(((x - y).abs().mean(0) - pairs / 2).mean()))
    close(metrics.crps(x[:1], y), metrics.mae(x[0], y))


def test_gradient_snr():
    g = torch.randn(10, 4, 3, dtype=torch.float64) + 2
    close(metrics.gradient_snr(g), float(np.mean((g.numpy() ** 2).mean(0) / g.numpy().var(0))))
    close(metrics.gradient_snr(list(g)), metrics.gradient_snr(g))
    padded = torch.cat((g.flatten(1), torch.zeros(10, 5, dtype=torch.float64)), 1)
    close(metrics.gradient_snr(padded), metrics.gradient_snr(g))
    noise = torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0))
    assert metrics.gradient_snr(noise) == pytest.approx(1.0, abs=1e-3)
    assert metrics.gradient_snr([[1.0], [1.0]]) == math.inf
    for wrong, says in (
        ([[1.0]], "at least 2"),
        ([[0.0], [0.0]], "took no part"),
        ([[1.0], [math.nan]], "NaN"),
    ):
        with pytest.raises(ValueError, match=says):
            metrics.gradient_snr(wrong)
