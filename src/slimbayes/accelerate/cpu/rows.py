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
from slimbayes.accelerate.cpu import addresses, dense, new

KINDS = ("point", "normal", "cauchy")  # in the order of rows.c
_KIND = {kind: number for number, kind in enumerate(KINDS)}
_NONE = (None, None, None)
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
    _sweep((x, None, out, loc, rho, bias), _NONE, source, shape)
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
    made = (
        torch.empty_like(loc) if needs[0] else None,
        torch.empty_like(loc) if needs[1] and rho is not None else None,
        torch.empty_like(loc) if needs[2] else None,
    )
    _sweep((x, grad, out, loc, rho, None), made if any(needs) else _NONE, source, shape)
    return made


def _sweep(
    given: tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None],
    made: tuple[Tensor | None, Tensor | None, Tensor | None],
    source: Source,
    shape: Shape,
) -> None:
    """x, g, out, loc, ρ and b are given; the gradients of the last three are made."""
    loc, rho = given[3:5]
    components, channels = loc.shape
    each, of_loc = shape.inner * channels, components * channels
    rows = components * source.lines * shape.rows * each
    places = addresses(given, (shape.source * each, rows, rows, of_loc, of_loc, of_loc), dense)
    slots = 0 if made is _NONE else _slots(components, source.lines, shape.rows, shape.inner, channels)
    room = None if rho is None and not slots else loc.new_empty(of_loc + slots)  # of σ, and of sums
    start = new(room)
    _kernels().slimbayes_sweep(
        *places,
        *(made if made is _NONE else map(new, made)),
        None if rho is None else start,
        start + 4 * of_loc if slots else None,
        components,
        source.lines,
        shape.rows,
        shape.inner,
        channels,
        shape.source,
        shape.last,
        _KIND[source.kind],
        math.inf if source.clip is None else source.clip,
        source.seed,
        source.stream,
        torch.get_num_threads(),
    )


def noise(source: Source, loc: Tensor) -> Tensor:
    """ε [components, lines, channels] of a factor, as the products make it."""
    made = loc.new_empty(loc.shape[0], source.lines, loc.shape[1])
    _kernels().slimbayes_factor(
        *addresses([made], [made.numel()]),
        *made.shape,
        _KIND[source.kind],
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
    down, across, whole = draws * lines, draws * width, lines * width
    given = (own, weight, left, right, grad_w, grad_l, grad_r)
    _kernels().slimbayes_fold(
        *addresses(given, (draws * whole, whole, down, across, whole, down, across)),
        new(slots),
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
    places = [*map(new, made)]
    outputs = [_pointers(part) for part in (places[: len(locs)], places[len(locs) :])]
    _kernels().slimbayes_normal_kl_gradients(
        *_arrays(locs, rhos), len(locs), centre, precision, grad, *outputs, torch.get_num_threads()
    )
    return made


def _arrays(locs: Sequence[Tensor], rhos: Sequence[Tensor]) -> tuple[Any, Any, Any]:
    count, numbers = len(locs), [loc.numel() for loc in locs]
    places = addresses([*locs, *rhos], numbers * 2)
    return _pointers(places[:count]), _pointers(places[count:]), (ctypes.c_int64 * count)(*numbers)


def _pointers(places: Sequence[int]) -> Any:
    return (ctypes.c_void_p * len(places))(*places)


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
