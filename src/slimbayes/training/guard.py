"""No step that is not finite: the optimizer leaves it out, and nothing that a step changes is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.conversion import find_record
from slimbayes.verbs.finiteness import finite


@dataclass
class Skips:
    """Steps that were left out: since the last row of history, in a row, and in all; and the last one that was not."""

    since_row: int = 0
    in_a_row: int = 0
    total: int = 0
    last_finite: int = 0


def fusable(model: nn.Module, device: torch.device) -> bool:
    """Whether torch's fused optimizers, which can leave a step out by a tensor on the device, take the model there."""
    return device.type == "cuda" and not any(getattr(module, "sparse", False) for module in model.modules())


class Guard:
    """Looks at the loss and all gradients of a step before the optimizer makes it.

    Where the host waits for nothing (a CPU), it decides. On a GPU a tensor decides that the fused optimizer reads: no
    step waits for Python, and a recorded one has it too. With ``sticky`` all steps after the first that is not finite
    are left out, so that the host finds the weights as they were, whenever it looks.
    """

    def __init__(
        self,
        objective: nn.Module,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        fabric: Any,
        fused: bool,
        sticky: bool,
    ) -> None:
        self.fabric, self.optimizer, self.sticky = fabric, optimizer, sticky
        self.parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.kept = Kept(objective)
        self.record = find_record(model)
        self.baseline = self.record.baseline
        self.several = fabric.world_size > 1
        self.flag: Tensor | None = None
        if fused:
            self.flag = torch.zeros((), device=fabric.device)
            heed(optimizer, self.flag)

    def before(self) -> None:
        """Remember what the forward pass of a step may change."""
        self.kept.remember()
        self.baseline = self.record.baseline

    def step(self, loss: Tensor, norm: Tensor | None, apply: Callable[[], Any]) -> Tensor:
        """Make the optimizer's step unless something is not finite; 1 if it was made, else 0.

        ``norm``: of all gradients, where it is known.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self.flag is not None:
            return self._on_device(loss.detach(), gradients, apply)
        good = math.isfinite(loss.detach()) and (
            (norm is not None and math.isfinite(norm)) or finite(gradients)
        )
        if self.several:  # gradients agree, a loss may be one process's own
            agreed = torch.tensor(float(good), device=self.fabric.device)
            good = bool(self.fabric.all_reduce(agreed, reduce_op="min"))
        if good:
            apply()
        else:
            self.undo()
        return torch.tensor(float(good), device=self.fabric.device)

    def undo(self) -> None:
        """Give buffers and baseline the values that they had before the step."""
        self.kept.put_back()
        self.record.baseline = self.baseline

    def _on_device(self, loss: Tensor, gradients: list[Tensor], apply: Callable[[], Any]) -> Tensor:
        assert self.flag is not None
        bad = not_finite_flag([*gradients, loss])
        if self.several:
            bad = self.fabric.all_reduce(bad, reduce_op="max")
        self.flag.copy_(torch.maximum(self.flag, bad) if self.sticky else bad)
        apply()
        self.kept.put_back_where(self.flag)
        if self.record.baseline is not self.baseline:
            before = self.baseline.to(self.record.baseline)
            self.record.baseline = torch.where(self.flag > 0, before, self.record.baseline)
        return 1.0 - self.flag


def not_finite_flag(tensors: Sequence[Tensor]) -> Tensor:
    """1 where an element of a tensor is not finite, else 0: on the device, by the largest magnitude of each.

    >>> not_finite_flag([torch.tensor([1e38, -1e38])]), not_finite_flag([torch.tensor([1.0, float("nan")])])
    (tensor(0.), tensor(1.))
    """
    largest = torch._foreach_norm([t for t in tensors if t.numel()], math.inf)
    if len({each.dtype for each in largest}) > 1:
        largest = tuple(each.double() for each in largest)
    return (~torch.isfinite(torch.stack(largest).amax())).float()


def heed(optimizer: torch.optim.Optimizer, flag: Tensor) -> None:
    """Have a fused optimizer leave its step out where ``flag`` is 1."""
    optimizer.found_inf = flag  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        if group.get("momentum"):
            # Momentum that a first step would have made, had it not been left out, would be whatever memory holds.
            for p in group["params"]:
                if p.requires_grad and "momentum_buffer" not in optimizer.state[p]:
                    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)


class Kept:
    """The buffers that forward passes change (running statistics), as they were before the last.

    All of them at first, then those that have changed. Torch counts changes of a tensor, but not those that its own
    norms make of their statistics.
    """

    def __init__(self, module: nn.Module) -> None:
        owners = [part._buffers for part in module.modules()]
        places = [(owner, key) for owner in owners for key, value in owner.items() if value is not None]
        self.places = list({id(owner[key]): (owner, key) for owner, key in places}.values())
        self.versions: list[tuple[int, int]] = []
        self.changing: set[int] | None = None  # not known before the second step
        self.chosen: list[int] = []  # those that have been copied
        self.copies: list[Tensor] = []

    def remember(self) -> None:
        """Copy what may change."""
        if not self.places:
            return
        buffers = self._now(range(len(self.places)))
        versions = [(id(buffer), buffer._version) for buffer in buffers]
        if self.versions:
            changed = {i for i, old in enumerate(self.versions) if old != versions[i]}
            if self.changing is None:
                self.changing = {i for i, (owner, _) in enumerate(self.places) if "running_mean" in owner}
                changed |= {i for i, copy in enumerate(self.copies) if not torch.equal(copy, buffers[i])}
            self.changing |= changed
        self.versions = versions
        chosen = list(range(len(buffers))) if self.changing is None else sorted(self.changing)
        if not chosen:  # buffers that no step changes
            self.chosen, self.copies = [], []
        elif chosen == self.chosen:
            torch._foreach_copy_(self.copies, [buffers[i] for i in chosen])
        else:
            self.chosen, self.copies = chosen, [buffers[i].clone() for i in chosen]

    def put_back(self) -> None:
        """All of it."""
        for buffer, copy in zip(self._now(self.chosen), self.copies, strict=True):
            buffer.copy_(copy)

    def put_back_where(self, flag: Tensor) -> None:
        """All of it where the flag is 1, nothing where it is 0, in few operations: the host does not know which."""
        choose(self._now(self.chosen), self.copies, flag)

    def _now(self, which: Iterable[int]) -> list[Tensor]:
        """A module may have put another tensor into a buffer's place."""
        found = [self.places[i] for i in which]
        return [buffer for owner, key in found if (buffer := owner[key]) is not None]


def choose(now: Sequence[Tensor], before: Sequence[Tensor], flag: Tensor) -> None:
    """Put ``before`` into the tensors where the flag is 1, in place.

    >>> mean, count = torch.tensor([math.nan, 1.0]), torch.tensor(3)
    >>> choose([mean, count], [torch.zeros(2), torch.tensor(2)], torch.tensor(1.0))
    >>> mean, count
    (tensor([0., 0.]), tensor(2))
    """
    kinds: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(now):
        kinds.setdefault(tensor.dtype, []).append(i)
    for places in kinds.values():
        own = [now[i] for i in places]
        old = torch.cat([before[i].reshape(-1) for i in places])
        new = torch.cat([tensor.reshape(-1) for tensor in own])
        parts = torch.where(flag > 0, old, new).split([tensor.numel() for tensor in own])
        torch._foreach_copy_(own, [part.view(t.shape) for part, t in zip(parts, own, strict=True)])
