"""The steps of an LSTM by the kernels of lstm.c."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate import cpu

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
            *_pointers((x, s, out)),
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
    rows, size = out.shape[1:]
    r_in, r, offset, s = (None if t is None else t.contiguous() for t in (r_in, r, offset, s))
    c = c.contiguous()
    tensors = (made, products, r_in, r, offset, s, c, gates, cells, out, scaled)
    strides = [0 if t is None or len(t) == 1 else t.stride(0) for t in (products, gates, cells)]
    plan = _FORWARD.pack(
        *_pointers(tensors),
        rows,
        size,
        *[1 if t is None else max(1, rows // max(1, len(t))) for t in (r_in, r, offset, s)],
        *strides,
        out.stride(0),
    )
    return _caller("slimbayes_lstm_forward", plan, rows * size, tensors)


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
    rows, size = out.shape[1:]
    r_in, r, s = (None if t is None else t.contiguous() for t in (r_in, r, s))
    c, grad_out = c.contiguous(), _dense(grad_out)
    grad_c = None if grad_c is None else _dense(grad_c)
    tensors = (
        *(gates, cells, c, out, grad_out, grad_c, down, products, inputs, r_in, r, s),
        *(carry, inner, outer, of_r_in, of_r, of_s, of_offset),
    )
    of_cells = (0, 0) if grad_c is None else grad_c.stride()[:2]
    plan = _BACKWARD.pack(*_pointers(tensors), rows, size, *grad_out.stride()[:2], *of_cells)
    return _caller("slimbayes_lstm_backward", plan, rows * size, tensors)


def _dense(x: Tensor) -> Tensor:
    """With its last axis in neighbouring places."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _pointers(tensors: tuple[Tensor | None, ...]) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def _caller(name: str, plan: bytes, units: int, kept: Any) -> Callable[[int, int, int], None]:
    run = getattr(cpu._load(), name)
    threads = torch.get_num_threads() if units >= _FEWEST else 1

    def step(t: int, before: int, place: int, kept: Any = kept) -> None:  # kept: what the plan points to
        run(plan, t, before, place, threads)

    return step
