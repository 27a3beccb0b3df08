"""What the papers' image networks have in common: jobs, and precision, layout and corrupted images in evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from slimbayes.lab.data import Split
from slimbayes.lab.data.shifts import Shift
from slimbayes.lab.experiments.networks import Trained
from slimbayes.lab.experiments.session import Session
from slimbayes.training.step import channels_last


@dataclass(frozen=True)
class Job:
    """One network to train and measure: which row of which setting, and its seed."""

    setting: str
    label: str
    seed: int

    def words(self) -> str:
        """What it is, for a line of progress."""
        return f"{self.setting} {self.label} seed {self.seed}"


@contextlib.contextmanager
def evaluation(session: Session, seed: int) -> Iterator[None]:
    """bfloat16 on a GPU, and a generator of its own for noise that is not keyed."""
    devices = [session.device] if session.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        with torch.autocast(session.device.type, torch.bfloat16, enabled=session.device.type == "cuda"):
            yield


def ready(session: Session, trained: Trained) -> nn.Module:
    """The network in the memory layout that a GPU's convolutions want."""
    if session.device.type == "cuda":
        channels_last(trained.model)
    return trained.model


def corrupted(session: Session, data: str, clean: Split, shift: Shift, severity: int) -> Split:
    """The corrupted images of a data set, the same for every network: made once a call, and held as bytes."""
    key = ("corrupted", data, shift.name, severity, len(clean))
    made: Split = session.once(key, lambda: shift.apply(clean, severity, seed=0))
    return made
