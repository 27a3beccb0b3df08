"""The steps of an LSTM by the CPU kernels, against torch's own operations."""

from __future__ import annotations

import itertools

import pytest
import torch
from helpers_sequences import SIZE, Sequences

import slimbayes as sb
from slimbayes.accelerate import cpu
from slimbayes.accelerate.cpu import lstm as kernels
from slimbayes.accelerate.cpu import lstm_layer
from slimbayes.core.rules.kernel_map import Mapped
from slimbayes.sequences.steps import unroll

pytestmark = pytest.mark.skipif(cpu._load() is None, reason="the kernels are not compiled")

NEAR = {"rtol": 1e-5, "atol": 2e-6}


def test_nonlinearities():
    """To the last digits, from the smallest numbers to those that are none, with the gates kept or not."""
    some = torch.cat([torch.linspace(-20, 20, 999), torch.tensor([0.0, 1e-30, -1e-8, 3e-4, 90.0, -1e4])])
    z = torch.stack([some, some.flip(0), some.roll(7), some.roll(300)]).view(1, 1, -1)
    c, zero = torch.randn(1, len(some)), torch.zeros_like(z)
    i, f, g, o = z.double().view(4, -1)
    cell = f.sigmoid() * c.double() + i.sigmoid() * g.tanh()
    wanted = o.sigmoid() * cell.tanh()
    for gates in (torch.empty_like(z), None):
        cells, out = torch.empty(1, 1, len(some)), torch.empty(1, 1, len(some))
        kernels.forward(z, zero, None, None, None, None, c, gates, cells, out, None)(0, -1, 0)
        torch.testing.assert_close(cells[0].double(), cell, rtol=2e-6, atol=1e-7)
        torch.testing.assert_close(out[0, 0].double(), wanted.flatten(), rtol=2e-6, atol=1e-7)
        if gates is not None:
            exact = torch.stack([i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()])
            torch.testing.assert_close(gates.double().view(4, -1), exact, rtol=5e-7, atol=1e-37)
        for value in (torch.inf, -torch.inf, torch.nan):
            bad = z.clone()
            bad[0, 0, len(some) * 2] = value
            kernels.forward(bad, zero, None, None, None, None, c, gates, cells, out, None)(0, -1, 0)
            finite = out.isfinite().sum()
            assert finite == len(some) - (value != value)


def kernel(rows, size, out, inner, outer, bias):
    def some(*shape, scale=0.5):
        return torch.randn(*shape).mul_(scale).requires_grad_()

    return Mapped(
        some(1, out, size, scale=size**-0.5),  # or else a step would magnify roundings
        some(1, out) if bias else None,
        some(rows, size) if inner else None,
        some(rows, out) if outer else None,
    )


def outputs(x, h, c, ih, hh, mask, reverse, on):
    if not on:
        with sb.fast_paths(False):
            y, last = unroll("LSTM", x, (h, c), ih, hh, None, mask, reverse)
    elif mask is None:
        y, last = lstm_layer.run(x, h, c, ih, hh, reverse)
    else:
        y, last = lstm_layer.run_padded(x, h, c, ih, hh, mask, reverse)
    return y, *last


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("rows", "size", "steps"), [(7, 5, 4), (2, 300, 3), (1, 1, 1), (0, 3, 2), (40, 64, 5)]
)
def test_outputs_and_gradients(monkeypatch, reverse, padded, rows, size, steps):
    """With each of the factors and without, inputs and gradients in other orders of axes."""
    monkeypatch.setattr(lstm_layer, "_BLOCK", 2 * 4 * rows * size)
    for inner, outer, bias in itertools.product((False, True), repeat=3):
        torch.manual_seed(0)
        ih = kernel(rows, 3, 4 * size, inner, outer, bias)
        hh = kernel(rows, size, 4 * size, outer, inner, False)
        x = torch.randn(rows, steps, 3, requires_grad=True)
        h, c = (torch.randn(size, rows, requires_grad=True) for _ in range(2))
        mask = (
            torch.arange(steps).view(-1, 1, 1) < torch.randint(1, steps + 1, (1, rows, 1)) if padded else None
        )
        given = [
            x,
            h,
            c,
            *[t for k in (ih, hh) for t in (k.weight, k.bias, k.inner, k.outer) if t is not None],
        ]
        results = []
        for on in (True, False):
            found = outputs(x.transpose(0, 1), h.t(), c.t(), ih, hh, mask, reverse, on)
            loss = sum([(y.transpose(0, 1) ** 2).sum() for y in found])
            with torch.no_grad():
                again = outputs(x.transpose(0, 1), h.t(), c.t(), ih, hh, mask, reverse, on)
            results.append([*found, *again, *torch.autograd.grad(loss, given)])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("factors", ["both", "input", "output"])
@pytest.mark.parametrize("late", [True, False])
def test_factors_of_draws_stay_out_of_the_weights(monkeypatch, late, factors):
    """Predictions with one factor for the rows of a draw are those of weights that it is folded into."""
    torch.manual_seed(0)
    net = Sequences(num_layers=2, bidirectional=True, batch_first=True, states=True)
    model = sb.bayesianize(net, sb.Rank1.paper(components=2, factors=factors, dropout_rate=0.2)).eval()
    for rows, part in ((5, 1 << 17), (5, 80), (1, 60)):
        x = torch.randn(rows, 4, SIZE)
        results = []
        for on in (True, False):
            with monkeypatch.context() as patch, torch.no_grad(), sb.fast_paths(late=late, native=True):
                calls = []
                forwards = lstm_layer._forwards
                patch.setattr(lstm_layer, "_PART", part)
                patch.setattr(
                    lstm_layer, "_forwards", lambda *given, f=forwards, c=calls: c.append(1) or f(*given)
                )
                if not on:
                    patch.setattr(lstm_layer, "by_lines", lambda *given: False)
                results.append(sb.draw(model, x, samples=3, seed=1, noise="shared"))
                assert bool(calls) == on
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, **NEAR)


def test_autocast_and_float64_are_left_to_torch():
    torch.manual_seed(0)
    model = sb.bayesianize(Sequences(batch_first=True), sb.Rank1.paper(components=2, dropout_rate=0.2)).eval()
    x = torch.randn(3, 4, SIZE)
    with torch.no_grad():
        plain = sb.draw(model, x, seed=1, noise="shared")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = sb.draw(model, x, seed=1, noise="shared")
        wide = sb.draw(model.double(), x.double(), seed=1, noise="shared")
    assert wide.dtype == torch.float64
    torch.testing.assert_close(low.float(), plain, rtol=0.05, atol=0.05)
    assert not kernels.usable(wide)
