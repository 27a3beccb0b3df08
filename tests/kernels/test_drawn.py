"""Factors by two nodes: their twin of torch's own operations, and gradients that meet before they are parted."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers_kernels import DEVICE
from torch import nn

import slimbayes as sb
from slimbayes import fast_paths
from slimbayes.accelerate import factor_groups
from slimbayes.accelerate.gpu import factor_samples
from slimbayes.accelerate.gpu.factors import sample_factors

SETTINGS = (1, 3, "normal", None, torch.float32)


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    shapes = [(2, 5), (2, 1), (2, 8)]
    return [
        [torch.randn(shape, device=DEVICE, dtype=dtype, requires_grad=True) for shape in shapes]
        for _ in range(2)
    ]


@pytest.mark.parametrize("family", ["normal", "cauchy", "lognormal", "halfcauchy"])
@pytest.mark.parametrize("clip", [None, 1.5])
@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_twin(family, clip, triton, dtype):
    locs, rhos = parameters(dtype)
    seed = torch.tensor([7], device=DEVICE)
    with fast_paths(triton=triton):
        found = factor_samples.samples(
            factor_samples.join_all(locs, rhos), [5, 1, 8], seed, 2, 3, family, clip, dtype
        )
        exact = sample_factors(locs, rhos, seed, 2, 3, family, clip)
        grads = [torch.randn_like(one) for one in exact]
        for one, other in zip(found, exact, strict=True):
            assert torch.equal(one, other)
        wanted = [*locs, *rhos]
        for one, other in zip(
            torch.autograd.grad(found, wanted, grads), torch.autograd.grad(exact, wanted, grads), strict=True
        ):
            assert torch.equal(one, other)


def test_a_sample_that_nobody_uses_and_a_frozen_parameter():
    locs, rhos = parameters()
    rhos[1].requires_grad_(False)
    found = factor_samples.samples(
        factor_samples.join_all(locs, rhos), [5, 1, 8], torch.tensor([7], device=DEVICE), *SETTINGS
    )
    wanted = [*locs, rhos[0], rhos[2]]
    grads = torch.autograd.grad(found[2].sum(), wanted)
    assert [bool(grad.any()) for grad in grads] == [False, False, True, False, True]
    with pytest.raises(ValueError, match="family"):
        factor_samples.samples(
            factor_samples.join_all(locs, rhos),
            [5, 1, 8],
            torch.tensor([7]),
            1,
            3,
            "uniform",
            None,
            torch.float32,
        )


def test_gradients_meet_at_one_node():
    locs, rhos = parameters()
    first = nn.Identity()
    joint = factor_samples.join_all(locs, rhos)
    factor_samples.keep(first, joint)
    loc, rho = factor_samples.again(first, locs, rhos)
    assert torch.equal(loc, joint.loc) and torch.equal(rho, joint.rho)
    assert loc.grad_fn.next_functions[0][0] is joint.loc.grad_fn
    total = (loc.square() + rho).sum() + joint.loc.sum()
    for one in torch.autograd.grad(total, rhos, retain_graph=True):
        assert torch.equal(one, torch.ones_like(one))
    for one, other in zip(torch.autograd.grad(total, locs), locs, strict=True):
        torch.testing.assert_close(one, 2 * other + 1)
    assert factor_samples.again(first, locs, rhos) is None  # for one use


def test_values_are_those_of_now():
    locs, rhos = parameters()
    first = nn.Identity()
    factor_samples.keep(first, factor_samples.join_all(locs, rhos))
    locs[0].data.fill_(3.0)  # leaves no trace in the version
    loc, _ = factor_samples.again(first, locs, rhos)
    assert torch.equal(loc[:10], torch.full((10,), 3.0, device=DEVICE))


def test_other_parameters_are_not_taken_for_those_of_the_draw():
    locs, rhos = parameters()
    first = nn.Identity()

    def kept():
        factor_samples.keep(first, factor_samples.join_all(locs, rhos))

    kept()
    assert factor_samples.again(first, locs[:2], rhos[:2]) is None
    kept()
    assert factor_samples.again(first, [*locs[:2], locs[2].detach().clone()], rhos) is None
    kept()
    with torch.no_grad():
        assert factor_samples.again(first, locs, rhos) is None
    kept()
    rhos[0].requires_grad_(False)
    assert factor_samples.again(first, locs, rhos) is None
    assert not factor_samples.joinable([torch.zeros(1), type("Own", (torch.Tensor,), {})([1.0])])


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(factor_groups, "DEVICES", (DEVICE.type,))
    monkeypatch.setattr("slimbayes.accelerate.factor_groups.DEVICES", (DEVICE.type,))
    with fast_paths(native=False):
        yield


def network(**settings):
    torch.manual_seed(1)
    return sb.bayesianize(
        nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), sb.Rank1.paper(**settings)
    ).to(DEVICE)


def step(net, draws=1):
    net.zero_grad()
    torch.manual_seed(2)
    x, y = torch.ones(3, 4, device=DEVICE), torch.zeros(3, dtype=torch.long, device=DEVICE)
    for made in [sb.draw(net, x) for _ in range(draws)]:
        sb.elbo(made, y, net, num_data=10).loss.backward()
    return [p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize(
    "settings",
    [{}, {"posterior": "cauchy", "prior": sb.Cauchy(1.0, 0.1)}, {"clip": 1.1}],
    ids=["normal", "cauchy", "clip"],
)
@pytest.mark.parametrize("draws", [1, 2])
def test_steps(settings, draws, as_on_a_gpu, monkeypatch):
    net = network(**settings)
    step(net)
    found = step(net, draws)
    monkeypatch.setattr(factor_samples, "joinable", lambda _: False)
    for one, other in zip(found, step(net, draws), strict=True):
        torch.testing.assert_close(one, other)


def test_kl_after_a_step_and_copies(as_on_a_gpu):
    net = network()
    x = torch.ones(3, 4, device=DEVICE)
    sb.draw(net, x)
    copied = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.5)
    exact = copy.deepcopy(net)
    torch.testing.assert_close(sb.kl(net), sb.kl(exact))
    assert not torch.equal(sb.kl(copied), sb.kl(exact))


def lone(dtype=torch.float32):
    """A network with one factor, which is a group of its own."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 5))
    return sb.bayesianize(net, sb.Rank1.paper(components=2, factors="input")).to(DEVICE, dtype)


def test_one_factor_is_joined_in_memory_of_its_own(as_on_a_gpu):
    net, x = lone(), torch.randn(3, 4, device=DEVICE)
    grads = []
    for changed in (False, True):
        torch.manual_seed(2)
        net.zero_grad(set_to_none=True)
        y = sb.draw(net, x)
        rho = net[0].bayes.s.spread.rho
        if changed:
            rho.data.mul_(2.0)
        y.square().sum().backward()
        grads.append(rho.grad.clone())
    assert torch.equal(*grads)
    sb.draw(net, x)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(1.1)
    sb.kl(net).backward()


def test_a_network_that_changes_its_type_after_a_draw(as_on_a_gpu):
    net = network()
    sb.draw(net, torch.randn(3, net[0].in_features, device=DEVICE))
    net.double()
    sb.kl(net).backward()
    assert {p.grad.dtype for p in net.parameters() if p.grad is not None} == {torch.float64}


def test_vectorised_gradients(as_on_a_gpu):
    net = network()
    wanted = [p for n, p in net.named_parameters() if "bayes" in n]
    y = sb.draw(net, torch.randn(3, net[0].in_features, device=DEVICE))
    kl = sb.kl(net)
    for value in (y, kl):
        along = torch.randn(2, *value.shape, device=DEVICE)
        found = torch.autograd.grad(
            value, wanted, along, is_grads_batched=True, retain_graph=True, allow_unused=True
        )
        for i in range(2):
            exact = torch.autograd.grad(value, wanted, along[i], retain_graph=True, allow_unused=True)
            for one, other in zip(found, exact, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    torch.testing.assert_close(one[i], other, rtol=1e-4, atol=1e-5)


def test_parameters_that_are_computed_are_not_held(as_on_a_gpu):
    net = network()
    given = {name: p * 1.0 for name, p in net.named_parameters()}
    factor_samples._LAST.clear()
    torch.func.functional_call(Drawing(net), {f"net.{n}": p for n, p in given.items()}, torch.randn(3, 4))
    assert len(factor_samples._LAST) == 0


class Drawing(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return sb.draw(self.net, x[:, : self.net[0].in_features].to(DEVICE))
