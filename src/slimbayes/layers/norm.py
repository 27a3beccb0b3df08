"""Normalisation layers: statistics stay shared by all rows, the affine part is what can be random."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.apply.base import Inputs, Slot
from slimbayes.layers.base import Converted, affine_per_group


class _Norm(Converted):
    """Output and input have the same channels; one output unit sees one input unit."""

    linear = False
    float_input = True
    matrix_weight = False
    is_matrix = False
    fan_in = 1

    def matrix_sides(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Not a plain matrix product."""
        raise TypeError("a normalisation layer is not a matrix product")

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer's rule."""
        return self._apply_rule(input)


class _ChannelNorm(_Norm):
    """Channels are axis 1."""

    output_axis = 1

    @property
    def input_slots(self) -> tuple[Slot, ...]:
        """The one input, channels after the rows."""
        return (Slot(0, 1, self.output_size),)

    def grouped(self, inputs: Inputs, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Normalise all rows at once, then one affine map per group."""
        y = self.compute(inputs, None, None)
        return affine_per_group(y, weight, bias, (weight.shape[-1], *[1] * (y.dim() - 2)))


class _BatchNorm(_ChannelNorm):
    """BatchNorm: batch and running statistics are over all rows, as in the rank-1 reference."""

    momentum: float | None
    eps: float
    track_running_stats: bool
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    num_features: int

    @property
    def output_size(self) -> int:
        """Channels."""
        return self.num_features

    def compute(self, inputs: Inputs, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """torch's kernel, with torch's bookkeeping of the running statistics."""
        x = inputs[0]
        self._check_input_dim(x)  # type: ignore[operator]
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # cumulative average
                factor = 1.0 / float(self.num_batches_tracked)
        use_batch = self.training or (self.running_mean is None and self.running_var is None)
        keep = not self.training or self.track_running_stats
        mean = self.running_mean if keep else None
        variance = self.running_var if keep else None
        return F.batch_norm(x, mean, variance, weight, bias, use_batch, factor, self.eps)


class BayesBatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """BatchNorm over [R, C] or [R, C, L]."""

    title = "BatchNorm1d"


class BayesBatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """BatchNorm over [R, C, H, W]."""

    title = "BatchNorm2d"


class BayesBatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """BatchNorm over [R, C, D, H, W]."""

    title = "BatchNorm3d"


class BayesGroupNorm(_ChannelNorm, nn.GroupNorm):
    """GroupNorm over [R, C, ...]."""

    title = "GroupNorm"

    @property
    def output_size(self) -> int:
        """Channels."""
        return self.num_channels

    def compute(self, inputs: Inputs, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """torch's kernel."""
        return F.group_norm(inputs[0], self.num_groups, weight, bias, self.eps)


class _TrailingNorm(_Norm):
    """Normalises the trailing axes ``normalized_shape``."""

    output_axis = -1
    normalized_shape: tuple[int, ...]

    @property
    def input_slots(self) -> tuple[Slot, ...]:
        """The one input, channels last."""
        return (Slot(0, -1, self.output_size),)

    @property
    def output_size(self) -> int:
        """Size of the last axis."""
        return self.normalized_shape[-1]

    def grouped(self, inputs: Inputs, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Normalise all rows at once, then one affine map per group."""
        y = self.compute(inputs, None, None)
        ones = [1] * (y.dim() - 1 - len(self.normalized_shape))
        return affine_per_group(y, weight, bias, (*ones, *self.normalized_shape))


class BayesLayerNorm(_TrailingNorm, nn.LayerNorm):
    """LayerNorm over the trailing axes."""

    title = "LayerNorm"

    def compute(self, inputs: Inputs, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """torch's kernel."""
        return F.layer_norm(inputs[0], self.normalized_shape, weight, bias, self.eps)


class BayesRMSNorm(_TrailingNorm, nn.RMSNorm):
    """RMSNorm over the trailing axes; it has no bias."""

    title = "RMSNorm"
    bias = None  # torch's class has no such attribute

    def compute(self, inputs: Inputs, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """torch's kernel."""
        return F.rms_norm(inputs[0], self.normalized_shape, weight, self.eps)
