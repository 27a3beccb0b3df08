"""All weights of a small network sampled at once: the numbers of one layer after the other."""

import pytest
import torch
from test_weights import METHODS, X, Y, gradients, network
from torch import nn

import slimbayes as sb
from slimbayes.accelerate import cpu, weight_groups
from slimbayes.core import context
from slimbayes.core.posteriors import positive

GATHERED = [name for name in METHODS if "local" not in name and "capped" not in name]


needs_kernels = pytest.mark.skipif(cpu._load() is None, reason="the kernels are not compiled")


def loss(model, seed=3, samples=1, noise="example"):
    torch.manual_seed(7)  # for the KL against a prior of another family, which samples
    draws = sb.draw(model, X.to(next(model.parameters()).dtype), samples=samples, seed=seed, noise=noise)
    return sb.elbo(draws, Y, model, num_data=20).loss


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize("name", METHODS)
def test_one_layer_after_the_other(monkeypatch, name, noise, samples):
    model = network(METHODS[name])
    together = loss(model, samples=samples, noise=noise)
    together.backward()
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    monkeypatch.setattr(weight_groups, "MOST", 0)
    alone = loss(model, samples=samples, noise=noise)
    alone.backward()
    torch.testing.assert_close(together, alone, rtol=1e-13, atol=0)
    for key, value in gradients(model).items():
        torch.testing.assert_close(found[key], value, rtol=1e-11, atol=1e-14, msg=key)


@needs_kernels
@pytest.mark.uncounted
def test_every_weight_has_noise_of_its_own():
    """The parts of the piece do not overlap: samples of all tensors are uncorrelated, of variance σ²."""
    torch.manual_seed(0)
    model = sb.bayesianize(
        nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)), sb.MeanField.paper(stddev_init=0.5)
    )
    made = []
    for _ in range(4000):
        draw = context.Draw(1, 1, 2)
        weight_groups.prefill_weights([(layer.bayes, layer) for layer in model], draw)
        values = {k: v for k, v in draw.prefilled.items() if not k.endswith((".noise", ".seed"))}
        assert [k.removesuffix(".single") for k in values] == ["0.weight", "0.bias", "1.weight", "1.bias"]
        made.append(torch.cat([value.detach().flatten() for value in values.values()]))
    spreads = [part for layer in model for part in (layer.bayes.weight, layer.bayes.bias)]
    scale = torch.cat([positive(part.rho.detach()).flatten() for part in spreads])
    covariance = (torch.stack(made) / scale).T.cov()
    assert (covariance - torch.eye(len(covariance))).abs().max() < 5 * (2 / 4000) ** 0.5


@needs_kernels
def test_a_tied_weight_is_sampled_once():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = sb.bayesianize(nn.Sequential(first, second), sb.MeanField(stddev_init=0.3))
    draw = context.Draw(1, 1, 4)
    weight_groups.prefill_weights([(layer.bayes, layer) for layer in model], draw)
    assert sorted(draw.prefilled) == ["0.weight.seed", "0.weight.single"]
    with context.activate(draw):
        found = model(torch.eye(4))
    torch.testing.assert_close(found.T, torch.linalg.matrix_power(draw.prefilled["0.weight.single"], 2))


def test_large_networks_go_layer_by_layer(monkeypatch):
    monkeypatch.setattr(weight_groups, "MOST", 10)
    draw = context.Draw(1, 1, 6)
    model = network(sb.MeanField())
    weight_groups.prefill_weights([(model[0].bayes, model[0])], draw)
    assert not draw.prefilled and not draw.byproducts


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_the_same_draws_with_and_without_gradients(name, samples):
    model = network(METHODS[name])
    torch.manual_seed(5)
    expected = sb.draw(model, X, samples=samples)
    torch.manual_seed(5)
    with torch.no_grad():
        torch.testing.assert_close(sb.draw(model, X, samples=samples), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.uncounted
@needs_kernels
@pytest.mark.parametrize("name", ["meanfield", "ktied"])
def test_compiled_code_samples_all_weights_at_once(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 90), nn.ReLU(), nn.Linear(90, 90), nn.ReLU(), nn.Linear(90, 3))
    model = sb.bayesianize(net, METHODS[name])
    counts = []

    def backend(graph, inputs):
        called = [str(node.target) for node in graph.graph.nodes]
        counts.append(
            [sum(name in target for target in called) for name in ("slimbayes.", ".sampled_weights")]
        )
        return graph.forward

    def step(x, y):
        return sb.elbo(sb.draw(model, x), y, model, num_data=100).loss

    x, y = torch.randn(8, 40), torch.zeros(8, dtype=torch.long)
    torch.compile(step, fullgraph=True, backend=backend)(x, y).backward()
    assert counts == [[1, 1]]
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    torch._dynamo.reset()
