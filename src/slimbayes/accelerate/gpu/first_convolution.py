"""The first convolution of a network, whose input needs no gradient but whose input factor does, as one operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate.gpu.launch import ceil_div, launch, power_of_two
from slimbayes.accelerate.gpu.norm_launch import LAST, fits
from slimbayes.accelerate.gpu.waves import multiprocessors
from slimbayes.core.custom_operation import operation

CHANNELS = 4  # of the input, at most: with more of them the gradient of the input is the cheaper way
_BYTES, _OUTPUTS, _TAPS = (
    128,
    64,
    256,
)  # tile of a program: bytes of a line of positions, outputs, numbers of a kernel


def scaled_conv(
    x: Tensor, s: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """y = conv2d(x∘s, W) for x [R, C, H, W] without a gradient and s [R, C].

    ds[c] = Σ over positions of x_c∘(∂L/∂(x∘s))_c: the gradient of the convolution's input is needed only under that
    sum. For a strided stem of three channels it would cost more than any other convolution of the network. Instead
    G[k, t] = Σ over positions of g_k∘x_t is made for every row, t counting all that the kernel covers: ds = Σ W∘G and
    dW = Σ over rows of s∘G.

    >>> x, s, w = torch.randn(2, 3, 5, 5), torch.full((2, 3), 2.0), torch.randn(4, 3, 3, 3)
    >>> y = scaled_conv(x, s, w, (1, 1), (1, 1))
    >>> torch.allclose(y, torch.nn.functional.conv2d(2 * x, w, padding=1), atol=1e-5)
    True
    """
    kind = x.device.type
    double = torch.float64 in (x.dtype, weight.dtype)  # which autocast leaves alone
    cast = torch.is_autocast_enabled(kind) and not double
    dtype = torch.get_autocast_dtype(kind) if cast else weight.dtype
    with torch.no_grad():  # its gradient is the operation's own
        scaled = (x * s.to(x.dtype)[:, :, None, None]).to(dtype).contiguous(memory_format=LAST)
    y: Tensor = torch.ops.slimbayes.scaled_conv(
        scaled, x.detach(), s, weight.to(dtype), list(stride), list(padding)
    )
    return y


@operation(
    "scaled_conv",
    "(Tensor scaled, Tensor x, Tensor s, Tensor weight, SymInt[] stride, SymInt[] padding) -> Tensor",
)
def _scaled_conv(
    scaled: Tensor, x: Tensor, s: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        y = torch.conv2d(scaled, weight, None, stride, padding)
    return y.contiguous(memory_format=LAST)


@_scaled_conv.register_fake
def _(
    scaled: Tensor, x: Tensor, s: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    sizes = [(x.shape[2 + at] + 2 * padding[at] - weight.shape[2 + at]) // stride[at] + 1 for at in range(2)]
    y = weight.new_empty((x.shape[0], weight.shape[0], *sizes))
    return y.contiguous(memory_format=LAST)


@operation(
    "scaled_conv_backward",
    "(Tensor g, Tensor x, Tensor s, Tensor weight, SymInt[] stride, SymInt[] padding) -> (Tensor, Tensor)",
)
def _scaled_conv_backward(
    g: Tensor, x: Tensor, s: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Gradients of (s, weight)."""
    g = g.contiguous(memory_format=LAST)
    height, width = weight.shape[2:]
    if fits(g) and x.shape[1] <= CHANNELS and height * _line(width) <= _TAPS:
        gs, gw = stem_gradients(g, x, s, weight, stride, padding)
    else:
        scaled = (x * s.to(x.dtype)[:, :, None, None]).to(weight.dtype).contiguous(memory_format=LAST)
        gx, gw, _ = torch.ops.aten.convolution_backward(
            g, scaled, weight, None, stride, padding, [1, 1], False, [0, 0], 1, [True, True, False]
        )
        gs = (gx * x).sum((2, 3))
    return gs.to(s.dtype), gw.to(weight.dtype).contiguous(memory_format=LAST)


@_scaled_conv_backward.register_fake
def _(g: Tensor, x: Tensor, s: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return s.new_empty(s.shape), torch.empty_like(weight, memory_format=LAST)


def _line(width: int) -> int:
    """Numbers of a line of the kernel, four channels, as the program takes it."""
    return max(16, power_of_two(width * CHANNELS))


def stem_gradients(
    g: Tensor, x: Tensor, s: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Gradients of s [R, C] and of the weight, by the kernel, in float32."""
    from slimbayes.accelerate.gpu.programs import first as programs

    (rows, channels, height, width), (outputs, _, tall, wide) = x.shape, weight.shape
    positions, line = g.shape[2] * g.shape[3], _line(wide)
    # Every line that is read ends inside the image, and begins at a multiple of 16 bytes where it can.
    across = 4 * ceil_div(max(width + 2 * padding[1], (g.shape[3] - 1) * stride[1] + line // CHANNELS), 4)
    image = torch.zeros(
        rows, height + 2 * padding[0], across, CHANNELS, dtype=g.dtype, device=g.device
    )  # fmt: skip
    inner = image[:, padding[0] : padding[0] + height, padding[1] : padding[1] + width, :channels]
    inner.copy_(x.permute(0, 2, 3, 1))
    taps = torch.zeros(outputs, tall, wide, CHANNELS, dtype=weight.dtype, device=g.device)
    taps[..., :channels].copy_(weight.permute(0, 2, 3, 1))
    bp, bk = _BYTES // g.element_size(), max(16, min(_OUTPUTS, power_of_two(outputs)))
    bt, blocks = power_of_two(tall * line), ceil_div(outputs, bk)
    workers = max(1, multiprocessors(g.device) // blocks)
    splits = min(ceil_div(positions, bp), ceil_div(4 * workers, rows))  # a few pieces for every program
    per = bp * ceil_div(ceil_div(positions, splits), bp)
    workers = min(workers, rows * splits)
    line_sums = torch.empty(rows, splits * blocks, bt, dtype=torch.float32, device=g.device)
    tap_sums = torch.empty(workers, blocks * bk, bt, dtype=torch.float32, device=g.device)
    step = stride[1] * CHANNELS
    launch(
        programs.stem_gradients, workers * blocks, g,
        g, image, taps, s.contiguous(), line_sums, tap_sums, outputs, channels, image[0].numel(), across * CHANNELS,
        stride[0] * across * CHANNELS, step, g.shape[3], positions, tall, wide * CHANNELS, splits, rows * splits, per,
        blocks, BP=bp, BK=bk, BJ=line, BT=bt, VEC=8 if step % 8 == 0 else 4, STAGES=3, num_warps=8,
    )  # fmt: skip

    def whole(sums: Tensor) -> Tensor:  # [N, pieces, BT] summed over the pieces: [N, KH, KW, C]
        cut = sums.sum(1)[:, : tall * line].unflatten(1, (tall, line))[..., : wide * CHANNELS]
        pixels: Tensor = cut.unflatten(2, (wide, CHANNELS))
        return pixels[..., :channels]

    return whole(line_sums).sum((1, 2)), whole(tap_sums.transpose(0, 1))[:outputs].permute(0, 3, 1, 2)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, x, s, weight, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, s, weight)


def _backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    gs, gw = torch.ops.slimbayes.scaled_conv_backward(g, *ctx.saved_tensors, ctx.stride, ctx.padding)
    return None, None, gs, gw, None, None


_scaled_conv.register_autograd(_backward, setup_context=_setup)
