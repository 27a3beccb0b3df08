"""What compiled code does instead of eager code, run without a compiler: the same distributions, KL and gradients."""

import math

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.accelerate.gpu import weight_samples
from slimbayes.accelerate.point_factors import prefill_points
from slimbayes.core.context import Draw
from slimbayes.core.conversion import converted_layers

METHODS = {
    "rank1": sb.Rank1.paper(components=2),
    "rank1-input": sb.Rank1.paper(components=2, random="input"),
    "rank1-cauchy": sb.Rank1.paper(components=2, posterior="cauchy"),
    "meanfield": sb.MeanField.paper(stddev_init=0.3),
    "ktied": sb.KTied.paper(stddev_init=0.3),
    "flipout": sb.MeanField.paper(stddev_init=0.3, estimator="flipout"),
    "local": sb.KTied.paper(stddev_init=0.3, estimator="local"),
}


@pytest.fixture
def traced(monkeypatch):
    """As if a compiler were at work, in one call of a function that ``sb.compile`` has compiled."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(weight_samples.SCOPE, "open", True)
    monkeypatch.setattr(weight_samples.SCOPE, "made", [])


@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize("name", METHODS)
def test_kl_and_gradients(name, noise, traced, monkeypatch):
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)), METHODS[name])
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    result = sb.elbo(sb.draw(model, x, noise=noise), y, model, num_data=64)
    result.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    monkeypatch.undo()
    assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in gradients)
    with sb.fast_paths(False):
        torch.testing.assert_close(result.kl, sb.kl(model), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "rank1-cauchy"])
def test_moments(name, noise, traced, monkeypatch):
    """Of one linear layer with many samples, against its mean and its plain twin's variance."""
    torch.manual_seed(1)
    model = sb.bayesianize(nn.Linear(6, 40), METHODS[name])
    x, samples = torch.randn(4, 6), 600
    with sb.fast_paths(triton=False):
        found = sb.draw(model, x, samples=samples, noise=noise).detach()
    monkeypatch.undo()
    plain, mean = (
        sb.draw(model, x, samples=samples, noise=noise).detach(),
        sb.draw(model, x, noise="mean").detach(),
    )
    components = found.shape[0] // samples
    for each in (found, plain):
        by_component = each.view(components, samples, *each.shape[1:])
        error = by_component.std(1) / math.sqrt(samples) + 1e-6
        assert ((by_component.mean(1) - mean.view(components, *mean.shape[1:])).abs() < 6 * error).all()
    ratio = found.view(components, samples, -1).var(1) / plain.view(components, samples, -1).var(1)
    assert abs(ratio.log().mean()) < 0.05 and (ratio.log().abs() < 8 * math.sqrt(4 / samples)).all()


def test_point_factors_are_repeated_for_every_row(traced, monkeypatch):
    torch.manual_seed(2)
    model = sb.bayesianize(
        nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 1)), sb.BatchEnsemble(components=2)
    )
    pairs = [(layer.bayes, layer) for _, layer in converted_layers(model)]
    draw = Draw(components=2, samples=1, batch=7)
    prefill_points(pairs, draw)
    assert len(draw.prefilled) == 4
    total = torch.zeros(())
    for rule, _ in pairs:
        for which in ("r", "s"):
            value, loc = draw.prefilled[f"{rule.name}.{which}"], getattr(rule, which).loc
            torch.testing.assert_close(value, loc[:, None, None].expand(2, 1, 7, -1))
            total = total + value.sum()
    total.backward()
    assert all(torch.equal(rule.r.loc.grad, torch.full_like(rule.r.loc, 7.0)) for rule, _ in pairs)
    for unused in (
        Draw(2, 1, 7, noise="mean"),
        Draw(2, 1, 7, component_ids=torch.tensor([0, 1])),
        Draw(3, 1, 7),
    ):
        prefill_points(pairs, unused)
        assert unused.prefilled == {}
