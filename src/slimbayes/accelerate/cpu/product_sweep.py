"""A matrix product between factors that are never stored, y = r ∘ (x ∘ s) W + b, by the kernels in C.

With h = (x ∘ s) W, g the gradient of y, g' = g ∘ r and d = g' Wᵀ: one sweep gives g', Σ g∘h, Σ g∘h∘ε and Σ g, and
another d ∘ s, Σ d∘x and Σ d∘x∘ε. Where only a factor s that a draw's rows share needs d, it is not computed:
G_d = x_dᵀ g'_d, which dW = Σ_d s_d ∘ G_d needs anyhow, gives ds_d = Σ G_d ∘ W over outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate import switches
from slimbayes.accelerate.cpu import rows as kernels
from slimbayes.accelerate.cpu.factor_sweep import Grads, Seeded, clipped, factor_of, to_parameters
from slimbayes.accelerate.situation import further
from slimbayes.core.context import Frame
from slimbayes.core.rules.base import Operation

TOGETHER = 1 << 22  # elements of the gradients of draws' weights that are held at a time


@dataclass
class Plan:
    """How a matrix product between factors is computed."""

    s: kernels.Source | None
    r: kernels.Source | None
    components: int  # of a bias
    draws: int  # how often x stands for the rows of a draw
    first: bool  # the weight is [out, in]
    by_draw: bool  # the gradient of s from those of each draw's weight


def multiplied(
    op: Operation, x: Tensor, s: Seeded | None, r: Seeded | None, bias: Tensor | None, frame: Frame
) -> Tensor:
    """r ∘ (x ∘ s) W + b for contiguous rows x [R, ..., in] and a bias [K, out] or None."""
    first = bool(op.matrix_sides(True, False)[1])  # type: ignore[arg-type]  # the output's side is first
    draws = 1 if frame.tiled else frame.draws
    shared = s is not None and len(s.loc) * s.source.lines == frame.draws
    by_draw = shared and switches.paths.folded and not x.requires_grad and op.weight.is_contiguous()
    plan = Plan(
        None if s is None else s.source,
        None if r is None else r.source,
        frame.components if bias is None else len(bias),
        draws,
        first,
        by_draw,
    )
    s_loc, s_rho = (None, None) if s is None else (s.loc, s.rho)
    r_loc, r_rho = (None, None) if r is None else (r.loc, r.rho)
    if torch.is_grad_enabled():
        return _Multiplied.apply(x, op.weight, bias, s_loc, s_rho, r_loc, r_rho, plan)  # type: ignore[no-any-return, no-untyped-call]
    return _forward(x, op.weight, bias, s_loc, s_rho, r_loc, r_rho, plan, True)[0]


def _lines(source: kernels.Source, loc: Tensor, positions: int, given: int) -> kernels.Shape:
    return kernels.Shape(positions // (len(loc) * source.lines), 1, True, given)


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    s_loc: Tensor | None,
    s_rho: Tensor | None,
    r_loc: Tensor | None,
    r_rho: Tensor | None,
    plan: Plan,
    own: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [R, ..., out], x ∘ s [P, in] and h = (x ∘ s) W [P, out], over which y is written when ``own``."""
    flat = x.view(-1, x.shape[-1])
    given = flat.shape[0]
    positions = plan.draws * given
    scaled = flat
    if plan.s is not None and s_loc is not None:
        shape = _lines(plan.s, s_loc, positions, given)
        scaled = flat.new_empty(positions, flat.shape[1])
        kernels.product(flat, s_loc, s_rho, None, plan.s, shape, scaled)
    matrix = weight.t() if plan.first else weight
    out = x.new_empty(
        plan.draws * x.shape[0], *x.shape[1:-1], matrix.shape[1]
    )  # no view: may be changed in place
    y = out.view(-1, out.shape[-1])
    h = torch.mm(scaled, matrix, out=y) if own or plan.r is None else torch.mm(scaled, matrix)
    if plan.r is not None and r_loc is not None:
        kernels.product(h, r_loc, r_rho, bias, plan.r, _lines(plan.r, r_loc, positions, positions), y)
    elif bias is not None:
        y.view(bias.shape[0], -1, y.shape[1]).add_(bias.unsqueeze(1))
    return out, scaled, h


class _Multiplied(torch.autograd.Function):
    """y for rows x [R, ..., in]; a bias and the factors' locations and raw scales are [K, C]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        s_loc: Tensor | None,
        s_rho: Tensor | None,
        r_loc: Tensor | None,
        r_rho: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        y, scaled, h = _forward(x, weight, bias, s_loc, s_rho, r_loc, r_rho, plan, False)
        needs = ctx.needs_input_grad
        ctx.by_draw = plan.by_draw and (needs[3] or needs[4]) and not needs[0]  # then x ∘ s is not needed
        ctx.plan, ctx.biased = plan, bias is not None
        kept = None if plan.s is None or ctx.by_draw or not needs[1] else scaled
        kept_h = h if needs[5] or needs[6] else None
        ctx.save_for_backward(x, weight, s_loc, s_rho, r_loc, r_rho, kept, kept_h)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Grads:
        x, weight, s_loc, s_rho, r_loc, r_rho, kept, h = ctx.saved_tensors
        plan, needs = ctx.plan, ctx.needs_input_grad
        if further(grad):
            return (*_plain_multiplied(grad, x, weight, s_loc, s_rho, r_loc, r_rho, plan, ctx.biased), None)
        flat = x.view(-1, x.shape[-1])
        positions = flat.shape[0]
        inner = grad = grad.reshape(positions, -1).contiguous()  # [P, out]
        grad_x = grad_w = grad_b = grad_sl = grad_sr = grad_rl = grad_rr = None
        behind = any(needs[:2]) or needs[3] or needs[4]
        if plan.r is not None:
            shape = _lines(plan.r, r_loc, positions, positions)
            inner = torch.empty_like(grad)
            if h is None:
                kernels.product(grad, r_loc, r_rho, None, plan.r, shape, inner)
                if needs[2]:
                    grad_b = grad.view(plan.components, -1, grad.shape[1]).sum(1)
            else:
                wanted = (needs[5], needs[6], needs[2])
                grad_rl, grad_rr, grad_b = kernels.gradients(
                    grad, h, r_loc, r_rho, plan.r, shape, inner if behind else None, wanted
                )
        elif needs[2]:
            grad_b = grad.view(plan.components, -1, grad.shape[1]).sum(1)
        if ctx.by_draw:
            grad_w, grad_sl, grad_sr = _by_draw(flat, inner, weight, s_loc, s_rho, plan, needs[1], needs[4])
        else:
            first = plan.first
            if needs[1]:
                sides = (inner, flat if kept is None else kept)
                grad_w = torch.mm(sides[0].t(), sides[1]) if first else torch.mm(sides[1].t(), sides[0])
            if needs[0] or needs[3] or needs[4]:
                d = torch.mm(inner, weight if first else weight.t())
                if plan.s is not None:
                    shape = _lines(plan.s, s_loc, positions, positions)
                    wanted = (needs[3], needs[4], False)
                    grad_sl, grad_sr, _ = kernels.gradients(
                        d, flat, s_loc, s_rho, plan.s, shape, d if needs[0] else None, wanted
                    )
                if needs[0]:
                    grad_x = d.view(x.shape)
        return grad_x, grad_w, grad_b, grad_sl, grad_sr, grad_rl, grad_rr, None


def _by_draw(
    x: Tensor,
    grad: Tensor,
    weight: Tensor,
    loc: Tensor,
    rho: Tensor | None,
    plan: Plan,
    needs_weight: bool,
    needs_rho: bool,
) -> Grads:
    """dW, and the gradients of s, from G_d = x_dᵀ g_d of some draws after the other."""
    assert plan.s is not None
    draws = len(loc) * plan.s.lines
    ones = loc.new_ones(draws, loc.shape[1])
    one = kernels.Shape(1, 1, True, draws)
    factors = kernels.product(ones, loc, rho, None, plan.s, one, torch.empty_like(ones))  # [draws, in]
    grad_s = torch.empty_like(factors)
    grad_w = torch.empty_like(weight) if needs_weight else None
    sides = x.view(draws, -1, x.shape[1]), grad.view(draws, -1, grad.shape[1])
    most = max(1, TOGETHER // weight.numel())
    for start in range(0, draws, most):
        some = slice(start, start + most)
        a, b, f, g = (tensor[some] for tensor in (*sides, factors, grad_s))
        if plan.first:
            kernels.fold(torch.bmm(b.transpose(1, 2), a), weight, None, f, grad_w, None, g, start > 0)
        else:
            kernels.fold(torch.bmm(a.transpose(1, 2), b), weight, f, None, grad_w, g, None, start > 0)
    made = kernels.gradients(grad_s, ones, loc, rho, plan.s, one, None, (True, needs_rho, False))
    return grad_w, made[0], made[1]


def _plain_multiplied(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    s_loc: Tensor | None,
    s_rho: Tensor | None,
    r_loc: Tensor | None,
    r_rho: Tensor | None,
    plan: Plan,
    biased: bool,
) -> Grads:
    """All gradients in operations that can be differentiated again, from the inputs alone."""
    matrix = weight.t() if plan.first else weight  # [in, out]
    flat = x.reshape(-1, x.shape[-1])
    grad = grad.reshape(flat.shape[0], -1)
    scaled, inner = flat, grad
    if plan.s is not None and s_loc is not None:
        s, s_noise = factor_of(plan.s, s_loc, s_rho)
        wide_s = clipped(s, plan.s).flatten(0, 1).repeat_interleave(len(flat) // (len(s) * s.shape[1]), 0)
        scaled = flat * wide_s
    if plan.r is not None and r_loc is not None:
        r, r_noise = factor_of(plan.r, r_loc, r_rho)
        wide_r = clipped(r, plan.r).flatten(0, 1).repeat_interleave(len(flat) // (len(r) * r.shape[1]), 0)
        inner = grad * wide_r
    d = inner @ matrix.t()
    of_s: Grads = (None, None)
    of_r: Grads = (None, None)
    grad_x = d
    if plan.s is not None:
        own = (d * flat).view(*s.shape[:2], -1, s.shape[2]).sum(2)
        of_s = to_parameters(own, s, s_noise, s_rho, plan.s)
        grad_x = d * wide_s
    if plan.r is not None:
        own = (grad * (scaled @ matrix)).view(*r.shape[:2], -1, r.shape[2]).sum(2)
        of_r = to_parameters(own, r, r_noise, r_rho, plan.r)
    grad_w = scaled.t() @ inner
    grad_b = grad.view(plan.components, -1, grad.shape[1]).sum(1) if biased else None
    return grad_x.reshape(x.shape), grad_w.t() if plan.first else grad_w, grad_b, *of_s, *of_r
