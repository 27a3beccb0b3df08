"""The state of a run on disk: one safetensors file with a JSON header, written whole, never pickled."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from slimbayes.files import parse_json, shortened, write_whole
from slimbayes.verbs.checkpoint import CheckpointError, read_tensors

FORMAT = 1
HEADER = "slimbayes-training"


class DamagedState(CheckpointError):
    """A state that was cut off, changed or cannot be read."""


class States:
    """The two last states of a run in its folder: should the newest be damaged, the one before is there.

    >>> import tempfile
    >>> states = States(Path(tempfile.mkdtemp()), "training.safetensors")
    >>> for step in (1, 2, 3):
    ...     states.write({"w": torch.ones(2)}, {"step": step})
    >>> states.path.write_bytes(b"damaged")
    7
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")  # it says so
    ...     states.read()[1]
    {'step': 2}
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self.previous = self.path.with_name(f"{self.path.stem}.previous{self.path.suffix}")
        self.whole = (
            False  # the newest file, as far as this process knows: only then may it replace the other
        )
        self.used = self.path  # what was read
        self.step = 0  # of the last state that was read or written

    def write(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Write a state; the newest so far becomes the one before."""
        write_state(self.path, tensors, facts, self.previous if self.whole else None)
        self.whole, self.step = True, facts.get("step", 0)

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest whole state, with a warning where that is not the newest file; None where there is none."""
        found = [path for path in (self.path, self.previous) if path.exists()]
        damaged: list[CheckpointError] = []
        for path in found:
            try:
                tensors, facts = read_state(path)
            except CheckpointError as error:
                damaged.append(error)
                continue
            self.whole, self.used, self.step = path == self.path, path, facts.get("step", 0)
            if not self.whole:
                why = (
                    str(damaged[0]).partition(": delete")[0] if damaged else f"{str(self.path)!r} is missing"
                )
                warnings.warn(
                    f"{why}; the run goes on from the state before it, {str(path)!r} (step {self.step})",
                    stacklevel=2,
                )
            return tensors, facts
        if len(damaged) > 1:
            raise DamagedState(
                f"{damaged[0]}. {str(self.previous)!r}, the state before it, cannot be used either: delete both"
            ) from damaged[0]
        if damaged:
            raise damaged[0]
        return None

    def clear(self) -> None:
        """Remove both."""
        for path in (self.path, self.previous):
            path.unlink(missing_ok=True)
        self.whole = False


def write_state(
    path: Path, tensors: dict[str, Tensor], facts: dict[str, Any], keep: Path | None = None
) -> None:
    """Write tensors and JSON facts to one file, whole or not at all; ``keep`` gets what was there.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "training.safetensors"
    >>> write_state(path, {"w": torch.ones(2)}, {"step": 3})
    >>> read_state(path)
    ({'w': tensor([1., 1.])}, {'step': 3})
    """
    kept = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    text = json.dumps(facts, sort_keys=True)
    header = json.dumps({"format": FORMAT, "facts": text, "sha256": _digest(text, kept)})
    write_whole(path, save(kept, metadata={HEADER: header}), keep)


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts of a file; a damaged one is a DamagedState, which is a CheckpointError."""
    try:
        tensors, metadata = read_tensors(path)
        header = parse_json(metadata[HEADER])
        if header["format"] != FORMAT:
            raise CheckpointError(f"{str(path)!r} has format {header['format']!r}: update slimbayes")
        intact = header["sha256"] == _digest(header["facts"], tensors)
        facts: dict[str, Any] = parse_json(header["facts"])
        if not isinstance(facts, dict):
            raise TypeError("its facts are no mapping")
    except CheckpointError:
        raise
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise DamagedState(
            f"{str(path)!r} is no whole training state ({shortened(repr(error))}): delete it to train from the start"
        ) from error
    if not intact:
        raise DamagedState(
            f"{str(path)!r} was damaged, it does not match its checksum: delete it to train from the start"
        )
    return tensors, facts


def _digest(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as named tensors, and what of it is plain numbers.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> weight.grad = torch.ones(2); optimizer.step()
    >>> optimizer_tensors(optimizer)
    ({'optimizer.0.momentum_buffer': tensor([1., 1.])}, {})
    """
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{key}"] = value
            elif value is not None:
                scalars[f"{index}.{key}"] = value
    return tensors, scalars


def restore_optimizer(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], scalars: dict[str, Any]
) -> None:
    """Put back what ``optimizer_tensors`` gave."""
    state: dict[int, dict[str, Any]] = {}
    named = {
        name.removeprefix("optimizer."): v for name, v in tensors.items() if name.startswith("optimizer.")
    }
    for name, value in (*named.items(), *scalars.items()):
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = value
    known = optimizer.state_dict()
    optimizer.load_state_dict({"state": state, "param_groups": known["param_groups"]})
    # A file has no memory layout, and fused optimizers want the parameter's.
    for parameter, entries in optimizer.state.items():
        for key, value in entries.items():
            alike = isinstance(value, Tensor) and value.shape == parameter.shape
            if alike and value.stride() != parameter.stride():
                entries[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def remove_partial(folder: Path) -> None:
    """Remove what a killed run left half-written."""
    for path in folder.glob("*.partial"):
        os.unlink(path)
