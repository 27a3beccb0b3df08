"""Calibration errors: by hand, by brute force, against torchmetrics where the definitions agree."""

import math

import numpy as np
import pytest
import torch
from helpers_metrics import close, problem
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import multiclass_calibration_error

from slimbayes import metrics


def binary(confidences):
    """Two-class probabilities of given confidence in class 0."""
    p = torch.tensor(confidences, dtype=torch.float64)
    return torch.stack((p, 1 - p), -1)


def brute_force(p, y, bins, min_count=0):
    """The counted gaps per bin, one example and one bin at a time."""
    gaps, counts = [], []
    for b in range(bins):
        inside = [
            i for i, row in enumerate(p)
            if b / bins <= float(row.max()) < (b + 1) / bins or (b == bins - 1 and float(row.max()) >= 1)
        ]  # fmt: skip
        if len(inside) > min_count:
            right = np.mean([int(p[i].argmax() == y[i]) for i in inside])
            gaps.append(abs(right - np.mean([float(p[i].max()) for i in inside])))
            counts.append(len(inside))
    return np.array(gaps), np.array(counts)


def test_by_hand():
    # Bins of a fifth: [0.6, 0.8) holds 0.6 and 0.7, one right; [0.8, 1] holds 0.8, 0.9 and 1, two right.
    p, y = binary([0.6, 0.7, 0.8, 0.9, 1.0]), torch.tensor([0, 1, 1, 0, 0])
    low, high = abs(0.5 - 0.65), abs(2 / 3 - 0.9)
    close(metrics.ece(p, y, bins=5), (2 * low + 3 * high) / 5)
    close(metrics.mce(p, y, bins=5), high)
    # Without the bin of at most 2 examples.
    close(metrics.ece(p, y, bins=5, min_count=2), 3 * high / 5)
    close(metrics.ece(p, y, bins=5, min_count=2, total="kept"), high)
    close(metrics.mce(p, y, bins=5, min_count=2), high)
    assert math.isnan(metrics.ece(p, y, bins=5, min_count=3)) and math.isnan(metrics.mce(p, y, 5, 3))
    diagram = metrics.reliability(p, y, bins=5)
    assert diagram.count.tolist() == [0, 0, 0, 2, 3]
    assert diagram.edges.tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert diagram.confidence.tolist() == pytest.approx([0, 0, 0, 0.65, 0.9])
    assert diagram.to_dict()["accuracy"] == pytest.approx([0, 0, 0, 0.5, 2 / 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bins", [10, 15, 20])
def test_an_edge_belongs_to_the_bin_above(bins, dtype):
    for edge in range(bins // 2, bins):
        if edge / bins >= 0.5:
            p = torch.tensor([[edge / bins, 1 - edge / bins]], dtype=torch.float64).to(dtype)
            assert int(metrics.reliability(p, [0], bins).count.argmax()) == edge


@pytest.mark.parametrize(("bins", "min_count"), [(15, 0), (20, 5), (1, 0), (100, 2)])
def test_against_brute_force(bins, min_count):
    p, y = problem(rows=300)
    gaps, counts = brute_force(p, y, bins, min_count)
    close(metrics.ece(p, y, bins, min_count), float((gaps * counts).sum() / 300))
    close(metrics.ece(p, y, bins, min_count, "kept"), float((gaps * counts).sum() / counts.sum()))
    close(metrics.mce(p, y, bins, min_count), float(gaps.max()))


def test_against_torchmetrics():
    p, y = problem(rows=500, dtype=torch.float32)
    for norm, function in (("l1", metrics.ece), ("max", metrics.mce)):
        close(function(p, y), float(multiclass_calibration_error(p, y, 5, n_bins=15, norm=norm)), 1e-6)


def test_adaptive_ece_against_numpy():
    p, y = problem(rows=103)
    confidence, right = p.max(-1).values.numpy(), (p.argmax(-1) == y).numpy()
    expected = 0.0
    for part in np.array_split(np.argsort(confidence), 15):
        expected += len(part) / 103 * abs(right[part].mean() - confidence[part].mean())
    close(metrics.adaptive_ece(p, y), expected)
    close(metrics.adaptive_ece(p, y, bins=1), abs(right.mean() - confidence.mean()))


def test_adaptive_ece_shares_ties():
    """All confidences alike: whatever the order, every bin sees the mean accuracy."""
    y = torch.tensor([0] * 5 + [1] * 5)
    close(metrics.adaptive_ece(binary([0.8] * 10), y, bins=5), 0.3)


@given(st.integers(0, 10_000), st.integers(1, 50), st.integers(1, 30), st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_bounds(seed, rows, bins, min_count):
    p, y = problem(seed, rows, 3)
    ece, mce = metrics.ece(p, y, bins, min_count), metrics.mce(p, y, bins, min_count)
    assert math.isnan(ece) == math.isnan(mce)
    if not math.isnan(ece):
        assert 0 <= ece <= mce + 1e-12 <= 1 + 1e-12
    assert abs(metrics.accuracy(p, y) - float(p.max(-1).values.mean())) <= metrics.ece(p, y, bins) + 1e-12
    assert 0 <= metrics.adaptive_ece(p, y, bins) <= 1


def test_calibrated_forecasts_have_small_errors_and_overconfident_ones_large():
    generator = torch.Generator().manual_seed(0)
    p = (2 * torch.randn(20_000, 4, generator=generator)).softmax(-1)
    y = torch.multinomial(p, 1, generator=generator).squeeze(-1)
    sharp = p.pow(3) / p.pow(3).sum(-1, keepdim=True)
    for function in (metrics.ece, metrics.adaptive_ece):
        assert function(p, y) < 0.02
        assert function(sharp, y) > 0.1


def test_wrong_options():
    p, y = problem(rows=3)
    for call, says in [
        (lambda: metrics.ece(p, y, bins=0), "bins must be"),
        (lambda: metrics.adaptive_ece(p, y, bins=2.5), "bins must be"),
        (lambda: metrics.ece(p, y, min_count=-1), "min_count"),
        (lambda: metrics.ece(p, y, total="some"), "total='some'"),
    ]:
        with pytest.raises(ValueError, match=says):
            call()
