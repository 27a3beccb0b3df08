"""Fused weight samples and their KL: the plain path's values and gradients, whatever the order of the calls."""

import pickle
from dataclasses import replace

import pytest
import torch
from helpers_statistics import F64, scatter
from torch import nn
from torch.utils.checkpoint import checkpoint

import slimbayes as sb
from slimbayes.accelerate import log_sigma

METHODS = {  # with biases, whose noise the tests of the kernels in C count
    "meanfield": sb.MeanField(biases=True),
    "meanfield normal prior": sb.MeanField.paper(),
    "meanfield shifted prior": sb.MeanField(biases=True, prior=sb.Normal(0.2, 0.5)),
    "meanfield he prior": sb.MeanField(biases=True, prior=sb.HeNormal()),
    "meanfield empirical prior": sb.MeanField(biases=True, prior=sb.EmpiricalNormal(0.2)),
    "meanfield tied mean": sb.MeanField(biases=True, prior=sb.Normal(0.0, 0.1), tied_mean=True),
    "meanfield cauchy prior": sb.MeanField(biases=True, prior=sb.Cauchy(0.0, 0.5)),
    "meanfield capped": sb.MeanField(biases=True, stddev_max=0.3),
    "meanfield flipout": sb.MeanField(biases=True, estimator="flipout"),
    "meanfield local": sb.MeanField(biases=True, estimator="local"),
    "ktied 1": sb.KTied(biases=True, rank=1),
    "ktied": sb.KTied(biases=True),
    "ktied 3": sb.KTied(biases=True, rank=3, prior=sb.HeNormal()),
    "ktied empirical prior": sb.KTied(biases=True, prior=sb.EmpiricalNormal()),
    "ktied flipout": sb.KTied(biases=True, estimator="flipout"),
    "ktied local": sb.KTied(biases=True, estimator="local"),
}
X = torch.randn(6, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def network(method, dtype=F64):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    return scatter(sb.bayesianize(net, method), 0.05, 0.3)


def gradients(model):
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def run(work, model, fast):
    """Gradients of all parameters after ``work(model)``, with or without the fast weights, from the same seed."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    with sb.fast_paths(weights=fast, log_sigma=False):
        value = work(model)
    return value, gradients(model)


def assert_twins(work, model, tolerance=1e-10):
    (fast, fast_grads), (plain, plain_grads) = run(work, model, True), run(work, model, False)
    torch.testing.assert_close(fast, plain, rtol=tolerance, atol=tolerance)
    for name, expected in plain_grads.items():
        torch.testing.assert_close(fast_grads[name], expected, rtol=tolerance, atol=tolerance, msg=name)


def loss_of(model, samples=1, seed=3):
    return sb.elbo(sb.draw(model, X, samples=samples, seed=seed), Y, model, num_data=20)


def together(model):
    result = loss_of(model)
    result.loss.backward()
    return result.loss.detach()


def several_samples(model):
    result = loss_of(model, samples=3)
    result.loss.backward()
    return result.loss.detach()


def kl_alone(model):
    value = sb.kl(model)
    value.backward()
    return value.detach()


def kl_twice(model):
    draws = sb.draw(model, X, seed=3)
    value = sb.kl(model) + 2 * sb.kl(model)
    (draws.square().sum() + value).backward()
    return value.detach()


def kl_of_another_draw(model):
    """A draw whose KL is never asked for, then its backward pass, then a KL."""
    sb.draw(model, X, seed=3).square().sum().backward()
    value = sb.kl(model)
    value.backward()
    return value.detach()


def separate_backward(model):
    result = loss_of(model)
    result.nll.backward()
    result.kl.backward()
    return result.loss.detach()


def kl_first(model):
    result = loss_of(model)
    result.kl.backward()
    result.nll.backward()
    return result.loss.detach()


def two_draws_one_backward(model):
    first, second = loss_of(model, seed=3), loss_of(model, seed=4)
    loss = first.loss + 2 * second.loss
    loss.backward()
    return loss.detach()


def two_draws_then_kl(model):
    draws = sb.draw(model, X, seed=3).square().sum() + sb.draw(model, X, seed=4).sum()
    loss = draws + sb.kl(model)
    loss.backward()
    return loss.detach()


def retained(model):
    result = loss_of(model)
    result.loss.backward(retain_graph=True)
    result.loss.backward()
    return result.loss.detach()


def after_a_step(model):
    """The parameters change between the draw and the KL: what the draw left behind is of no use."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    draws = sb.draw(model, X, seed=3)
    draws.square().sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
    value = sb.kl(model)
    value.backward()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
    return value.detach()


def of_some_inputs(model):
    """torch.autograd.grad with respect to one tensor alone."""
    result = loss_of(model)
    (found,) = torch.autograd.grad(result.loss, [model[0].weight], retain_graph=True)
    rest = [p for n, p in model.named_parameters() if "bayes" in n]
    more = torch.autograd.grad(result.loss, rest)
    return torch.cat([found.flatten(), *(g.flatten() for g in more)])


def frozen_means(model):
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)
    try:
        return together(model)
    finally:
        for layer in (model[0], model[2]):
            layer.weight.requires_grad_(True)


def no_gradients(model):
    with torch.no_grad():
        return sb.draw(model, X, samples=2, seed=3) + sb.kl(model)


def checkpointed(model):
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=False)

    wrapped = Inside()
    result = sb.elbo(sb.draw(wrapped, X, seed=3), Y, model, num_data=20)
    result.loss.backward()
    return result.loss.detach()


def second_derivative(model):
    result = loss_of(model)
    found = torch.autograd.grad(result.loss, list(model.parameters()), create_graph=True)
    value = sum(g.square().sum() for g in found)
    value.backward()
    return value.detach()


WORKS = [
    together,
    several_samples,
    kl_alone,
    kl_twice,
    kl_of_another_draw,
    separate_backward,
    kl_first,
    two_draws_one_backward,
    two_draws_then_kl,
    retained,
    after_a_step,
    of_some_inputs,
    frozen_means,
    no_gradients,
    checkpointed,
    second_derivative,
]


def test_saving_after_a_draw():
    model = network(sb.MeanField())
    sb.draw(model, X)
    again = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(sb.kl(again), sb.kl(model))


@pytest.mark.parametrize("name", ["meanfield", "ktied", "ktied local", "meanfield flipout"])
def test_autocast_samples_in_float32(name):
    model = network(METHODS[name], torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = sb.draw(model, X.float(), seed=3)
        loss = found.float().square().sum() + sb.kl(model)
    loss.backward()
    fast = gradients(model)
    model.zero_grad()
    with sb.fast_paths(False), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = sb.draw(model, X.float(), seed=3)
        loss = expected.float().square().sum() + sb.kl(model)
    loss.backward()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    for key, value in gradients(model).items():
        torch.testing.assert_close(fast[key], value, rtol=0.05, atol=0.05 * value.abs().max().item() + 1e-4)


@pytest.mark.parametrize("name", ["meanfield", "ktied", "ktied local", "meanfield flipout"])
def test_finite_differences_of_several_draws(name):
    """Several samples and several draws before one backward pass: the noise of each must be kept."""
    model = network(replace(METHODS[name], prior=sb.Normal(0.0, 0.3)))  # whose scale stays where means move

    def loss():
        return loss_of(model, samples=2, seed=3).loss + loss_of(model, samples=3, seed=5).loss

    loss().backward()
    for parameter in model.parameters():
        flat, grad = parameter.data.view(-1), parameter.grad.view(-1)
        for i in (0, flat.numel() - 1):
            keep, step = flat[i].item(), 1e-5
            values = []
            for sign in (1, -1):
                flat[i] = keep + sign * step
                with torch.no_grad():
                    values.append(loss().item())
            flat[i] = keep
            assert grad[i].item() == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-8)


def test_unseeded_noise_follows_torchs_generator():
    for name in ("meanfield", "ktied", "ktied local", "meanfield flipout"):
        model = network(METHODS[name], torch.float32)
        made = []
        for _ in range(2):
            torch.manual_seed(5)
            made.append(sb.draw(model, X.float()))
        assert torch.equal(*made)


def test_large_rho_is_not_overflowed():
    model = network(sb.MeanField())
    with torch.no_grad():
        model[0].bayes.weight.rho[0, 0] = 800.0
    assert_twins(kl_twice, model)


def test_zero_inputs_have_no_slope():
    model = sb.bayesianize(nn.Linear(4, 3, bias=False).double(), sb.KTied(estimator="local"))
    x = torch.zeros(2, 4, dtype=F64, requires_grad=True)
    sb.draw(model, x).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters()) and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize(
    ("dtype", "value_error", "gradient_error"), [(torch.float32, 1e-6, 1e-4), (F64, 1e-13, 1e-11)]
)
def test_interpolated_log_sigma(monkeypatch, dtype, value_error, gradient_error, spread):
    monkeypatch.setattr(log_sigma, "SMALLEST", 1)
    torch.manual_seed(2)
    u, v = (-2.6 + spread * torch.randn(n, 2, dtype=dtype) for n in (150, 90))
    u.requires_grad_(), v.requires_grad_()
    u64, v64 = (t.detach().double().requires_grad_() for t in (u, v))
    expected = log_sigma.exact(u64, v64)
    wanted = torch.autograd.grad(expected, (u64, v64))
    for value in (log_sigma.sum_log_sigma(u, v), log_sigma.interpolated(u, v)[0]):
        assert value.item() == pytest.approx(expected.item(), rel=value_error)
        for found, exact in zip(torch.autograd.grad(value, (u, v)), wanted, strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=gradient_error, atol=0)


def test_number_of_nodes():
    assert (
        log_sigma.nodes_needed(0.0, 1e-9)
        < log_sigma.nodes_needed(1.0, 1e-9)
        < log_sigma.nodes_needed(3.0, 1e-9)
    )
    assert log_sigma.nodes_needed(float("inf"), 1e-9) > log_sigma._MOST_NODES
    assert log_sigma.nodes_needed(float("nan"), 1e-9) > log_sigma._MOST_NODES


def test_interpolated_kl_of_a_model():
    torch.manual_seed(3)
    model = sb.bayesianize(nn.Linear(400, 350), sb.KTied())
    found, found_grads = run(kl_alone, model, True)
    model.zero_grad()
    with sb.fast_paths(weights=True, log_sigma=True):
        value = sb.kl(model)
        value.backward()
    assert value.item() == pytest.approx(found.item(), rel=1e-6)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, found_grads[name], rtol=1e-4, atol=1e-5)


@pytest.mark.uncounted
def test_the_operation_compiles():
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = sb.bayesianize(nn.Linear(400, 350), sb.KTied(estimator="local"))
    x, y = torch.randn(8, 400), torch.zeros(8, dtype=torch.long)

    def loss(x, y):
        return sb.elbo(sb.draw(model, x, seed=2), y, model, num_data=100).loss

    loss(x, y).backward()
    expected = gradients(model)
    model.zero_grad()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(x, y).backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-3, atol=1e-4)
    torch._dynamo.reset()


def test_a_spread_that_was_given_other_memory_has_its_own_kl():
    model = sb.bayesianize(nn.Linear(6, 5), sb.MeanField())
    sb.draw(model, torch.randn(4, 6))
    rho = model.bayes.weight.rho
    rho.data = torch.zeros_like(rho)  # no version counts this
    first, second = sb.kl(model), sb.kl(model)
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("method", [sb.KTied(), sb.KTied(estimator="flipout"), sb.MeanField()], ids=str)
def test_weights_with_channels_last(method, native, monkeypatch):
    """Convolutions whose σ is written over, as that of a large one is, in memory of another order."""
    monkeypatch.setattr(log_sigma, "SMALLEST", 1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.Conv2d(6, 8, 5), nn.Flatten(), nn.Linear(128, 3))
    model = sb.bayesianize(net.to(memory_format=torch.channels_last), method)
    x, y = torch.randn(4, 1, 12, 12).to(memory_format=torch.channels_last), torch.tensor([0, 1, 2, 0])
    found = []
    for fast in (True, False):
        model.zero_grad(set_to_none=True)
        with sb.fast_paths(weights=fast, native=native):
            result = sb.elbo(sb.draw(model, x, seed=3), y, model, num_data=10)
            result.loss.backward()
            sb.elbo(
                sb.draw(model, x), y, model, num_data=10
            ).loss.backward()  # unseeded: the kernels' own noise
        found.append((result.loss.detach(), result.kl.detach()))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
