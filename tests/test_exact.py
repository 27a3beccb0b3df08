"""Linear-Gaussian problems, where the evidence and the best mean-field posterior are known in closed form."""

import math
from dataclasses import dataclass

import pytest
import torch
from helpers_statistics import F64, assert_covariance, assert_mean, force_noise, scatter
from torch import nn
from torch.func import functional_call

import slimbayes as sb


@dataclass
class Problem:
    """y = J θ + c + noise of precision τ, with the prior θ ~ N(m, s²).

    The posterior has precision A = τ JᵀJ + 1/s² and mean A⁻¹(τ Jᵀ(y − c) + m/s²); the best independent
    Normals have its mean and the variances 1/A_ii.
    """

    jacobian: torch.Tensor
    offset: torch.Tensor
    targets: torch.Tensor
    precision: float
    prior_mean: float
    prior_scale: float
    num_data: int

    @property
    def posterior(self):
        j, eye = self.jacobian, torch.eye(self.jacobian.shape[1], dtype=F64)
        precision = self.precision * j.T @ j + eye / self.prior_scale**2
        residual = (self.targets.flatten() - self.offset).unsqueeze(1)
        pull = self.precision * j.T @ residual + self.prior_mean / self.prior_scale**2
        return torch.linalg.solve(precision, pull).squeeze(1), precision

    @property
    def log_evidence(self):
        j = self.jacobian
        covariance = torch.eye(len(j), dtype=F64) / self.precision + self.prior_scale**2 * j @ j.T
        mean = self.offset + self.prior_mean * j.sum(1)
        law = torch.distributions.MultivariateNormal(mean, covariance)
        return law.log_prob(self.targets.flatten()).item()

    def elbo(self, mean, sigma):
        """log evidence − KL(q‖posterior) for independent Normals q."""
        centre, precision = self.posterior
        q = torch.distributions.MultivariateNormal(mean, scale_tril=torch.diag(sigma))
        p = torch.distributions.MultivariateNormal(centre, precision_matrix=precision)
        return self.log_evidence - torch.distributions.kl_divergence(q, p).item()

    @property
    def optimum(self):
        mean, precision = self.posterior
        return mean, precision.diagonal().rsqrt()


def linear_map(run, sizes):
    """Jacobian and offset of a function that is linear in tensors of these shapes."""
    zeros = tuple(torch.zeros(size, dtype=F64) for size in sizes)
    offset = run(*zeros).flatten()
    parts = torch.autograd.functional.jacobian(lambda *values: run(*values).flatten(), zeros)
    return torch.cat([part.flatten(1) for part in parts], 1), offset


PRIOR, PRECISION = sb.Normal(0.1, 0.5), 4.0


def regression(rows=30, weak=0.2):
    """Three correlated inputs, two hidden units to infer, and a fixed readout of three outputs.

    The readout hears the second unit ``weak``ly: the best σ_ij = (τ c_i t_j + 1/s²)^(−½) is then far from a
    product of an i and a j part.
    """
    torch.manual_seed(0)
    x = torch.randn(rows, 3, dtype=F64)
    x[:, 1] += 0.8 * x[:, 0]
    x *= torch.tensor([1.0, 0.7, 0.4], dtype=F64)
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3)).double()
    with torch.no_grad():
        net[1].weight.mul_(torch.tensor([2.0, weak], dtype=F64))
    net[1].requires_grad_(False)

    def run(weight, bias):
        return functional_call(net, {"0.weight": weight, "0.bias": bias}, (x,))

    with torch.no_grad():
        truth = run(torch.randn(2, 3, dtype=F64), torch.randn(2, dtype=F64))
        y = truth + torch.randn_like(truth) / math.sqrt(PRECISION)
    jacobian, offset = linear_map(run, [(2, 3), (2,)])
    return net, x, y, Problem(jacobian, offset, y, PRECISION, PRIOR.loc, PRIOR.scale, rows)


def current(model):
    """Means and standard deviations of the converted layer, in the problem's order."""
    weight, bias = model[0].bayes.weight(model[0].weight), model[0].bayes.bias(model[0].bias)
    return (
        torch.cat([weight.loc.flatten(), bias.loc]).detach(),
        torch.cat([weight.scale.flatten(), bias.scale]).detach(),
    )


def orthogonal_noise(monkeypatch):
    """Noise of exactly zero mean, unit variance and no correlation over 16 samples; signs are all +1.

    A quadratic loss then has exactly its expectation, and the objective is a deterministic function.
    """
    hadamard = torch.ones(1, 1, dtype=F64)
    for _ in range(4):
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    places = {}

    def make(kind, source, size):
        if kind == "sign":
            return torch.ones(size, dtype=F64)
        count = math.prod(size[3:])
        if source not in places:
            places[source] = 1 + sum(length for _, length in places.values()), count
        start, count = places[source]
        assert start + count <= 16
        return hadamard[:, start : start + count].reshape(1, 16, 1, *size[3:])

    force_noise(monkeypatch, make)


METHODS = {
    "shared": lambda: sb.MeanField.paper(prior=PRIOR),
    "flipout": lambda: sb.MeanField.paper(prior=PRIOR, estimator="flipout"),
    "local": lambda: sb.MeanField.paper(prior=PRIOR, estimator="local"),
    "KTied shared": lambda: sb.KTied.paper(rank=2, prior=PRIOR),
    "KTied local": lambda: sb.KTied.paper(rank=2, prior=PRIOR, estimator="local"),
}


def minimise(model, objective):
    """A deterministic objective to the bottom."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    solver = torch.optim.LBFGS(
        parameters, max_iter=400, tolerance_grad=1e-9, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure():
        solver.zero_grad()
        loss = objective()
        loss.backward()
        return loss

    solver.step(closure)


@pytest.mark.parametrize("name", METHODS)
def test_loss_is_the_exact_negative_elbo(monkeypatch, name):
    """N · loss = −log evidence + KL(q‖posterior) at any q, so never below −log evidence."""
    net, x, y, problem = regression()
    model = scatter(sb.bayesianize(net, METHODS[name](), include="^0$"))
    orthogonal_noise(monkeypatch)
    result = sb.elbo(sb.draw(model, x, samples=16), y, model, len(x), sb.Gaussian(PRECISION))
    assert -len(x) * result.loss.item() == pytest.approx(problem.elbo(*current(model)), rel=1e-10)
    assert -len(x) * result.loss.item() < problem.log_evidence


@pytest.mark.parametrize("name", METHODS)
def test_exact_objective_reaches_the_closed_form(monkeypatch, name):
    net, x, y, problem = regression()
    torch.manual_seed(1)
    model = sb.bayesianize(net, METHODS[name](), include="^0$")
    orthogonal_noise(monkeypatch)
    likelihood = sb.Gaussian(PRECISION)
    minimise(model, lambda: sb.elbo(sb.draw(model, x, samples=16), y, model, len(x), likelihood).loss)
    mean, sigma = current(model)
    best_mean, best_sigma = problem.optimum
    torch.testing.assert_close(mean, best_mean, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(sigma, best_sigma, rtol=1e-4, atol=0.0)
    assert problem.elbo(mean, sigma) == pytest.approx(problem.elbo(best_mean, best_sigma), abs=1e-6)


def test_rank_one_cannot_hold_this_optimum(monkeypatch):
    """What makes the full rank's success worth a test."""
    net, x, y, problem = regression()
    model = sb.bayesianize(net, sb.KTied.paper(rank=1, prior=PRIOR), include="^0$")
    orthogonal_noise(monkeypatch)
    likelihood = sb.Gaussian(PRECISION)
    minimise(model, lambda: sb.elbo(sb.draw(model, x, samples=16), y, model, len(x), likelihood).loss)
    assert (problem.elbo(*problem.optimum) - problem.elbo(*current(model))) / len(x) > 2e-3


@pytest.mark.uncounted
@pytest.mark.parametrize(
    ("name", "samples"),
    [("shared", 512), ("flipout", 128), ("local", 128), ("KTied local", 128)],
)
def test_training_converges_to_the_closed_form(name, samples):
    """Adam on sampled draws: means to 1e-3, standard deviations to 2 %, the ELBO to 1e-3 per datum."""
    net, x, y, problem = regression(rows=60, weak=2.0)
    torch.manual_seed(2)
    model = sb.bayesianize(net, METHODS[name](), include="^0$")
    likelihood, steps = sb.Gaussian(precision=PRECISION), 400
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 - t / steps)
    tail = [torch.zeros_like(p) for p in parameters]  # the mean of the last half of the way
    for step in range(steps):
        optimizer.zero_grad()
        draws = sb.draw(model, x, samples=samples)
        sb.elbo(draws, y, model, num_data=len(x), likelihood=likelihood).loss.backward()
        optimizer.step()
        schedule.step()
        if step >= steps // 2:
            for total, parameter in zip(tail, parameters, strict=True):
                total += parameter.detach() / (steps - steps // 2)
    with torch.no_grad():
        for total, parameter in zip(tail, parameters, strict=True):
            parameter.copy_(total)
    mean, sigma = current(model)
    best_mean, best_sigma = problem.optimum
    gap = (problem.elbo(best_mean, best_sigma) - problem.elbo(mean, sigma)) / len(x)
    assert -1e-12 <= gap < 1e-3
    torch.testing.assert_close(mean, best_mean, rtol=0.0, atol=1e-3)
    torch.testing.assert_close(sigma, best_sigma, rtol=0.02, atol=0.0)


def test_batches_add_up_to_the_whole(monkeypatch):
    """The mean loss over equal batches is the full-batch loss: the KL is divided by num_data alone."""
    net, x, y, _ = regression()
    model = scatter(sb.bayesianize(net, sb.MeanField.paper(prior=PRIOR), include="^0$"))
    orthogonal_noise(monkeypatch)
    likelihood = sb.Gaussian(PRECISION)

    def loss(rows):
        return sb.elbo(sb.draw(model, x[rows], samples=16), y[rows], model, len(x), likelihood).loss

    parts = torch.stack([loss(slice(start, start + 6)) for start in range(0, 30, 6)])
    torch.testing.assert_close(parts.mean(), loss(slice(0, 30)), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("noise", ["example", "shared"])
def test_rank1_factors_reach_the_closed_form(monkeypatch, noise):
    """With a frozen base the output is linear in s: y = W (s ∘ x) + b with the prior s ~ N(1, 0.1²)."""
    torch.manual_seed(3)
    layer, x = nn.Linear(4, 2).double(), torch.randn(25, 4, dtype=F64)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()

    def run(s):
        return (x * s) @ weight.T + bias

    y = run(1.0 + 0.2 * torch.randn(4, dtype=F64)) + 0.05 * torch.randn(25, 2, dtype=F64)
    problem = Problem(*linear_map(run, [(4,)]), y, 400.0, 1.0, 0.1, 25)
    model = sb.bayesianize(layer, sb.Rank1.paper(components=1, factors="input", train_base=False))
    orthogonal_noise(monkeypatch)
    likelihood = sb.Gaussian(precision=400.0)
    minimise(
        model,
        lambda: sb.elbo(sb.draw(model, x, samples=16, noise=noise), y, model, 25, likelihood).loss,
    )
    factor = model.bayes.s()
    mean, sigma = problem.optimum
    torch.testing.assert_close(factor.loc[0].detach(), mean, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(factor.scale[0].detach(), sigma, rtol=1e-4, atol=0.0)
    loss = sb.elbo(sb.draw(model, x, samples=16, noise=noise), y, model, 25, likelihood).loss
    assert -25 * loss.item() == pytest.approx(problem.elbo(mean, sigma), abs=1e-6)
    assert -25 * loss.item() < problem.log_evidence


@pytest.mark.parametrize("noise", ["example", "shared"])
@pytest.mark.parametrize("seed", [None, 5])
def test_predictive_of_the_linear_gaussian_model(noise, seed):
    """Mean J μ + c, epistemic variance diag(J σ² Jᵀ), aleatoric variance 1/τ."""
    net, x, _, problem = regression(rows=4)
    model = scatter(sb.bayesianize(net, sb.MeanField.paper(prior=PRIOR, estimator="local"), include="^0$"))
    likelihood = sb.Gaussian(precision=PRECISION)
    prediction = sb.predict(model, x, samples=20_000, noise=noise, seed=seed, likelihood=likelihood)
    mean, sigma = current(model)
    centre = problem.jacobian @ mean + problem.offset
    variance = problem.jacobian.square() @ sigma.square()
    assert_mean(prediction.draws.flatten(1), centre)
    torch.testing.assert_close(prediction.epistemic.flatten(), variance, rtol=5.5 * 0.01, atol=0.0)
    torch.testing.assert_close(prediction.aleatoric, torch.full((4, 3), 1 / PRECISION, dtype=F64))
    joint = (problem.jacobian * sigma.square()) @ problem.jacobian.T
    if noise == "shared":
        assert_covariance(prediction.draws.flatten(1), joint)
