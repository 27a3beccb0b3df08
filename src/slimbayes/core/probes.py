"""Passes whose output nobody keeps: what they tell of a network, and the mode they run in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from slimbayes.accelerate.late_tiling import Plan, probe
from slimbayes.core.context import Draw, RowError, activate, row_message
from slimbayes.core.conversion import Record, every_module
from slimbayes.core.memory import out_of_memory
from slimbayes.core.rows import FlatInputs, unfold


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode and restore every module's own mode afterwards."""
    every = every_module(model)
    training = [module for module in every if module.training]
    if not training:
        yield
        return
    evaluated = [module for module in every if not module.training]
    # What train() does but for its look at every attribute that is set: a fifth of a small network's prediction.
    plain = all([_is_plain(module) for module in every])
    if plain:
        for module in training:
            module.__dict__["training"] = False
    else:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            if not module.training:
                module.training = True
        for module in evaluated:
            if module.training:
                module.training = False


def _is_plain(module: nn.Module) -> bool:
    """Whether a module's mode is its flag and nothing else."""
    kind = type(module)
    own = kind.train is nn.Module.train and kind.eval is nn.Module.eval
    return own and not isinstance(module, torch.jit.ScriptModule) and "train" not in vars(module)


def plan_for(
    model: nn.Module, record: Record, flat: FlatInputs, noise: str, key: tuple[Any, ...]
) -> Plan | None:
    """How to tile late for inputs with this signature, probed once; None where that is not safe."""
    if key not in record.late:
        known = record.rows_checked
        plan = probe(model, flat.resized, record.components, flat.batch, noise, not known)
        record.late[key] = plan
        record.rows_checked = known or plan is not None
    return record.late[key]


def verify_rows(model: nn.Module, seen: Draw, flat: FlatInputs) -> None:
    """Once per model: run it noiselessly on another batch size and see that every layer's rows scale with it.

    A table shared by the batch can have a first dimension that the rows happen to divide; splitting it among
    the draws would be silent nonsense.
    """
    assert seen.rows_seen is not None
    batch = 2 if seen.batch != 2 else 3
    probe = Draw(seen.components, 1, batch, "mean", component_ids=seen.component_ids, rows_seen={})
    resized = flat.map_tiled(lambda leaf: torch.cat([leaf[:1]] * batch), batch)
    args, kwargs = resized.tile(seen.components)
    # A network may refuse the probe for reasons of its own; only what the layers saw counts.
    with torch.no_grad(), evaluating(model), activate(probe), contextlib.suppress(Exception):
        model(*args, **kwargs)
    assert probe.rows_seen is not None
    for layer, calls in probe.rows_seen.items():
        for rows, probed in zip(seen.rows_seen.get(layer, []), calls, strict=False):
            if probed * seen.rows != rows * probe.rows:
                raise RowError(row_message(layer, rows, seen))


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
