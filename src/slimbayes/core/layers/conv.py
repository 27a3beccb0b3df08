"""Convolutions and transposed convolutions: stride, padding and its modes, dilation, groups, bias."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.core.layers.base import Converted, unbatched
from slimbayes.core.rules.base import Inputs, Slot
from slimbayes.core.rules.groups import one_by_one


class _Convolution(Converted):
    """Channels are axis 1; the factors of a rank-1 layer hold one entry per channel, not per tap."""

    output_axis = 1
    linear = True
    float_input = True
    matrix_weight = True
    is_matrix = False
    in_channels: int
    out_channels: int
    groups: int
    kernel_size: tuple[int, ...]

    @property
    def input_slots(self) -> tuple[Slot, ...]:
        """The one input, channels after the rows."""
        return (Slot(0, 1, self.in_channels),)

    @property
    def output_size(self) -> int:
        """Output channels."""
        return self.out_channels

    @property
    def fan_in(self) -> int:
        """Input channels of one group × kernel taps."""
        taps = 1
        for size in self.kernel_size:
            taps *= size
        return self.in_channels // self.groups * taps

    def matrix_sides(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Not a plain matrix product."""
        raise TypeError("a convolution is not a matrix product")

    def grouped(self, inputs: Inputs, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Group by group."""
        return one_by_one(self, inputs, weight, bias)


class _Forward(_Convolution):
    def compute(self, inputs: Inputs, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """torch's own path, padding modes included."""
        output: Tensor = self._conv_forward(inputs[0], weight, bias)  # type: ignore[operator]
        return output

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer's rule."""
        return unbatched(self._apply_rule, input, len(self.kernel_size) + 2)


class BayesConv1d(_Forward, nn.Conv1d):
    """One-dimensional convolution."""

    title = "Conv1d"


class BayesConv2d(_Forward, nn.Conv2d):
    """Two-dimensional convolution."""

    title = "Conv2d"


class BayesConv3d(_Forward, nn.Conv3d):
    """Three-dimensional convolution."""

    title = "Conv3d"


_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class _Transposed(_Convolution):
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]

    def compute(self, inputs: Inputs, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """torch's kernel."""
        x, output_padding = inputs
        assert weight is not None
        run = _TRANSPOSED[len(self.kernel_size)]
        output: Tensor = run(
            x, weight, bias, self.stride, self.padding, output_padding, self.groups, self.dilation
        )
        return output

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Apply the layer's rule."""
        dims = len(self.kernel_size)
        output_padding = self._output_padding(  # type: ignore[operator]
            input, output_size, self.stride, self.padding, self.kernel_size, dims, self.dilation
        )
        return unbatched(lambda x: self._apply_rule(x, tuple(output_padding)), input, dims + 2)


class BayesConvTranspose1d(_Transposed, nn.ConvTranspose1d):
    """One-dimensional transposed convolution."""

    title = "ConvTranspose1d"


class BayesConvTranspose2d(_Transposed, nn.ConvTranspose2d):
    """Two-dimensional transposed convolution."""

    title = "ConvTranspose2d"


class BayesConvTranspose3d(_Transposed, nn.ConvTranspose3d):
    """Three-dimensional transposed convolution."""

    title = "ConvTranspose3d"
