"""The tensors of N networks of one structure, stacked, and one step of all of them: losses, gradients, statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from slimbayes.accelerate.members import INSIDE
from slimbayes.accelerate.switches import fast_paths
from slimbayes.core.context import Request
from slimbayes.core.conversion import ATTRIBUTE, find_record
from slimbayes.core.convert import bayesianize
from slimbayes.core.layers.dropout import ACTIVE
from slimbayes.core.likelihoods import Gaussian, Likelihood, guarded
from slimbayes.core.methods import Deterministic
from slimbayes.training.many.inputs import Member
from slimbayes.training.many.noise import Given, Listed
from slimbayes.training.settings import Training
from slimbayes.training.step import Objective, TrainingError

BASELINE = "mixing_baseline"


@contextmanager
def together() -> Iterator[None]:
    """Inside, networks run under our vmap: by plain operations, which vmap can take, members of ensembles at once."""
    before = INSIDE.vmap
    INSIDE.vmap = True
    try:
        with fast_paths(False, members=True):
            yield
    finally:
        INSIDE.vmap = before


class Stack:
    """N networks with their likelihoods: every tensor is [N, ...], by its name in the objective.

    ``trained`` has gradients; ``fixed`` holds frozen parameters, ``buffers`` what a step changes in place.
    """

    def __init__(self, members: Sequence[Member], settings: Training, device: torch.device) -> None:
        self.members = list(members)
        first = members[0]
        model = _converted(first.model)
        likelihood, precisions = _joint_likelihood([member.likelihood for member in members])
        self.num_data = len(first.table)
        self.objective = Objective(model, likelihood, self.num_data, settings).to(device).train()
        if settings.noise == "example":
            _key_dropouts(model)
        self.record = find_record(model)
        self.learns_mixing = any(getattr(method, "learn_mixing", False) for method in self.record.methods)
        self.trained: dict[str, nn.Parameter] = {}
        self.fixed: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        for part in ("model", "likelihood"):
            own = [getattr(member, part) for member in members]
            for name, _ in getattr(first, part).named_parameters():
                self._stack_parameter(f"{part}.{name}", [each.get_parameter(name) for each in own], device)
            for name, _ in getattr(first, part).named_buffers():
                values = [each.get_buffer(name).detach().to(device) for each in own]
                self.buffers[f"{part}.{name}"] = torch.stack(values)
        if precisions is not None:
            like = next(iter(self.trained.values()))
            self.fixed["likelihood.log_precision"] = torch.tensor(
                [math.log(value) for value in precisions], dtype=like.dtype, device=device
            )
        if self.learns_mixing:
            baselines = [find_record(member.model).baseline.to(device, self.dtype) for member in members]
            self.buffers[BASELINE] = torch.stack(baselines)

    def _stack_parameter(self, name: str, values: list[nn.Parameter], device: torch.device) -> None:
        stacked = torch.stack([value.detach().to(device) for value in values])
        if values[0].requires_grad:
            self.trained[name] = nn.Parameter(stacked)
        else:
            self.fixed[name] = stacked

    def __len__(self) -> int:
        return len(self.members)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return next(iter(self.trained.values())).dtype

    def optimizer(self, settings: Training) -> torch.optim.Optimizer:
        """One over all networks: its arithmetic is element by element, so each is as if alone."""
        inner = self.objective
        groups = settings.optimizer_groups(inner.model, inner.likelihood.parameters())
        names = {id(parameter): name for name, parameter in inner.named_parameters()}
        for group in groups:
            own = [names[id(parameter)] for parameter in group["params"]]
            group["params"] = [self.trained[name] for name in own if name in self.trained]
        return settings.optimizer_over([group for group in groups if group["params"]], fused=True)

    def requests(self, inputs: Tensor, targets: Tensor) -> list[Request]:
        """A first pass of the first network alone, on its own batch: the noise that it asks for.

        It also finds what is wrong with shapes and labels, with the messages of the network alone.
        """
        listed = Listed()
        values = self.tensors()
        alone = {name: value[0].clone() for name, value in values.items() if name != BASELINE}
        handle = self.objective.register_forward_hook(
            lambda objective, *rest: self._check_buffers(objective, alone)
        )
        try:
            with torch.no_grad(), together(), guarded():  # what is not finite is told by its step
                functional_call(self.objective, alone, (inputs, targets, listed))
        finally:
            handle.remove()
        return listed.requests

    def _check_buffers(self, objective: nn.Module, given: dict[str, Tensor]) -> None:
        """Raise if a module has put another tensor into a buffer's place: only changes in place are seen outside."""
        for name, buffer in objective.named_buffers():
            if name in given and buffer is not given[name]:
                own = name.partition(".")[2]
                raise TrainingError(
                    f"network {self.members[0].index} assigns its buffer {own!r} anew in its forward pass, which "
                    f"fit_many would lose: change it in place (self.{own}.copy_(...)), or train it with sb.fit"
                )

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return {**self.trained, **self.fixed, **self.buffers}

    def losses(
        self,
        trained: dict[str, Tensor],
        buffers: dict[str, Tensor],
        inputs: Tensor,
        targets: Tensor,
        noise: dict[str, Tensor],
        kl_weight: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Losses [N], figures (loss, nll, KL) [N, 3] and the buffers after the step.

        They are the given ones, changed in place, but for the baselines of learned mixing, which are new.
        """
        moving = dict(buffers)
        baseline = moving.pop(BASELINE, None)

        def one(
            own: dict[str, Tensor], start: Tensor | None, x: Tensor, y: Tensor, numbers: dict[str, Tensor]
        ) -> tuple[Tensor, ...]:
            if start is not None:
                self.record.baseline = start
            score, nll, divergence = functional_call(self.objective, own, (x, y, Given(numbers)))
            loss = score + kl_weight * divergence / self.num_data
            figures = torch.stack([part.detach() for part in (loss, nll, divergence)])
            return (loss, figures) if start is None else (loss, figures, self.record.baseline.detach())

        axes = (0, None if baseline is None else 0, 0, 0, 0)
        tensors = {**trained, **self.fixed, **moving}
        try:
            with together():
                found = vmap(one, in_dims=axes)(tensors, baseline, inputs, targets, noise)
        finally:  # what belongs to this vmap must not outlive it
            self.record.baseline = torch.zeros(())
        return found[0], found[1], buffers if baseline is None else {**moving, BASELINE: found[2]}

    def set_buffers(self, values: dict[str, Tensor]) -> None:
        """Copy new values into the buffers, by one call for each type."""
        for dtype in {value.dtype for value in values.values()}:
            names = [name for name, value in values.items() if value.dtype == dtype]
            torch._foreach_copy_([self.buffers[name] for name in names], [values[name] for name in names])

    def put_back(self) -> None:
        """Give every network its tensors, where and in the type in which it has them."""
        with torch.no_grad():
            for i, member in enumerate(self.members):
                for part in ("model", "likelihood"):
                    module: nn.Module = getattr(member, part)
                    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                        stacked = self.tensors().get(f"{part}.{name}")
                        if stacked is not None:
                            tensor.copy_(stacked[i])
                if self.learns_mixing:
                    find_record(member.model).baseline = self.buffers[BASELINE][i].clone()
                member.model.eval()


def _converted(model: nn.Module) -> nn.Module:
    """A copy of the network, converted if it is plain: the modules through which all run."""
    twin = copy.deepcopy(model)
    if not any(ATTRIBUTE in module.__dict__ for module in twin.modules()):
        bayesianize(twin, Deterministic())
    return twin


def _key_dropouts(model: nn.Module) -> None:
    """Let the network's own dropout take the noise of its draw: torch's generator knows no networks."""
    for name, module in model.named_modules():
        kind = ACTIVE.get(type(module))
        if kind is not None:
            module.__class__ = kind
            module.source = name or "dropout"


def _joint_likelihood(likelihoods: Sequence[Likelihood]) -> tuple[Likelihood, list[float] | None]:
    """A copy that serves all, and the fixed precisions of Gaussians where they differ."""
    first = copy.deepcopy(likelihoods[0])
    if type(first) is Gaussian and first.learn == "fixed":
        precisions = [each.precision for each in likelihoods if isinstance(each, Gaussian)]
        if len(set(precisions)) > 1:
            joint = Gaussian(precision=first.precision, learn="global")
            joint.requires_grad_(False)
            return joint, precisions
    return first, None


def explained(stack: Stack, error: Exception, run: Callable[[], Any]) -> TrainingError:
    """An error under vmap as one that names the module where it came up, found by running again."""
    names = {id(module): name for name, module in stack.objective.model.named_modules()}
    inside: list[str] = []

    def enter(module: nn.Module, args: Any) -> None:
        if id(module) in names:
            inside.append(f"{names[id(module)]!r} ({type(module).__name__})")

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in names and inside:
            inside.pop()

    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
    try:
        run()
    except Exception as again:
        error = again
    finally:
        for handle in handles:
            handle.remove()
    if "random operation" in str(error):
        place = f"module {inside[-1]}" if inside else "its loss"
        return TrainingError(
            f"network {stack.members[0].index} draws random numbers from torch's generator in {place}, which would not "
            f"be its own beside other networks: train it with sb.fit"
        )
    where = f"module {inside[-1]}" if inside else "its loss or its gradients"
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return TrainingError(
        f"network {stack.members[0].index} cannot be trained beside others, for torch.func.vmap does not take "
        f"{where}: {first} Train it with sb.fit."
    )
