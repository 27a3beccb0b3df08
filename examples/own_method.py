"""A method of your own: Gaussian dropout, y = op(x ∘ ε, W) with ε ~ N(1, α) (Srivastava et al. 2014)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.core import context
from slimbayes.core import distributions as d
from slimbayes.core.layers.base import Converted
from slimbayes.core.layers.table import is_weighted
from slimbayes.core.methods import METHODS, Method
from slimbayes.core.methods.base import Outline, Shared, Traits, check_positive, needs_linear
from slimbayes.core.rules.base import Inputs, Operation, Rule, sample, scale_inputs


class GaussianNoiseRule(Rule):
    """Multiply every input channel by noise of mean one: per example, or per draw when noise is shared."""

    def __init__(self, name: str, alpha: float) -> None:
        super().__init__()
        self.name = name  # the layer's name: it keys the noise of a seeded draw
        self.alpha = alpha

    def forward(self, op: Operation, inputs: Inputs) -> Tensor:
        """The layer's output for these inputs."""
        frame = context.frame(self.name, inputs[0].shape[0])  # how rows split into draws and examples
        one = op.weight.new_ones(sum(slot.size for slot in op.input_slots))  # [channels]
        spread = d.Normal(one, one * self.alpha**0.5)
        source, per_example = f"{self.name}.epsilon", frame.noise == "example"
        epsilon = frame.once(source, lambda: sample(spread, frame, source, per_example, component_axis=False))
        return op.compute(scale_inputs(op, inputs, epsilon, frame, torch.mul), op.weight, op.bias)


@dataclass(frozen=True)
class GaussianDropout(Method):
    """Gaussian noise of variance ``alpha`` on the inputs of the selected layers.

    >>> GaussianDropout(alpha=0.25).alpha
    0.25
    """

    alpha: float = 0.25

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)

    @property
    def traits(self) -> Traits:
        """Draws are samples alone, everything is trained, and the weight is deterministic."""
        return Traits()

    def selects(self, name: str, module: nn.Module, outline: Outline) -> bool:
        """Layers that multiply by a weight."""
        return is_weighted(module)

    def refuses(self, layer: type[Converted]) -> str | None:
        """Why this kind of layer cannot be converted, or None if it can."""
        return needs_linear("GaussianDropout", layer)

    def attach(self, layer: Converted, name: str, shared: Shared) -> Rule:
        """No new parameters."""
        return GaussianNoiseRule(name, self.alpha)


METHODS["GaussianDropout"] = GaussianDropout  # so that sb.load finds it by name


def main() -> dict[str, float]:
    torch.manual_seed(0)
    x = torch.randn(4, 3)
    model = sb.bayesianize(nn.Linear(3, 2), GaussianDropout(alpha=0.25))
    draws = sb.draw(model, x, samples=20_000, seed=0)  # [20000, 4, 2]
    # Var[y_j | x] = α Σ_i x_i² w_ij²
    expected = 0.25 * x.square() @ model.weight.detach().square().t()
    ratio = (draws.var(0) / expected).mean().item()
    mean_gap = (draws.mean(0) - sb.draw(model, x, noise="mean")[0]).abs().max().item()
    print(f"sampled variance / α Σ x² w² = {ratio:.3f}; largest gap of the means {mean_gap:.4f}")
    return {"ratio": ratio, "mean_gap": mean_gap}


if __name__ == "__main__":
    main()
