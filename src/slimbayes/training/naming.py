"""Why a step was not finite, in words: the step is run once more, and every tensor of it looked at."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slimbayes.core.likelihoods import guarded
from slimbayes.training.sources import Batch, mixed_seed
from slimbayes.training.step import seed_generators
from slimbayes.verbs.finiteness import Culprit, culprit, culprits, first_output, kl_culprits, listed

if TYPE_CHECKING:
    from slimbayes.training.loop import Run


def why(run: Run, step: int, row: list[float]) -> str:
    """What went wrong at a step with these figures (loss, nll, KL, made): names, the last finite step, remedies."""
    loss, nll, divergence = row[:3]
    figures = run.complaint or f"loss {loss}, nll {nll}, KL {divergence}"
    last = run.skips.last_finite
    remedies = f"lower lr={run.settings.lr:g}, set clip_norm, or look for extreme inputs"
    if run.settings.on_nonfinite == "stop":
        whose = f"the last finite step is {last}" if last else "no step was finite"
        remedies += ", or leave such steps out with on_nonfinite='skip'"
    else:
        row_of = "this step was" if run.skips.in_a_row == 1 else f"{run.skips.in_a_row} steps in a row were"
        whose = f"{row_of} left out, the last that was made is {last or 'none'}"
    kept = f"the last state in {str(run.folder)!r} is whole" if run.folder else "nothing was saved"
    what = "the loss is" if run.complaint or not math.isfinite(loss) else "gradients are"
    return (
        f"{what} not finite at step {step} ({figures}): {_culprits(run, step, row)}; {whose}, and the network has its "
        f"weights; {remedies}; {kept}"
    )


def _culprits(run: Run, step: int, row: list[float]) -> str:
    """Who it was, by all processes: one of them may be the only one to know."""
    found = "its tensors could not be looked at again"
    with suppress(Exception):  # the step is known, and that it was not finite: nothing here may hide it
        found = _again(run, step, row)
    texts = [found]
    if run.fabric.world_size > 1:
        texts = [run.fabric.broadcast(found, src=rank) for rank in range(run.fabric.world_size)]
    named = {text: rank for rank, text in reversed(list(enumerate(texts))) if text}
    if not named:
        return "run once more, it was finite (kernels that are not deterministic?)"
    if len(texts) == 1:
        return texts[0]
    return "; ".join(
        f"process {rank}: {text}" for text, rank in sorted(named.items(), key=lambda pair: pair[1])
    )


def _again(run: Run, step: int, row: list[float]) -> str:
    """Run the step once more, without its optimizer: the weights are those it had, for none has been made since."""
    inputs, targets = _batch(run, step)
    seed_generators(mixed_seed(run.settings.seed, 1, step - 1, run.fabric.global_rank), run.fabric.device)
    outputs: list[Culprit] = []
    run.guard.before()
    run.optimizer.zero_grad()
    try:
        with guarded(), first_output(run.model, outputs), run.fabric.autocast():
            likelihood, nll, divergence = run.plain(inputs, targets)
        weight = run.settings.kl_factor(step - 1, run.steps)
        loss = likelihood + weight * divergence / run.source.num_data
        loss.backward()
        wrong = culprits(run.model)
        for parameter in run.likelihood.named_parameters():
            wrong += _likelihood(*parameter)
    finally:
        run.guard.undo()
        run.optimizer.zero_grad()
    parts = []
    at_fault = [name for name, value in (("nll", nll), ("KL", divergence)) if not torch.isfinite(value)]
    if at_fault:
        parts.append(f"first in the {' and the '.join(at_fault)}")
    if "KL" in at_fault:
        outputs = outputs + kl_culprits(run.model)
    if outputs or wrong:
        # Statistics are put back; a gradient says more than the output that it came from.
        parts.append(listed([*outputs, *(each for each in wrong if each.what != "buffer")]))
    return ", ".join(parts)


def _likelihood(name: str, parameter: Tensor) -> list[Culprit]:
    found = list(culprit("parameter", f"likelihood.{name}", parameter))
    if parameter.grad is not None:
        found += culprit("gradient", f"likelihood.{name}", parameter.grad)
    return found


def _batch(run: Run, step: int) -> Batch:
    """The step's batch: the one at hand, or the source's, which repeats itself."""
    if step == run.step and run.batch is not None:
        return run.batch
    epoch, start = divmod(step - 1, run.per_epoch)
    batch: Batch = run.fabric.to_device(next(iter(run.source.epoch(epoch, start))))
    return batch
