"""Sums of partial sums by one launch, and how many rows a program takes."""

from __future__ import annotations

import pytest
import torch
from helpers_kernels import DEVICE, needs_kernels

from slimbayes.accelerate.gpu.totals import totals
from slimbayes.accelerate.gpu.waves import multiprocessors, rows_per_program


@needs_kernels
@pytest.mark.parametrize(
    "shapes", [[(5, 7)], [(33, 40, 3), (2, 5)], [(70, 2, 31), (1, 33), (40, 1)]], ids=str
)
def test_totals(shapes):
    torch.manual_seed(0)
    parts = [torch.randn(shape, device=DEVICE) for shape in shapes]
    for total, part in zip(totals(*parts), parts, strict=True):
        assert total.shape == part.shape[1:]
        torch.testing.assert_close(total.double(), part.double().sum(0), rtol=1e-5, atol=1e-5)


def test_single_parts_need_no_launch():
    parts = [torch.randn(1, 3, 2, device=DEVICE), torch.randn(1, 4, device=DEVICE)]
    for total, part in zip(totals(*parts), parts, strict=True):
        assert total.data_ptr() == part.data_ptr() and total.shape == part.shape[1:]


@pytest.mark.parametrize("rows", [1, 100, 4096, 10**6])
@pytest.mark.parametrize("across", [1, 16, 5000])
def test_one_wave(rows, across):
    """No more programs than run at once, unless each has all rows, or as many as it may have."""
    steps = rows_per_program(rows, across, 12, DEVICE)
    down = -(-rows // steps)
    assert 4 <= steps <= 64
    assert down * across <= 12 * multiprocessors(DEVICE) or down == 1 or steps == 64
