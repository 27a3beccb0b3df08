"""Random problems and comparisons shared by the tests of metrics."""

import pytest
import torch


def problem(seed=0, rows=200, classes=5, draws=None, dtype=torch.float64):
    """Probabilities [N, C] or [D, N, C] that say something about the targets [N]."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (rows,), generator=generator)
    shape = (rows, classes) if draws is None else (draws, rows, classes)
    logits = 2 * torch.randn(shape, generator=generator, dtype=torch.float64)
    logits = logits + 1.5 * torch.nn.functional.one_hot(y, classes)
    return logits.softmax(-1).to(dtype), y


def close(actual, expected, tolerance=1e-12):
    assert isinstance(actual, float)
    assert actual == pytest.approx(expected, abs=tolerance, rel=tolerance)
