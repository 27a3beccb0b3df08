"""``fit``: the one training loop, on Lightning Fabric, from Python and from the command line."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from slimbayes.accelerate.compile import entry
from slimbayes.containers.datasets import Dataset
from slimbayes.containers.records import RecordDataset
from slimbayes.containers.streaming import StreamedDataset
from slimbayes.core.conversion import find_record, unwrap
from slimbayes.core.likelihoods import Categorical, Gaussian, Likelihood, NotFiniteError, guarded
from slimbayes.training.averaging import Averages
from slimbayes.training.faults import Ending, ReaderDied, dead_worker, explained, release, stopped_words
from slimbayes.training.guard import Guard, Skips, fusable
from slimbayes.training.judging import judge
from slimbayes.training.keeping import STATE, describe, due, keep, put_weights, take_up, weights_of
from slimbayes.training.monitor import History, Progress, Row, spread_of, tensorboard
from slimbayes.training.recording import Recorder, check_recordable
from slimbayes.training.rows import collect, fit_noise, log, short
from slimbayes.training.settings import Training
from slimbayes.training.sources import Batch, Source, as_split, hold_out, make_source, mixed_seed
from slimbayes.training.state import States, remove_partial
from slimbayes.training.step import Objective, channels_last, make_fabric, private_randomness, seed_generators
from slimbayes.verbs.diagnosis.findings import Finding

if TYPE_CHECKING:
    from slimbayes.metrics import Evaluation

Callback = Callable[[int, Row], None]
_AGAIN = 100  # more than there are readers


@dataclass
class FitResult:
    """What ``sb.fit`` leaves: rows of history, where the run stopped, and the best validation."""

    history: list[Row]
    step: int
    epoch: int
    seconds: float
    stopped_early: bool = False
    best: Row = field(default_factory=dict)
    skipped: int = 0  # steps that were not finite, and left out
    findings: tuple[Finding, ...] = ()  # how the model may be worse than it could be, as in sb.diagnose


def fit(
    model: nn.Module,
    data: Any,
    settings: Training | None = None,
    *,
    validation: Any = None,
    likelihood: Likelihood | None = None,
    num_data: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: bool = True,
    label: str = "training",
    callback: Callback | None = None,
    on_start: Callable[[], None] | None = None,
    fabric: Any = None,
    **overrides: Any,
) -> FitResult:
    """Train a converted model in place on nll + kl_weight · KL / num_data.

    ``data``: a pair of tensors (inputs, targets), a slimbayes ``Dataset``, ``Split`` or ``RecordDataset``, a
    DataLoader, or a list of (inputs, targets) batches with ``num_data``. ``validation``: the same (a ``RecordDataset``
    has a part for it), or a fraction to hold out; with ``early_stopping`` the weights of the best validation NLL are
    put back at the end, and a Gaussian that learns its noise has it fitted to these data (``Gaussian.fit_noise``).
    ``settings`` is a ``Training``; single ones may be given by name: ``sb.fit(model, data, epochs=10, lr=0.01)``. With
    a ``folder`` the run writes its state and history there and ``resume=True`` goes on where it stopped, to the same
    weights. A row of history holds the means over the steps since the row before; there is one every ``log_every``
    steps and at the end of an epoch. ``callback(step, row)`` is
    called with each; if it raises ``slimbayes.training.StopTraining`` the state is kept first. ``on_start()`` is called
    once, when everything has been checked and before anything is written. A model that is worse than it could be (the
    KL outweighs the data, noise drowns the signal, coverage is off) is warned of at the end, with the remedy.

    >>> import slimbayes as sb
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(64, 2); y = (x[:, 0] > 0).long()
    >>> model = sb.bayesianize(nn.Linear(2, 2), sb.Rank1(components=2))
    >>> result = sb.fit(model, (x, y), epochs=20, lr=0.05, batch_size=32, progress=False)
    >>> result.step, result.history[-1]["nll"] < result.history[0]["nll"]
    (40, True)
    """
    if not isinstance(settings, (Training, type(None))):
        raise TypeError(f"settings is a slimbayes.training.Training, got {type(settings).__name__}")
    settings = Training.from_dict({**(settings or Training()).to_dict(), **overrides})
    find_record(model)
    if fabric is None:
        fabric = make_fabric(settings)
        fabric.launch()
    if isinstance(validation, (float, int)) and not isinstance(validation, bool):
        data, validation = hold_out(data, float(validation), settings.seed)
    if settings.early_stopping is not None and validation is None:
        raise ValueError(
            "early_stopping needs validation data: give validation, a fraction to hold out or a data set"
        )
    if isinstance(data, Dataset) and (split := as_split(validation)) is not None:
        validation = replace(data, test=split)  # in the units of the training data
    if resume and folder is None:
        raise ValueError("resume=True needs the folder in which the run wrote its state")
    regression = isinstance(data, Dataset) and data.task == "regression"
    likelihood = likelihood or (Gaussian() if regression else Categorical())
    run = Run(model, data, settings, validation, likelihood, num_data, folder, fabric, callback)
    with private_randomness(fabric.device):
        return run.train(resume, on_start or (lambda: None), progress and fabric.is_global_zero, label)


class Run:
    """The state of one call of ``fit``."""

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        settings: Training,
        validation: Any,
        likelihood: Likelihood,
        num_data: int | None,
        folder: str | os.PathLike[str] | None,
        fabric: Any,
        callback: Callback | None,
    ) -> None:
        self.settings, self.fabric, self.callback = settings, fabric, callback
        self.model, self.likelihood = unwrap(model), likelihood
        self.folder = Path(folder) if folder is not None else None
        self.states = None if self.folder is None else States(self.folder, STATE)
        self.ending = Ending(self.folder is not None)  # without a folder there is nothing to go on from
        self.source: Source = make_source(data, settings, num_data, fabric)
        self.validation = (
            None if validation is None else make_source(validation, settings, 1, fabric, train=False)
        )
        self.target_scaling = data.target_scaling if isinstance(data, Dataset) else None
        self.per_epoch = len(self.source)
        whole = isinstance(data, (Dataset, RecordDataset))
        known: Any = data.train if whole else data if isinstance(data, StreamedDataset) else as_split(data)
        # Hashing the data takes a moment, and only a run that can be resumed needs it.
        self.fingerprint = known.fingerprint() if known is not None and folder is not None else ""
        if self.per_epoch == 0:
            raise ValueError("the training data hold no full batch: lower batch_size")
        self.steps = settings.length(self.per_epoch)
        if settings.channels_last and any(isinstance(m, nn.Conv2d) for m in self.model.modules()):
            channels_last(self.model)
        if settings.capture:
            check_recordable(self.model, settings, fabric)
            self.model.to(fabric.device)  # where the optimizer's rates are to be
            likelihood.to(fabric.device)
        fused = settings.capture or fusable(self.model, fabric.device)
        self.optimizer = settings.make_optimizer(self.model, likelihood.parameters(), fused)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.plain = Objective(self.model, likelihood, self.source.num_data, settings)
        objective = entry.compile(self.plain) if settings.compile else self.plain
        self.objective, self.stepper = fabric.setup(objective, self.optimizer)
        self.guard = Guard(
            self.plain, self.model, self.optimizer, fabric, fused, settings.on_nonfinite == "stop"
        )
        self.skips = Skips()
        self.complaint = ""  # of the likelihood, about the outputs of the step
        self.batch: Batch | None = None  # of the step
        self.recorder = Recorder(self._compute, fabric.device) if settings.capture else None
        self.step = 0
        self.averages: Averages | None = None
        if settings.averaging:
            self.averages = Averages(weights_of(self), settings.averaging, self.steps)
        self.multiplier = -1.0  # of the rates that the optimizer has
        # Of loss, nll, KL and 1 over steps made since the last row.
        self.sums = torch.zeros(4, dtype=torch.float64)
        self.best: Row = {}
        self.best_weights: dict[str, Tensor] = {}
        self.held: Evaluation | None = None  # of the validation data, by the weights that are kept
        self.waited = 0
        self.done = False
        self.earlier = 0.0  # seconds that the run had taken when it was interrupted
        self.clock = time.monotonic()

    def train(self, resume: bool, on_start: Callable[[], None], progress: bool, label: str) -> FitResult:
        rows = take_up(self) if resume else []
        on_start()
        folder = self.folder if self.fabric.is_global_zero else None  # one process writes
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            remove_partial(folder)
            if not resume and self.states is not None:
                self.states.clear()
            describe(self, resume)
        self.history = History(None if folder is None else folder / "history.csv", rows)
        self.logger = tensorboard(folder)
        self.start = {} if rows else spread_of(self.model)
        self.clock = time.monotonic()
        bar = Progress(self.steps, self.step, label)
        self.model.train()
        with self.ending, bar.live() if progress else nullcontext():
            self._epochs(bar if progress else None)
        if self.best_weights:
            put_weights(self, self.best_weights)
        elif self.averages is not None:
            self.averages.put(weights_of(self))
        self.model.eval()
        fit_noise(self)
        if self.logger is not None:
            self.logger.finalize("success")
        epoch = math.ceil(self.step / self.per_epoch)
        return FitResult(
            self.history.rows, self.step, epoch, self.seconds(), self.done, self.best, self.skips.total,
            judge(self),
        )  # fmt: skip

    def seconds(self) -> float:
        return self.earlier + time.monotonic() - self.clock

    def _epochs(self, bar: Progress | None) -> None:
        """All steps that are left. What ends them from outside is explained."""
        error: Exception | None = None
        for _ in range(_AGAIN):
            try:
                if error is None:
                    while self.step < self.steps and not self.done:
                        self._epoch(bar)
                    return
                outcome = self._explained(error)
                break
            except Exception as caught:
                error = caught  # a loader that lost a reader raises again when another one ends, amid this
        else:
            outcome = None
        assert error is not None
        if outcome is None:
            raise error
        raise outcome from error

    def _explained(self, error: Exception) -> BaseException | None:
        if dead_worker(error):
            release(error)
            if self.ending.received:  # the signal went to the readers too, amid a step
                return self._ended(together=False)
        return explained(error, self.step + 1, self)

    def _batches(self, epoch: int, begin: int) -> Iterator[Batch]:
        try:
            yield from self.source.epoch(epoch, begin)
        except Exception as error:
            if not dead_worker(error):
                raise
            if self.ending.received:  # between two steps: all of it can be kept
                keep(self)
            raise ReaderDied(str(error)) from error

    def _ended(self, together: bool = True) -> BaseException:
        if together:
            self.fabric.barrier()  # the first process writes the state, and the others do not leave before
        kept = self.step if self.states is None else self.states.step
        return self.ending.end(stopped_words(kept, self.steps, self.folder), self.fabric.is_global_zero)

    def _epoch(self, bar: Progress | None) -> None:
        epoch, begin = divmod(self.step, self.per_epoch)
        pending: list[Tensor] = []  # (loss, nll, KL, made) of steps not yet read from the device
        clock = time.monotonic()
        for seen, batch in enumerate(self._batches(epoch, begin), 1):
            pending.append(self._train_step(batch))
            self.step += 1
            if self.averages is not None:
                self.averages.add(self.step, list(weights_of(self).values()))
            ended = self.step == self.steps or self.step % self.per_epoch == 0
            logs = self.step % self.settings.log_every == 0
            writes = due(self, ended)
            # Reading a loss waits for the device: every step on a CPU, now and then on a GPU.
            looks = logs or ended or writes or self.fabric.device.type == "cpu"
            if looks:
                last = collect(self, pending)
                pending = []
                examples = seen * len(batch[1]) * int(self.fabric.world_size)
                rate = examples / max(time.monotonic() - clock, 1e-9)
                if bar is not None:
                    bar.show(self.step, short(last, self.source.num_data), rate)
                if ended or logs:
                    log(self, epoch, rate, ended)
            stop = self.ending.agreed(self.fabric, looks)
            if stop and pending:
                collect(self, pending)
            if writes or stop or (self.done and self.folder is not None):  # stopped early
                keep(self)
            if stop:
                raise self._ended()
            if ended or self.done:
                return

    def _train_step(self, batch: Batch) -> Tensor:
        settings, fabric = self.settings, self.fabric
        self._set_rates(settings.multiplier(self.step, self.steps, self.per_epoch))
        # Noise is a function of (seed, step, rank): a resumed run draws what an undisturbed one would have.
        seed_generators(mixed_seed(settings.seed, 1, self.step, fabric.global_rank), fabric.device)
        self.batch = inputs, targets = fabric.to_device(batch)
        weight = settings.kl_factor(self.step, self.steps)
        self.complaint = ""
        try:
            # A process that raises alone would leave the others waiting, and a GPU would be waited for.
            with guarded() if fabric.world_size > 1 or fabric.device.type != "cpu" else nullcontext():
                return (self.recorder or self._compute)(inputs, targets, weight)
        except NotFiniteError as error:
            self.complaint = str(error).partition(":")[0]
            self.guard.undo()
            return torch.tensor([math.nan, math.nan, math.nan, 0.0])

    def _set_rates(self, multiplier: float) -> None:
        if self.recorder is not None and multiplier == self.multiplier:
            return
        self.multiplier = multiplier
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * multiplier)
            else:
                group["lr"] = rate * multiplier

    def _compute(self, inputs: Any, targets: Tensor, kl_weight: float | Tensor) -> Tensor:
        """Loss, gradients and the optimizer's step; returns (loss, nll, KL, 1 or, if it was left out, 0)."""
        self.guard.before()
        self.stepper.zero_grad()
        likelihood, nll, divergence = self.objective(inputs, targets)
        loss = likelihood + kl_weight * divergence / self.source.num_data
        self.fabric.backward(loss)
        norm = None
        if self.settings.clip_norm is not None:
            norm = self.fabric.clip_gradients(
                self.objective, self.stepper, max_norm=self.settings.clip_norm, error_if_nonfinite=False
            )
        made = self.guard.step(loss, norm, self.stepper.step)
        figures = (loss.detach().float(), nll.detach().float(), divergence.detach().float(), made)
        return torch.stack(figures)
