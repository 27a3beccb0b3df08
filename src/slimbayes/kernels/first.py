"""The first convolution of a network, whose input needs no gradient but whose input factor does, as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimbayes.kernels.launch import ceil_div, launch, power_of_two
from slimbayes.kernels.norm_launch import LAST, fits

CHANNELS = 4  # of the input, at most: with more of them the gradient of the input is the cheaper way
_POSITIONS, _OUTPUTS, _TAPS = 64, 64, 128


def scaled_conv(
    x: Tensor, s: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """y = conv2d(x∘s, W) for x [R, C, H, W] without a gradient and s [R, C].

    ds[c] = Σ over positions of x_c∘(∂L/∂(x∘s))_c: the gradient of the convolution's input is needed only under that
    sum. For a strided stem of three channels it would cost more than any other convolution of the network.

    >>> x, s, w = torch.randn(2, 3, 5, 5), torch.full((2, 3), 2.0), torch.randn(4, 3, 3, 3)
    >>> y = scaled_conv(x, s, w, (1, 1), (1, 1))
    >>> torch.allclose(y, torch.nn.functional.conv2d(2 * x, w, padding=1), atol=1e-5)
    True
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    y: Tensor = torch.ops.slimbayes.scaled_conv(x.detach(), s, weight.to(dtype), list(stride), list(padding))
    return y


def _product(x: Tensor, s: Tensor, weight: Tensor) -> Tensor:
    scaled = x * s.to(x.dtype)[:, :, None, None]
    return scaled.to(weight.dtype).contiguous(memory_format=LAST)


@torch.library.custom_op(
    "slimbayes::scaled_conv",
    mutates_args=(),
    schema="(Tensor x, Tensor s, Tensor weight, SymInt[] stride, SymInt[] padding) -> Tensor",
)
def _scaled_conv(
    x: Tensor, s: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        y = torch.conv2d(_product(x, s, weight), weight, None, stride, padding)
    return y.contiguous(memory_format=LAST)


@_scaled_conv.register_fake
def _(x: Tensor, s: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    sizes = [(x.shape[2 + at] + 2 * padding[at] - weight.shape[2 + at]) // stride[at] + 1 for at in range(2)]
    y = weight.new_empty((x.shape[0], weight.shape[0], *sizes))
    return y.contiguous(memory_format=LAST)


@torch.library.custom_op(
    "slimbayes::scaled_conv_backward",
    mutates_args=(),
    schema="(Tensor g, Tensor x, Tensor s, Tensor weight, SymInt[] stride, SymInt[] padding) -> (Tensor, Tensor)",
)
def _scaled_conv_backward(
    g: Tensor, x: Tensor, s: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Gradients of (s, weight)."""
    g = g.contiguous(memory_format=LAST)
    kernel = fits(g) and x.shape[1] <= CHANNELS and weight[0, 0].numel() <= _TAPS
    gx, gw, _ = torch.ops.aten.convolution_backward(
        g, _product(x, s, weight), weight, None, stride, padding, [1, 1], False, [0, 0], 1,
        [not kernel, True, False],
    )  # fmt: skip
    gs = factor_sums(g, x, weight, stride, padding) if kernel else (gx * x).sum((2, 3))
    return gs.to(s.dtype), gw.contiguous(memory_format=LAST)


@_scaled_conv_backward.register_fake
def _(g: Tensor, x: Tensor, s: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return s.new_empty(s.shape), torch.empty_like(weight, memory_format=LAST)


def factor_sums(
    g: Tensor, x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """Σ over positions of x∘(gradient of the input), [R, C] in float32."""
    from slimbayes.kernels.programs import first as programs

    x = x.contiguous(memory_format=LAST)
    rows, channels, height, width = x.shape
    outputs, positions = g.shape[1], g.shape[2] * g.shape[3]
    taps = weight.transpose(0, 1).flatten(2).contiguous()  # [C, K, T]
    blocks = ceil_div(positions, _POSITIONS)
    sums = torch.empty(rows, blocks, channels, dtype=torch.float32, device=g.device)
    launch(
        programs.factor_sums, rows * blocks, g,
        g, x, taps, sums, outputs, channels, height, width, g.shape[3], positions, taps.shape[2], weight.shape[3],
        *stride, *padding, blocks,
        BP=_POSITIONS, BK=max(16, min(_OUTPUTS, power_of_two(outputs))), BT=max(16, power_of_two(taps.shape[2])),
    )  # fmt: skip
    return sums.sum(1)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, s, weight, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, s, weight)


def _backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    gs, gw = torch.ops.slimbayes.scaled_conv_backward(g, *ctx.saved_tensors, ctx.stride, ctx.padding)
    return None, gs, gw, None, None


_scaled_conv.register_autograd(_backward, setup_context=_setup)
