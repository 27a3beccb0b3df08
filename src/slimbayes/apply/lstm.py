"""An LSTM whose rows have factors of their own, with its backward pass written out.

z_t = x_t + r ∘ (U (s ∘ h_{t−1})). The gradients of U, r and s are sums over steps, each made by one operation after the
last step; autograd would add one term per step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from slimbayes.apply.mapped import Mapped
from slimbayes.noise import transformed


def usable(hh: Mapped, inputs: Tensor, state: tuple[Tensor, ...]) -> bool:
    """Whether the written-out passes apply: one weight for all rows, plain tensors of one type."""
    if hh.weight.shape[0] != 1 or hh.flips is not None or torch.compiler.is_compiling() or transformed():
        return False
    own = [inputs, *state, hh.weight, *[t for t in (hh.inner, hh.outer) if t is not None]]
    return all([t.dtype == inputs.dtype for t in own]) and not torch.is_autocast_enabled(inputs.device.type)


def run(
    inputs: Tensor, h: Tensor, c: Tensor, hh: Mapped, reverse: bool
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Outputs [T, R, H] and the last h and c, from the inputs of all gates [T, R, 4H]."""
    weight = hh.weight.squeeze(0)
    out, last = _Unrolled.apply(inputs, h, c, weight, hh.inner, hh.outer, reverse)  # type: ignore[no-untyped-call]
    return out, (out[0 if reverse else -1], last)


def _order(steps: int, reverse: bool) -> range:
    return range(steps - 1, -1, -1) if reverse else range(steps)


class _Unrolled(torch.autograd.Function):
    """Kept are the gates after their nonlinearities, the cells, U (s ∘ h) and s ∘ h of every step."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h: Tensor,
        c: Tensor,
        weight: Tensor,
        s: Tensor | None,
        r: Tensor | None,
        reverse: bool,
    ) -> tuple[Tensor, Tensor]:
        (steps, rows), size = x.shape[:2], h.shape[1]
        kept = any(ctx.needs_input_grad)
        many = steps if kept else 1
        gates, cells = x.new_empty(many, rows, 4 * size), x.new_empty(many, rows, size)
        products = x.new_empty(many if r is not None else 1, rows, 4 * size)
        states = x.new_empty(many if s is not None else 0, rows, size)
        out, wave = x.new_empty(steps, rows, size), torch.empty_like(h)
        turned = weight.t()
        before_h, before_c = h, c
        for t in _order(steps, reverse):
            z, own, product = (buffer[t if len(buffer) > 1 else 0] for buffer in (gates, cells, products))
            state = before_h if s is None else torch.mul(before_h, s, out=states[t if kept else 0])
            torch.mm(state, turned, out=product)
            if r is None:
                torch.add(x[t], product, out=z)
            else:
                torch.addcmul(x[t], product, r, out=z)
            z[:, : 2 * size].sigmoid_()
            z[:, 2 * size : 3 * size].tanh_()
            z[:, 3 * size :].sigmoid_()
            i, f, g, o = z.chunk(4, 1)
            torch.mul(f, before_c, out=own)
            own.addcmul_(i, g)
            torch.tanh(own, out=wave)
            torch.mul(o, wave, out=out[t])
            before_h, before_c = out[t], own
        ctx.reverse = reverse
        if kept:
            ctx.save_for_backward(gates, cells, products, states, out, h, c, weight, s, r)
        return out, before_c.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_c: Tensor) -> tuple[Tensor | None, ...]:
        gates, cells, products, states, out, h, c, weight, s, r = ctx.saved_tensors
        order = _order(len(out), ctx.reverse)
        grad = torch.empty_like(gates)  # of z
        scaled = grad if r is None else torch.empty_like(gates)  # r ∘ it
        of_s, of_r = (None if factor is None else torch.zeros_like(factor) for factor in (s, r))
        down, carry = torch.zeros_like(h), grad_c.clone()
        room = [torch.empty_like(h) for _ in range(3)]
        for t in reversed(order):
            at = t + 1 if ctx.reverse else t - 1
            first = t == order[0]
            torch.add(grad_out[t], down, out=room[2])
            _step_back(
                gates[t], cells[t], c if first else cells[at], room[2], carry, grad[t], room[0], room[1]
            )
            own = grad[t]
            if of_r is not None:
                of_r.addcmul_(own, products[t])
                own = torch.mul(own, r, out=scaled[t])
            torch.mm(own, weight, out=down)
            if of_s is not None:
                of_s.addcmul_(down, h if first else out[at])
                down.mul_(s)
        of_weight = None
        if ctx.needs_input_grad[3]:
            if s is None:
                before = h.unsqueeze(0)
                states = torch.cat((out[1:], before) if ctx.reverse else (before, out[:-1]))
            of_weight = scaled.flatten(0, 1).t() @ states.flatten(0, 1)
        return grad, down, carry, of_weight, of_s, of_r, None


def _step_back(
    z: Tensor,
    cell: Tensor,
    previous: Tensor,
    grad: Tensor,
    carry: Tensor,
    made: Tensor,
    wave: Tensor,
    slope: Tensor,
) -> None:
    """One step: gradients of h' and c' (in ``carry``) to those of z (in ``made``) and c (in ``carry``)."""
    i, f, g, o = z.chunk(4, 1)
    of_i, of_f, of_g, of_o = made.chunk(4, 1)
    torch.tanh(cell, out=wave)
    torch.mul(grad, wave, out=of_o)
    torch.mul(wave, wave, out=slope)
    torch.mul(grad, o, out=wave)
    carry.add_(wave).addcmul_(wave, slope, value=-1)  # += grad o (1 − tanh²)
    torch.mul(carry, g, out=of_i)
    torch.mul(carry, previous, out=of_f)
    torch.mul(carry, i, out=of_g)
    carry.mul_(f)
    for gate, own in ((i, of_i), (f, of_f), (o, of_o)):
        torch.mul(own, gate, out=slope)
        torch.addcmul(slope, slope, gate, value=-1, out=own)  # σ (1 − σ)
    torch.mul(g, g, out=slope)
    of_g.addcmul_(of_g, slope, value=-1)
