"""The first convolution and the factor on its input: which are one operation, with the same results."""

from __future__ import annotations

import pytest
import torch
from helpers_graphs import R, compiled, factor, image
from torch.nn import functional as F

from slimbayes.accelerate.compile.first_fusion import fuse_first
from slimbayes.accelerate.row_factors import row_product


def first(change):
    weight = factor(9, 8, 3 * 9).view(8, 3, 3, 3)

    def function(x, s):
        return change(x, s, weight)

    return function


def _written(x, s, weight):
    product = row_product(x, s)
    x.mul_(0.0)
    return F.conv2d(product, weight, None, (2, 2), (1, 1), (1, 1), 1)


def _without_gradient(x, s, weight):
    with torch.no_grad():
        product = row_product(x, s)
    return F.conv2d(product, weight, None, (2, 2), (1, 1), (1, 1), 1)


def _numbers(x, s, weight):
    return F.conv2d(row_product(x, s), weight, None, 2, 1, 1, 1)


def _some_numbers(x, s, weight):
    return F.conv2d(row_product(x, s), weight, None, 2, (1, 1), (1, 1), 1)


def _padded_by_name(x, s, weight):
    return F.conv2d(row_product(x, s), weight, None, (1, 1), "same", (1, 1), 1)


def _pairs(x, s, weight):
    return F.conv2d(row_product(x, s), weight, None, (2, 2), (1, 1), (1, 1), 1)


@pytest.mark.parametrize(
    "change, count",
    [
        (_written, 0),
        (_without_gradient, 0),
        (_numbers, 0),
        (_some_numbers, 0),
        (_padded_by_name, 0),
        (_pairs, 1),
    ],
)
def test_first_convolutions(change, count: int) -> None:
    function, counts = first(change), []
    s = factor(1, R, 3).requires_grad_(change is not _written)
    grads = []
    for call in (function, compiled(function, counts, fuse_first)):
        s.grad = None
        y = call(image(0, R, 3), s)
        if y.requires_grad:
            y.sin().sum().backward()
        grads.append((y.detach(), s.grad))
    assert counts == [count] and (grads[0][1] is None) == (grads[1][1] is None)
    torch.testing.assert_close(grads[0][0], grads[1][0], rtol=1e-9, atol=1e-9)
    if grads[0][1] is not None:
        torch.testing.assert_close(grads[0][1], grads[1][1], rtol=1e-9, atol=1e-9)
