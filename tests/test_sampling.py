"""Random tensors that are sampled, and scored, side by side are what each would be for itself."""

import pytest
import torch
from torch import nn

import slimbayes as sb
from slimbayes.core import context, sampling
from slimbayes.core.conversion import ruled_layers
from slimbayes.core.kl import total_kl

METHODS = {
    "rank1": sb.Rank1(components=3),
    "rank1 clipped": sb.Rank1(components=3, clip=1.01),
    "rank1 mean": sb.Rank1(components=3, kl_reduction="mean"),
    "rank1 cauchy": sb.Rank1(components=2, posterior="cauchy"),
    "rank1 lognormal": sb.Rank1(components=2, posterior="lognormal"),
    "rank1 halfcauchy": sb.Rank1(components=2, posterior="halfcauchy"),
    "rank1 output": sb.Rank1(components=2, random="output"),
    "meanfield": sb.MeanField(stddev_init=0.1),
    "meanfield capped": sb.MeanField(stddev_init=0.1, stddev_max=0.1),
    "meanfield he": sb.MeanField(prior=sb.HeNormal()),
    "meanfield tied mean": sb.MeanField.paper(tied_mean=True),
    "ktied": sb.KTied(stddev_init=0.1),
    "ktied he": sb.KTied(prior=sb.HeNormal(), rank=1),
}
X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network(method):
    torch.manual_seed(0)
    parts = [
        nn.Linear(5, 6),
        nn.Tanh(),
        nn.Linear(6, 6),
        nn.Tanh(),
        nn.Linear(6, 6),
        nn.Tanh(),
        nn.Linear(6, 3),
    ]
    return sb.bayesianize(nn.Sequential(*parts), method).double()


def gradients(value, model):
    found = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    return [torch.zeros(()) if grad is None else grad for grad in found]


def draws(model, monkeypatch, together, **options):
    """Noise that depends on nothing but a number's place among channels or elements of a row: 0.7 everywhere."""

    def level(kind, size, dtype, device):
        return torch.full(size, 0.7, dtype=dtype, device=device)

    with monkeypatch.context() as patch, sb.fast_paths(False):
        patch.setattr(sampling, "fresh_noise", level)
        patch.setattr(context, "fresh_noise", level)
        if not together:
            patch.setattr("slimbayes.core.draws.find_groups", lambda *_: [])
        return sb.draw(model, X, samples=2, **options)


@pytest.mark.parametrize("options", [{}, {"noise": "shared"}, {"layout": "passes"}], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_samples_and_their_gradients(monkeypatch, name, options):
    model = network(METHODS[name])
    one, other = (draws(model, monkeypatch, together, **options) for together in (True, False))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    weight = torch.linspace(-1, 1, one.numel(), dtype=one.dtype).view_as(one)
    pairs = zip(gradients((one * weight).sum(), model), gradients((other * weight).sum(), model), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", METHODS)
def test_the_kl_and_its_gradient(name):
    model = network(METHODS[name])
    with sb.fast_paths(False):
        found = sb.kl(model)
        alone = sum(
            total_kl(q, p) / (q.loc.shape[0] if reduction == "mean" else 1)
            for rule, layer in ruled_layers(model)
            for _, q, p, reduction in rule.kl_terms(layer)
        )
        torch.testing.assert_close(found, alone, rtol=1e-10, atol=0)
        for one, other in zip(gradients(found, model), gradients(alone, model), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def sampled_ahead(model, noise="example", batch=4):
    draw = context.Draw(1, 1, batch, noise)
    draw.components = max(rule.components for rule, _ in ruled_layers(model))
    with sb.fast_paths(False):
        return sampling.find_groups(ruled_layers(model), draw)


def test_few_groups_serve_many_layers():
    assert [len(group) for group in sampled_ahead(network(sb.Rank1()))] == [8]
    assert [len(group) for group in sampled_ahead(network(sb.MeanField(biases=True)))] == [8]
    assert sorted(len(group) for group in sampled_ahead(network(sb.KTied(biases=True)))) == [1, 1, 2, 4]
    assert sampled_ahead(network(sb.MeanField(estimator="flipout"))) == []


def test_every_tensor_has_noise_of_its_own():
    model = network(sb.MeanField(stddev_init=0.5))
    with sb.fast_paths(False), torch.no_grad():
        now = context.Draw(1, 2000, 1)
        (group,) = sampling.find_groups(ruled_layers(model), now)
        sampling.sample_group(group, now)
    values = torch.cat([now.prefilled[one.name].flatten(1) - one.loc.flatten() for one in group], 1)
    scales = torch.cat([one.posterior(one.loc).scale.flatten() for one in group])
    correlation = torch.corrcoef(values.T)
    assert (correlation - torch.eye(len(correlation))).abs().max() < 0.15
    torch.testing.assert_close(values.std(0), scales, rtol=0.15, atol=0.0)


def test_large_tensors_and_too_many_are_left_to_their_layers(monkeypatch):
    model = network(sb.MeanField(biases=True))
    monkeypatch.setattr(sampling, "_LARGE", 20)
    assert [one.loc.numel() for group in sampled_ahead(model) for one in group] == [6, 6, 6, 18, 3]
    monkeypatch.setattr(sampling, "_MOST", 20)
    assert sampled_ahead(model)
    with torch.no_grad():
        assert sampled_ahead(model) == []
    monkeypatch.setattr(sampling, "_TOGETHER", 12)
    assert len(sampled_ahead(model)) > 1


def test_a_hook_that_may_set_a_weight_is_waited_for():
    """The weight of a layer is what it has when the layer runs: samples around an older one would be stale."""
    model = network(sb.MeanField())
    found = []

    def look(layer, inputs):
        found.append(dict(context.current_draw().prefilled))

    model[2].register_forward_hook(lambda layer, inputs, output: look(layer, inputs))
    with sb.fast_paths(False):
        sb.draw(model, X)
        assert found.pop()
        model[0].register_forward_pre_hook(lambda layer, inputs: None)
        sb.draw(model, X)
    assert not found.pop()


def test_nothing_is_kept_for_second_runs_without_a_checkpoint():
    seen = []
    model = network(sb.Rank1())
    model[0].register_forward_hook(lambda *_: seen.append(context.current_draw().memory))
    sb.draw(model, X)
    assert seen and all(memory is None for memory in seen)
