"""N networks of one structure in training: their batches, schedules and steps, all read from the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimbayes.containers.files import permutations
from slimbayes.core.context import Request
from slimbayes.core.memory import out_of_memory
from slimbayes.training.many.guard import Watch, complaint
from slimbayes.training.many.inputs import Member
from slimbayes.training.many.noise import NoisePlan
from slimbayes.training.many.stack import BASELINE, Stack, explained
from slimbayes.training.many.tracing import Traced, compiled_noise
from slimbayes.training.monitor import Row
from slimbayes.training.settings import Training
from slimbayes.training.step import TrainingError

# Steps from which it pays to trace one, and to compile it: a GPU runs what is recorded quickly, compiled or not.
TRACED_FROM = 300
COMPILED_FROM = {"cpu": 3000, "cuda": 50_000}
LONGEST = 50  # steps in a block
_CHUNK_STEPS, _CHUNK_NUMBERS = 2048, 1 << 22  # steps and row numbers whose order is made at once
_BLOCK_BYTES = {"cpu": 1 << 22, "cuda": 1 << 28}  # batches and noise of a block: in the cache, or in memory


class Group:
    """Networks that step together. ``block(n)`` makes n steps and is a function of the device's tensors alone."""

    def __init__(self, members: Sequence[Member], settings: Training, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.members = list(members)
        self.stack = Stack(members, settings, device)
        self._lay_out_data()
        self.steps = settings.length(self.per_epoch)
        self.on_device = settings.capture  # rates are read there
        self.optimizer = self.stack.optimizer(settings)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        tried = [self._try_out(member) for member in self._one_per_table()]
        self.noise = NoisePlan(tried[0], [member.seed for member in members], device)
        self._lay_out_chunks()
        self.longest = self._longest_block()
        count = len(self.members)
        self.done = 0  # steps, as the host knows
        self.step = torch.zeros((), dtype=torch.int64, device=device)  # and as the device does
        self.sums = torch.zeros(count, 3, dtype=torch.float64, device=device)  # since the last row of history
        self.summed = 0
        self.watch = Watch(self.optimizer, self.sums, device.type == "cpu" and not settings.capture)
        self.used: list[str] | None = None  # the parameters that have gradients, once known
        self.traced: Traced | None = None
        self.compiled = False
        self.made: dict[int, Any] = {}  # compiled noise, by the number of steps

    def _one_per_table(self) -> list[Member]:
        return list({id(member.table): member for member in reversed(self.members)}.values())[::-1]

    def _try_out(self, member: Member) -> list[Request]:
        """The noise that the network asks for; raises on shapes and labels that do not fit it."""
        table = member.table
        rows = torch.arange(self.batch, device=self.device)
        if not table.targets.is_floating_point():  # labels out of range are among the extremes
            labels = table.targets.flatten(1).amax(1) if table.targets.dim() > 1 else table.targets
            extremes = torch.stack([labels.argmax(), labels.argmin()])[: self.batch]
            rows[: len(extremes)] = extremes
        return self.stack.requests(table.inputs[rows], table.targets[rows])

    def _lay_out_data(self) -> None:
        """One table of all rows; the networks' rows of it start at ``offsets``."""
        tables = {id(member.table): member.table for member in self.members}
        places = {key: i for i, key in enumerate(tables)}
        rows = len(self.members[0].table)
        every = list(tables.values())
        self.inputs = torch.cat([table.inputs for table in every]) if len(every) > 1 else every[0].inputs
        self.targets = torch.cat([table.targets for table in every]) if len(every) > 1 else every[0].targets
        starts = [rows * places[id(member.table)] for member in self.members]
        self.offsets = torch.tensor(starts, device=self.device)
        self.rows = rows
        self.batch = min(self.settings.batch_size, rows)
        self.per_epoch = rows // self.batch

    def _lay_out_chunks(self) -> None:
        """Room for the order of the rows and the schedules of a few epochs."""
        most = max(1, _CHUNK_NUMBERS // (len(self.members) * self.rows))
        last = math.ceil(self.steps / self.per_epoch)
        self.epochs = min(most, math.ceil(_CHUNK_STEPS / self.per_epoch), last)
        length = self.epochs * self.per_epoch
        self.chunk = -1  # which one is there
        shape = (length, len(self.members), self.batch)
        self.order = torch.zeros(shape, dtype=torch.int64, device=self.device)
        weight = self.settings.kl_weight  # of every step, unless a schedule changes it
        self.kl_weights = torch.full((length,), weight, dtype=self.stack.dtype, device=self.device)
        self.multipliers = torch.ones(length, dtype=torch.float32, device=self.device)
        self.start = torch.zeros((), dtype=torch.int64, device=self.device)  # first step of the chunk

    def _longest_block(self) -> int:
        count = len(self.members)
        row = math.prod(self.inputs.shape[1:]) * self.inputs.element_size()
        numbers = 4 * self.noise.blocks * 12  # words and what is made of them
        size = count * (self.batch * row + numbers)
        budget = _BLOCK_BYTES["cuda" if self.device.type == "cuda" else "cpu"]
        return max(1, min(LONGEST, self.settings.log_every, budget // max(1, size)))

    def room(self, until: int) -> int:
        """Steps that the next block may have on the way to step ``until``."""
        self.prepare()
        end = (self.chunk + 1) * len(self.order)
        return min(self.longest, until - self.done, end - self.done)

    def prepare(self) -> None:
        """Have the order and the schedules of the chunk that the next step is in."""
        wanted = self.done // len(self.order)
        if wanted == self.chunk or self.done >= self.steps:
            return
        self.chunk = wanted
        first = wanted * len(self.order)
        epochs = torch.arange(wanted * self.epochs, (wanted + 1) * self.epochs)
        seeds = [member.seed for member in self.members]
        order = permutations(self.rows, seeds, "batches.order", epochs, self.device)  # [N, E, rows]
        order = order[..., : self.per_epoch * self.batch] + self.offsets[:, None, None]
        # [N, E·per_epoch, batch] to [E·per_epoch, N, batch]
        self.order.copy_(order.reshape(len(seeds), -1, self.batch).transpose(0, 1))
        numbers = range(first, first + len(self.order))
        if self.settings.kl_annealing or self.settings.kl_coefficient is not None:
            weights = [self.settings.kl_factor(step, self.steps) for step in numbers]
            self.kl_weights.copy_(torch.tensor(weights, dtype=torch.float64))
        if self.on_device and (self.settings.schedule != "constant" or self.settings.warmup):
            factors = [self.settings.multiplier(step, self.steps, self.per_epoch) for step in numbers]
            self.multipliers.copy_(torch.tensor(factors))
        self.start.fill_(first)

    def advance(self, count: int) -> None:
        """Make the next ``count`` steps, within ``room``."""
        self.block(count)
        self.passed(count)

    def passed(self, count: int) -> None:
        """The host's part of a block."""
        self.done += count
        self.summed += count

    def block(self, count: int) -> None:
        """The device's part: nothing here depends on the step but through tensors (without capture, the rates do)."""
        steps = self.step + torch.arange(count, device=self.device)
        place = steps - self.start
        rows = self.order.index_select(0, place)  # [T, N, batch]
        inputs, targets = self.inputs[rows], self.targets[rows]  # [T, N, batch, ...]
        noise = self._make_noise(steps)
        weights = self.kl_weights.index_select(0, place)
        factors = self.multipliers.index_select(0, place) if self.on_device else None
        rates = [None if factors is None else factors * rate for rate in self.rates]
        figures = []
        for t in range(count):
            self._set_rates(t, rates)
            own = {name: value[t] for name, value in noise.items()}
            figures.append(self._step(inputs[t], targets[t], own, weights[t], steps[t] + 1))
        self._account(torch.stack(figures))
        self.step.add_(count)

    def warm(self, count: int) -> None:
        """Compile what a block of this length needs and has not had yet."""
        self._make_noise(self.step + torch.arange(count, device=self.device))

    def _make_noise(self, steps: Tensor) -> dict[str, Tensor]:
        # Blocks of all lengths would be compiled one by one; recorded ones have two.
        if not (self.compiled and self.on_device and self.noise.requests):
            return self.noise.make(steps)
        if len(steps) not in self.made:
            self.made[len(steps)] = compiled_noise(self.noise, steps)
        found: dict[str, Tensor] = self.made[len(steps)](steps)
        return found

    def _set_rates(self, t: int, on_device: list[Tensor | None]) -> None:
        multiplier = 1.0
        if not self.on_device:
            multiplier = self.settings.multiplier(self.done + t, self.steps, self.per_epoch)
        for group, rate, there in zip(self.optimizer.param_groups, self.rates, on_device, strict=True):
            group["lr"] = rate * multiplier if there is None else there[t]

    def _step(
        self, inputs: Tensor, targets: Tensor, noise: dict[str, Tensor], kl_weight: Tensor, number: Tensor
    ) -> Tensor:
        """Losses, gradients and the optimizer's step; returns (loss, nll, KL) [N, 3]."""
        args = (inputs, targets, noise, kl_weight)
        before = {name: value.clone() for name, value in self.stack.buffers.items()}
        if self.used is None:
            grads, figures = self._first(args)
        elif self.traced is None:
            grads, figures = self.plainly(args)
        else:
            grads, figures, after = self.traced(self.stack, *args)
            self.stack.set_buffers(after)
        self.watch.look(list(grads.values()), figures.detach(), number)
        self._apply(grads)
        self.watch.put_back(self.stack.buffers, before)
        return figures

    def plainly(self, args: tuple[Any, ...]) -> tuple[dict[str, Tensor], Tensor]:
        """The step by vmap and autograd: gradients by name, figures."""
        stack = self.stack
        losses, figures, after = stack.losses(stack.trained, stack.buffers, *args)  # type: ignore[arg-type]
        names, parameters = list(stack.trained), list(stack.trained.values())
        found = torch.autograd.grad(losses.sum(), parameters, allow_unused=True)
        if BASELINE in after:
            stack.buffers[BASELINE].copy_(after[BASELINE])
        return {n: grad for n, grad in zip(names, found, strict=True) if grad is not None}, figures

    def _first(self, args: tuple[Any, ...]) -> tuple[dict[str, Tensor], Tensor]:
        """The first step shows whether vmap takes the network; where steps are many, the others are traced."""
        stack = self.stack
        before = {name: value.clone() for name, value in stack.buffers.items()}
        try:
            grads, figures = self.plainly(args)
        except Exception as error:
            if out_of_memory(error):
                raise TrainingError(
                    f"the memory of {self.device.type} is too small for {len(self.members)} networks at a time: give "
                    f"fit_many fewer, or a smaller batch_size={self.batch} ({error})"
                ) from error
            copies = {name: value.clone() for name, value in stack.buffers.items()}
            raise explained(stack, error, lambda: stack.losses(stack.trained, copies, *args)) from error  # type: ignore[arg-type]
        self.used = list(grads)
        # By all steps, not by those that are left: a resumed run computes as an uninterrupted one does.
        self.compiled = self.settings.compile and self.steps >= COMPILED_FROM[self.device.type]
        if self.compiled or self.steps >= TRACED_FROM:
            try:
                self.traced = Traced(stack, self.used, args, self.compiled)
            except Exception:  # what cannot be traced runs as it did
                if self.compiled:
                    raise
        if self.traced is not None and not self.traced.agrees(stack, before, args, figures):
            raise TrainingError(
                f"network {self.members[0].index} computes something else from call to call (a counter or a schedule "
                f"in its Python code?), which a step that is traced once cannot: train it with sb.fit"
            )
        return grads, figures

    def _apply(self, grads: dict[str, Tensor]) -> None:
        # Fused optimizers go through memory, and take a gradient to lie there as its parameter does.
        grads = {name: grad.contiguous() for name, grad in grads.items()}
        if self.settings.clip_norm is not None and grads:
            grads = dict(zip(grads, clipped(list(grads.values()), self.settings.clip_norm), strict=True))
        for name, grad in grads.items():
            self.stack.trained[name].grad = grad
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _account(self, figures: Tensor) -> None:
        """Add the figures [T, N, 3] of a block's steps."""
        self.sums.add_(figures.double().sum(0))

    def check(self) -> None:
        """Raise if a loss or a gradient was not finite: reads the device."""
        number = int(self.watch.step)
        if number >= 0:
            raise complaint(self, number)

    def rows_of_history(self) -> dict[int, Row]:
        """The means since the last ones, by the network's index: reads the device."""
        self.check()
        means = (self.sums / self.summed).tolist()
        self.sums.zero_()
        self.summed = 0
        last = self.done - 1
        common = {
            "lr": self.settings.lr * self.settings.multiplier(last, self.steps, self.per_epoch),
            "kl_weight": self.settings.kl_factor(last, self.steps),
        }
        found: dict[int, Row] = {}
        for member, (loss, nll, divergence) in zip(self.members, means, strict=True):
            row: dict[str, Any] = {"step": self.done, "epoch": round(self.done / self.per_epoch, 4)}
            found[member.index] = {**row, "loss": loss, "nll": nll, "kl": divergence, **common}
        return found


def clipped(grads: Sequence[Tensor], most: float) -> list[Tensor]:
    """The gradients [N, ...] of every network, scaled to a norm of at most ``most``.

    g_n · min(1, most / (‖g_n‖ + 1e-6)), the norm over all tensors of network n. Not in place: two parameters may have
    one tensor as their gradients.

    >>> clipped([torch.tensor([[3.0], [0.3]]), torch.tensor([[4.0], [0.4]])], 1.0)
    [tensor([[0.6000],
            [0.3000]]), tensor([[0.8000],
            [0.4000]])]
    """
    squares = [grad.flatten(1).square().sum(1) for grad in grads]  # [N] each
    norm = torch.stack(squares).sum(0).sqrt()
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    return [grad * factor.view(-1, *[1] * (grad.dim() - 1)).to(grad.dtype) for grad in grads]
