"""A posterior of your own for rank-1 factors: Student's t with four degrees of freedom, which has heavy tails."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributions as td

import slimbayes as sb
from slimbayes.core.kl import closed, monte_carlo
from slimbayes.core.methods.rank1 import FAMILIES, Family
from slimbayes.core.posteriors import Posterior, inverse_softplus, positive
from slimbayes.core.priors import PRIORS, Prior


class Student(td.Distribution):
    """x = loc + scale·t with t of four degrees of freedom, whose quantiles have a closed form (Shaw 2006)."""

    noise = "uniform"  # what ``from_noise`` is handed; there are "normal", "cauchy", "uniform" and "sign"
    arg_constraints = {}

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = torch.broadcast_tensors(loc, scale)
        super().__init__(self.loc.shape, validate_args=False)

    def point(self) -> Tensor:
        """The mean."""
        return self.loc

    def from_noise(self, u: Tensor) -> Tensor:
        """The quantile of u: t = ±2·sqrt(cos(arccos(√a)/3)/√a − 1) with a = 4u(1 − u)."""
        u = u.clamp(1e-7, 1 - 1e-7)
        root = (4 * u * (1 - u)).clamp(max=1.0).sqrt()
        return (
            self.loc
            + self.scale * (u - 0.5).sign() * 2 * ((root.acos() / 3).cos() / root - 1).clamp_min(0).sqrt()
        )

    def log_prob(self, value: Tensor) -> Tensor:
        """log 3/8 − log scale − 5/2 log(1 + z²/4)."""
        z = (value - self.loc) / self.scale
        return math.log(3 / 8) - self.scale.log() - 2.5 * torch.log1p(z * z / 4)


class StudentPosterior(Posterior):
    """Student(loc, scale), scale = softplus(ρ) + 1e-7."""

    def __init__(self, sigma: Tensor) -> None:
        super().__init__()
        self.rho = nn.Parameter(inverse_softplus(sigma))

    def forward(self, loc: Tensor) -> Student:
        """The distribution around ``loc``."""
        return Student(loc, positive(self.rho))


@dataclass(frozen=True)
class StudentPrior(Prior):
    """Student(loc, scale), elementwise."""

    loc: float = 1.0
    scale: float = 0.1

    def distribution(self, like: Tensor, fan_in: int | None = None) -> Student:
        """The prior of a tensor like ``like``."""
        return Student(torch.full_like(like, self.loc), torch.full_like(like, self.scale))


closed(Student, Student)(monte_carlo)  # no formula is known: the KL is estimated, at one sample per element
PRIORS["StudentPrior"] = StudentPrior  # so that sb.load finds it by name
FAMILIES["student"] = Family(StudentPosterior, lambda one: StudentPrior(one, 0.1))


def main() -> dict[str, float]:
    torch.manual_seed(0)
    model = sb.bayesianize(
        nn.Linear(8, 1, bias=False), sb.Rank1(components=1, posterior="student", factors="input")
    )
    draws = sb.draw(model, torch.eye(8), samples=20_000, seed=0).squeeze(-1)  # [20000, 8]: s_i · w_i
    t = (draws - sb.draw(model, torch.eye(8), noise="mean").squeeze(-1)) / model.weight[0].abs().detach()
    ratio = (
        (t.std(0) / (math.sqrt(2) * positive(model.bayes.s.spread.rho[0]))).mean().item()
    )  # Var[t] = ν/(ν − 2)
    x, y = torch.randn(64, 8), torch.randn(64, 1)
    loss = sb.elbo(sb.draw(model, x, samples=4), y, model, num_data=64, likelihood=sb.Gaussian())
    loss.loss.backward()
    print(f"standard deviation / √2 scale = {ratio:.3f}; KL {loss.kl.item():.2f}")
    return {"ratio": ratio, "kl": loss.kl.item()}


if __name__ == "__main__":
    main()
