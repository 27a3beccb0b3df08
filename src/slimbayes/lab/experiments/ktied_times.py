"""The k-tied paper's step times (Table 4), and the time that estimators take to a given −ELBO."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slimbayes.core.convert import bayesianize
from slimbayes.core.draws import draw
from slimbayes.core.methods import KTied, MeanField
from slimbayes.core.objective import elbo
from slimbayes.core.priors import Normal
from slimbayes.lab.experiments.ktied_recipes import Job, seeds_of, size_of, train
from slimbayes.lab.experiments.ktied_tables import TITLES
from slimbayes.lab.experiments.ktied_words import probed_choice
from slimbayes.lab.experiments.outcome import Outcome, Table, check, curve
from slimbayes.lab.experiments.session import Session, with_precision

ESTIMATORS = ("shared", "flipout", "local")
_ROUNDS = {"smoke": 3, "desk": 31, "gpu": 61, "paper": 61}


def _step(network: nn.Module, bayesian: bool, x: Tensor, y: Tensor, captured: bool) -> Callable[[], object]:
    """One training step: eager, or recorded as a CUDA graph."""
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4, capturable=captured)

    def step() -> None:
        optimizer.zero_grad()
        loss = elbo(draw(network, x), y, network, 60_000).loss if bayesian else F.cross_entropy(network(x), y)
        loss.backward()
        optimizer.step()

    if not captured:
        return step
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _times(session: Session, width: int, rows: int, captured: bool) -> dict[str, list[float]]:
    """Milliseconds of steps, the three networks in turn."""
    device = session.device
    torch.manual_seed(0)
    x, y = torch.rand(rows, 784, device=device), torch.randint(10, (rows,), device=device)
    methods = {
        "Point estimate": None,
        "Mean-field": MeanField.paper(prior=Normal(0.0, 0.3)),
        "2-tied": KTied.paper(rank=2),
    }
    steps = {}
    for label, method in methods.items():
        network = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10)).to(device)
        if method is not None:
            bayesianize(network, method)
        steps[label] = _step(network, method is not None, x, y, captured)
    times: dict[str, list[float]] = {label: [] for label in steps}
    for turn in range(3 + _ROUNDS[session.scale]):
        for label, step in steps.items():
            if device.type == "cuda":
                torch.cuda.synchronize()
            begun = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 3:
                times[label].append(1e3 * (time.perf_counter() - begun))
    return times


def table4(session: Session, setting: str) -> Outcome:
    """Step times of two dense layers: point estimate, mean-field and 2-tied, interleaved in one run."""
    with_precision(session)
    cuda = session.device.type == "cuda"
    width, rows = (64, 64) if session.scale == "smoke" else (400, 1024)
    outcome = Outcome()
    for captured in (True, False) if cuda else (False,):
        how = "recorded as a CUDA graph" if captured else "eager"
        title = f"Training step, two dense layers 784-{width}-10, {rows} rows, {how}"
        columns = (
            ("step_ms", "step_ratio") if cuda else ("step_ratio",)
        )  # a small machine's times say nothing
        table = Table("step" if captured or not cuda else "step-eager", title, columns)
        times = _times(session, width, rows, captured)
        base = statistics.median(times["Point estimate"])
        for label, found in times.items():
            middle = statistics.median(found)
            table.add(label, {"step_ms": middle, "step_ratio": middle / base}, {})
        outcome.tables.append(table)
        if session.scale != "smoke":
            ratio = table.mean("2-tied", "step_ratio") / table.mean("Mean-field", "step_ratio")
            words = f"A 2-tied step takes no longer than mean-field's, {how}"
            outcome.checks.append(check(words, ratio <= 1, ratio, "≤ 1"))
    outcome.deviations += [
        "The widths of the paper's two dense layers and its batch are not printed: 784-400-10 and 1,024 rows here.",
        f"The steps were interleaved in one run; medians of {_ROUNDS[session.scale]}.",
    ]
    return outcome


def timed(session: Session) -> list[Job]:
    """Mean-field and 2-tied networks under every estimator, one at a time: their seconds count."""
    return [
        Job("mnist", "timed", label, seed, estimator=estimator)
        for seed in seeds_of(session, "mnist")[:1]
        for label in ("Mean-field", "2-tied")
        for estimator in ESTIMATORS
    ]


def without_start(steps: list[int], seconds: list[float]) -> list[float]:
    """Seconds less what came before the first step, if all steps until the first reading took as long as the rest.

    >>> without_start([10, 20, 30], [7.0, 8.0, 9.0])
    [1.0, 2.0, 3.0]
    """
    if len(steps) < 2:
        return seconds
    rate = (seconds[-1] - seconds[0]) / (steps[-1] - steps[0])
    start = max(0.0, seconds[0] - steps[0] * rate)
    return [second - start for second in seconds]


def time_to_elbo(session: Session, setting: str) -> Outcome:
    """Seconds of training until the validation −ELBO has fallen to given values."""
    outcome = Outcome()
    lines, runs = [], {}
    for job in timed(session):
        probes = train(session, job).probes
        steps = sorted(map(int, probes))
        seconds = [probes[str(step)]["seconds"] for step in steps]
        seconds = without_start(steps, seconds)
        values = [probes[str(step)]["neg_elbo"] for step in steps]
        label = f"{job.label}, {job.estimator}"
        runs[label] = (steps, seconds, values)
        lines.append((label, seconds, [values]))
    words = f"{TITLES[setting]}: −ELBO on validation data against seconds of training"
    outcome.curves.append(
        curve(f"{setting}-time", words, "seconds of training", "−ELBO per example", lines, log_y=True)
    )
    worst_end = max(values[-1] for _, _, values in runs.values())
    start = max(values[0] for _, _, values in runs.values())
    rounded = [float(f"{level:.2g}") for level in (start / 2, start / 5, 1.1 * worst_end)]
    levels = list(dict.fromkeys(level for level in rounded if level >= worst_end))
    columns = tuple(f"to {level:g}, s" for level in levels)
    table = Table(
        f"{setting}-time", "Seconds of training to a validation −ELBO", (*columns, "step, ms", "last −ELBO")
    )
    for label, (steps, seconds, values) in runs.items():
        row = {}
        for column, level in zip(columns, levels, strict=True):
            reached = [second for second, value in zip(seconds, values, strict=True) if value <= level]
            if reached:
                row[column] = reached[0]
        row["step, ms"] = 1e3 * seconds[-1] / steps[-1]
        row["last −ELBO"] = values[-1]
        table.add(label, row, {})
    outcome.tables.append(table)
    every = size_of(setting, session.scale).curve_every
    outcome.deviations.append(
        f"Times are read every {every} steps, without the time of measuring, and without what the first {every} steps "
        f"took longer than the others (the start of the GPU, the recording of a step); one run each."
    )
    outcome.deviations += probed_choice(session, setting)
    return outcome
