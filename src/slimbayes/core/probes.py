"""Passes whose output nobody keeps: what they tell of a network, and the mode they run in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.context import Draw, RowError, activate
from slimbayes.core.conversion import ATTRIBUTE, Record, every_module
from slimbayes.core.memory import out_of_memory
from slimbayes.core.modes import evaluating_alone
from slimbayes.core.rows import FlatInputs, unfold


def evaluating(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """The model in eval mode, with every module's own mode restored after the last thread that wants it so."""
    every = every_module(model)
    record: Record | None = model.__dict__.get(ATTRIBUTE)
    if record is None:  # in a module inside, or not converted
        record = next((module.__dict__[ATTRIBUTE] for module in every if ATTRIBUTE in module.__dict__), None)
    if record is None or torch.compiler.is_compiling():
        return evaluating_alone(model, every)
    return record.modes.evaluating(model, every)


@contextlib.contextmanager
def kept(model: nn.Module, leaves: list[Any]) -> Iterator[None]:
    """Put buffers, tensors that modules hold as attributes, and torch's generators back as they were."""
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    before = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not buffer.is_meta
    ]
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            for store, name, buffer, value in before:
                store[name] = buffer
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
            for now, then in attributes:
                for name in [name for name, value in now.items() if isinstance(value, Tensor)]:
                    if now[name] is not then.get(name):
                        now.pop(name) if name not in then else now.update({name: then[name]})


def verify_unsplit(
    model: nn.Module, record: Record, flat: FlatInputs, seen: Draw, key: tuple[Any, ...]
) -> None:
    """Run the network with one sample more: what serves all rows serves those too, what was split among draws fails.

    A mask of two rows beside one example is an error of the network's, and must stay one when two draws make two rows.
    """
    probe = Draw(seen.components, seen.samples + 1, seen.batch, "mean", component_ids=seen.component_ids)
    args, kwargs = flat.tile(probe.components * probe.samples)
    try:
        with torch.no_grad(), evaluating(model), activate(probe):
            output = model(*args, **kwargs)
        unfold(output, probe.components * probe.samples, flat.batch)  # or rows were left out
    except Exception as error:
        if out_of_memory(error):
            return
        shapes = ", ".join(f"input {i} of shape {shape}" for i, shape in key[3:])
        raise RowError(
            f"{shapes} was not repeated for the draws, for its first dimension is not the batch's {flat.batch}; but "
            f"the network takes it for rows, and would split it among the {seen.components * seen.samples} draws. "
            f"Give it one row per example (with another number of samples the network says: {error})"
        ) from error
    record.unsplit.add(key)
