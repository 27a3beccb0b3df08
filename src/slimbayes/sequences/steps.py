"""Recurrent layers step by step, where rows differ in their weights: one product for all inputs, one per step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slimbayes.core.paths import ASKED, first
from slimbayes.core.rules.kernel_map import Mapped

State = tuple[Tensor, ...]  # (h,), or (h, c) of an LSTM, [R, ·] each
Step = Callable[[Tensor, Tensor, State], State]


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    """i, f, g, o: c' = σ(f) c + σ(i) tanh(g), h' = σ(o) tanh(c')."""
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    """r, z, n: h' = n + z (h − n) with n = tanh(n_x + r n_h)."""
    (rx, zx, nx), (rh, zh, nh) = x.chunk(3, -1), h.chunk(3, -1)
    n = torch.addcmul(nx, (rx + rh).sigmoid(), nh).tanh()
    return (torch.lerp(n.to(state[0].dtype), state[0], (zx + zh).sigmoid().to(state[0].dtype)),)


def _tanh(x: Tensor, h: Tensor, state: State) -> State:
    return ((x + h).tanh(),)


def _relu(x: Tensor, h: Tensor, state: State) -> State:
    return ((x + h).relu(),)


STEPS: dict[str, Step] = {"LSTM": _lstm, "GRU": _gru, "RNN_TANH": _tanh, "RNN_RELU": _relu}


def cell(mode: str, x: Tensor, state: State, ih: Mapped, hh: Mapped) -> State:
    """One step of a cell on rows x [R, in]."""
    return STEPS[mode](ih(x), hh(state[0]), state)


def unroll(
    mode: str,
    x: Tensor,
    state: State,
    ih: Mapped,
    hh: Mapped,
    hr: Mapped | None = None,
    mask: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, State]:
    """One layer in one direction: outputs [T, R, H] and the last state, for x [T, R, in].

    x may have the rows of one draw where the state has those of all. ``hr`` projects the state of an LSTM. Where
    ``mask`` [T, R, 1] is False a sequence has ended, or not begun.
    """
    if hr is None and ASKED.unrolled:
        made: tuple[Tensor, State] | None = first(ASKED.unrolled, mode, x, state, ih, hh, mask, reverse)
        if made is not None:
            return made
    if state[0].shape[0] != x.shape[1]:
        x = torch.cat([x] * (state[0].shape[0] // x.shape[1]), 1)
    inputs = ih(x)
    offset = None if mode == "GRU" else hh.offset(x.shape[1])
    if offset is not None:
        inputs = inputs + offset
    product = hh if mode == "GRU" else hh.product
    step, outputs = STEPS[mode], []
    each = list(inputs.unbind(0))
    for t in range(len(each) - 1, -1, -1) if reverse else range(len(each)):
        new = step(each[t], product(state[0]), state)
        if hr is not None:
            new = (hr(new[0]), *new[1:])
        if mask is None:
            outputs.append(new[0])
        else:
            outputs.append(new[0] * mask[t])
            new = tuple([torch.where(mask[t], a, b) for a, b in zip(new, state, strict=True)])
        state = new
    return torch.stack(outputs[::-1] if reverse else outputs), state
