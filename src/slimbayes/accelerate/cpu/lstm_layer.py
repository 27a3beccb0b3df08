"""An LSTM whose rows have factors of their own, with its backward pass written out.

z_t = r ∘ (W (s ∘ x_t)) + r' ∘ (U (s' ∘ h_{t−1})) + b. Steps are gone through in blocks that fit into a cache: the
inputs of a block meet W by one product, and the gradients of W, U and x are made by one each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slimbayes.accelerate import switches
from slimbayes.accelerate.cpu import lstm as kernels
from slimbayes.accelerate.situation import eager
from slimbayes.core.context import Frame
from slimbayes.core.paths import FastPath
from slimbayes.core.rules.kernel_map import Mapped, by_draw, expand_groups
from slimbayes.core.rules.rank1 import Rank1Rule
from slimbayes.sequences.kernels import Kernel, Several

_BLOCK = 1 << 20  # numbers of a block's gates
_PART = 1 << 18  # gates of the rows that a thread predicts together
Pair = tuple[Tensor, tuple[Tensor, Tensor]]


class Given(NamedTuple):
    """z_t = r_in ∘ (W (s_in ∘ x_t)) + r ∘ (U (s ∘ h_{t−1})) + offset.

    x [T, R, in]; h and c [R, H]; W and U [4H, ·]; lines for every row, or for as many groups of neighbouring rows.
    """

    x: Tensor
    h: Tensor
    c: Tensor
    w: Tensor
    u: Tensor
    s_in: Tensor | None
    r_in: Tensor | None
    s: Tensor | None
    r: Tensor | None
    offset: Tensor | None


class LSTMLayers(FastPath):
    """Layers whose rows have factors of their own."""

    def on(self) -> bool:
        """By ``rows``."""
        return switches.paths.rows

    def kernels(
        self, layer: nn.Module, x: Tensor, states: tuple[Tensor, ...], frame: Frame
    ) -> dict[str, Mapped] | None:
        """The kernels with factors for every draw left out of their weights, where that takes less time."""
        assert isinstance(layer, Several)
        rows = x.shape[1] // frame.draws if frame.tiled else x.shape[1]
        size, proj = int(layer.hidden_size), int(layer.proj_size)  # type: ignore[arg-type]  # of nn.LSTM
        if layer.mode != "LSTM" or proj > 0 or not by_lines(x, rows, size):
            return None
        maps: dict[str, Mapped] = {}
        for kernel in layer.kernels:
            own = _factored(kernel, frame)
            if own is None:
                return None
            maps[kernel.key] = own
        ends = [key.removeprefix("ih_") for key in maps if key.startswith("ih_")]
        return (
            maps if all([usable(maps[f"ih_{end}"], maps[f"hh_{end}"], x, states) for end in ends]) else None
        )

    def unrolled(
        self,
        mode: str,
        x: Tensor,
        state: tuple[Tensor, ...],
        ih: Mapped,
        hh: Mapped,
        mask: Tensor | None,
        reverse: bool,
    ) -> Pair | None:
        """An LSTM's outputs and last state; without gradients x may have the rows of one draw, which stand for all."""
        if mode != "LSTM" or not usable(ih, hh, x, state):
            return None
        if state[0].shape[0] != x.shape[1] and (ih.inner is None or torch.is_grad_enabled()):
            return None
        if mask is None:
            return run(x, state[0], state[1], ih, hh, reverse)
        return run_padded(x, state[0], state[1], ih, hh, mask, reverse)


def _factored(kernel: Kernel, frame: Frame) -> Mapped | None:
    """One weight, with factors [draws, in] and [draws, out] for the rows of every draw; None where it is not so."""
    rule = kernel.bayes
    if not isinstance(rule, Rank1Rule) or rule.additive:
        return None
    pairs = ((rule.s, "s"), (rule.r, "r"))
    s, r = (None if f is None else rule.sample_factor(f, name, frame) for f, name in pairs)
    if any([f is not None and f.shape[2] != 1 for f in (r, s)]):
        return None
    draws = frame.components, frame.samples, 1
    inner, outer = (None if f is None else by_draw(f.expand(*draws, f.shape[-1])) for f in (s, r))
    bias = None if kernel.bias is None else frame.pick(kernel.bias)
    return Mapped(kernel.weight.unsqueeze(0), bias, inner, outer)


def usable(ih: Mapped, hh: Mapped, x: Tensor, state: tuple[Tensor, ...]) -> bool:
    """Whether the written-out passes apply: one W and one U for all rows, plain tensors of one type."""
    if not eager() or not kernels.usable(x) or torch.is_autocast_enabled(x.device.type):
        return False
    if any([one.weight.shape[0] != 1 or one.flips is not None or one.whole is not None for one in (ih, hh)]):
        return False
    given = [*state, *[t for one in (ih, hh) for t in (one.weight, one.inner, one.outer) if t is not None]]
    return all([t.dtype == x.dtype for t in given])


def by_lines(x: Tensor, rows: int, size: int) -> bool:
    """Whether factors that all rows of a draw share are better not folded into a weight of its own.

    So it is with compiled steps, where a draw has few rows: torch's kernel for each of them would do little at a time.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not kernels.usable(x):
        return False  # first: what a traced program compares, it holds to
    return rows * 4 * size <= _PART * torch.get_num_threads()


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


def _given(x: Tensor, h: Tensor, c: Tensor, ih: Mapped, hh: Mapped) -> Given:
    """W, U, the four factors and what is added, for rows like h."""
    rows = max([len(t) for t in (ih.inner, ih.outer, hh.inner, hh.outer) if t is not None], default=len(h))
    offsets = [t for t in (ih.offset(rows), hh.offset(rows)) if t is not None]
    offset = None if not offsets else offsets[0] if len(offsets) == 1 else offsets[0] + offsets[1]
    weights = ih.weight.squeeze(0), hh.weight.squeeze(0)
    return Given(x, h, c, *weights, ih.inner, ih.outer, hh.inner, hh.outer, offset)


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

    def before(self, step: int) -> int:
        """The step run before this one, -1 for the first."""
        at = step + 1 if self.reverse else step - 1
        return at if at < self.steps else -1


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
        out, last, saved = _forwards(Given(*tensors), reverse, every, kept)
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
        given, plan = Given(*tensors), ctx.plan
        x, h, c, w, u, s_in, r_in, s, r, offset = given
        of_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        of_w, of_u = torch.zeros_like(w), torch.zeros_like(u)
        of_s_in, of_r_in, of_s, of_r = (None if t is None else _zeros(t) for t in (s_in, r_in, s, r))
        of_offset = None if offset is None else h.new_zeros(plan.rows, 4 * plan.size)
        down, carry = (
            _zeros(h),
            _zeros(c) if ctx.every else grad_c.clone(memory_format=torch.contiguous_format),
        )
        blocks = list(plan.blocks())
        longest = max(map(len, blocks))
        inner = h.new_empty(longest, plan.rows, 4 * plan.size)
        outer = inner if r is None and r_in is None else torch.empty_like(inner)
        states = h.new_empty(longest, plan.rows, plan.size)
        of_cells = grad_c if ctx.every else None
        step = kernels.backward(
            gates, cells, c, out, grad_out, of_cells, down, products, inputs, r_in, r, s, carry, inner, outer,
            of_r_in, of_r, of_s, of_offset,
        )  # fmt: skip
        for block in reversed(blocks):
            first, count = min(block), len(block)
            for t in reversed(block):
                step(t, plan.before(t), t - first)
                torch.mm(outer[t - first], u, out=down)
            _previous(states[:count], out, h, s, first - 1 + 2 * plan.reverse)
            of_u.addmm_(outer[:count].flatten(0, 1).t(), states[:count].flatten(0, 1))
            own = None if of_x is None else of_x[_slice(block)]
            _input_back(inner[:count], x[_slice(block)], w, s_in, of_w, of_s_in, own)
        if of_s is not None and s is not None:  # the gradient of s ∘ h to those of s and h
            of_s.addcmul_(down, h)
            down.mul_(s)
        if of_offset is not None and offset is not None and len(offset) == 1:
            of_offset = of_offset.sum(0, keepdim=True)
        return of_x, down, carry, of_w, of_u, of_s_in, of_r_in, of_s, of_r, of_offset, None, None


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, memory_format=torch.contiguous_format)


def _previous(states: Tensor, out: Tensor, h: Tensor, s: Tensor | None, first: int) -> None:
    """s ∘ h before every step of a block: outputs from ``first`` on, or h where there are none."""
    low, high = max(first, 0), min(first + len(states), len(out))
    inside = states[low - first : high - first]
    inside.copy_(out[low:high]) if s is None else torch.mul(out[low:high], s, out=inside)
    if high - low < len(states):
        states[0 if first < 0 else -1] = h if s is None else h * s


def _forwards(
    given: Given, reverse: bool, every: bool, kept: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Outputs, in the place that is given or a new one; the last cell or ``every``; and what is kept for gradients."""
    x, h, _, w, u, s_in, _, s, r, _ = given
    plan = _Plan(x.shape[0], h.shape[0], h.shape[1], reverse)
    out = x.new_empty(plan.steps, plan.rows, plan.size) if out is None else out
    many = plan.steps if kept else 1
    gates = x.new_empty(many, plan.rows, 4 * plan.size)
    cells = x.new_empty(plan.steps if every else many, plan.rows, plan.size)
    products = x.new_empty(many if r is not None else 1, plan.rows, 4 * plan.size)
    inputs = x.new_empty(plan.steps if kept else 0, plan.rows, 4 * plan.size)
    scaled = None if s is None else (h * expand_groups(s, len(h))).contiguous()
    state, turned = h if scaled is None else scaled, u.t()
    for block in plan.blocks():
        made = _projected(x, _slice(block), w, s_in, plan.rows, inputs if kept else None)
        step = kernels.forward(
            made,
            products,
            given.r_in,
            r,
            given.offset,
            s,
            given.c,
            gates if kept else None,
            cells,
            out,
            scaled,
        )
        for t in block:
            torch.mm(state, turned, out=products[t if len(products) > 1 else 0])
            step(t, plan.before(t), t - min(block))
            state = out[t] if scaled is None else scaled
    last = cells if every else cells[t if len(cells) > 1 else 0].clone()
    return out, last, (inputs, products, gates, cells)


def _in_parts(given: Given, reverse: bool, every: bool) -> tuple[Tensor, Tensor]:
    """The same without gradients, few rows at a time: all that a step touches then stays in a cache."""
    x, h, c, w, u, *factors = given
    rows, batch = len(h), x.shape[1]
    if rows == 0:
        return _forwards(given, reverse, every, False)[:2]
    size = max(1, _PART * torch.get_num_threads() // (4 * h.shape[1]))
    each = max([rows // len(t) for t in factors if t is not None and len(t) > 1], default=1)  # to a line
    if batch < rows:  # whole draws, which share x
        each = batch
    count = -(-rows // (max(1, size // each) * each))
    size = -(-rows // (count * each)) * each  # parts of about the same size
    out = x.new_empty(len(x), rows, h.shape[1])
    last = []
    for start in range(0, rows, size):
        parts = [t if t is None or len(t) == 1 else _lines(t, start, size, rows) for t in factors]
        own = slice(start, start + size)
        part = Given(x if batch < rows else x[:, own], h[own], c[own], w, u, *parts)
        last.append(_forwards(part, reverse, every, False, out[:, own])[1])
    return out, torch.cat(last, 1 if every else 0)


def _lines(factor: Tensor, start: int, size: int, rows: int) -> Tensor:
    each = rows // len(factor)
    return factor[start // each : (start + size) // each]


def _unrolled(x: Tensor, h: Tensor, c: Tensor, ih: Mapped, hh: Mapped, reverse: bool, every: bool) -> Any:
    given = _given(x, h, c, ih, hh)
    if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in given]):
        return _Unrolled.apply(*given, reverse, every)  # type: ignore[no-untyped-call]
    return _in_parts(given, reverse, every)


def _projected(
    x: Tensor, where: slice, w: Tensor, s: Tensor | None, rows: int, room: Tensor | None
) -> Tensor:
    """W (s ∘ x) of a block of steps, [L, R, 4H], in its place in ``room`` if there is one.

    The rows of x may be those of one draw, with the factors of all.
    """
    block = x[where]
    if s is not None:
        block = kernels.inputs(block, s, rows)
    made = None if room is None else room[where].flatten(0, 1)
    flat = torch.mm(block.reshape(-1, block.shape[-1]), w.t(), out=made)
    return flat.view(len(block), -1, w.shape[0])


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
