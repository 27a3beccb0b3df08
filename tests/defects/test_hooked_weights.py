"""Layers that compute their weight (weight_norm, spectral_norm, prune, 8 bits): right, or refused by name."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import slimbayes as sb

pytestmark = pytest.mark.filterwarnings("ignore")

NORMS = {
    "weight_norm": nn.utils.weight_norm,
    "spectral_norm": nn.utils.spectral_norm,
    "prune": lambda layer: prune.random_unstructured(layer, "weight", 0.5),
    "parametrized weight_norm": parametrizations.weight_norm,
    "parametrized spectral_norm": parametrizations.spectral_norm,
}
HOOKED = ["weight_norm", "spectral_norm", "prune"]
X, TARGETS = torch.linspace(-1, 1, 24).view(4, 6), torch.tensor([0, 1, 1, 0])


def network(norm: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    if norm is not None:
        NORMS[norm](net[0])
    return net.eval()


def trains(model: nn.Module) -> None:
    """Two steps, each with gradients for all."""
    for _ in range(2):
        model.zero_grad()
        sb.elbo(sb.draw(model, X), TARGETS, model, num_data=4).loss.backward()
        missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert not missing


@pytest.mark.parametrize(
    "method", [sb.MeanField(), sb.KTied(), sb.MCDropout(0.1)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("norm", NORMS)
def test_before_the_conversion(norm, method):
    net = network(norm)
    expected = net(X).detach()
    model = sb.bayesianize(net, method)
    torch.testing.assert_close(sb.draw(model, X, noise="mean")[0], expected)
    trains(model)


@pytest.mark.parametrize("method", [sb.EMP(2), sb.ECMP(2)], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("norm", HOOKED)
def test_several_weights_of_one_that_is_computed(norm, method):
    net = network(norm)
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(
        ValueError, match=r"layer '0' .* computes its weight .*remove_weight_norm.*exclude='0'"
    ):
        sb.bayesianize(net, method, include="^[02]$")
    assert type(net[0]) is nn.Linear and net.state_dict().keys() == before.keys()


@pytest.mark.parametrize("norm", NORMS)
def test_members_that_would_all_be_the_same(norm):
    """reset_parameters draws the computed weight anew, not what it is computed from."""
    net = network(norm)
    with pytest.raises(ValueError, match=r"layer '0' .* computes its weight"):
        sb.bayesianize(net, sb.DeepEnsemble(2))
    expected = net(X).detach()
    model = sb.bayesianize(net, sb.DeepEnsemble(2, reinitialize=False)).eval()
    for draw in sb.draw(model, X):
        torch.testing.assert_close(draw, expected)
    trains(model)

    def own(member):
        for parameter in member.parameters():
            parameter.detach().normal_()

    drawn = sb.draw(sb.bayesianize(network(norm), sb.DeepEnsemble(2, reinitialize=own)).eval(), X)
    assert not torch.allclose(drawn[0], drawn[1])


@pytest.mark.parametrize("norm", NORMS)
def test_after_an_ensemble(norm):
    model = sb.bayesianize(network(), sb.DeepEnsemble(2)).eval()
    NORMS[norm](model[0])
    with pytest.raises(
        ValueError, match=r"'0.weight' of the ensemble .* has been replaced since the conversion"
    ):
        sb.draw(model, X)


@pytest.mark.parametrize("method", [sb.EMP(2), sb.ECMP(2)], ids=lambda m: type(m).__name__)
def test_after_a_conversion_to_several_weights(method):
    model = sb.bayesianize(network(), method, include="^[02]$").eval()
    expected = sb.draw(model, X, noise="mean").detach()
    with pytest.raises(ValueError, match="'0' has several weights"):
        nn.utils.spectral_norm(copy.deepcopy(model)[0])
    with pytest.raises(ValueError, match="'0' has several weights"):
        changed = copy.deepcopy(model)
        parametrizations.spectral_norm(changed[0])
        sb.draw(changed, X)
    nn.utils.weight_norm(model[0])
    torch.testing.assert_close(sb.draw(model, X, noise="mean"), expected)
    trains(model)


def int8(net: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(net, quantization.Int8WeightOnlyConfig())


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("method", [sb.Rank1(components=2), sb.BatchEnsemble(2), sb.MCDropout(0.1)])
def test_a_weight_of_8_bits_that_is_not_random(method, before):
    """Factors go on the rows: y = r ∘ W (s ∘ x), and what W is like is the layer's own business."""
    net = network()
    if before:
        int8(net)
    model = sb.bayesianize(net, method)
    if not before:
        int8(model)
    reference = sb.bayesianize(network(), method)
    own = {key: value for key, value in model.state_dict().items() if "bayes" in key or "bias" in key}
    reference.load_state_dict(own, strict=False)
    for one in (model, reference):
        one.eval()
    found, expected = (sb.draw(one, X, noise="mean") for one in (model, reference))
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0.03)
    loss = sb.elbo(sb.draw(model, X), TARGETS, model, num_data=4).loss
    loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "bayes" in name)


@pytest.mark.parametrize("method", [sb.MeanField(), sb.KTied(), sb.MeanField(estimator="local"), sb.EMP(2)])
@pytest.mark.parametrize("before", [True, False])
def test_a_weight_of_8_bits_that_would_be_random(method, before):
    net = network()
    if before:
        int8(net)
    with pytest.raises(TypeError, match=r"weight of layer '0' is a \w+, .*quantize\(sb.freeze"):
        model = sb.bayesianize(net, method, include="^[02]$")
        if not before:
            int8(model)
        sb.elbo(sb.draw(model, X), TARGETS, model, num_data=4)
