"""Layers that activation checkpointing computes again, from within the backward pass, see their own draw's samples."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import slimbayes as sb

METHODS = {
    "rank1": sb.Rank1.paper(components=2, clip=None),
    "batchensemble": sb.BatchEnsemble(components=2),
    "meanfield": sb.MeanField.paper(stddev_init=0.2),
    "ktied": sb.KTied.paper(stddev_init=0.2),
    "flipout": sb.MeanField.paper(stddev_init=0.2, estimator="flipout"),
    "local": sb.KTied.paper(stddev_init=0.2, estimator="local"),
    "emp": sb.EMP.paper(components=3, patch=(nn.Linear,), init_noise=0.3),
    "ecmp learned": sb.ECMP.paper(components=3, patch=(nn.Linear,), init_noise=0.3, learn_mixing=True),
    "mcdropout": sb.MCDropout(0.3),
    "dropconnect": sb.DropConnect(0.3),
    "ensemble": [("inner", sb.DeepEnsemble(members=2))],
}
X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (6,), generator=torch.Generator().manual_seed(1))
MODES = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class Net(nn.Module):
    """A layer outside, parts that may be computed again, and one layer, with dropout, in two of them."""

    def __init__(self, reentrant=None, options=None):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.dropout = nn.Dropout(0.2)
        self.reentrant, self.options = reentrant, options or {}

    def part(self, x):
        return x + torch.tanh(self.dropout(self.inner(x)))

    def again(self, function, x):
        if self.reentrant is None:
            return function(x)
        return checkpoint(function, x, use_reentrant=self.reentrant, **self.options)

    def forward(self, x):
        x = self.again(self.part, torch.tanh(self.first(x)))
        return self.last(self.again(lambda x: self.part(self.part(x)), x))


def pair(method, reentrant, network=Net):
    """The same converted network without checkpointing and with it."""
    torch.manual_seed(3)
    plain = sb.bayesianize(network(), METHODS[method])
    again = copy.deepcopy(plain)
    again.reentrant = reentrant
    return plain, again


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def assert_alike(plain, again):
    assert {n for n, g in plain.items() if g is None} == {n for n, g in again.items() if g is None}
    for name, grad in plain.items():
        if grad is not None:
            torch.testing.assert_close(
                again[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


def losses(model, seed, samples=2):
    """Two draws, of different batches, and one loss of both: their backward passes are one."""
    torch.manual_seed(5)
    first = sb.draw(model, X.clone().requires_grad_(), samples=samples, seed=seed)
    second = sb.draw(model, X[:4].clone().requires_grad_(), noise="shared", seed=None if seed is None else 8)
    return [sb.elbo(first, Y, model, 50).loss, 2.0 * sb.elbo(second, Y[:4], model, 50).loss]


@MODES
@pytest.mark.parametrize("paths", [True, False], ids=["fast", "plain"])
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("method", METHODS)
def test_two_draws_and_one_backward_pass(method, seed, paths, reentrant):
    found = []
    for model in pair(method, reentrant):
        with sb.fast_paths(paths):
            sum(losses(model, seed)).backward()
        found.append(gradients(model))
    assert_alike(*found)


@MODES
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0,), (1,)])
@pytest.mark.parametrize("method", ["rank1", "meanfield", "mcdropout"])
def test_draws_in_any_order(method, order, reentrant):
    found = []
    for model in pair(method, reentrant):
        parts = losses(model, None)
        for i in order:
            parts[i].backward()
        found.append(gradients(model))
    assert_alike(*found)


@MODES
@pytest.mark.parametrize("method", ["rank1", "ktied", "flipout", "emp"])
def test_a_backward_pass_twice(method, reentrant):
    found = []
    for model in pair(method, reentrant):
        loss = sum(losses(model, None))
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(gradients(model))
    assert_alike(*found)


@MODES
@pytest.mark.parametrize("method", ["rank1", "meanfield", "ktied", "flipout", "mcdropout", "emp"])
def test_a_backward_pass_in_another_thread(method, reentrant):
    """As those of a GPU: the thread of the backward pass has drawn something else itself."""
    found = []
    for model in pair(method, reentrant):
        loss = sum(losses(model, None))
        other, errors = copy.deepcopy(model), []

        def work(loss=loss, other=other, errors=errors):
            try:
                state = torch.get_rng_state()
                sb.draw(other, X[:2], samples=3, seed=4)
                torch.set_rng_state(state)
                loss.backward()
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not errors
        found.append(gradients(model))
    assert_alike(*found)


class Nested(Net):
    """A checkpoint inside a checkpoint, and a draw of another converted network inside this one's."""

    def __init__(self, reentrant=None):
        super().__init__(reentrant)
        self.aside = None

    def forward(self, x):
        def inside(x):
            return self.again(self.part, self.part(x))

        x = self.again(inside, torch.tanh(self.first(x)))
        if self.aside is not None:
            x = x + sb.draw(self.aside[0], x, samples=3).mean(0)[:, :7]
        return self.last(self.again(self.part, x))


@MODES
@pytest.mark.parametrize("method", ["rank1", "meanfield", "ktied", "local", "mcdropout"])
def test_nested_checkpoints(method, reentrant):
    found = []
    for model in pair(method, reentrant, Nested):
        sum(losses(model, None)).backward()
        found.append(gradients(model))
    assert_alike(*found)


@MODES
@pytest.mark.parametrize("method", ["rank1", "meanfield"])
def test_a_draw_inside_a_draw(method, reentrant):
    found = []
    for model in pair(method, reentrant, Nested):
        torch.manual_seed(9)
        aside = nn.Sequential(nn.Linear(7, 5), Net(model.reentrant))
        aside[1].last = nn.Linear(7, 7)
        sb.bayesianize(aside, METHODS[method])
        model.aside = (aside,)  # no part of the network itself
        sum(losses(model, None)).backward()
        found.append(gradients(model) | {f"aside.{n}": g for n, g in gradients(aside).items()})
    assert_alike(*found)


class Sequence(nn.Module):
    """A recurrent layer inside a checkpoint."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.embed, self.rnn, self.last = nn.Linear(1, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)
        self.reentrant = reentrant

    def forward(self, x):
        def run(x):
            return torch.tanh(self.rnn(x)[0])

        x = self.embed(x.unsqueeze(-1))
        x = run(x) if self.reentrant is None else checkpoint(run, x, use_reentrant=self.reentrant)
        return self.last(x[:, -1])


@MODES
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("method", ["rank1", "meanfield", "ktied", "flipout"])
def test_recurrent_layers(method, seed, reentrant):
    found = []
    for model in pair(method, reentrant, Sequence):
        sum(losses(model, seed)).backward()
        found.append(gradients(model))
    assert_alike(*found)


@pytest.mark.accelerate  # which makes the samples ahead
@pytest.mark.parametrize("seed", [None, 7])
def test_without_the_generators_state_there_is_an_error_or_the_same_noise(seed):
    """Keyed noise of a layer that is called several times cannot be told apart; samples made ahead are there."""
    torch.manual_seed(3)
    model = sb.bayesianize(Net(False, {"preserve_rng_state": False}), METHODS["mcdropout"])
    loss = losses(model, 7)[0]
    with pytest.raises(RuntimeError, match="preserve_rng_state=True"):
        loss.backward()
    found = []
    for options in ((), (False, {"preserve_rng_state": False})):
        torch.manual_seed(3)
        network = Net(*options)
        network.dropout = nn.Identity()
        model = sb.bayesianize(network, METHODS["meanfield"])
        if options and seed is not None:  # sampled by the layer itself, as torch's own checkpoint finds out
            with pytest.raises(RuntimeError, match="number of tensors was saved"):
                sum(losses(model, seed)).backward()
            return
        sum(losses(model, seed)).backward()
        found.append(gradients(model))
    assert_alike(*found)


@MODES
def test_a_call_outside_of_draws_is_none(reentrant):
    """Its rows are taken as tiled, also where the same backward pass comes to a draw."""
    found = []
    for model in pair("rank1", reentrant):
        torch.manual_seed(5)
        draws = sb.draw(model, X[:3].clone().requires_grad_(), samples=2)
        rows = model(X.clone().requires_grad_())
        (draws.square().sum() + rows.square().sum()).backward()
        found.append(gradients(model))
    assert_alike(*found)


@MODES
@pytest.mark.parametrize("method", ["meanfield", "ktied"])
def test_the_first_kl_is_as_every_other(method, reentrant):
    """A layer outside of the checkpointed part had its KL counted again in the first step."""
    _, model = pair(method, reentrant)
    for _ in range(2):
        result = sb.elbo(sb.draw(model, X.clone().requires_grad_()), Y, model, 50)
        torch.testing.assert_close(result.kl, sb.kl(model), rtol=1e-4, atol=1e-4)
