"""A matrix product between factors, y = r ∘ (x ∘ s) W + b, as one operation with one backward pass.

With h = (x ∘ s) W, g the gradient of y and g' = g ∘ r: dW = (x ∘ s)ᵀ g', dr = Σ g ∘ h, db = Σ g, and with
d = g' Wᵀ: ds = Σ d ∘ x, dx = d ∘ s. Where only the factor s needs d, and is one for all rows of a draw, it is
not computed: with G_d = x_dᵀ g'_d, which dW = Σ_d s_d ∘ G_d needs anyhow, ds_d is the sum of G_d ∘ W over outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.accelerate import cpu, row_factors, switches
from slimbayes.accelerate.cpu import rows as kernels
from slimbayes.core.context import Frame
from slimbayes.core.noise import transformed
from slimbayes.core.rules.base import Operation

TOGETHER = 1 << 22  # elements of the gradients of all draws' weights that kernels take together
_KNOWN = (Tensor, nn.Parameter)
LARGE = 2**15  # elements of a weight from which its gradients are taken draw by draw, within the cache


def usable(op: Operation, x: Tensor, s: Tensor | None, r: Tensor | None) -> bool:
    """Whether the operation is one product of dense rows on the CPU, in one type.

    Compiled, only for factors that a draw's rows share: the compiler fuses others into what is around them.
    """
    if not (switches.paths.rows and op.is_matrix and x.is_cpu):
        return False
    if torch.compiler.is_compiling():
        shared = (s is None or s.shape[2] == 1) and (r is None or r.shape[2] == 1)
        if not (shared and switches.paths.folded and op.training and torch.is_grad_enabled()):
            return False  # not in training it may be exported, and others do not know our operation
    elif not row_factors.eager():
        return False
    for tensor in (op.weight, op.bias, s, r):
        if tensor is not None and tensor.dtype != x.dtype:
            return False
    if type(op.weight) not in _KNOWN and not torch.compiler.is_compiling():
        return False  # a weight of 8 bits, which knows the layer's operation alone
    return x.is_contiguous() and x.numel() > 0 and not torch.is_autocast_enabled("cpu")


def factored(
    op: Operation,
    x: Tensor,
    s: Tensor | None,
    r: Tensor | None,
    bias: Tensor | None,
    frame: Frame,
    by_draw: bool = False,
) -> Tensor:
    """r ∘ (x ∘ s) W + b for rows x [R, ..., in], factors [K, S, B or 1, C] or None and a bias [K, out] or None.

    ``by_draw``: ds comes from the gradients of each draw's weight where x needs no gradient itself.
    """
    s, r = (None if f is None else grouped(f, frame) for f in (s, r))
    first = bool(op.matrix_sides(True, False)[1])  # type: ignore[arg-type]  # [out, in]: the output's side is first
    if torch.compiler.is_compiling():
        by_draw = by_draw and not x.requires_grad
        y: Tensor = torch.ops.slimbayes.product(x, op.weight, s, r, bias, first, by_draw)[0]
        return y
    if torch.is_grad_enabled():
        return _Product.apply(x, op.weight, s, r, bias, first, by_draw)  # type: ignore[no-any-return, no-untyped-call]
    return forward(x, op.weight, s, r, bias, first, True)[0]


def grouped(factor: Tensor, frame: Frame) -> Tensor:
    """A factor [K, S or 1, E, C] as [G, C], one line for each group of rows that has it."""
    if factor.shape[1] != frame.samples:
        factor = factor.expand(-1, frame.samples, -1, -1)
    return factor.reshape(-1, factor.shape[-1])


def _by_kernel(*tensors: Tensor | None) -> bool:
    """Whether the CPU kernels may work on these matrices, whose values are known."""
    if cpu.library() is None or torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if tensor is not None and not (
            tensor.dtype == torch.float32 and tensor.is_contiguous() and type(tensor) in _KNOWN
        ):
            return False
    return torch._C._get_tracing_state() is None and not transformed()


def _points(x: Tensor, factor: Tensor) -> tuple[kernels.Source, kernels.Shape]:
    """A factor [G, C] of equal parts of the rows [P, C], as kernels take it."""
    return kernels.Source("point", 1), kernels.Shape(x.shape[0] // factor.shape[0], 1, True, x.shape[0])


def _over(x: Tensor, factor: Tensor, out: Tensor | None = None) -> Tensor:
    """x ∘ f for x [P, C] and a factor [G, C] of equal parts of the rows."""
    if _by_kernel(x, factor, out):
        return kernels.product(
            x, factor, None, None, *_points(x, factor), torch.empty_like(x) if out is None else out
        )
    if factor.shape[0] == x.shape[0]:
        return torch.mul(x, factor, out=out)
    parts = (factor.shape[0], -1, x.shape[1])
    wide = torch.mul(x.view(parts), factor.unsqueeze(1), out=None if out is None else out.view(parts))
    return wide.view(x.shape)


def forward(
    x: Tensor,
    weight: Tensor,
    s: Tensor | None,
    r: Tensor | None,
    bias: Tensor | None,
    first: bool,
    own: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [R, ..., out], x ∘ s [P, in] and h [P, out], over which y is written when ``own``."""
    flat = x.view(-1, x.shape[-1])
    scaled = flat if s is None else _over(flat, s)
    matrix = weight.t() if first else weight
    out = x.new_empty(*x.shape[:-1], matrix.shape[1])  # not a view, so that it may be changed in place
    y = out.view(-1, out.shape[-1])
    h = torch.mm(scaled, matrix, out=y if own or r is None else None)
    if r is not None and bias is not None and bias.shape[0] == r.shape[0] and _by_kernel(h, r, bias):
        kernels.product(h, r, None, bias, *_points(h, r), y)
    elif r is not None and bias is not None:
        # [K, groups of one component, rows of a group, out]
        shape = (bias.shape[0], r.shape[0] // bias.shape[0], -1, y.shape[1])
        factor, shift = r.view(bias.shape[0], -1, 1, y.shape[1]), bias[:, None, None]
        torch.addcmul(shift, h.view(shape), factor, out=y.view(shape))
    elif r is not None:
        _over(h, r, y)
    elif bias is not None:
        y.view(bias.shape[0], -1, y.shape[1]).add_(bias.unsqueeze(1))
    return out, scaled, h


class _Product(torch.autograd.Function):
    """y, for rows x [R, ..., in], factors [G, C] and a bias [K, out] of equal parts of the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        s: Tensor | None,
        r: Tensor | None,
        bias: Tensor | None,
        first: bool,
        by_draw: bool,
    ) -> Tensor:
        y, scaled, h = forward(x, weight, s, r, bias, first, False)
        needs = ctx.needs_input_grad
        ctx.first, ctx.components = first, 0 if bias is None else bias.shape[0]
        ctx.by_draw = by_draw and s is not None and needs[2] and not needs[0]  # then x ∘ s is not needed
        if s is None or ctx.by_draw or not needs[1]:
            scaled = None  # type: ignore[assignment]  # x itself, or not needed
        ctx.save_for_backward(x, weight, s, r, bias, scaled, h if needs[3] else None)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if row_factors.plain_backward(grad):
            return _plain_backward(ctx, grad)
        x, weight, s, r, _, scaled, h = ctx.saved_tensors
        kept = Kept(x, weight, s, r, scaled, h)
        made = gradients(kept, grad, ctx.needs_input_grad, ctx.components, ctx.first, ctx.by_draw)
        return (*made, None, None)


class Kept(NamedTuple):
    """What the gradients need; ``scaled`` is x ∘ s, or None where they do not or there is no s."""

    x: Tensor
    weight: Tensor
    s: Tensor | None
    r: Tensor | None
    scaled: Tensor | None
    h: Tensor | None


def gradients(
    kept: Kept, grad: Tensor, needs: Sequence[bool], components: int, first: bool, by_draw: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of x, W, s, r and b that are needed."""
    x, weight, s, r, scaled, h = kept
    flat = x.view(-1, x.shape[-1])
    grad = grad.reshape(flat.shape[0], -1)  # [P, out]
    grad_x = grad_w = grad_s = grad_r = grad_b = None
    if needs[3] and r is not None and h is not None and _by_kernel(grad, h, r):
        inner, adds = torch.empty_like(grad), needs[4] and components == r.shape[0]
        wanted = (True, False, adds)
        grad_r, _, grad_b = kernels.gradients(grad, h, r, None, *_points(h, r), inner, wanted)
    else:
        if needs[3] and r is not None and h is not None:
            grad_r = _summed(grad * h, r.shape[0])
        inner = grad if r is None else _over(grad, r)  # g'
    if by_draw and s is not None:
        grad_w, grad_s = _by_draw(flat, inner, weight, s, needs[1], first)
    else:
        if needs[1]:
            sides = (inner, flat if scaled is None else scaled)
            grad_w = torch.mm(sides[0].t(), sides[1]) if first else torch.mm(sides[1].t(), sides[0])
        if needs[0] or needs[2]:
            d = torch.mm(inner, weight if first else weight.t())
            if needs[2] and s is not None and _by_kernel(d, flat, s):
                out, wanted = d if needs[0] else None, (True, False, False)
                grad_s, _, _ = kernels.gradients(d, flat, s, None, *_points(flat, s), out, wanted)
                grad_x = d.view(x.shape) if needs[0] else None
            else:
                if needs[2] and s is not None:
                    grad_s = _summed(torch.mul(d, flat, out=None if needs[0] else d), s.shape[0])
                if needs[0]:
                    grad_x = (d if s is None else _over(d, s, d)).view(x.shape)
    if needs[4] and grad_b is None:
        grad_b = grad.view(components, -1, grad.shape[1]).sum(1)
    return grad_x, grad_w, grad_s, grad_r, grad_b


def _summed(values: Tensor, groups: int) -> Tensor:
    """[P, C] summed over the rows of each group, [G, C]."""
    return values if groups == values.shape[0] else values.view(groups, -1, values.shape[1]).sum(1)


def _by_draw(
    x: Tensor, grad: Tensor, weight: Tensor, s: Tensor, wanted: bool, first: bool
) -> tuple[Tensor | None, Tensor]:
    """dW (if wanted) and ds from G_d, one after the other for a large weight."""
    draws = s.shape[0]
    sides = [side.view(draws, -1, side.shape[1]) for side in ((grad, x) if first else (x, grad))]
    axis = 0 if first else 1  # of the outputs
    if draws * weight.numel() <= TOGETHER and _by_kernel(weight, s):
        own, made = torch.bmm(sides[0].transpose(1, 2), sides[1]), torch.empty_like(s)
        grad_w = torch.empty_like(weight) if wanted else None
        if first:
            kernels.fold(own, weight, None, s, grad_w, None, made, False)
        else:
            kernels.fold(own, weight, s, None, grad_w, made, None, False)
        return grad_w, made
    if weight.numel() < LARGE:
        own = torch.bmm(sides[0].transpose(1, 2), sides[1])  # [D, *weight]
        grad_s = (own * weight).sum(axis + 1)
        return (own.mul_(s.unsqueeze(axis + 1)).sum(0) if wanted else None), grad_s
    own, grad_s = torch.empty_like(weight), torch.empty_like(s)
    grad_w = torch.empty_like(weight) if wanted else None
    parts = zip(sides[0].unbind(0), sides[1].unbind(0), s.unsqueeze(axis + 1).unbind(0), grad_s, strict=True)
    for d, (a, b, factor, own_s) in enumerate(parts):
        torch.mm(a.t(), b, out=own)
        if grad_w is not None and d == 0:
            torch.mul(own, factor, out=grad_w)
        elif grad_w is not None:
            grad_w.addcmul_(own, factor)
        torch.sum(own.mul_(weight), axis, out=own_s)
    return grad_w, grad_s


def _plain_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients in operations that can be differentiated again, from the inputs alone."""
    x, weight, s, r, _, _, _ = ctx.saved_tensors
    matrix = weight.t() if ctx.first else weight  # [in, out]
    flat = x.reshape(-1, x.shape[-1])
    grad = grad.reshape(flat.shape[0], -1)
    wide_s, wide_r = (
        None if f is None else f.repeat_interleave(flat.shape[0] // f.shape[0], 0) for f in (s, r)
    )
    scaled = flat if wide_s is None else flat * wide_s
    inner = grad if wide_r is None else grad * wide_r
    d = inner @ matrix.t()
    grad_w = scaled.t() @ inner
    grad_s = None if s is None else (d * flat).view(s.shape[0], -1, flat.shape[1]).sum(1)
    grad_r = None if r is None else (grad * (scaled @ matrix)).view(r.shape[0], -1, grad.shape[1]).sum(1)
    grad_b = grad.view(ctx.components, -1, grad.shape[1]).sum(1) if ctx.components else None
    grad_x = (d if wide_s is None else d * wide_s).reshape(x.shape)
    return grad_x, grad_w.t() if ctx.first else grad_w, grad_s, grad_r, grad_b, None, None
