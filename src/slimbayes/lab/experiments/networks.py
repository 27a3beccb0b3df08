"""Networks of experiments: their data, the recipes that make them, and what is left when they are trained."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slimbayes.core.convert import bayesianize
from slimbayes.lab.data import Dataset, RecordDataset, Scaling, Split
from slimbayes.lab.models.text import network_builder
from slimbayes.training import Training, mixed_seed
from slimbayes.verbs.checkpoint import CheckpointError
from slimbayes.verbs.method_text import parse_stored

MODEL = "model.safetensors"


@dataclass(frozen=True, eq=False)
class Prepared:
    """A data set as a paper prepares it: training examples without the validation ones, and inputs in its units."""

    data: Dataset
    validation: Split
    key: str = ""  # how it was made: part of what tells networks apart

    @property
    def num_train(self) -> int:
        """The N that divides the KL."""
        return len(self.data.train)


@dataclass(frozen=True, eq=False)
class PreparedRecords:
    """Medical records, which bring their validation part along."""

    data: RecordDataset
    key: str = ""

    @property
    def num_train(self) -> int:
        """The N that divides the KL."""
        return len(self.data.train)

    @property
    def validation(self) -> RecordDataset:
        """``fit`` takes its part for validation."""
        return self.data


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a trained network but its seed."""

    setting: str
    purpose: str  # why it is trained: "converged", "by-nll", ...
    label: str  # the row it belongs to
    network: str
    data: str
    method: str
    training: Training
    tied: str | None = None  # layers, by a regular expression, that ``method`` is for; None: its own default
    rest: str | None = None  # the method of the other layers; None: they stay as they are

    def build(self, shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
        """A new converted network; the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mixed_seed(seed, 5))
            network = network_builder(self.network)(shape, outputs)
            method = parse_stored(self.method)
            if self.rest is None:
                return bayesianize(network, method, include=self.tied)
            return bayesianize(network, [(self.tied, method), (None, parse_stored(self.rest))])

    def parameters(self, shape: tuple[int, ...], outputs: int) -> int:
        """Trained parameters of its networks, counted without their memory."""
        with torch.device("meta"):
            return sum(p.numel() for p in self.build(shape, outputs, 0).parameters() if p.requires_grad)

    def facts(self, seed: int) -> dict[str, Any]:
        """The same as plain values."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**own, "training": self.training.to_dict(), "seed": seed}


@dataclass
class Trained:
    """A trained network, what was measured while it trained, and how long that took."""

    recipe: Recipe
    seed: int
    probes: dict[str, Any]
    steps: int
    seconds: float
    folder: Path
    read: Callable[[], nn.Module]

    @functools.cached_property
    def model(self) -> nn.Module:
        """The network itself, read when it is first asked for: curves do not need it."""
        if not (self.folder / MODEL).is_file():
            raise CheckpointError(
                f"the weights in {str(self.folder)!r} are gone: delete the folder to train again"
            )
        return self.read()

    @property
    def parameters(self) -> int:
        """As ``count_parameters`` counts them."""
        return count_parameters(self.model)


def count_parameters(model: nn.Module) -> int:
    """Trained parameters and, as the k-tied paper counts them, the running means and variances of norms.

    >>> count_parameters(nn.BatchNorm2d(3))
    12
    """
    running = sum(
        b.numel() for name, b in model.named_buffers() if name.endswith(("running_mean", "running_var"))
    )
    return sum(p.numel() for p in model.parameters() if p.requires_grad) + running


def as_tokens(data: Dataset) -> Dataset:
    """Whole numbers in the order in which they lie: pixels as words."""
    train, test = (Split(s.inputs.flatten(1).long(), s.targets) for s in (data.train, data.test))
    return replace(data, kind="text", train=train, test=test, scaling=Scaling((), ()), augment=())


def without_mean(data: Dataset) -> Dataset:
    """Inputs in [0, 1] less the mean training image, as floats: what a per-channel scaling cannot say."""
    unit = 1 / 255
    mean = data.train.inputs.float().mean(0, keepdim=True) * unit
    train, test = (Split(s.inputs.float() * unit - mean, s.targets) for s in (data.train, data.test))
    channels = train.inputs.shape[1]
    return replace(data, train=train, test=test, scaling=Scaling((0.0,) * channels, (1.0,) * channels))
