"""The steps of an LSTM whose rows have factors of their own: all but the products, by torch or by lstm.c."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slimbayes.accelerate.cpu import lstm as kernels

Step = Callable[[int, int, int], None]  # of a step, the one before it (-1: none) and its place in its block


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


@dataclass
class Forward:
    """Where steps write: buffers of every step [T, R, ·], or of one [1, R, ·]; ``scaled``, s ∘ h."""

    given: Given
    gates: Tensor
    cells: Tensor
    products: Tensor
    out: Tensor
    scaled: Tensor | None
    kept: bool

    def block(self, made: Tensor) -> Step:
        """What does the steps of a block with W (s_in ∘ x) = ``made`` [L, R, 4H]."""
        g = self.given
        if kernels.usable(self.out):
            gates = self.gates if self.kept else None
            rows = (
                made,
                self.products,
                g.r_in,
                g.r,
                g.offset,
                g.s,
                g.c,
                gates,
                self.cells,
                self.out,
                self.scaled,
            )
            return kernels.forward(*rows)
        wave = torch.empty_like(g.h)

        def step(t: int, before: int, place: int) -> None:
            z, own, product = (
                buffer[t if len(buffer) > 1 else 0] for buffer in (self.gates, self.cells, self.products)
            )
            last = g.c if before < 0 else self.cells[before if len(self.cells) > 1 else 0]
            _join(z, made[place], g.r_in, product, g.r, g.offset)
            _gate(z, own, last, wave, self.out[t])
            if g.s is not None:
                torch.mul(self.out[t], g.s, out=self.scaled)

        return step


@dataclass
class Backward:
    """What gradients are made of, and where they go.

    ``inner`` and ``outer`` [L, R, 4H] are those of W (s_in ∘ x) and U (s ∘ h) in a block, ``down`` is that of s ∘ h,
    ``carry`` that of c; the others are sums over steps.
    """

    given: Given
    inputs: Tensor
    products: Tensor
    gates: Tensor
    cells: Tensor
    out: Tensor
    grad_out: Tensor
    grad_c: Tensor | None
    down: Tensor
    carry: Tensor
    inner: Tensor
    outer: Tensor
    of_r_in: Tensor | None
    of_s: Tensor | None
    of_r: Tensor | None
    of_offset: Tensor | None

    def steps(self) -> Step:
        """What does a step: the gradients of h' and c' to those of z and c."""
        g = self.given
        if kernels.usable(self.out):
            return kernels.backward(
                *(
                    self.gates,
                    self.cells,
                    g.c,
                    self.out,
                    self.grad_out,
                    self.grad_c,
                    self.down,
                    self.products,
                ),
                *(self.inputs, g.r_in, g.r, g.s, self.carry, self.inner, self.outer),
                *(self.of_r_in, self.of_r, self.of_s, self.of_offset),
            )
        room = [torch.empty_like(g.h) for _ in range(3)]
        both = torch.empty_like(self.gates[0]) if g.r is not None and g.r_in is not None else None

        def step(t: int, before: int, place: int) -> None:
            self.scale_down(self.out[t])
            grad = torch.add(self.grad_out[t], self.down, out=room[2])
            if self.grad_c is not None:
                self.carry.add_(self.grad_c[t])
            inner, outer = self.inner[place], self.outer[place]
            made = both if both is not None else outer if g.r is None else inner
            previous = g.c if before < 0 else self.cells[before]
            _ungate(self.gates[t], self.cells[t], previous, grad, self.carry, made, room)
            if self.of_offset is not None:
                self.of_offset.add_(made)
            if self.of_r is not None and g.r is not None:
                self.of_r.addcmul_(made, self.products[t])
                torch.mul(made, g.r, out=outer)
            if self.of_r_in is not None and g.r_in is not None:
                self.of_r_in.addcmul_(made, self.inputs[t])
                torch.mul(made, g.r_in, out=inner)

        return step

    def scale_down(self, h: Tensor) -> None:
        """The gradient of s ∘ h to those of s and h."""
        if self.of_s is not None and self.given.s is not None:
            self.of_s.addcmul_(self.down, h)
            self.down.mul_(self.given.s)


def _join(
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


def _gate(z: Tensor, cell: Tensor, last_c: Tensor, wave: Tensor, out: Tensor) -> None:
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


def _ungate(
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
