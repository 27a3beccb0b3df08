"""One step of training as a module, and where it runs."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slimbayes.core.context import Supply
from slimbayes.core.draws import draw
from slimbayes.core.likelihoods import Likelihood
from slimbayes.core.objective import elbo
from slimbayes.core.predict import scored
from slimbayes.extras import need
from slimbayes.training.settings import Training
from slimbayes.verbs.evaluation import arguments


class TrainingError(RuntimeError):
    """Training that cannot go on, with the step and the remedy."""


class StopTraining(Exception):
    """What a callback raises to end a run whose state is to be kept: ``resume=True`` goes on from there."""


class Objective(nn.Module):
    """One forward pass of the loss: draws, their nll and the KL, apart from its weight.

    As one module, so that Fabric's precision, DistributedDataParallel and torch.compile see the whole step.
    """

    def __init__(self, model: nn.Module, likelihood: Likelihood, num_data: int, settings: Training) -> None:
        super().__init__()
        self.model = model
        self.likelihood = likelihood
        self.num_data = num_data
        self.samples, self.noise, self.reduction = settings.samples, settings.noise, settings.reduction
        self.split = settings.split_batch

    def forward(
        self, inputs: Any, targets: Tensor, noise: Supply | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(nll with the gradients of learned mixing, nll, KL); ``noise`` is torch's own unless given."""
        args, named = arguments(inputs)
        found = draw(
            self.model, *args, samples=self.samples, noise=self.noise, seed=noise, split=self.split, **named
        )
        draws = scored(found)
        result = elbo(
            draws, targets, self.model, self.num_data, self.likelihood, self.reduction, kl_weight=0.0
        )
        return result.loss, result.nll, result.kl


def in_dtype(inputs: Any, dtype: torch.dtype, device: torch.device | None = None) -> Any:
    """Floating-point inputs in the type of the network's parameters, all on its device; others as they are.

    >>> in_dtype({"x": torch.zeros(1), "i": torch.tensor(1)}, torch.float64)
    {'x': tensor([0.], dtype=torch.float64), 'i': tensor(1)}
    """

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype) if leaf.is_floating_point() else leaf.to(device)

    return pytree.tree_map(cast, inputs)


def channels_last(model: nn.Module) -> None:
    """Put the kernels of 2-d convolutions into channels_last, in place.

    ``model.to(memory_format=...)`` would fail on kernels with a component or member axis, which stay as they are.
    """
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


def make_fabric(settings: Training) -> Any:
    """Lightning Fabric as the settings ask: accelerator, devices, precision; DDP for several processes."""
    fabric = need("lightning.fabric", "training with sb.fit", "train")
    several = settings.devices * settings.num_nodes > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1
    return fabric.Fabric(
        accelerator=settings.accelerator,
        devices=settings.devices,
        num_nodes=settings.num_nodes,
        precision=settings.precision,
        strategy="ddp" if several else "auto",
    )


def seed_generators(seed: int, device: torch.device) -> None:
    """``torch.manual_seed`` for the CPU and the device of a run alone.

    Of every kind of device that is not in use torch's own notes where it was called from, which takes as long as a
    small training step.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    elif device.type == "cuda":
        torch.default_generator.manual_seed(seed)
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@contextmanager
def private_randomness(device: torch.device) -> Iterator[None]:
    """The loop seeds torch's generators, and numpy's and Python's for a loader; the caller's states come back."""
    others = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        np.random.set_state(others[0])
        random.setstate(others[1])
