"""Steps of many networks that are not finite: left out from the first one on, and named when the host looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slimbayes.training.guard import choose, heed, not_finite_flag
from slimbayes.training.step import TrainingError
from slimbayes.verbs.finiteness import Culprit, culprit, finite, listed

if TYPE_CHECKING:
    from slimbayes.training.many.group import Group


class Watch:
    """A flag on the device that one step raises and no other lowers: the optimizer of the group heeds it.

    ``step``: the number of that step, -1 before; ``networks``: those of the figures [N, ...] ``like`` which were not
    finite in it. ``host``: whether the host may read it at every step, which on a CPU is quicker.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, like: Tensor, host: bool) -> None:
        self.flag = torch.zeros((), device=like.device)
        self.step = torch.full((), -1, dtype=torch.int64, device=like.device)
        self.networks = torch.zeros(len(like), dtype=torch.bool, device=like.device)
        self.host = host
        heed(optimizer, self.flag)

    def look(self, gradients: Sequence[Tensor], figures: Tensor, number: Tensor) -> None:
        """At the gradients [N, ...] and figures [N, 3] of the step with this number."""
        if self.host:
            if int(self.step) >= 0 or finite([*gradients, figures]):
                return
            self.flag.fill_(1.0)
        else:
            self.flag.copy_(torch.maximum(self.flag, not_finite_flag([*gradients, figures])))
        first = (self.step < 0) & (self.flag > 0)
        self.networks.logical_or_(first & ~torch.isfinite(figures).all(1))
        self.step.copy_(torch.where(first, number, self.step))

    def put_back(self, buffers: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
        """Statistics as they were, if the flag is up."""
        if before and (not self.host or self.flag > 0):
            with torch.no_grad():
                choose(list(buffers.values()), [before[name] for name in buffers], self.flag)


def complaint(group: Group, number: int) -> TrainingError:
    """What went wrong at a step: the network, its tensors, the last finite step, remedies."""
    found = culprits(group, number)
    losses = [m.index for m, bad in zip(group.members, group.watch.networks.tolist(), strict=True) if bad]
    index = min(losses or found or [group.members[0].index])
    what = "loss" if losses else "gradient"
    named = f", {listed(found[index])}" if found.get(index) else ""
    last = f"the last finite step is {number - 1}" if number > 1 else "no step was finite"
    return TrainingError(
        f"the {what} of network {index} is not finite at step {number}: lower lr={group.settings.lr:g}, set clip_norm, "
        f"or look for extreme inputs{named}; the other networks are not to blame; {last}, and the networks have its "
        f"weights"
    )


def culprits(group: Group, number: int) -> dict[int, list[Culprit]]:
    """Gradients that are not finite, by the network's index: the step is run once more, with the weights it had."""
    found: dict[int, list[Culprit]] = {}
    with suppress(Exception):  # the step is known: nothing here may hide it
        group.done, group.chunk = number - 1, -1
        group.prepare()
        steps = torch.tensor([number - 1], device=group.device)
        place = steps - group.start
        rows = group.order.index_select(0, place)[0]  # [N, batch]
        noise = {name: value[0] for name, value in group.noise.make(steps).items()}
        before = {name: value.clone() for name, value in group.stack.buffers.items()}
        args = (group.inputs[rows], group.targets[rows], noise, group.kl_weights.index_select(0, place)[0])
        gradients, _ = group.plainly(args)
        for name, value in before.items():
            group.stack.buffers[name].copy_(value)
        for i, member in enumerate(group.members):
            for name, gradient in gradients.items():
                for own in culprit("gradient", name.removeprefix("model."), gradient[i]):
                    found.setdefault(member.index, []).append(own)
    return found
