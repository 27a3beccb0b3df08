"""The rows of a run: steps gathered into figures, validation and early stopping, and who is told of them."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slimbayes.core.conversion import find_record
from slimbayes.core.likelihoods import Gaussian
from slimbayes.core.predict import predict
from slimbayes.core.predictive import Predictive
from slimbayes.training.keeping import keep, weights_of
from slimbayes.training.monitor import Row, spread_of, warn_of_collapse
from slimbayes.training.naming import why
from slimbayes.training.sources import Source, mixed_seed
from slimbayes.training.step import StopTraining, TrainingError, in_dtype
from slimbayes.verbs.evaluation import arguments, assess

if TYPE_CHECKING:
    from slimbayes.metrics import Evaluation
    from slimbayes.training.loop import Run

LEAST_HELD_OUT = 30  # targets from which the noise is fitted
_ENOUGH = 10_000
_DRAWS = 16


def collect(run: Run, pending: list[Tensor]) -> Tensor:
    """Add the figures of the steps that were made to the sums, averaged over processes; returns the last step's.

    Steps that were left out are counted, or end the run.
    """
    figures = torch.stack(pending).double()  # [steps, 4]
    if run.fabric.world_size > 1:
        figures = run.fabric.all_reduce(figures, reduce_op="mean")
    figures = figures.cpu()
    for number, row in enumerate(figures.tolist(), run.step - len(figures) + 1):
        if row[3] == 1:
            run.skips.in_a_row, run.skips.last_finite = 0, number
            continue
        for count in ("since_row", "in_a_row", "total"):
            setattr(run.skips, count, getattr(run.skips, count) + 1)
        if run.settings.on_nonfinite == "stop" or run.skips.in_a_row >= run.settings.max_skips:
            raise TrainingError(why(run, number, row))
        if run.skips.total == 1:
            text = why(run, number, row)  # in all processes, which tell each other
            if run.fabric.is_global_zero:
                warnings.warn(f"left out: {text}", stacklevel=6)  # who called fit
    made = figures[figures[:, 3] == 1]
    run.sums[:3] += made[:, :3].sum(0)
    run.sums[3] += len(made)
    return figures[-1]


def log(run: Run, epoch: int, rate: float, ended: bool) -> None:
    """A row of the steps since the one before: into the history, to TensorBoard, to the callback."""
    loss, nll, divergence = (run.sums[:3] / run.sums[3]).tolist()
    run.sums.zero_()
    step = run.step - 1
    row: Row = {
        "step": run.step,
        "epoch": round(run.step / run.per_epoch, 4),
        "loss": loss,
        "nll": nll,
        "kl": divergence,
        "lr": run.settings.lr * run.settings.multiplier(step, run.steps, run.per_epoch),
        "kl_weight": run.settings.kl_factor(step, run.steps),
        "examples_per_second": rate,
        **spread_of(run.model),
    }
    if run.settings.on_nonfinite == "skip":
        row["skipped"] = run.skips.since_row
    run.skips.since_row = 0
    last_step = run.step == run.steps
    if run.validation is not None and ended and (last_step or (epoch + 1) % run.settings.validate_every == 0):
        with nullcontext() if run.averages is None else run.averages.instead(weights_of(run)):
            row.update(_validate(run))
    run.history.add(row)
    if run.fabric.is_global_zero:
        warn_of_collapse(run.history.rows, run.start, run.model)
    if run.logger is not None:
        named = {f"train/{k}": v for k, v in row.items() if k != "step"}
        try:
            run.logger.log_metrics(named, step=run.step)
        except Exception as error:
            # Its thread dies where the disk is full: the run itself will say so, if it is.
            warnings.warn(f"TensorBoard cannot be written from step {run.step} on: {error!r}", stacklevel=2)
            run.logger = None
    _call(run, row)


def _call(run: Run, row: Row) -> None:
    """The callback, in the first process; when it stops the run, the run stops in all of them."""
    stop: StopTraining | None = None
    if run.callback is not None and run.fabric.is_global_zero:
        try:
            run.callback(run.step, row)
        except StopTraining as error:
            stop = error
    if run.fabric.world_size > 1:
        stop = run.fabric.broadcast(stop)
    if stop is not None:
        keep(run)
        raise stop


def _validate(run: Run) -> Row:
    """Figures on the validation data, from the first process; decides on early stopping for all."""
    row: Row = {}
    found: Evaluation | None = None
    if run.fabric.is_global_zero and run.validation is not None:
        dtype = next((p.dtype for p in run.model.parameters()), torch.float32)
        found = assess(
            run.model, run.validation.epoch(0), samples=run.settings.validation_samples,
            seed=mixed_seed(run.settings.seed, 4), likelihood=run.likelihood,
            target_scaling=run.target_scaling, prepare=lambda inputs: in_dtype(inputs, dtype),
        )  # fmt: skip
        figures = found.compute()
        wanted = ("nll", "accuracy", "ece", "rmse")
        row = {f"validation_{name}": figures[name] for name in wanted if name in figures}
        row.setdefault("validation_nll", math.nan)  # a figure that is not defined is left out there
    if run.fabric.world_size > 1:
        row = run.fabric.broadcast(row)
    if not run.best or row["validation_nll"] < run.best["validation_nll"]:
        run.best, run.waited, run.held = {"step": run.step, **row}, 0, found
        if run.settings.early_stopping is not None:
            run.best_weights = {k: v.detach().clone() for k, v in weights_of(run).items()}
    else:
        run.waited += 1
    patience = run.settings.early_stopping
    if patience is None:  # else the weights of the best validation are put back
        run.held = found
    run.done = patience is not None and run.waited >= patience
    return row


def fit_noise(run: Run) -> None:
    """Fit the noise that a Gaussian learns to the validation data, in the first process, for all.

    Residuals of training understate it where the network overfits, and those of single draws overstate it where the
    draws disagree. A few targets would say less than all of training.
    """
    likelihood = run.likelihood
    if not isinstance(likelihood, Gaussian) or likelihood.learn == "fixed":
        return
    if run.fabric.is_global_zero and run.validation is not None:
        found = _held_out(run, run.validation)
        if found is not None and len(found[1]) >= LEAST_HELD_OUT:
            likelihood.fit_noise(*found)
    if run.fabric.world_size > 1:  # each has followed its own residuals since the last broadcast of buffers
        own = likelihood.state_dict()
        likelihood.load_state_dict(run.fabric.broadcast({name: value.cpu() for name, value in own.items()}))


def _held_out(run: Run, source: Source) -> tuple[Predictive, Tensor] | None:
    """Predictions and targets of the first validation batches, as the likelihood sees them."""
    like, record = next(run.model.parameters()), find_record(run.model)
    noisy = any(method.traits.noisy for method in record.methods)
    parts: list[Predictive] = []
    labels: list[Tensor] = []
    seen = 0
    for inputs, targets in source.epoch(0):
        args, named = arguments(in_dtype(inputs, like.dtype, like.device))
        predicted = predict(
            run.model, *args, samples=max(1, _DRAWS // record.components) if noisy else 1,
            seed=mixed_seed(run.settings.seed, 6), likelihood=run.likelihood, first_example=seen, **named,
        )  # fmt: skip
        parts.append(predicted)
        labels.append(targets.to(like.device))
        seen += len(targets)
        if seen >= _ENOUGH:
            break
    return (Predictive.cat(parts), torch.cat(labels)) if parts else None


def short(figures: Tensor, num_data: int) -> str:
    """The figures of a step for the line on the screen."""
    loss, nll, divergence, _ = figures.tolist()
    return f"loss {loss:.4f}  nll {nll:.4f}  kl/data {divergence / num_data:.4f}"
