"""A layer type of your own: a gated product y = (x Vᵀ) ∘ sigmoid(x Wᵀ + b), of which every method can take W."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import slimbayes as sb
from slimbayes.core.layers.base import Converted
from slimbayes.core.layers.table import WEIGHTED
from slimbayes.core.rules.base import Inputs, Slot
from slimbayes.core.rules.groups import one_by_one


class Gate(nn.Module):
    """The plain layer, which knows nothing of slimbayes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Rows [B, inputs] to [B, outputs]."""
        return gated(x, self.value, self.weight, self.bias)


def gated(x: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(x Vᵀ) ∘ sigmoid(x Wᵀ + b)."""
    return F.linear(x, value) * torch.sigmoid(F.linear(x, weight, bias))


class BayesGate(Converted, Gate):
    """The same layer, retyped: it says what it computes, and its rule what of it is random."""

    title = "Gate"
    output_axis = -1  # where the outputs' channels are
    linear = False  # scaling the output is not scaling the weight: Rank1 and its like refuse it
    float_input = True  # not an index
    matrix_weight = True  # [outputs, inputs], which KTied needs
    is_matrix = False  # no plain matrix product: local reparameterization and flipout refuse it

    @property
    def input_slots(self) -> tuple[Slot, ...]:
        """The one input: its position among the arguments, its channel axis and their number."""
        return (Slot(0, -1, self.fan_in),)

    @property
    def output_size(self) -> int:
        """Output channels."""
        return int(self.value.shape[0])

    @property
    def fan_in(self) -> int:
        """Inputs of one output."""
        return int(self.value.shape[1])

    def matrix_sides(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Which side of a weight U Vᵀ sees the inputs, and which the outputs."""
        return v, u

    def compute(self, inputs: Inputs, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """One weight for all rows."""
        assert weight is not None
        return gated(inputs[0], self.value, weight, bias)

    def grouped(self, inputs: Inputs, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One weight for each group of rows: [groups, outputs, inputs]."""
        return one_by_one(self, inputs, weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer's rule."""
        return self._apply_rule(x)


WEIGHTED[Gate] = BayesGate


def main() -> dict[str, float]:
    torch.manual_seed(0)
    plain = Gate(8, 3)
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    wanted = plain(x)
    model = sb.bayesianize(plain, sb.MeanField(stddev_init=0.3))
    gap = (sb.draw(model, x, noise="mean")[0] - wanted).abs().max().item()
    spread = sb.draw(model, x, samples=64).std(0).mean().item()
    sb.elbo(sb.draw(model, x, samples=4), y, model, num_data=64).loss.backward()
    print(f"the mean is the plain layer to {gap:.1e}; draws spread by {spread:.3f}")
    return {"gap": gap, "spread": spread}


if __name__ == "__main__":
    main()
