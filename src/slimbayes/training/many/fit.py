"""``fit_many``: many small networks trained at once, each as if it were alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slimbayes.containers.datasets import Split
from slimbayes.core.likelihoods import Likelihood
from slimbayes.training.faults import Ending, stopped_words
from slimbayes.training.many.group import Group
from slimbayes.training.many.inputs import DTYPES, alike, in_precision, make_members
from slimbayes.training.many.recording import Recorded
from slimbayes.training.many.state import STATE, keep, take_up
from slimbayes.training.monitor import Progress, Row
from slimbayes.training.settings import Training
from slimbayes.training.state import States
from slimbayes.training.step import StopTraining

Callback = Callable[[int, dict[int, Row]], None]


@dataclass
class ManyResult:
    """What ``sb.fit_many`` leaves: rows of history and steps of every network, in the order of the models.

    ``groups`` holds the indices of the networks that were trained as one.
    """

    histories: list[list[Row]]
    steps: list[int]
    seconds: float
    groups: list[list[int]] = field(default_factory=list)


def fit_many(
    models: Sequence[nn.Module],
    data: Any,
    settings: Training | None = None,
    *,
    likelihood: Likelihood | Sequence[Likelihood] | None = None,
    seeds: Sequence[int] | None = None,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = True,
    progress: bool = True,
    label: str = "training",
    callback: Callback | None = None,
    **overrides: Any,
) -> ManyResult:
    """Train many networks in place, each on its nll + kl_weight · KL / num_data, as one batched computation.

    For networks n = 1, …, N of one structure, with parameters θ_n, batches B_n and noise ε_n, a step is

        ∇ Σ_n L(θ_n; B_n, ε_n),  and an optimizer's step on the stacked θ, element by element:

    every network goes the way that it would go alone. ``models`` are converted or plain (then deterministic);
    networks that differ in structure, method or number of rows form groups that step in turn. ``data`` (tensors
    (inputs, targets), a ``Split`` or a ``Dataset``) and ``likelihood`` are one for all or a sequence with one each.
    ``seeds`` gives each network its order of batches and its noise, which depend on nothing else; without, all have
    ``settings.seed``, and batches come in the order of ``sb.fit``.

    A row of history holds the means over the steps since the row before; there is one every ``log_every`` steps and
    at the end. ``callback(step, rows)`` gets the new rows by the network's index; if it raises
    ``slimbayes.training.StopTraining`` the state is kept first. With a ``folder`` the state is kept every
    ``checkpoint_every`` steps, and at the end; the same call goes on from there, unless ``resume=False``.

    >>> import slimbayes as sb
    >>> _ = torch.manual_seed(0)
    >>> x = torch.randn(64, 2); y = (x[:, 0] > 0).long()
    >>> models = [sb.bayesianize(nn.Linear(2, 2), sb.Rank1(components=2)) for _ in range(3)]
    >>> result = sb.fit_many(models, (x, y), epochs=20, lr=0.05, batch_size=32, log_every=10, progress=False)
    >>> result.steps, all(rows[-1]["nll"] < rows[0]["nll"] for rows in result.histories)
    ([40, 40, 40], True)
    """
    if not isinstance(settings, (Training, type(None))):
        raise TypeError(f"settings is a slimbayes.training.Training, got {type(settings).__name__}")
    settings = Training.from_dict({**(settings or Training()).to_dict(), **overrides})
    device = _device(settings)
    _check(settings, device)
    members = make_members(models, data, likelihood, seeds, settings, device)
    for member in members:
        in_precision(member, settings.precision)
    groups = [Group(own, settings, device) for own in alike(members)]
    run = Run(groups, settings, Path(folder) if folder is not None else None, callback, len(members))
    if run.folder is not None:
        run.folder.mkdir(parents=True, exist_ok=True)
        take_up(run, resume)
    try:
        run.train(progress, label)
    finally:
        # Also of a run that was stopped: what it has learned so far.
        run.wait()
        for group in groups:
            group.stack.put_back()
    order = sorted((member.index, group.steps) for group in groups for member in group.members)
    indices = [[member.index for member in group.members] for group in groups]
    return ManyResult(run.histories, [steps for _, steps in order], run.seconds(), indices)


def _device(settings: Training) -> torch.device:
    name = settings.accelerator
    if name in ("cuda", "gpu") or (name == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())
    if name in ("cpu", "auto"):
        return torch.device("cpu")
    raise ValueError(f"accelerator={name!r}: fit_many runs on 'cpu' or 'cuda'; use sb.fit elsewhere")


def _check(settings: Training, device: torch.device) -> None:
    """Raise on settings that mean something to ``sb.fit`` alone."""
    if settings.early_stopping is not None:
        raise ValueError(
            f"early_stopping={settings.early_stopping}: fit_many validates nothing, and all networks make all steps; "
            f"leave it out, or use sb.fit"
        )
    if settings.averaging:
        raise ValueError(
            f"averaging={settings.averaging}: fit_many keeps the weights of the last step; use sb.fit"
        )
    if settings.split_batch:
        raise ValueError("split_batch=True: every network of fit_many sees its whole batch; use sb.fit")
    if settings.on_nonfinite != "stop":
        raise ValueError(
            f"on_nonfinite={settings.on_nonfinite!r}: fit_many steps all networks by one optimizer, which cannot leave "
            f"out the step of one; leave it out, or use sb.fit"
        )
    if settings.devices * settings.num_nodes > 1:
        raise ValueError(
            f"fit_many runs on one device, got devices={settings.devices}: start it once for each"
        )
    if settings.precision not in DTYPES:
        known = ", ".join(map(repr, DTYPES))
        raise ValueError(
            f"precision={settings.precision!r}: fit_many computes in {known}; use sb.fit for others"
        )
    if settings.capture and device.type != "cuda":
        raise ValueError(
            f"capture=True records steps on a GPU, and this run is on {device.type}: leave it out"
        )


class Run:
    """The state of one call of ``fit_many``."""

    def __init__(
        self,
        groups: list[Group],
        settings: Training,
        folder: Path | None,
        callback: Callback | None,
        count: int,
    ) -> None:
        self.groups, self.settings, self.folder, self.callback = groups, settings, folder, callback
        self.states = None if folder is None else States(folder, STATE)
        self.ending = Ending(folder is not None)  # without a folder there is nothing to go on from
        self.histories: list[list[Row]] = [[] for _ in range(count)]
        self.step = 0  # of every network that has not made all of its own
        self.last = max(group.steps for group in groups)
        self.recorded = {id(group): Recorded(group) for group in groups if settings.capture}
        self.fingerprints: dict[int, str] = {}
        self.earlier = 0.0  # seconds that the run had taken when it was interrupted
        self.clock = time.monotonic()

    def seconds(self) -> float:
        """Of training, those before an interruption included."""
        return self.earlier + time.monotonic() - self.clock

    def fingerprint(self, split: Split) -> str:
        """Of a data set, found once."""
        if id(split) not in self.fingerprints:
            self.fingerprints[id(split)] = split.fingerprint()
        return self.fingerprints[id(split)]

    def wait(self) -> None:
        """Until the device has done what it was given, on all streams."""
        if self.recorded:
            torch.cuda.synchronize(self.groups[0].device)

    def train(self, progress: bool, label: str) -> None:
        """Make all steps that are left."""
        bar = Progress(self.last, self.step, label)
        self.clock = start = time.monotonic()
        examples = 0
        with self.ending, bar.live() if progress else nullcontext():
            while self.step < self.last:
                until = self._next()
                examples += self._go(until)
                self.step = until
                self._note()
                if self.ending.received:
                    self._keep()
                    raise self.ending.end(stopped_words(self.step, self.last, self.folder))
                if progress:
                    bar.show(self.step, self._text(), examples / max(time.monotonic() - start, 1e-9))

    def _next(self) -> int:
        """The next step at which something is to be done."""
        marks = [group.steps for group in self.groups if group.steps > self.step]
        for every in (self.settings.log_every, self._checkpoint_every()):
            if every is not None:
                marks.append((self.step // every + 1) * every)
        return min(marks)

    def _checkpoint_every(self) -> int | None:
        return self.settings.checkpoint_every if self.folder is not None else None

    def _go(self, until: int) -> int:
        """Take all networks to a step, the groups in turn; returns how many examples that were."""
        examples = 0
        waiting = [group for group in self.groups if group.done < min(until, group.steps)]
        while waiting:
            for group in waiting:
                recorded = self.recorded.get(id(group))
                end = min(until, group.steps)
                count = group.room(end) if recorded is None else recorded.room(end)
                (group if recorded is None else recorded).advance(count)
                examples += count * group.batch * len(group.members)
            waiting = [group for group in waiting if group.done < min(until, group.steps)]
        return examples

    def _note(self) -> None:
        """Rows of history, the callback and the state, where they are due."""
        logs = self.step % self.settings.log_every == 0
        rows: dict[int, Row] = {}
        for group in self.groups:
            if group.summed and (logs or group.done == group.steps):
                rows.update((self.recorded.get(id(group)) or group).rows_of_history())
        for index, row in sorted(rows.items()):
            self.histories[index].append(row)
        every = self._checkpoint_every()
        if self.folder is not None and (
            self.step == self.last or (every is not None and self.step % every == 0)
        ):
            self._keep()
        if rows and self.callback is not None:
            try:
                self.callback(self.step, dict(sorted(rows.items())))
            except StopTraining:
                if self.folder is not None:
                    self._keep()
                raise

    def _keep(self) -> None:
        """The state on disk, unless a loss was not finite: a state of that would be of no use."""
        for group in self.groups:
            (self.recorded.get(id(group)) or group).check()
        keep(self)

    def _text(self) -> str:
        last = [rows[-1]["loss"] for rows in self.histories if rows]
        return f"{len(self.histories)} networks  mean loss {sum(last) / len(last):.4f}" if last else "started"
