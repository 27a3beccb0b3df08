"""What is said at the end of a run: the findings of ``sb.diagnose`` that its history and a batch of its data give."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from slimbayes.core.conversion import find_record, shared_out
from slimbayes.training.step import in_dtype
from slimbayes.verbs.diagnosis import behaviour
from slimbayes.verbs.diagnosis.findings import Finding, ModelWarning

if TYPE_CHECKING:
    from slimbayes.metrics import Evaluation
    from slimbayes.training.loop import Run

_DRAWS = 8  # of a look at validation data, where the run's own validation had fewer
_ENOUGH = 4  # draws of the run's own


def judge(run: Run) -> tuple[Finding, ...]:
    """Findings on a trained model, and one warning that names them, to who called ``fit``.

    Of the history: a KL that outweighs the nll, or never counted. Of the last batch of training, drawn once more: noise
    that drowns the signal. Of the last validation: coverage and calibration, with a batch of draws of its own where
    that took fewer than four.
    """
    if not run.fabric.is_global_zero or not run.history.rows:
        return ()
    found = [*_of_history(run), *_of_last_batch(run), *_of_validation(run)]
    if found:
        lines = "".join(f"\n- {finding.kind}: {finding.what}. {finding.remedy}." for finding in found)
        text = f"the model may be worse than it could be (sb.diagnose says more):{lines}"
        warnings.warn(text, ModelWarning, stacklevel=4)
    return tuple(found)


@contextmanager
def unsaid() -> Iterator[None]:
    """No warning at the end of runs: who called ``fit`` passes on what it found."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ModelWarning)
        yield


def _of_history(run: Run) -> Iterator[Finding]:
    rows, last = run.history.rows, run.history.rows[-1]
    if last["kl"] > 0 and not any(row["kl_weight"] for row in rows):
        yield from behaviour.unused(run.step)
    divergence = last["kl_weight"] * last["kl"]
    yield from behaviour.outweighed(last["nll"], divergence, run.source.num_data, run.likelihood)


def _of_last_batch(run: Run) -> list[Finding]:
    """Two passes without gradients: less than one step."""
    if run.batch is None or not behaviour.noisy(run.model) or shared_out(run.model):
        return []
    inputs, targets = run.batch
    inputs = in_dtype(inputs, _dtype(run))
    seed = run.settings.seed

    def look() -> list[Finding]:
        draws = behaviour.outputs(run.model, inputs, 1, seed)
        return list(behaviour.drowned(run.model, inputs, draws, targets, run.likelihood))

    return _tried(look)


def _of_validation(run: Run) -> list[Finding]:
    from slimbayes.verbs.diagnosis.calibration import judged

    evaluation = run.held
    if evaluation is None:
        return []
    draws = find_record(run.model).components * run.settings.validation_samples
    if draws >= _ENOUGH or not behaviour.noisy(run.model):
        return list(judged(evaluation))
    if shared_out(run.model):
        return []
    return _tried(lambda: list(judged(_more_draws(run))))


def _more_draws(run: Run) -> Evaluation:
    from slimbayes.verbs.evaluation import assess

    assert run.validation is not None
    batches = run.validation.epoch(0)
    first = next(iter(batches))
    return assess(
        run.model, [first], samples=_DRAWS, seed=run.settings.seed, likelihood=run.likelihood,
        target_scaling=run.target_scaling, prepare=lambda inputs: in_dtype(inputs, _dtype(run)),
    )  # fmt: skip


def _tried(look: Callable[[], list[Finding]]) -> list[Finding]:
    """What a look finds; nothing where it fails, because a finished training is worth more than a look at it."""
    try:
        return look()
    except Exception:
        return []


def _dtype(run: Run) -> torch.dtype:
    return next((parameter.dtype for parameter in run.model.parameters()), torch.float32)
