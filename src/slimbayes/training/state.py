"""The state of a run on disk: one safetensors file with a JSON header, written whole, never pickled."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from slimbayes.checkpoint import CheckpointError, read_tensors
from slimbayes.files import parse_json, shortened, write_whole

FORMAT = 1
HEADER = "slimbayes-training"


def write_state(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write tensors and JSON facts to one file, whole or not at all.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "training.safetensors"
    >>> write_state(path, {"w": torch.ones(2)}, {"step": 3})
    >>> read_state(path)
    ({'w': tensor([1., 1.])}, {'step': 3})
    """
    kept = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    text = json.dumps(facts, sort_keys=True)
    header = json.dumps({"format": FORMAT, "facts": text, "sha256": _digest(text, kept)})
    write_whole(path, save(kept, metadata={HEADER: header}))


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and facts of a file; a damaged one is a CheckpointError."""
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
        raise CheckpointError(
            f"{str(path)!r} is no whole training state ({shortened(repr(error))}): delete it to train from the start"
        ) from error
    if not intact:
        raise CheckpointError(
            f"{str(path)!r} does not match its checksum: it was damaged. Delete it to train from the start"
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
