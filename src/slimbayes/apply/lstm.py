"""An LSTM whose rows have factors of their own, with its backward pass written out.

z_t = r ∘ (W (s ∘ x_t)) + r' ∘ (U (s' ∘ h_{t−1})) + b. Steps are gone through in blocks that fit into a cache: the
inputs of a block meet W by one product, and the gradients of W, U and x are made by one each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimbayes.apply.mapped import Mapped
from slimbayes.noise import transformed

_BLOCK = 1 << 20  # numbers of a block's gates
_PART = 1 << 17  # gates of the rows that a thread predicts together
Pair = tuple[Tensor, tuple[Tensor, Tensor]]


def usable(ih: Mapped, hh: Mapped, x: Tensor, state: tuple[Tensor, ...]) -> bool:
    """Whether the written-out passes apply: one W and one U for all rows, plain tensors of one type."""
    if torch.compiler.is_compiling() or transformed() or torch.is_autocast_enabled(x.device.type):
        return False
    if any([one.weight.shape[0] != 1 or one.flips is not None for one in (ih, hh)]):
        return False
    given = [*state, *[t for one in (ih, hh) for t in (one.weight, one.inner, one.outer) if t is not None]]
    return all([t.dtype == x.dtype for t in given])


def run(x: Tensor, h: Tensor, c: Tensor, ih: Mapped, hh: Mapped, reverse: bool) -> Pair:
    """Outputs [T, R, H] and the last h and c for x [T, R, in].

    Without gradients x may have the rows of one draw, which stand for all.
    """
    out, last = _unrolled(x, h, c, ih, hh, reverse, False)
    return out, (out[0 if reverse else -1], last)


def run_padded(x: Tensor, h: Tensor, c: Tensor, ih: Mapped, hh: Mapped, mask: Tensor, reverse: bool) -> Pair:
    """The same for sequences of several lengths, True in ``mask`` [T, R, 1]: outputs are 0 where they have ended.

    What a sequence does after its end has no influence on what it did before: its last state is looked up where it
    ended, and one that is read backwards is turned round first.
    """
    lengths = mask.sum(0, keepdim=True)  # [1, R, 1]
    x = _turned(x, lengths) if reverse else x
    out, cells = _unrolled(x, h, c, ih, hh, False, True)
    ends = (lengths - 1).expand(1, *h.shape)
    last_h, last_c = (states.gather(0, ends).squeeze(0) for states in (out, cells))
    out = out * mask
    return _turned(out, lengths) if reverse else out, (last_h, last_c)


def _given(h: Tensor, ih: Mapped, hh: Mapped) -> tuple[Tensor | None, ...]:
    """W, U, the four factors and what is added, for rows like h."""
    offsets = [t for t in (ih.offset(len(h)), hh.offset(len(h))) if t is not None]
    offset = None if not offsets else offsets[0] if len(offsets) == 1 else offsets[0] + offsets[1]
    weights = ih.weight.squeeze(0), hh.weight.squeeze(0)
    return *weights, ih.inner, ih.outer, hh.inner, hh.outer, offset


def _turned(x: Tensor, lengths: Tensor) -> Tensor:
    """Every sequence of x [T, R, ·] backwards within its length."""
    steps = torch.arange(len(x), device=x.device).view(-1, 1, 1)
    places = torch.where(steps < lengths, lengths - 1 - steps, steps)
    return x.gather(0, places.expand_as(x))


@dataclass
class _Plan:
    """Steps in their order, in blocks."""

    steps: int
    rows: int
    size: int
    reverse: bool

    def blocks(self) -> Iterator[range]:
        """Neighbouring steps, in the order in which they are run."""
        length = max(1, _BLOCK // max(1, self.rows * 4 * self.size))
        starts = range(0, self.steps, length)
        for start in reversed(starts) if self.reverse else starts:
            block = range(start, min(start + length, self.steps))
            yield block[::-1] if self.reverse else block

    def before(self, step: int) -> int | None:
        """The step run before this one, None for the first."""
        at = step + 1 if self.reverse else step - 1
        return at if 0 <= at < self.steps else None


def _slice(block: range) -> slice:
    return slice(min(block), max(block) + 1)


class _Unrolled(torch.autograd.Function):
    """Outputs, and the last cell or with ``every`` all.

    Kept are W (s ∘ x), U (s' ∘ h), the gates after their nonlinearities, the cells and the outputs.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *tensors, reverse, every = given
        kept = any(ctx.needs_input_grad)
        out, last, saved = _forwards(tensors, reverse, every, kept)
        ctx.plan, ctx.every = _Plan(len(out), out.shape[1], out.shape[2], reverse), every
        if kept:
            ctx.save_for_backward(*saved, out, *tensors)
        return out, last

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, grad_c: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # as it is with create_graph=True alone
            raise RuntimeError(
                "an LSTM with factors for every example has no second derivatives (create_graph=True): use "
                "nn.LSTMCell in a loop"
            )
        inputs, products, gates, cells, out, *tensors = ctx.saved_tensors
        x, h, c, w, u, s_in, r_in, s, r, offset = tensors
        plan, needs = ctx.plan, ctx.needs_input_grad
        of_x = torch.empty_like(x) if needs[0] else None
        of_w, of_u = torch.zeros_like(w), torch.zeros_like(u)
        of_s_in, of_r_in, of_s, of_r = (
            None if t is None else torch.zeros_like(t) for t in (s_in, r_in, s, r)
        )
        of_rows = None if offset is None else h.new_zeros(plan.rows, 4 * plan.size)
        down, carry = torch.zeros_like(h), torch.zeros_like(c) if ctx.every else grad_c.clone()
        room = [torch.empty_like(h) for _ in range(3)]
        blocks = list(plan.blocks())
        longest = max(map(len, blocks))
        grad = h.new_empty(longest, plan.rows, 4 * plan.size)  # of z
        inner, outer = torch.empty_like(grad), grad if r is None else torch.empty_like(grad)
        states = h.new_empty(longest, plan.rows, plan.size)
        for block in reversed(blocks):
            first = min(block)
            for t in reversed(block):
                at = plan.before(t)
                made, previous = grad[t - first], h if at is None else out[at]
                torch.add(grad_out[t], down, out=room[2])
                if ctx.every:
                    carry.add_(grad_c[t])
                _step_back(gates[t], cells[t], c if at is None else cells[at], room[2], carry, made, room)
                if of_rows is not None:
                    of_rows.add_(made)
                own = made
                if of_r is not None:
                    of_r.addcmul_(made, products[t])
                    own = torch.mul(made, r, out=outer[t - first])
                if of_r_in is not None:
                    of_r_in.addcmul_(made, inputs[t])
                    torch.mul(made, r_in, out=inner[t - first])
                torch.mm(own, u, out=down)
                if of_s is None:
                    states[t - first].copy_(previous)
                else:
                    of_s.addcmul_(down, previous)
                    torch.mul(previous, s, out=states[t - first])
                    down.mul_(s)
            count = len(block)
            of_u.addmm_(outer[:count].flatten(0, 1).t(), states[:count].flatten(0, 1))
            sided = (grad if r_in is None else inner)[:count]
            _input_back(
                sided, x[_slice(block)], w, s_in, of_w, of_s_in, None if of_x is None else of_x[_slice(block)]
            )
        if of_rows is not None and offset.shape[0] == 1:
            of_rows = of_rows.sum(0, keepdim=True)
        return of_x, down, carry, of_w, of_u, of_s_in, of_r_in, of_s, of_r, of_rows, None, None


def _forwards(
    tensors: Sequence[Any], reverse: bool, every: bool, kept: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Outputs, in the place that is given or a new one; the last cell or ``every``; and what is kept for gradients."""
    x, h, c, w, u, s_in, r_in, s, r, offset = tensors
    plan = _Plan(x.shape[0], h.shape[0], h.shape[1], reverse)
    out = x.new_empty(plan.steps, plan.rows, plan.size) if out is None else out
    many = plan.steps if kept else 1
    gates = x.new_empty(many, plan.rows, 4 * plan.size)
    cells = x.new_empty(plan.steps if every else many, plan.rows, plan.size)
    products = x.new_empty(many if r is not None else 1, plan.rows, 4 * plan.size)
    inputs = x.new_empty(plan.steps if kept else 0, plan.rows, 4 * plan.size)
    wave, scaled, turned = torch.empty_like(h), torch.empty_like(h), u.t()
    last_h, last_c = h, c
    for block in plan.blocks():
        made = _projected(x, _slice(block), w, s_in, inputs if kept else None)
        for t in block:
            z, own, product = (buffer[t if len(buffer) > 1 else 0] for buffer in (gates, cells, products))
            torch.mm(last_h if s is None else torch.mul(last_h, s, out=scaled), turned, out=product)
            _joined(z, made[t - min(block)], r_in, product, r, offset)
            _gated(z, own, last_c, wave, out[t])
            last_h, last_c = out[t], own
    return out, cells if every else last_c.clone(), (inputs, products, gates, cells)


def _in_parts(tensors: Sequence[Any], reverse: bool, every: bool) -> tuple[Tensor, Tensor]:
    """The same without gradients, few rows at a time: all that a step touches then stays in a cache."""
    x, h, c, w, u, *factors = tensors
    rows, batch = len(h), x.shape[1]
    size = max(1, _PART * torch.get_num_threads() // (4 * h.shape[1]))
    if batch < rows:  # whole draws, which share x
        size = max(1, size // batch) * batch
    out = x.new_empty(len(x), rows, h.shape[1])
    last = []
    for start in range(0, rows, size):
        own = slice(start, start + size)
        parts = [t if t is None or len(t) == 1 else t[own] for t in factors]
        given = (x if batch < rows else x[:, own], h[own], c[own], w, u, *parts)
        last.append(_forwards(given, reverse, every, False, out[:, own])[1])
    return out, torch.cat(last, 1 if every else 0)


def _unrolled(x: Tensor, h: Tensor, c: Tensor, ih: Mapped, hh: Mapped, reverse: bool, every: bool) -> Any:
    tensors = (x, h, c, *_given(h, ih, hh))
    if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors]):
        return _Unrolled.apply(*tensors, reverse, every)  # type: ignore[no-untyped-call]
    return _in_parts(tensors, reverse, every)


def _projected(x: Tensor, where: slice, w: Tensor, s: Tensor | None, room: Tensor | None) -> Tensor:
    """W (s ∘ x) of a block of steps, in its place in ``room`` if there is one."""
    block = x[where]
    if s is not None and len(s) > x.shape[1]:  # the rows of one draw, with the factors of all
        block = (block.unsqueeze(1) * s.unflatten(0, (-1, x.shape[1]))).flatten(1, 2)
    elif s is not None:
        block = block * s
    made = None if room is None else room[where].flatten(0, 1)
    flat = torch.mm(block.reshape(-1, block.shape[-1]), w.t(), out=made)
    return flat.view(len(block), -1, w.shape[0])


def _joined(
    z: Tensor, x: Tensor, r_in: Tensor | None, product: Tensor, r: Tensor | None, offset: Tensor | None
) -> None:
    """z = r_in ∘ x + r ∘ product + offset."""
    if r_in is None:
        torch.add(x, product, out=z) if r is None else torch.addcmul(x, product, r, out=z)
        if offset is not None:
            z.add_(offset)
        return
    if offset is None:
        torch.mul(x, r_in, out=z)
    else:
        torch.addcmul(offset, x, r_in, out=z)
    z.add_(product) if r is None else z.addcmul_(product, r)


def _gated(z: Tensor, cell: Tensor, last_c: Tensor, wave: Tensor, out: Tensor) -> None:
    """i, f, g, o in the place of z; c' = f c + i g and h' = o tanh(c')."""
    size = cell.shape[1]
    z[:, : 2 * size].sigmoid_()
    z[:, 2 * size : 3 * size].tanh_()
    z[:, 3 * size :].sigmoid_()
    i, f, g, o = z.chunk(4, 1)
    torch.mul(f, last_c, out=cell)
    cell.addcmul_(i, g)
    torch.tanh(cell, out=wave)
    torch.mul(o, wave, out=out)


def _step_back(
    z: Tensor, cell: Tensor, previous: Tensor, grad: Tensor, carry: Tensor, made: Tensor, room: list[Tensor]
) -> None:
    """One step: gradients of h' and c' (in ``carry``) to those of z (in ``made``) and c (in ``carry``)."""
    i, f, g, o = z.chunk(4, 1)
    of_i, of_f, of_g, of_o = made.chunk(4, 1)
    wave, slope = room[:2]
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
    torch.mul(of_g, slope, out=slope)
    of_g.sub_(slope)


def _input_back(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    s: Tensor | None,
    of_w: Tensor,
    of_s: Tensor | None,
    of_x: Tensor | None,
) -> None:
    """Gradients of a block's inputs, of W and of s, from that of W (s ∘ x)."""
    flat = grad.flatten(0, 1)
    of_w.addmm_(flat.t(), (x if s is None else x * s).reshape(-1, x.shape[-1]))
    if of_x is None and of_s is None:
        return
    back = (flat @ w).view_as(x)
    if of_s is not None:
        of_s += (back * x).sum(0)
    if of_x is not None:
        torch.mul(back, s, out=of_x) if s is not None else of_x.copy_(back)
