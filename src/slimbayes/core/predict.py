"""``predict``: draws turned into a predictive distribution, in as little memory as asked for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.chunks import Pieces, attempt
from slimbayes.core.context import Draw
from slimbayes.core.conversion import Record, every_module, find_record, shared_out, unwrap
from slimbayes.core.draws import draw_flat
from slimbayes.core.likelihoods import Categorical, Likelihood, check_likelihood
from slimbayes.core.memory import Footprint, budget, device_of, footprint, small
from slimbayes.core.options import check_flag
from slimbayes.core.paths import ASKED, first
from slimbayes.core.plan import Plan
from slimbayes.core.predictive import CategoricalPredictive, Predictive
from slimbayes.core.probes import evaluating, kept
from slimbayes.core.row_mixing import in_passes
from slimbayes.core.rows import FlatInputs, flatten_inputs, signature
from slimbayes.core.sharded import agreed

_LOOKED: dict[torch.device, tuple[float, float | None]] = {}  # when, and what there was
_RECENT = 1.0  # seconds
_SURE = 0.125  # of the memory that there was: a pass of less runs whole


def predict(
    model: nn.Module,
    *inputs: Any,
    samples: int = 1,
    noise: str = "example",
    seed: int | None = None,
    likelihood: Likelihood | None = None,
    chunk: int | None = None,
    keep_draws: bool = True,
    shared_inputs: Sequence[str | int] = (),
    select: Callable[[Any], Tensor] | None = None,
    first_example: int = 0,
    layout: str = "auto",
    **named_inputs: Any,
) -> Predictive:
    """Predictive distribution p(y | x) ≈ (1/D) Σ_d p(y | f_d(x)) over D = components × samples draws.

    Runs in eval mode without gradients and restores the model's mode. ``chunk`` bounds the rows (draws ×
    examples) of one pass, at least one example of every component; None lets the free memory decide. The
    result is the same as in one pass with the same seed. A pass that runs out of memory is halved and tried
    again. ``keep_draws=False`` keeps running moments instead of all outputs: memory does not grow with the number of
    draws, but for what passes hold together, at most about three times the inputs' or a MiB. ``select`` picks the
    tensor to score from a structured output (default: the tensor itself, or ``.logits``). ``first_example`` is the
    index of the first example, as in ``draw``. ``layout`` as in ``draw``: where the network runs once per draw, a batch
    is never cut, and ``chunk`` bounds no more than how many outputs are held.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(3, 2), sb.Rank1())
    >>> p = sb.predict(net, torch.zeros(5, 3), samples=8)
    >>> p.mean.shape, p.mutual_information.shape
    (torch.Size([5, 2]), torch.Size([5]))
    """
    likelihood = Categorical() if likelihood is None else likelihood
    find_record(model)
    flat = flatten_inputs(model, inputs, named_inputs, shared_inputs)
    plan = Plan(samples, noise, seed, first_example, layout=layout, evaluated=True)
    return predict_flat(model, flat, plan, Scoring(likelihood, select, chunk, keep_draws))


@dataclass(frozen=True)
class Scoring:
    """What becomes of the draws of a prediction, and how many rows one pass may have."""

    likelihood: Likelihood
    select: Callable[[Any], Tensor] | None = None
    chunk: int | None = None
    keep_draws: bool = True

    def check(self) -> None:
        """Raise on options that mean nothing."""
        check_chunk(self.chunk)
        check_flag("keep_draws", self.keep_draws)
        check_likelihood(self.likelihood)
        if self.select is not None and not callable(self.select):
            raise TypeError(f"select must be a function of the network's output, got {self.select!r}")


def predict_flat(model: nn.Module, flat: FlatInputs, plan: Plan, scoring: Scoring) -> Predictive:
    """``predict`` on flattened inputs."""
    plan.check()
    scoring.check()
    course = None
    if not torch.compiler.is_compiling():
        course = first(ASKED.course, model, plan.samples, flat.numel())
    try:
        return _predict(model, flat, plan, scoring, course)
    finally:
        if course is not None:
            course.close()


def _predict(model: nn.Module, flat: FlatInputs, plan: Plan, scoring: Scoring, course: Any) -> Predictive:
    record, samples, likelihood = find_record(model), plan.samples, scoring.likelihood
    # Settled before anything is cut: a part of the batch would not say.
    now = Draw(record.components, samples, flat.batch, plan.noise)
    whole = in_passes(model, record, flat, now, plan.layout)
    plan = replace(plan, layout="passes" if whole else "rows")

    def run(part: FlatInputs, count: int, first_sample: int, start: int) -> Tensor:
        place = plan.first_example + start
        own = replace(plan, samples=count, first_sample=first_sample, first_example=place)
        found = scored(draw_flat(model, part, own, course), scoring.select)
        # The next pass may write where this one did: a network compiled to CUDA graphs does.
        return found if (count, part.batch) == (samples, flat.batch) else found.clone()

    inner = unwrap(model)
    with torch.no_grad(), evaluating(inner):
        fold = _fold(inner, record, flat, plan, scoring.chunk)
        if scoring.chunk is None and fold == (flat.batch, samples):
            draws = attempt(lambda: run(flat, samples, 0, 0))
            if draws is not None:
                return _scored_whole(draws, scoring)
        if plan.seed is None:
            # One function per draw must stay one function in every chunk: chunks are keyed by a random seed.
            shared = every_module(inner) if shared_out(inner) else ()
            plan = replace(plan, seed=int(agreed(torch.randint(2**62, ()), shared)))
        pieces = Pieces(run, flat, samples, record.components, likelihood, scoring.keep_draws, whole)
        return pieces.all(*fold)


def _scored_whole(draws: Tensor, scoring: Scoring) -> Predictive:
    """The predictive distribution of draws that came in one pass."""
    likelihood = scoring.likelihood
    if scoring.keep_draws and type(likelihood) is Categorical and not torch.compiler.is_compiling():
        likelihood.check(draws)
        return CategoricalPredictive(likelihood, None, draws)  # most callers want the mean alone
    return likelihood.predictive(draws if scoring.keep_draws else likelihood.moments(draws))


def _fold(
    model: nn.Module, record: Record, flat: FlatInputs, plan: Plan, chunk: int | None
) -> tuple[int, int]:
    """Examples and samples of one pass: as many as the chunk allows, or as there is memory for."""
    components = record.components
    if plan.layout == "passes":  # a batch is never cut
        return flat.batch, (
            plan.samples if chunk is None else max(1, min(plan.samples, chunk // (components * flat.batch)))
        )
    if chunk is None:
        return _fitting(model, record, flat, plan)
    examples = max(1, min(flat.batch, chunk // components))
    return examples, max(1, min(plan.samples, chunk // (components * examples)))


def _fitting(model: nn.Module, record: Record, flat: FlatInputs, plan: Plan) -> tuple[int, int]:
    """All examples and samples, unless memory is too short for that."""
    samples, whole = plan.samples, (flat.batch, plan.samples)
    if small(record.components * samples * flat.batch, record.components) or torch.compiler.is_compiling():
        return whole
    if shared_out(model):
        return whole  # processes run as many passes as each other, whatever memory each has
    device = device_of(flat.leaves, model)
    available = _lately(device)
    if available is None:
        return whole
    inputs = signature(flat.leaves, flat.spec, flat.tiled, flat.batch, plan.noise)
    if inputs is None:
        return whole
    key = samples > 1, inputs
    if key not in record.footprints:
        record.footprints[key] = traced(model, flat, samples, plan.noise)
    known = record.footprints[key]
    if known is None or known.peak(samples, flat.batch) <= _SURE * available:
        return whole
    available = budget(device)
    return whole if available is None else known.fold(samples, flat.batch, available)


def _lately(device: torch.device) -> float | None:
    """The memory that a pass may take, as of the last second: to ask takes as long as to run a small layer."""
    now = time.monotonic()
    if device not in _LOOKED or now - _LOOKED[device][0] > _RECENT:
        _LOOKED[device] = now, budget(device)
    return _LOOKED[device][1]


def traced(model: nn.Module, flat: FlatInputs, samples: int, noise: str) -> Footprint | None:
    """The memory of a pass, from small ones that leave no trace themselves; None if they fail."""

    def run(count: int, examples: int) -> Any:
        plan = Plan(count, noise, 0, layout="rows", evaluated=True)
        return draw_flat(model, flat.resized(examples), plan)

    with contextlib.suppress(Exception), kept(model, flat.leaves):
        run(samples, min(2, flat.batch))  # what happens only once is not to be traced
        return footprint(run, flat.batch, samples)
    return None


def check_chunk(chunk: int | None) -> None:
    """Raise on a bound of rows that means nothing."""
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk must be a positive number of rows or None, got {chunk!r}")


def scored(output: Any, select: Callable[[Any], Tensor] | None = None) -> Tensor:
    """The tensor of a structured output that is scored: the selected one, the output itself or its logits."""
    if select is None and type(output) is Tensor:
        return output
    scored = select(output) if select is not None else getattr(output, "logits", output)
    if not isinstance(scored, Tensor):
        raise TypeError(
            f"the model returned {type(output).__name__}; tell predict which tensor to score, for example "
            f"select=lambda output: output[0]"
        )
    return scored
