"""Factors on rows by the kernels of rows.c, folds.c and kl.c.

The noise of a factor is made in registers where it is used, and made again by its gradients.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate import cpu

KINDS = ("point", "normal", "cauchy")  # in the order of rows.c
_PIECE = 32768  # elements that one thread folds at a time


@dataclass
class Source:
    """Where a factor's noise comes from: f = loc + σ∘ε within ±clip, ε [components, lines, channels]."""

    kind: str
    lines: int  # of one component
    clip: float | None = None
    seed: int = 0
    stream: int = 0


@dataclass
class Shape:
    """Rows in memory: ``rows`` to a line of the factor, of ``inner`` positions each, channels behind them or before."""

    rows: int
    inner: int
    last: bool
    source: int  # rows of x, which stands for all draws where it has fewer


def product(
    x: Tensor, loc: Tensor, rho: Tensor | None, bias: Tensor | None, source: Source, shape: Shape, out: Tensor
) -> Tensor:
    """x ∘ f + b, written into ``out``, which may be x; loc, ρ and b are [components, channels].

    >>> x, out, loc = torch.ones(4, 3), torch.empty(4, 3), torch.tensor([[2.0, 3.0, 4.0]])
    >>> product(x, loc, None, None, Source("point", 4), Shape(1, 1, True, 4), out)[0].tolist()
    [2.0, 3.0, 4.0]
    """
    scale = None if rho is None else torch.empty_like(loc)
    _sweep(x, None, out, loc, rho, bias, None, None, None, scale, None, source, shape)
    return out


def gradients(
    grad: Tensor,
    x: Tensor,
    loc: Tensor,
    rho: Tensor | None,
    source: Source,
    shape: Shape,
    out: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """g ∘ f into ``out`` (which may be g; None: not wanted), and those of loc, ρ and b that are needed.

    With t = Σ g∘x over a line's positions, 0 where f was clipped: dloc = Σ t, dρ = σ'(ρ) ∘ Σ t∘ε, db = Σ g.
    """
    scale = None if rho is None else torch.empty_like(loc)
    made = [torch.empty_like(loc) if need else None for need in needs]
    if rho is None:
        made[1] = None
    slots = None
    if any(needs):
        size = _slots(loc.shape[0], source.lines, shape.rows, shape.inner, loc.shape[1])
        slots = loc.new_empty(size)
    _sweep(x, grad, out, loc, rho, None, made[0], made[1], made[2], scale, slots, source, shape)
    return made[0], made[1], made[2]


def _sweep(
    x: Tensor,
    grad: Tensor | None,
    out: Tensor | None,
    loc: Tensor,
    rho: Tensor | None,
    bias: Tensor | None,
    grad_loc: Tensor | None,
    grad_rho: Tensor | None,
    grad_bias: Tensor | None,
    scale: Tensor | None,
    slots: Tensor | None,
    source: Source,
    shape: Shape,
) -> None:
    tensors = (x, grad, out, loc, rho, bias, grad_loc, grad_rho, grad_bias, scale, slots)
    _kernels().slimbayes_sweep(
        *[None if tensor is None else tensor.data_ptr() for tensor in tensors],
        loc.shape[0],
        source.lines,
        shape.rows,
        shape.inner,
        loc.shape[1],
        shape.source,
        shape.last,
        KINDS.index(source.kind),
        math.inf if source.clip is None else source.clip,
        source.seed,
        source.stream,
        torch.get_num_threads(),
    )


def noise(source: Source, loc: Tensor) -> Tensor:
    """ε [components, lines, channels] of a factor, as the products make it."""
    made = loc.new_empty(loc.shape[0], source.lines, loc.shape[1])
    _kernels().slimbayes_factor(
        made.data_ptr(),
        *made.shape,
        KINDS.index(source.kind),
        source.seed,
        source.stream,
        torch.get_num_threads(),
    )
    return made


def fold(
    own: Tensor,
    weight: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    grad_w: Tensor | None,
    grad_l: Tensor | None,
    grad_r: Tensor | None,
    add: bool,
) -> None:
    """Write the gradients that are wanted, from G_d = ``own`` [D, m, n], those of W ∘ l_d r_dᵀ.

        dW (+)= Σ_d G_d ∘ l_d r_dᵀ, dl_d = (G_d ∘ W) r_d, dr_d = (G_d ∘ W)ᵀ l_d

    for l [D, m] and r [D, n], None for ones.

    >>> g, w, out = torch.ones(1, 2, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.empty(1, 2)
    >>> fold(g, w, None, None, None, None, out, False)
    >>> out.tolist()
    [[4.0, 6.0]]
    """
    draws, lines, width = own.shape
    run = max(1, _PIECE // (draws * width))
    slots = None if grad_r is None else weight.new_empty(-(-lines // run), draws, width)
    tensors = (own, weight, left, right, grad_w, grad_l, grad_r, slots)
    _kernels().slimbayes_fold(
        *[None if tensor is None else tensor.data_ptr() for tensor in tensors],
        draws,
        lines,
        width,
        run,
        add,
        torch.get_num_threads(),
    )


def normal_kl(locs: Sequence[Tensor], rhos: Sequence[Tensor], centre: float, precision: float) -> float:
    """Σ ½(σ² + (loc − centre)²)·precision − log σ over contiguous factors, σ = softplus(ρ) + 1e-7."""
    totals = (ctypes.c_double * len(locs))()
    _kernels().slimbayes_normal_kl(
        *_arrays(locs, rhos), len(locs), centre, precision, totals, torch.get_num_threads()
    )
    return math.fsum(totals)


def normal_kl_gradients(
    locs: Sequence[Tensor], rhos: Sequence[Tensor], centre: float, precision: float, grad: float
) -> list[Tensor]:
    """Its gradients, times ``grad``: of all locations, then of all ρ."""
    made = [torch.empty_like(tensor) for tensor in (*locs, *rhos)]
    outputs = [_pointers(part) for part in (made[: len(locs)], made[len(locs) :])]
    _kernels().slimbayes_normal_kl_gradients(
        *_arrays(locs, rhos), len(locs), centre, precision, grad, *outputs, torch.get_num_threads()
    )
    return made


def _arrays(locs: Sequence[Tensor], rhos: Sequence[Tensor]) -> tuple[Any, Any, Any]:
    counts = (ctypes.c_int64 * len(locs))(*[loc.numel() for loc in locs])
    return _pointers(locs), _pointers(rhos), counts


def _pointers(tensors: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


@lru_cache(1024)
def _slots(components: int, lines: int, rows: int, inner: int, channels: int) -> int:
    found = ctypes.c_int64()
    _kernels().slimbayes_sweep_slots(ctypes.addressof(found), components, lines, rows, inner, channels)
    return found.value


def _kernels() -> Any:
    # Not library(): a backward pass may come when the switch has been turned off again.
    kernels = cpu._load()
    assert kernels is not None, "there are no compiled kernels"
    return kernels
