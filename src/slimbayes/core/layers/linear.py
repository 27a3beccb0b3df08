"""Matrix products: Linear, Hugging Face's Conv1D (a Linear with a transposed weight), and Bilinear."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.core.layers.base import Converted, unbatched
from slimbayes.core.rules.base import Inputs, Slot
from slimbayes.core.rules.groups import one_by_one


class BayesLinear(Converted, nn.Linear):
    """y = x Wᵀ + b, for any number of leading dimensions."""

    title = "Linear"
    output_axis = -1
    linear = True
    float_input = True
    matrix_weight = True
    is_matrix = True

    @property
    def input_slots(self) -> tuple[Slot, ...]:
        """The one input, channels last."""
        return (Slot(0, -1, self.in_features),)

    @property
    def output_size(self) -> int:
        """Output features."""
        return self.out_features

    @property
    def fan_in(self) -> int:
        """Input features."""
        return self.in_features

    def matrix_sides(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The weight is [out, in]."""
        return v, u

    def compute(self, inputs: Inputs, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """torch's kernel."""
        assert weight is not None
        return F.linear(inputs[0], weight, bias)

    def grouped(self, inputs: Inputs, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One batched product."""
        return batched_product(inputs[0], weight.transpose(1, 2), bias)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer's rule."""
        if type(input) is Tensor and input.dim() > 1:
            return self._apply_rule(input)
        return unbatched(self._apply_rule, input, 2)


def batched_product(x: Tensor, matrices: Tensor, bias: Tensor | None) -> Tensor:
    """Rows x [R, ..., in] in G groups times matrices [G, in, out]."""
    flat = x.reshape(matrices.shape[0], -1, x.shape[-1])  # [G, R/G·..., in]
    y = torch.bmm(flat, matrices) if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, matrices)
    return y.reshape(*x.shape[:-1], matrices.shape[-1])


class TransposedLinear(Converted):
    """y = x W + b with W [in, out]: mixed into transformers' Conv1D, which the core does not import."""

    title = "Conv1D (transformers)"
    output_axis = -1
    linear = True
    float_input = True
    matrix_weight = True
    is_matrix = True

    @property
    def input_slots(self) -> tuple[Slot, ...]:
        """The one input, channels last."""
        return (Slot(0, -1, self.weight.shape[-2]),)

    @property
    def output_size(self) -> int:
        """Output features."""
        return int(self.weight.shape[-1])

    @property
    def fan_in(self) -> int:
        """Input features."""
        return int(self.weight.shape[-2])

    def matrix_sides(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The weight is [in, out]."""
        return u, v

    def compute(self, inputs: Inputs, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """transformers' kernel: addmm on flattened rows."""
        assert weight is not None
        x = inputs[0]
        flat = x.reshape(-1, x.shape[-1])
        y = flat @ weight if bias is None else torch.addmm(bias, flat, weight)
        return y.reshape(*x.shape[:-1], weight.shape[-1])

    def grouped(self, inputs: Inputs, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One batched product."""
        return batched_product(inputs[0], weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer's rule."""
        return unbatched(self._apply_rule, x, 2)


class BayesBilinear(Converted, nn.Bilinear):
    """y_j = x₁ᵀ W_j x₂ + b_j; as a rank-1 layer both inputs are scaled."""

    title = "Bilinear"
    output_axis = -1
    linear = True
    float_input = True
    matrix_weight = True
    is_matrix = False

    @property
    def input_slots(self) -> tuple[Slot, ...]:
        """Both inputs, channels last."""
        return (Slot(0, -1, self.in1_features), Slot(1, -1, self.in2_features))

    @property
    def output_size(self) -> int:
        """Output features."""
        return self.out_features

    @property
    def fan_in(self) -> int:
        """Pairs of input features."""
        return self.in1_features * self.in2_features

    def matrix_sides(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Not a plain matrix product."""
        raise TypeError("Bilinear is not a matrix product")

    def compute(self, inputs: Inputs, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """torch's kernel."""
        assert weight is not None
        return F.bilinear(inputs[0], inputs[1], weight, bias)

    def grouped(self, inputs: Inputs, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Group by group."""
        return one_by_one(self, inputs, weight, bias)

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """Apply the layer's rule."""
        for x in (input1, input2):
            if not isinstance(x, Tensor):
                raise TypeError(f"a Bilinear layer takes two tensors, got {type(x).__name__} {x!r:.40}")
        if input1.dim() > 1:
            return self._apply_rule(input1, input2)
        return self._apply_rule(input1.unsqueeze(0), input2.unsqueeze(0)).squeeze(0)
