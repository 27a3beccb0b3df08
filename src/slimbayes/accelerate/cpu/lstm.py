"""The steps of an LSTM by the kernels of lstm.c."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate import cpu
from slimbayes.accelerate.cpu import address, addresses

_FORWARD, _BACKWARD = struct.Struct("=21q"), struct.Struct("=25q")  # what lstm.c calls so
_FEWEST = 1 << 11  # units of a step below which a second thread costs more than it does


def usable(like: Tensor) -> bool:
    """Whether the kernels take tensors of this type."""
    return (
        like.dtype == torch.float32
        and like.is_cpu
        and cpu.library() is not None
        and torch._C._get_tracing_state() is None  # a trace would keep the empty memory that they fill
    )


def inputs(x: Tensor, s: Tensor, rows: int) -> Tensor:
    """s ∘ x [L, R, in] for x [L, R, in], or the rows of one draw for all.

    >>> inputs(torch.ones(1, 1, 2), torch.tensor([[2.0, 3.0], [4.0, 5.0]]), 4).tolist()
    [[[2.0, 3.0], [2.0, 3.0], [4.0, 5.0], [4.0, 5.0]]]
    """
    x, s = _dense(x), s.contiguous()
    steps, given, size = x.shape
    out = x.new_empty(steps, rows, size)
    if out.numel():
        cpu._load().slimbayes_lstm_inputs(  # type: ignore[union-attr]
            address(x, x.numel(), _has_dense_lines),
            _lines(s, rows, size),
            address(out, steps * rows * size),
            steps,
            rows,
            given,
            size,
            *x.stride()[:2],
            rows // len(s),
            torch.get_num_threads() if out.numel() >= _FEWEST else 1,
        )
    return out


def forward(
    made: Tensor,
    products: Tensor,
    r_in: Tensor | None,
    r: Tensor | None,
    offset: Tensor | None,
    s: Tensor | None,
    c: Tensor,
    gates: Tensor | None,
    cells: Tensor,
    out: Tensor,
    scaled: Tensor | None,
) -> Callable[[int, int, int], None]:
    """What does the steps of a block: cells, outputs, the gates if they are kept and s ∘ h' for the next product.

    ``made`` [L, R, 4H] is for the steps of the block. Factors and the offset have lines for every row, or for as many
    groups of neighbouring rows. A buffer of one step, [1, R, ·], is written over.
    """
    steps, rows, size = out.shape
    unit = rows * size
    r_in, r, offset, s = (None if t is None else t.contiguous() for t in (r_in, r, offset, s))
    c = c.contiguous()
    tensors = (made, products, r_in, r, offset, s, c, gates, cells, out, scaled)
    strides = [0 if t is None or len(t) == 1 else t.stride(0) for t in (products, gates, cells)]
    plan = _FORWARD.pack(
        *_buffers((made, products), (len(made), steps), 4 * unit),
        *[_lines(t, rows, 4 * size) for t in (r_in, r, offset)],
        _lines(s, rows, size),
        address(c, unit),
        *_buffers((gates,), (steps,), 4 * unit),
        *_buffers((cells, out), (steps, steps), unit),
        address(scaled, unit),
        rows,
        size,
        *[1 if t is None else max(1, rows // max(1, len(t))) for t in (r_in, r, offset, s)],
        *strides,
        out.stride(0),
    )
    return _caller("slimbayes_lstm_forward", plan, (steps, len(made), unit), tensors)


def backward(
    gates: Tensor,
    cells: Tensor,
    c: Tensor,
    out: Tensor,
    grad_out: Tensor,
    grad_c: Tensor | None,
    down: Tensor,
    products: Tensor,
    inputs: Tensor,
    r_in: Tensor | None,
    r: Tensor | None,
    s: Tensor | None,
    carry: Tensor,
    inner: Tensor,
    outer: Tensor,
    of_r_in: Tensor | None,
    of_r: Tensor | None,
    of_s: Tensor | None,
    of_offset: Tensor | None,
) -> Callable[[int, int, int], None]:
    """What does the gradients of a step: ``inner`` and ``outer`` are written at its place in the block.

    ``down`` is the gradient of s ∘ h' from the step after it; ``carry`` and the four sums are added to.
    """
    steps, rows, size = out.shape
    gate, unit = 4 * rows * size, rows * size
    r_in, r, s = (None if t is None else t.contiguous() for t in (r_in, r, s))
    c, grad_out = c.contiguous(), _dense(grad_out)
    grad_c = None if grad_c is None else _dense(grad_c)
    tensors = (
        *(gates, cells, c, out, grad_out, grad_c, down, products, inputs, r_in, r, s),
        *(carry, inner, outer, of_r_in, of_r, of_s, of_offset),
    )
    of_cells = (0, 0) if grad_c is None else grad_c.stride()[:2]
    plan = _BACKWARD.pack(
        address(gates, steps * gate),
        address(cells, steps * unit),
        address(c, unit),
        address(out, steps * unit),
        address(grad_out, steps * unit, _has_dense_lines),
        address(grad_c, steps * unit, _has_dense_lines),
        address(down, unit),
        address(None if r is None else products, steps * gate),
        address(None if r_in is None else inputs, steps * gate),
        *[address(t, gate) for t in (r_in, r)],
        *[address(t, unit) for t in (s, carry)],
        *_buffers((inner, outer), (len(inner), len(inner)), gate),
        *[address(t, gate) for t in (of_r_in, of_r)],
        *[address(of_s, unit), address(of_offset, gate)],
        rows,
        size,
        *grad_out.stride()[:2],
        *of_cells,
    )
    return _caller("slimbayes_lstm_backward", plan, (steps, len(inner), unit), tensors)


def _dense(x: Tensor) -> Tensor:
    """With its last axis in neighbouring places."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _has_dense_lines(x: Tensor) -> bool:
    return x.stride(-1) == 1


def _has_dense_steps(x: Tensor) -> bool:
    return len(x) == 0 or x[0].is_contiguous()


def _buffers(tensors: tuple[Tensor | None, ...], steps: tuple[int, ...], size: int) -> list[int]:
    """Addresses of buffers of so many steps, or of one that is written over, of ``size`` numbers each."""
    lengths = [1 if t is None or len(t) == 1 else length for t, length in zip(tensors, steps, strict=True)]
    return addresses(tensors, [length * size for length in lengths], _has_dense_steps)


def _lines(x: Tensor | None, rows: int, size: int) -> int:
    """The address of lines [rows or a part of them, size], one for each group of neighbouring rows."""
    if x is None:
        return 0
    alike = max(1, rows // max(1, len(x)))
    return address(x, (-(-rows // alike) if rows else len(x)) * size)


def _caller(name: str, plan: bytes, size: tuple[int, int, int], kept: Any) -> Callable[[int, int, int], None]:
    """What does a step of a plan for so many steps, of which a block is at hand, of so many units each."""
    run = getattr(cpu._load(), name)
    steps, block, units = size
    threads = torch.get_num_threads() if units >= _FEWEST else 1

    def step(t: int, before: int, place: int, kept: Any = kept) -> None:  # kept: what the plan points to
        if not (0 <= t < steps and before < steps and 0 <= place < block):
            raise IndexError(
                f"step {t} after {before}, at {place} of its block, of {steps} steps in blocks of {block}"
            )
        run(plan, t, before, place, threads)

    return step
