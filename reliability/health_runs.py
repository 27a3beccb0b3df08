"""Health of whole computations: guarded training, the same draws however they are made, large heads, tails, edges."""

from __future__ import annotations

import copy
import math
import resource
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import slimbayes as sb
from reliability.health_cases import NamedError, Y, build, case, inputs, named, near
from slimbayes.core.keyed_noise import keyed_noise, layer_key
from slimbayes.core.methods.base import Method
from slimbayes.core.noise import fresh_noise

BAD = 5  # the step that meets the bad row
QUIET = {"epochs": 2, "batch_size": 8, "lr": 1e-3, "progress": False, "accelerator": "cpu"}
ALONE: dict[str, object] = {}  # cases that no method changes: name to function


def alone(function: object) -> object:
    """Put a case without a method into the table."""
    ALONE[function.__name__] = function  # type: ignore[attr-defined]
    return function


def poisoned() -> tuple[list[tuple[Tensor, Tensor]], int]:
    """Batches of which one has a row that is infinite, and the number of rows."""
    torch.manual_seed(3)
    batches = [(torch.randn(8, 5), torch.randint(3, (8,))) for _ in range(6)]
    batches[BAD - 1][0][3] = math.inf
    return batches, 48


def state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all tensors."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(first[name], second[name]) for name in first)


@case
def training_stops(method: Method) -> None:
    """The step is caught, its tensors are named, and the weights are those of the step before, bit for bit."""
    batches, rows = poisoned()
    model, short = build(method, norm=nn.BatchNorm1d), build(method, norm=nn.BatchNorm1d)
    options = {**QUIET, "schedule": "constant", "kl_annealing": 0.0, "num_data": rows}
    sb.fit(short, batches, steps=BAD - 1, **options)
    try:
        with named(
            sb.TrainingError, f"at step {BAD} ", "of '", f"the last finite step is {BAD - 1}", "lower lr="
        ):
            sb.fit(model, batches, **options)
    except NamedError:
        assert same(state(model), state(short)), "weights or statistics of a step that was not finite"
        raise
    raise AssertionError("an infinite input trained")


@case
def training_skips_and_resumes(method: Method) -> None:
    """Stopped, then resumed with on_nonfinite='skip': the weights of a run that skipped from the start."""
    batches, rows = poisoned()
    options = {**QUIET, "num_data": rows, "checkpoint_every": 2}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, part = build(method, norm=nn.BatchNorm1d), build(method, norm=nn.BatchNorm1d)
        first = sb.fit(whole, batches, on_nonfinite="skip", **options)
        with suppress(sb.TrainingError):
            sb.fit(part, batches, folder=Path(folder), **options)
        second = sb.fit(part, batches, folder=Path(folder), resume=True, on_nonfinite="skip", **options)
    assert first.skipped == second.skipped == 2, f"{first.skipped} and {second.skipped} steps skipped, not 2"
    assert same(state(whole), state(part)), "a resumed run went another way"
    assert all(torch.isfinite(value).all() for value in state(whole).values()), "weights that are not finite"


@case
def chunks_and_batches(method: Method) -> None:
    """A seed's predictions agree to 1e-6 whatever the chunk, and its metrics whatever the batches."""
    model, x = build(method), inputs(batch=12)
    y = torch.arange(12) % 3
    whole = sb.predict(model, x, samples=4, seed=5).mean
    for chunk in (1, 7, 64):
        near(sb.predict(model, x, samples=4, seed=5, chunk=chunk).mean, whole, 1e-6, f"chunk={chunk}")
    nll = {}
    for size in (1, 5, 12):
        batches = list(zip(x.split(size), y.split(size), strict=True))
        nll[size] = sb.evaluate(model, batches, samples=4, seed=5)["nll"]
    assert max(nll.values()) - min(nll.values()) < 1e-6, f"nll by batch size: {nll}"


@case
def replayed_by_number(method: Method) -> None:
    """A draw made again by its number is the draw among the others, to 1e-6, under both kinds of noise."""
    model, x = build(method), inputs()
    for noise in ("shared", "example"):
        whole = sb.draw(model, x, samples=4, noise=noise, seed=9)
        numbers = [len(whole) - 1, 1]
        again = sb.draw(model, x, samples=4, noise=noise, seed=9, draws=numbers)
        near(again, whole[numbers], 1e-6, f"draws {numbers} with noise={noise!r}")


@case
def deterministic_mode(method: Method) -> None:
    """Under torch.use_deterministic_algorithms two runs of draw, loss and gradients are one, bit for bit."""
    found = []
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            model = build(method, norm=nn.LayerNorm).train()
            torch.manual_seed(4)
            loss = sb.elbo(sb.draw(model, inputs(), samples=2), Y, model, num_data=10).loss
            loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            found.append([loss.detach(), *gradients])
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "two runs differ"


def large_head(method: Method, classes: int = 1_000_000) -> None:
    """predict and evaluate of a head with a million classes: within 3 GiB and a minute, probabilities that sum to 1.

    To 1e-3: logits of heavy-tailed factors are in the thousands, where float32 knows four digits after the point.
    """
    torch.manual_seed(0)
    options = {"include": lambda name, module: isinstance(module, nn.Linear)}
    if isinstance(method, sb.DeepEnsemble):
        options = {}
    model = sb.bayesianize(nn.Sequential(nn.Linear(4, classes)), method, **options).eval()
    x, y = torch.randn(2, 4), torch.tensor([0, classes - 1])
    clock, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    p = sb.predict(model, x, samples=2, seed=0).mean
    near(p.double().sum(-1), torch.ones(2).double(), 1e-3, "probabilities")
    metrics = sb.evaluate(model, [(x, y)], samples=2, seed=0)
    reference = -p.double().gather(1, y[:, None]).log().mean().item()
    assert abs(metrics["nll"] - reference) < 1e-3, f"nll {metrics['nll']} against {reference}"
    taken = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    seconds = time.monotonic() - clock
    assert taken < 3 and seconds < 60, f"{taken:.1f} GiB and {seconds:.0f} s"


case(large_head)


@alone
def cauchy_tails() -> None:
    """10⁶ Cauchy numbers, keyed and fresh, in every type: finite, quartiles to 2 %, the tails beyond 1000 to 15 %."""
    count, cpu = 1_000_000, torch.device("cpu")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        torch.manual_seed(0)
        keyed = keyed_noise("cauchy", layer_key(0, "tails"), 0, None, None, None, (count,), dtype, cpu)
        for what, x in (("keyed", keyed.flatten()), ("fresh", fresh_noise("cauchy", (count,), dtype, cpu))):
            assert torch.isfinite(x).all(), f"{what} {dtype}: not finite"
            quartiles = x.double().quantile(torch.tensor([0.25, 0.5, 0.75]).double())
            near(quartiles, torch.tensor([-1.0, 0.0, 1.0]), 0.02, f"{what} {dtype}: quartiles")
            beyond = (x.abs() > 1000).double().mean().item()  # 2/(1000π)
            assert abs(beyond / (2e-3 / math.pi) - 1) < 0.15, f"{what} {dtype}: {beyond:.1e} beyond 1000"


@alone
def cauchy_draws() -> None:
    """10⁶ draws of a network with Cauchy factors are finite, and so are their gradients."""
    for clip in (10.0, None):
        torch.manual_seed(0)
        model = sb.bayesianize(nn.Linear(1, 1), sb.Rank1(components=1, posterior="cauchy", clip=clip))
        draws = sb.draw(model, torch.ones(1, 1), samples=1_000_000)
        assert draws.shape[0] == 1_000_000 and torch.isfinite(draws).all(), f"clip={clip}: draws"
        loss = sb.elbo(draws, torch.zeros(1, 1), model, num_data=10, likelihood=sb.Gaussian())
        loss.loss.backward()
        sb.check_finite(model, loss)


@alone
def probabilities_of_0_and_1() -> None:
    """Metrics of probabilities that are exactly 0 and 1: those of float64, and an infinite nll only where it is."""
    p = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    m = sb.metrics
    functions = {
        "accuracy": m.accuracy, "ece": m.ece, "mce": m.mce, "adaptive_ece": m.adaptive_ece, "brier": m.brier,
        "aurc": m.aurc,
    }  # fmt: skip
    for y in (torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 2, 1])):
        for name, function in functions.items():
            ours, reference = function(p, y), function(p.double(), y)
            assert math.isfinite(ours) and abs(ours - reference) < 1e-6, f"{name}: {ours} against {reference}"
        certain = bool((p.argmax(1) == y).all())
        assert m.nll(p, y) == (0.0 if certain else math.inf), f"nll {m.nll(p, y)}"
    # Outputs so far apart that their softmax is 0 and 1: what a network gives.
    draws = torch.tensor([[[1e4, -1e4, 0.0]], [[1e4, -1e4, 0.0]]])
    predictive = sb.Categorical().predictive(draws)
    for name in ("entropy", "expected_entropy", "mutual_information", "variance"):
        near(getattr(predictive, name), torch.zeros_like(getattr(predictive, name)), 1e-6, name)
    near(predictive.log_prob(torch.tensor([1])), torch.tensor([-2e4]), 1e-6, "log_prob")


@alone
def workers_and_prefetch() -> None:
    """A seed's metrics are the same bits for 0 and 2 workers and other prefetches, its draws in any order."""
    model, x = build(sb.Rank1(components=3)), inputs(batch=24)
    data = TensorDataset(x, torch.arange(24) % 3)
    found = []
    for options in ({}, {"num_workers": 2}, {"num_workers": 2, "prefetch_factor": 5}):
        loader = DataLoader(data, batch_size=5, **options)  # type: ignore[arg-type]
        found.append(sb.evaluate(model, loader, samples=3, seed=1))
    assert found[0] == found[1] == found[2], "metrics differ with the workers"
    parts = {
        start: sb.draw(model, x[start : start + 6], seed=1, first_example=start) for start in (18, 0, 12, 6)
    }
    whole = sb.draw(model, x, seed=1)
    near(torch.cat([parts[start] for start in sorted(parts)], 1), whole, 1e-6, "batches in another order")


@alone
def trained_by_workers() -> None:
    """A run on a DataLoader ends with the same bits for 0 and 2 workers."""
    x = inputs(batch=24)
    data = TensorDataset(x, torch.arange(24) % 3)
    found = []
    for workers in (0, 2):
        model = build(sb.MeanField())
        loader = DataLoader(data, batch_size=6, shuffle=True, num_workers=workers)
        sb.fit(model, loader, **{**QUIET, "batch_size": 6})
        found.append(state(copy.deepcopy(model)))
    assert same(*found), "weights differ with the workers"
