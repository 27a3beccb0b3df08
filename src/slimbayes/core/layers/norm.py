"""Normalisation layers: statistics stay shared by all rows, the affine part is what can be random."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.core.layers.base import Converted, affine_per_group
from slimbayes.core.rules.base import Inputs, Slot
from slimbayes.core.rules.patching import Normalizing


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


class _BatchNorm(_ChannelNorm, Normalizing):
    """BatchNorm: batch and running statistics are over all rows, as in the rank-1 reference.

    Or, with buffers [K, channels], over the rows of each component: ``by_component``.
    """

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
        if not self.training and not torch.compiler.is_compiling():
            known = self._buffers  # without a look at everything else that a module has
            mean, variance = known.get("running_mean"), known.get("running_var")
            if mean is not None and variance is not None:
                cudnn = torch.backends.cudnn.enabled
                return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, self.eps, cudnn)
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

    def by_component(self, inputs: Inputs, weight: Tensor, bias: Tensor | None, index: Tensor) -> Tensor:
        """In training the statistics of all rows of a component, which its running ones follow; else those.

        One draw is torch's own kernel.
        """
        x = inputs[0]
        self._check_input_dim(x)  # type: ignore[operator]
        assert self.running_mean is not None and self.running_var is not None
        if self.training:
            self._count(index)
        if index.shape[0] == 1:
            return self._one_draw(x, weight.squeeze(0), None if bias is None else bias.squeeze(0), index)
        rows = x.unflatten(0, (index.shape[0], -1))  # [D, b, C, ...]
        if self.training:
            mean, variance = self._statistics(rows, index)
        else:
            mean, variance = (b.index_select(0, index) for b in (self.running_mean, self.running_var))
        shape = (index.shape[0], 1, -1, *[1] * (x.dim() - 2))
        scale = weight * (variance + self.eps).rsqrt()  # [D, C]
        shift = -mean * scale if bias is None else bias - mean * scale
        # Rows of 16 bits are added in the statistics' type: the difference of large numbers would have no digits left.
        y = torch.addcmul(shift.reshape(shape), rows, scale.reshape(shape))
        return y.to(x.dtype).flatten(0, 1)

    def averaged(self, inputs: Inputs, weight: Tensor, bias: Tensor | None, probs: Tensor) -> Tensor:
        """In training by the batch's statistics, which then are no component's: the running ones stay."""
        x = inputs[0]
        self._check_input_dim(x)  # type: ignore[operator]
        assert self.running_mean is not None and self.running_var is not None
        if self.training:
            return F.batch_norm(x, None, None, weight, bias, True, 0.0, self.eps)
        mean, variance = ((probs[:, None] * b).sum(0) for b in (self.running_mean, self.running_var))
        if not mean.requires_grad:
            return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, self.eps)
        # Learned mixing reaches the statistics too, of which torch's kernel has no gradient.
        shape = (1, -1, *[1] * (x.dim() - 2))
        scale = weight * (variance + self.eps).rsqrt()  # [C]
        shift = -mean * scale if bias is None else bias - mean * scale
        return torch.addcmul(shift.reshape(shape), x, scale.reshape(shape)).to(x.dtype)

    def _count(self, index: Tensor) -> None:
        """A batch more for every component that is drawn, once however many draws it has."""
        if self.num_batches_tracked is not None:
            drawn = torch.zeros_like(self.num_batches_tracked).index_fill_(0, index, 1)
            self.num_batches_tracked.add_(drawn)

    def _factors(self, index: Tensor) -> Tensor:
        """How far the running statistics [K] follow this batch: not at all where a component is not drawn."""
        assert self.running_mean is not None and self.num_batches_tracked is not None
        drawn = self.running_mean.new_zeros(len(self.running_mean)).index_fill_(0, index, 1.0)
        if self.momentum is None:  # cumulative average
            return drawn / self.num_batches_tracked.clamp_min(1)
        return drawn * self.momentum

    def _one_draw(self, x: Tensor, weight: Tensor, bias: Tensor | None, index: Tensor) -> Tensor:
        assert self.running_mean is not None and self.running_var is not None
        mean, variance = (b.index_select(0, index).squeeze(0) for b in (self.running_mean, self.running_var))
        if not self.training:
            return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, self.eps)
        momentum = self.momentum
        if momentum is None:
            assert self.num_batches_tracked is not None
            momentum = 1.0 / float(self.num_batches_tracked.index_select(0, index))
        y = F.batch_norm(x, mean, variance, weight, bias, True, momentum, self.eps)  # moves mean and variance
        with torch.no_grad():
            self.running_mean.index_copy_(0, index, mean.unsqueeze(0))
            self.running_var.index_copy_(0, index, variance.unsqueeze(0))
        return y

    def _statistics(self, rows: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of every draw's component [D, C], over the rows [D, b, C, ...] of all its draws."""
        assert self.running_mean is not None and self.running_var is not None
        axes = (1, *range(3, rows.dim()))
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        zeros = wide.new_zeros(len(self.running_mean), rows.shape[2])  # [K, C]
        draws = zeros[:, :1].index_add(0, index, wide.new_ones(len(index), 1)).clamp_min(1)  # [K, 1]
        mean = zeros.index_add(0, index, wide.mean(axes)) / draws  # [K, C]
        shape = (len(index), 1, -1, *[1] * (rows.dim() - 3))
        centred = wide - mean.index_select(0, index).reshape(shape)
        variance = zeros.index_add(0, index, centred.square().mean(axes)) / draws
        with torch.no_grad():
            number = draws * (rows[0].numel() / rows.shape[2])  # of rows and positions
            unbiased = variance * number / (number - 1).clamp_min(1)
            factor = self._factors(index)[:, None]
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        return mean.index_select(0, index), variance.index_select(0, index)


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
