"""What Theorem 1 of the rank-1 paper compares: a trained network, and how perturbed weights move it, by derivatives.

With a perturbation δ of the weights around a minimum W*, F = Σ_n f_n the negative log-likelihood, and layers perturbed
independently, there are the curvature that Equation 5 has, and two variances to first order,

    ½ E⟨δ, ∇²F δ⟩,      Σ_n E⟨∇f_n, δ⟩²,      E‖∇²F δ‖²  (the gradient's)

for W' = W* diag(s) with Cov(s) = Σ, and for a W' of covariance W_ij Σ_jl W_kl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.convert import bayesianize
from slimbayes.core.draws import draw
from slimbayes.core.methods import Rank1
from slimbayes.training import mixed_seed

WIDTH, DEPTH, EXAMPLES = 4, 2, 500  # few, so that the minimum of F is no flat one
_STEPS, _CLOSE = 200, 1e-6  # of Newton's method; below it F is too flat to be compared
QUANTITIES = ("curvature", "variance by example", "variance of the gradient")


@dataclass(frozen=True)
class Problem:
    """Examples, the readout a, the trained weights [layers, M, M] and a covariance Σ for each, [layers, M, M]."""

    x: Tensor
    y: Tensor
    readout: Tensor
    weights: Tensor
    sigma: Tensor

    def outputs(self, weights: Tensor) -> Tensor:
        """aᵀ tanh(W⁽ᴴ⁾ … tanh(W⁽¹⁾ x_n)), [..., N], of weights [..., layers, M, M]."""
        hidden = self.x
        for layer in range(DEPTH):
            hidden = torch.tanh(hidden @ weights[..., layer, :, :].mT)  # [..., N, M]
        return hidden @ self.readout

    def losses(self, weights: Tensor) -> Tensor:
        """f_n = ½ (y_n − output)², [..., N]: − log N(y_n; output, 1) but for a constant."""
        return 0.5 * (self.y - self.outputs(weights)).square()

    def covariance(self, indices: str = "jl") -> Tensor:
        """W_ij Σ_jl W_kl of every layer, [layers, M², M²]; ``indices="jk"`` has Σ as the paper prints it."""
        w = self.weights
        found = torch.einsum(f"hij,h{indices},hkl->hijkl", w, self.sigma, w)
        return found.reshape(DEPTH, WIDTH**2, WIDTH**2)


def random(*shape: int) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64)


def trained(seed: int) -> Problem:
    """A dense network in float64 at a minimum of F: trained from the network that made its noisy targets.

    >>> problem = trained(0)
    >>> float(gradients(problem, problem.weights.unsqueeze(0)).abs().max()) < 1e-9
    True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mixed_seed(seed, 7))
        x, readout = random(EXAMPLES, WIDTH), random(WIDTH)
        rotations = [
            nn.init.orthogonal_(torch.empty(WIDTH, WIDTH, dtype=torch.float64)) for _ in range(DEPTH)
        ]
        teacher = torch.stack(rotations) + 0.3 * random(DEPTH, WIDTH, WIDTH)
        root = random(DEPTH, WIDTH, WIDTH)
        problem = Problem(x, 0.1 * random(EXAMPLES), readout, teacher, root @ root.mT / WIDTH)
    problem = replace(problem, y=problem.y + problem.outputs(teacher))
    return replace(problem, weights=_minimum(problem))


def _minimum(problem: Problem) -> Tensor:
    """Weights at which ∇F vanishes, by Newton's steps: |eigenvalues| of ∇²F, so that F falls, halved until it does."""
    found, smallest = problem.weights, float("inf")
    for _ in range(_STEPS):
        gradient = gradients(problem, found.unsqueeze(0))[0]
        if float(gradient.abs().max()) >= smallest < _CLOSE:  # rounding: it does not fall any more
            break
        smallest = min(smallest, float(gradient.abs().max()))
        values, vectors = torch.linalg.eigh(_hessian(problem, found))
        step = vectors @ ((vectors.T @ gradient) / values.abs().clamp_min(1e-9 * values.abs().max()))
        step = step.reshape(found.shape)
        before = problem.losses(found).sum()
        while smallest > _CLOSE and problem.losses(found - step).sum() > before:
            step = step / 2
        found = found - step
    return found


def gradients(problem: Problem, weights: Tensor) -> Tensor:
    """∇F of every network, [draws, P]."""
    weights = weights.detach().requires_grad_()
    (found,) = torch.autograd.grad(problem.losses(weights).sum(), weights)
    return found.flatten(1)


def _hessian(problem: Problem, weights: Tensor) -> Tensor:
    """∇²F, [P, P]."""
    size = weights.numel()
    found: Tensor = torch.func.hessian(lambda w: problem.losses(w).sum())(weights)
    return found.reshape(size, size)


@dataclass(frozen=True)
class Exact:
    """Derivatives at the minimum in the weights: ∇f_n [N, P] and ∇²F [P, P]."""

    first: Tensor
    second: Tensor

    def of(self, covariance: Tensor) -> dict[str, float]:
        """The three quantities for perturbations of the weights with these covariances, [layers, M², M²]."""
        whole = torch.block_diag(*covariance)  # [P, P]: layers are independent
        return _three(self.first, self.second, self.second, whole)


def _three(first: Tensor, second: Tensor, jacobian: Tensor, covariance: Tensor) -> dict[str, float]:
    """½ tr(C ∇²F), Σ_n ∇f_nᵀ C ∇f_n and tr(J C Jᵀ)."""
    values = (
        0.5 * (covariance * second).sum(),
        ((first @ covariance) * first).sum(),
        ((jacobian @ covariance) * jacobian).sum(),
    )
    return dict(zip(QUANTITIES, map(float, values), strict=True))


def exact(problem: Problem) -> Exact:
    """First and second derivatives in the weights.

    >>> problem = trained(0)
    >>> bool(torch.linalg.eigvalsh(exact(problem).second)[0] > 0)  # a minimum
    True
    """
    first = torch.func.jacrev(problem.losses)(problem.weights).reshape(EXAMPLES, -1)
    return Exact(first, _hessian(problem, problem.weights))


def exact_factors(problem: Problem) -> dict[str, float]:
    """The three quantities for perturbations of s, by derivatives in the s of a network that ``Rank1`` converted.

    >>> problem = trained(0)
    >>> full = exact(problem).of(problem.covariance())
    >>> all(abs(value / full[name] - 1) < 1e-9 for name, value in exact_factors(problem).items())
    True
    """
    layers: list[nn.Module] = []
    for weight in problem.weights:
        linear = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
        linear.weight.data = weight.clone()
        layers += [linear, nn.Tanh()]
    model = bayesianize(nn.Sequential(*layers), Rank1.paper(components=1, factors="input"))
    converted: list[Any] = [module for module in model if hasattr(module, "weight")]
    factors = [module.bayes.s.loc for module in converted]
    for factor in factors:
        nn.init.ones_(factor)
    losses = 0.5 * (problem.y - draw(model, problem.x, noise="mean")[0] @ problem.readout).square()
    score = torch.autograd.grad(losses.sum(), [module.weight for module in converted], create_graph=True)
    slope = torch.autograd.grad(losses.sum(), factors, create_graph=True)
    covariance = torch.block_diag(*problem.sigma)
    # At the minimum the gradient in W* and that in W* diag(s) move alike: their difference is ∇F itself.
    return _three(
        _rows(losses, factors), _rows(_flat(slope), factors), _rows(_flat(score), factors), covariance
    )


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def _rows(values: Tensor, inputs: Sequence[Tensor]) -> Tensor:
    """Derivatives of every value in the inputs, [values, inputs]."""
    return torch.stack([_flat(torch.autograd.grad(v, inputs, retain_graph=True)) for v in values])
