"""Local noise of a k-tied matrix product in few sweeps: T = (x∘x) A, then y + √(T Bᵀ + extra)∘ε with ε in registers.

Neither the noise nor the variance is ever stored: the backward pass makes both again, from the seed and from T,
which is [rows, p]. A ReLU behind the noise, and the T of the product behind that, can be part of the same sweep
(``accelerate/compile/local_chain.py`` joins them in compiled code).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate.gpu import local_launch, plain_twins
from slimbayes.accelerate.gpu.launch import INTERPRETED, available
from slimbayes.core.custom_operation import CustomOp

_LARGEST = 2**31 - 2**24  # offsets inside a matrix are 32-bit
_RANKS = 10  # columns of A and B, each of which has its own registers
# The Triton of older versions cannot carry tuples through a loop.
_TUPLES = INTERPRETED or [int(part) for part in str(torch.__version__).split(".")[:2]] >= [2, 8]


def thin_local(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, extra: Tensor | None, seed: Tensor, stream: int = 0
) -> Tensor:
    """y + √max(x² A Bᵀ + extra, tiny)∘ε in the type of y, differentiable in all but the seed.

    ``y`` is [R, m], ``x`` [R, n], ``a`` [n, p], ``b`` [m, p], ``extra`` [m] or None; ``seed`` holds one int64 on
    the device, and streams of one seed are independent.

    >>> y, x, a = torch.ones(2, 3), torch.zeros(2, 4), torch.ones(4, 1)
    >>> thin_local(y, x, a, torch.ones(3, 1), None, torch.tensor([5]))
    tensor([[1., 1., 1.],
            [1., 1., 1.]])
    """
    return local_noise(y, thin_squares(x, a), b, extra, None, seed, stream)[0]


def thin_squares(x: Tensor, a: Tensor) -> Tensor:
    """T = (x∘x) A, [R, p] in float32 (float64 if x is), for x [R, n]: dx = 2x∘(dT Aᵀ), dA = (x∘x)ᵀ dT.

    >>> thin_squares(torch.full((1, 3), 2.0), torch.ones(3, 2))
    tensor([[12., 12.]])
    """
    args = (x, a, _runs(a.shape[1], x, a))
    if torch.compiler.is_compiling():
        return torch.ops.slimbayes.thin_squares(*args)  # type: ignore[no-any-return]
    made: Tensor = _ThinSquares.apply(*args)  # type: ignore[no-untyped-call]
    return made


def local_noise(
    y: Tensor, t: Tensor, b: Tensor, extra: Tensor | None, bias: Tensor | None, seed: Tensor, stream: int = 0,
    relu: bool = False, next_a: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """z = y + bias + √max(T Bᵀ + extra, tiny)∘ε (or its ReLU), and the next product's T, (z∘z) A, if A is given.

    With g the gradient at z, of the ReLU and of that T included, and h = g∘ε/(2√variance), 0 where the variance is
    clamped: dy = g, dT = h B, dB = hᵀ T, dextra = Σ_rows h, dbias = Σ_rows g.

    >>> y = torch.tensor([[-1.0, 2.0]])
    >>> z, t = local_noise(y, torch.zeros(1, 1), torch.ones(2, 1), None, torch.ones(2), torch.tensor([5]),
    ...                    relu=True, next_a=torch.ones(2, 1))
    >>> z, t
    (tensor([[0., 3.]]), tensor([[9.]]))
    """
    q = 0 if next_a is None else next_a.shape[1]
    kernel = _runs(max(b.shape[1], q), y, b) and t.dtype == torch.float32
    args = (y, t, b, extra, bias, next_a, seed, stream, relu, kernel)
    if torch.compiler.is_compiling():
        return torch.ops.slimbayes.local_noise(*args)  # type: ignore[no-any-return]
    made: tuple[Tensor, Tensor] = _LocalNoise.apply(*args)  # type: ignore[no-untyped-call]
    return made


def _runs(ranks: int, *tensors: Tensor) -> bool:
    fit = all(0 < tensor.numel() < _LARGEST and tensor.dtype != torch.float64 for tensor in tensors)
    return _TUPLES and available(tensors[0].device) and 0 < ranks <= _RANKS and fit


def _wide(y: Tensor) -> torch.dtype:
    return torch.promote_types(y.dtype, torch.float32)


def _thin(x: Tensor, a: Tensor, kernel: bool) -> Tensor:
    if kernel:
        return local_launch.thin(x, a)
    wide = _wide(x)
    return x.to(wide).square() @ a.to(wide)


def _thin_backward(
    d_thin: Tensor, x: Tensor, a: Tensor, kernel: bool, wants_x: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if kernel:
        return local_launch.thin_backward(d_thin, x, a, wants_x)
    values = x.to(d_thin.dtype)
    dx = (d_thin @ a.to(d_thin.dtype).t()).mul_(values).mul_(2.0).to(x.dtype) if wants_x else x.new_empty(0)
    return dx, d_thin.t() @ values.square()


def _noise(
    y: Tensor, t: Tensor, b: Tensor, extra: Tensor | None, bias: Tensor | None, next_a: Tensor | None,
    seed: Tensor, stream: int, relu: bool, kernel: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if kernel:
        return local_launch.noisy(y, t, b, extra, bias, next_a, seed, stream, relu)
    stddev = _variance(t, b, extra).clamp_min_(torch.finfo(t.dtype).tiny).sqrt_()
    z = plain_twins.draw("normal", tuple(y.shape), seed, stream, t.dtype).mul_(stddev).add_(y)
    if bias is not None:
        z.add_(bias)
    out = (z.relu_() if relu else z).to(y.dtype)
    return out, out.new_empty(0, dtype=t.dtype) if next_a is None else _thin(out, next_a, False)


def _noise_backward(
    grad: Tensor, d_next: Tensor | None, out: Tensor | None, t: Tensor, b: Tensor, extra: Tensor | None,
    bias: Tensor | None, next_a: Tensor | None, seed: Tensor, stream: int, relu: bool, kernel: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dy (empty where it is ``grad``), dT, dBᵀ with dextra and dbias as its last rows, dAᵀ of the next product."""
    if kernel:
        given = (grad, d_next, out, t, b, extra, bias is not None, next_a)
        return local_launch.noisy_backward(*given, seed, stream, relu)
    g, d_a = grad.to(t.dtype), t.new_empty(0)
    if next_a is not None:
        assert out is not None and d_next is not None
        g = g + (d_next @ next_a.to(t.dtype).t()).mul_(out).mul_(2.0)
        d_a = d_next.t() @ out.to(t.dtype).square()
    if relu:
        assert out is not None
        g = torch.where(out <= 0, 0.0, g)
    variance = _variance(t, b, extra)
    h = plain_twins.draw("normal", tuple(grad.shape), seed, stream, t.dtype).mul_(g).mul_(0.5)
    h = torch.where(variance > torch.finfo(t.dtype).tiny, h * variance.rsqrt(), 0.0)
    sums = [t.t() @ h]
    if extra is not None:
        sums.append(h.sum(0, keepdim=True))
    if bias is not None:
        sums.append(g.sum(0, keepdim=True))
    dy = g.to(grad.dtype) if relu or next_a is not None else grad.new_empty(0)
    return dy.clone() if dy is grad else dy, h @ b.to(t.dtype), torch.cat(sums), d_a


def _variance(t: Tensor, b: Tensor, extra: Tensor | None) -> Tensor:
    product = t @ b.to(t.dtype).t()
    return product if extra is None else product.add_(extra)


_thin_op = CustomOp("thin_squares", "(Tensor x, Tensor a, bool kernel) -> Tensor", _thin)
_thin_op_backward = CustomOp(
    "thin_squares_backward",
    "(Tensor d_thin, Tensor x, Tensor a, bool kernel, bool wants_x) -> (Tensor, Tensor)",
    _thin_backward,
)
_noise_op = CustomOp(
    "local_noise",
    "(Tensor y, Tensor t, Tensor b, Tensor? extra, Tensor? bias, Tensor? next_a, Tensor seed, int stream,"
    " bool relu, bool kernel) -> (Tensor, Tensor)",
    _noise,
)
_noise_op_backward = CustomOp(
    "local_noise_backward",
    "(Tensor grad, Tensor? d_next, Tensor? out, Tensor t, Tensor b, Tensor? extra, Tensor? bias,"
    " Tensor? next_a, Tensor seed, int stream, bool relu, bool kernel) -> (Tensor, Tensor, Tensor, Tensor)",
    _noise_backward,
)


@_thin_op.register_fake
def _(x: Tensor, a: Tensor, kernel: bool) -> Tensor:
    return x.new_empty(x.shape[0], a.shape[1], dtype=_wide(x))


@_thin_op_backward.register_fake
def _(d_thin: Tensor, x: Tensor, a: Tensor, kernel: bool, wants_x: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape if wants_x else (0,)), d_thin.new_empty(a.shape[1], a.shape[0])


@_noise_op.register_fake
def _(
    y: Tensor, t: Tensor, b: Tensor, extra: Tensor | None, bias: Tensor | None, next_a: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    following = (0,) if next_a is None else (y.shape[0], next_a.shape[1])
    return y.new_empty(y.shape), t.new_empty(following)


@_noise_op_backward.register_fake
def _(
    grad: Tensor, d_next: Tensor | None, out: Tensor | None, t: Tensor, b: Tensor, extra: Tensor | None,
    bias: Tensor | None, next_a: Tensor | None, seed: Tensor, stream: int, relu: bool, kernel: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dy = grad.new_empty(grad.shape if relu or next_a is not None else (0,))
    lines = b.shape[1] + int(extra is not None) + int(bias is not None)
    d_a = t.new_empty((0,) if next_a is None else (next_a.shape[1], next_a.shape[0]))
    return dy, t.new_empty(t.shape), t.new_empty(lines, b.shape[0]), d_a


def _thin_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.kernel = inputs[2]


def _thin_gradients(ctx: Any, grad: Tensor, run: Any) -> tuple[Tensor | None, ...]:
    x, a = ctx.saved_tensors
    wants = ctx.needs_input_grad[0]
    dx, da = run(grad, x, a, ctx.kernel, wants)
    return dx if wants else None, da.t().to(a.dtype), None


def _noise_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, t, b, extra, bias, next_a, seed, stream, relu, kernel = inputs
    kept = output[0] if relu or next_a is not None else None
    ctx.save_for_backward(kept, t, b, extra, bias, next_a, seed)
    ctx.settings = (stream, relu, kernel)
    ctx.set_materialize_grads(False)


def _noise_gradients(
    ctx: Any, grad: Tensor | None, d_next: Tensor | None, run: Any
) -> tuple[Tensor | None, ...]:  # fmt: skip
    kept, t, b, extra, bias, next_a, seed = ctx.saved_tensors
    if grad is None and (d_next is None or next_a is None):
        return (None,) * 10
    if grad is None:
        grad = torch.zeros_like(kept)
    if next_a is not None and d_next is None:
        d_next = t.new_zeros(t.shape[0], next_a.shape[1])
    given = None if next_a is None else d_next
    dy, d_t, sums, d_a = run(grad, given, kept, t, b, extra, bias, next_a, seed, *ctx.settings)
    p = b.shape[1]
    return (
        grad if kept is None else dy,
        d_t,
        sums[:p].t().to(b.dtype),
        None if extra is None else sums[p].to(extra.dtype),
        None if bias is None else sums[sums.shape[0] - 1].to(bias.dtype),
        None if next_a is None else d_a.t().to(next_a.dtype),
        None, None, None, None,
    )  # fmt: skip


def _through_thin(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _thin_gradients(ctx, grad, torch.ops.slimbayes.thin_squares_backward)


def _through_noise(ctx: Any, grad: Tensor | None, d_next: Tensor | None) -> tuple[Tensor | None, ...]:
    return _noise_gradients(ctx, grad, d_next, torch.ops.slimbayes.local_noise_backward)


_thin_op.register_autograd(_through_thin, setup_context=_thin_setup)
_noise_op.register_autograd(_through_noise, setup_context=_noise_setup)


class _ThinSquares(torch.autograd.Function):
    """The same pair without the operator's dispatch, which costs as much as a small layer."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _thin(*inputs)
        _thin_setup(ctx, inputs, output)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _thin_gradients(ctx, grad, _thin_backward)


class _LocalNoise(torch.autograd.Function):
    """Likewise."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        output = _noise(*inputs)
        _noise_setup(ctx, inputs, output)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, d_next: Tensor | None) -> tuple[Tensor | None, ...]:
        return _noise_gradients(ctx, grad, d_next, _noise_backward)
