"""Samples that are made before the network runs, and what may happen between that and their use."""

import copy

import pytest
import torch
from helpers_statistics import F64
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import slimbayes as sb
from slimbayes.core.posteriors import NormalPosterior
from slimbayes.core.probes import evaluating

METHODS = {
    "meanfield": sb.MeanField(),
    "ktied": sb.KTied(),
    "flipout": sb.MeanField(estimator="flipout"),
    "rank1": sb.Rank1(),
    "batchensemble": sb.BatchEnsemble(),
}
X = torch.randn(6, 5, dtype=F64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two segments, each of which may be checkpointed."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)
        self.reentrant = reentrant

    def forward(self, x):
        if self.reentrant is None:
            return self.b(torch.tanh(self.a(x)))
        h = checkpoint(lambda x: torch.tanh(self.a(x)), x, use_reentrant=self.reentrant)
        return checkpoint(self.b, h, use_reentrant=self.reentrant)


def pair(method, reentrant):
    """The same network with and without checkpointing."""
    torch.manual_seed(1)
    plain = sb.bayesianize(Net().to(F64), METHODS[method])
    checkpointed = copy.deepcopy(plain)
    checkpointed.reentrant = reentrant
    return checkpointed, plain


def gradients(model):
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_checkpointed_layers(method, reentrant):
    checkpointed, plain = pair(method, reentrant)
    for model in (checkpointed, plain):
        x = X.clone().requires_grad_()
        for step in range(2):
            model.zero_grad(set_to_none=True)
            sb.draw(model, x, seed=3 + step).square().sum().backward()
    for a, b in zip(gradients(checkpointed), gradients(plain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", ["meanfield", "ktied", "rank1"])
def test_recomputed_layers_see_the_noise_of_their_own_draw(method, reentrant):
    """Finite differences, with a draw of another network of the same names before the backward pass."""
    model, other = pair(method, reentrant)
    x = X.clone().requires_grad_()

    def loss():
        torch.manual_seed(5)
        return (sb.draw(model, x) - sb.draw(other, X).detach()).square().sum()

    loss().backward()
    keep, step = model.a.weight[0, 0].item(), 1e-6
    values = []
    for sign in (1, -1):
        model.a.weight.data[0, 0] = keep + sign * step
        values.append(loss().item())
    slope = (values[0] - values[1]) / (2 * step)
    assert model.a.weight.grad[0, 0].item() == pytest.approx(slope, rel=1e-4)


def test_pruned_weights_are_those_of_the_step():
    """A hook sets them when the layer is called."""
    torch.manual_seed(0)
    model = sb.bayesianize(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), sb.MeanField())
    prune.l1_unstructured(model[0], "weight", 0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        sb.draw(model, X.float()).square().mean().backward()
        optimizer.step()
    dead = model[0].weight_mask == 0
    assert dead.any() and (model[0].weight_orig.grad[dead] == 0).all()


def test_a_hook_on_the_way_is_seen():
    model = sb.bayesianize(nn.Sequential(nn.Linear(5, 7, bias=False)), sb.MeanField(stddev_init=1e-4))
    sb.draw(model, torch.ones(6, 5))

    def fill(module, args):
        module[0].weight.data.fill_(2.0)

    model.register_forward_pre_hook(fill)
    found = sb.draw(model, torch.ones(6, 5))
    torch.testing.assert_close(found, torch.full((1, 6, 7), 10.0), atol=0.01, rtol=0)


def _replaced_layer(model):
    model[2] = nn.Linear(4, 2)


def _replaced_posterior(model):
    model[0].bayes.weight = NormalPosterior(torch.full((4, 3), 0.2))


def _replaced_prior(model):
    model[0].bayes.prior = sb.Normal(0.0, 3.0)


def _capped(model):
    model[0].bayes.weight.maximum = 0.005


@pytest.mark.parametrize(
    "change", [_replaced_layer, _replaced_posterior, _replaced_prior, _capped], ids=lambda f: f.__name__
)
def test_the_kl_is_that_of_the_model_as_it_is(change):
    model = sb.bayesianize(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), sb.MeanField())
    before = sb.kl(model)
    sb.draw(model, torch.randn(5, 3))
    change(model)
    first, second = sb.kl(model), sb.kl(model)
    torch.testing.assert_close(first, second)
    assert not torch.isclose(first, before)


def test_scripted_modules_and_own_eval_are_put_into_eval_mode():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def eval(self):
            self.calls += 1
            return super().eval()

        def forward(self, x):
            return x

    scripted = torch.jit.script(nn.Dropout(0.5))
    model = nn.Sequential(sb.bayesianize(nn.Linear(3, 2), sb.Rank1()), scripted, Own())
    with evaluating(model):
        assert not scripted.training and torch.equal(scripted(torch.ones(20)), torch.ones(20))
    assert scripted.training and model.training
    own = Own()
    with evaluating(own):
        pass
    assert own.calls == 1 and own.training
