"""Predictions within the memory there is: traced footprints, automatic folding, smaller passes after an OOM."""

import sys

import pytest
import torch
from helpers_networks import METHODS, convert, features, images, mlp, residual_net
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import slimbayes as sb
from slimbayes.core import memory as budgets
from slimbayes.core.conversion import find_record
from slimbayes.core.memory import Footprint

predicting = sys.modules["slimbayes.core.predict"]  # the function of that name hides the module


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return output


class Limited(nn.Module):
    """Memory for so many rows, and no more."""

    def __init__(self, rows, error=torch.cuda.OutOfMemoryError):
        super().__init__()
        self.rows, self.error = rows, error
        self.seen = []

    def forward(self, x):
        self.seen.append(len(x))
        if len(x) > self.rows:
            raise self.error("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return x


def limited(rows, method="rank1", **options):
    model = convert(mlp, METHODS[method]()).eval()
    model.add_module("limit", Limited(rows, **options))
    return model


def tight(monkeypatch, available):
    """So many bytes, and traces for every prediction."""
    monkeypatch.setattr(predicting, "budget", lambda device: available)
    monkeypatch.setattr(predicting, "_LOOKED", {})
    monkeypatch.setattr(predicting, "small", lambda rows, components: False)


@pytest.mark.uncounted(but=4)
@pytest.mark.parametrize("method", METHODS)
def test_any_budget_gives_the_same_prediction(method, monkeypatch):
    model = convert(residual_net, METHODS[method]()).eval()
    whole = sb.predict(model, images(5), samples=4, seed=1)
    for available in (1.0, 20_000.0, 100_000.0, 1e9):
        tight(monkeypatch, available)
        cut = sb.predict(model, images(5), samples=4, seed=1)
        close(cut.draws, whole.draws, 1e-4)
        moments = sb.predict(model, images(5), samples=4, seed=1, keep_draws=False)
        close(moments.mean, whole.mean, 1e-4)
    assert all(found is not None for found in find_record(model).footprints.values())


def test_what_fits_in_one_pass_is_not_seeded(monkeypatch):
    model = convert(mlp, METHODS["rank1"]()).eval()
    torch.manual_seed(3)
    whole = sb.predict(model, features(5), samples=4)
    tight(monkeypatch, 1e9)
    sb.predict(model, features(5), samples=4)  # the trace is made
    for _again in range(2):
        torch.manual_seed(3)
        assert torch.equal(sb.predict(model, features(5), samples=4).draws, whole.draws)


def test_a_trace_leaves_the_generator_and_buffers_alone(monkeypatch):
    model = convert(residual_net, METHODS["rank1"]()).eval()
    tight(monkeypatch, 1e9)
    before = {name: value.clone() for name, value in model.named_buffers()}
    torch.manual_seed(3)
    first = sb.predict(model, images(5), samples=4)
    torch.manual_seed(3)
    assert torch.equal(sb.predict(model, images(5), samples=4).draws, first.draws)
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


@pytest.mark.parametrize("method", ["rank1", "meanfield", "ktied_local", "emp", "deep_ensemble"])
def test_footprints_foretell_the_peak(method):
    """A trace of a few rows gives the bytes of a pass of many."""
    model = convert(lambda: mlp(8, 4, 64), METHODS[method]()).eval()
    x = features(100, 8)
    flat = predicting.flatten_inputs(model, (x,), {}, ())
    with torch.no_grad():
        foretold = predicting.traced(model, flat, 10, "example")
        for samples, examples in ((10, 100), (3, 20), (1, 100)):
            with budgets._Trace() as trace:
                sb.draw(model, x[:examples], samples=samples, seed=0)
            peak = max(sum(trace.sizes[i] for i in alive) for alive in trace.together)
            assert peak <= foretold.peak(samples, examples) <= 4 * peak + 4096  # one draw alone is plainer


@pytest.mark.uncounted
def test_memory_does_not_grow_with_samples(monkeypatch):
    model = convert(lambda: mlp(3, 4, 64), METHODS["rank1"]()).eval()
    x = features(40)

    def largest(samples, **options):
        with Largest() as seen:
            sb.predict(model, x, samples=samples, seed=0, keep_draws=False, **options)
        return seen.bytes

    assert largest(64, chunk=120) == largest(4, chunk=120)
    assert largest(64) > 8 * largest(4)
    tight(monkeypatch, 200_000.0)
    assert largest(64) <= max(largest(4), 200_000)


def test_folding_keeps_a_prefix_in_one_piece():
    prefix = Footprint(((0.0, 0.0, 1000.0, 1.0),))
    assert prefix.fold(samples=100, batch=8, budget=4400.0) == (4, 100)
    weights = Footprint(((0.0, 1000.0, 0.0, 1.0),))
    assert weights.fold(samples=100, batch=8, budget=4400.0) == (8, 4)
    assert weights.fold(samples=100, batch=8, budget=0.0) == (1, 1)


@pytest.mark.uncounted(but=6)
@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, RuntimeError, MemoryError])
@pytest.mark.parametrize("chunk", [None, 45])
def test_out_of_memory_halves_the_rows(chunk, error):
    whole = sb.predict(limited(10**6), features(7), samples=6, seed=1)
    for rows in (100, 21, 20, 4, 3):
        model = limited(rows, error=error)
        options = {"samples": 6, "seed": 1, "chunk": chunk}
        close(sb.predict(model, features(7), **options).draws, whole.draws, 1e-6)
        close(sb.predict(model, features(7), keep_draws=False, **options).mean, whole.mean)


def test_work_that_is_done_is_not_done_again():
    model = limited(30)
    sb.predict(model, features(20), samples=4, seed=1, chunk=60)
    model.limit.seen.clear()
    sb.predict(model, features(20), samples=4, seed=1, chunk=60)
    done = [rows for rows in model.limit.seen if rows <= 30]
    assert sum(done) == 3 * 4 * 20 and len(model.limit.seen) - len(done) == 1


def test_without_a_seed_a_retry_keeps_functions_together():
    model = limited(12)
    x = features(1).expand(6, -1)
    draws = sb.predict(model, x, samples=4, noise="shared").draws
    close(draws, draws[:, :1].expand_as(draws))


def test_the_smallest_pass_raises_and_says_what_to_do():
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"1 example x 3 components x 1 sample = 3 rows"):
        sb.predict(limited(2), features(7), samples=6)
    with pytest.raises(RuntimeError, match=r"on cpu .*MiB.*smaller dtype"):
        sb.predict(limited(2, error=RuntimeError), features(7), samples=6, chunk=8)


def test_other_errors_are_not_retried():
    class Broken(nn.Module):
        def forward(self, x):
            raise RuntimeError("something else")

    model = convert(mlp, METHODS["rank1"]()).eval()
    model.add_module("broken", Broken())
    with pytest.raises(RuntimeError, match="something else"):
        sb.predict(model, features(4), samples=2)


def test_evaluate_survives_too(monkeypatch):
    y = torch.tensor([0, 1, 1, 0, 1, 0, 0])
    expected = sb.evaluate(limited(10**6), [(features(7), y)], samples=6, seed=1)
    found = sb.evaluate(limited(9), [(features(7), y)], samples=6, seed=1)
    tight(monkeypatch, 1000.0)
    folded = sb.evaluate(limited(10**6), [(features(7), y)], samples=6, seed=1)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-5)
        assert folded[name] == pytest.approx(value, abs=1e-5)


def test_a_network_that_cannot_be_traced_runs_whole(monkeypatch):
    class Fussy(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            if len(x) < 20:
                raise ValueError("too few")
            return self.linear(x)

    tight(monkeypatch, 1.0)
    model = convert(Fussy, METHODS["meanfield"]()).eval()
    assert sb.predict(model, features(30), samples=2).draws.shape == (2, 30, 2)


def test_budgets():
    available = budgets.host_memory()
    assert available is None or available > 0
    assert budgets.budget(torch.device("meta")) is None
    assert budgets.small(100, 1) and not budgets.small(100_000, 4)


def test_memory_is_asked_for_once_in_a_while(monkeypatch):
    """A pass that is small beside what there was a moment ago runs whole; one that is not asks again."""
    asked = []

    def budget(device):
        asked.append(device)
        return 1e9 if len(asked) == 1 else 1000.0

    tight(monkeypatch, 0.0)
    monkeypatch.setattr(predicting, "budget", budget)
    model = sb.bayesianize(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), sb.Rank1(4))
    x = torch.randn(20, 6)
    for _ in range(3):
        sb.predict(model, x, samples=2)
    assert len(asked) == 1
    monkeypatch.setattr(predicting, "_SURE", 0.0)
    sb.predict(model, x, samples=2)
    assert len(asked) == 2
    monkeypatch.setattr(predicting, "_RECENT", -1.0)
    sb.predict(model, x, samples=2)
    assert len(asked) == 4
