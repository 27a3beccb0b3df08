"""Networks that a draw cannot run as they are say why; those that torch.func differentiates are right."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import slimbayes as sb

METHODS = {
    "rank1": sb.Rank1(components=2),
    "meanfield": sb.MeanField(),
    "flipout": sb.MeanField(estimator="flipout"),
    "local": sb.MeanField(estimator="local"),
    "ktied": sb.KTied(),
    "emp": sb.EMP(2),
    "ensemble": sb.DeepEnsemble(2),
}


@pytest.mark.parametrize("name", METHODS)
def test_lazy_layers_are_called_lazy(name):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"layer '2' \(LazyLinear\) is lazy.* run the network once"):
        sb.bayesianize(net, METHODS[name])
    net(torch.zeros(1, 3))
    assert sb.draw(sb.bayesianize(net, METHODS[name]), torch.zeros(5, 3)).shape[1:] == (5, 2)


class Turned(nn.Module):
    """Turns its batch around for a layer that wants time first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, 16)

    def forward(self, x):
        x = x.transpose(0, 1)
        return self.inner(x, x).transpose(0, 1)


@pytest.mark.parametrize("method", [sb.Rank1(), sb.MeanField()], ids=lambda m: type(m).__name__)
def test_a_transformer_of_time_first(method):
    with pytest.raises(ValueError, match=r"Transformer 'inner' has batch_first=False.* batch_first=True"):
        sb.draw(sb.bayesianize(Turned(), method), torch.randn(3, 4, 8), samples=2)
    direct = sb.bayesianize(nn.Transformer(8, 2, 1, 1, 16), method)
    with pytest.raises(ValueError, match="batch_first"):
        sb.draw(direct, torch.randn(3, 4, 8), torch.randn(3, 4, 8), samples=2)


class Loss(nn.Module):
    """The elbo of a network whose parameters torch.func hands over."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x, targets, noise):
        return sb.elbo(sb.draw(self.model, x, noise=noise), targets, self.model, num_data=10).loss


@pytest.mark.parametrize("name", METHODS)
def test_gradients_of_every_example(name):
    """vmap(grad(elbo)) against a loop over the examples."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    kwargs = {"include": "."} if name == "emp" else {}
    loss = Loss(sb.bayesianize(net, METHODS[name], **kwargs))
    x, targets = torch.randn(4, 1, 6), torch.tensor([[0], [1], [1], [0]])
    values = {key: value.detach() for key, value in loss.named_parameters()}

    def of_one(parameters, one, target, noise="mean"):
        return functional_call(loss, parameters, (one, target, noise))

    found = vmap(grad(of_one), in_dims=(None, 0, 0), randomness="different")(values, x, targets)
    for i in range(4):
        loss.zero_grad()
        loss(x[i], targets[i], "mean").backward()
        for key, parameter in loss.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(found[key][i], expected, atol=1e-5, rtol=1e-4)
    noisy = vmap(grad(lambda *given: of_one(*given, "example")), in_dims=(None, 0, 0), randomness="different")
    assert all(torch.isfinite(value).all() for value in noisy(values, x, targets).values())


def test_values_are_still_checked_under_grad_alone():
    net = sb.bayesianize(nn.Linear(3, 2), sb.Rank1())
    loss = Loss(net)
    values = {key: value.detach() for key, value in loss.named_parameters()}
    with pytest.raises(ValueError, match="7"):
        grad(lambda p: functional_call(loss, p, (torch.zeros(1, 3), torch.tensor([7]), "mean")))(values)
