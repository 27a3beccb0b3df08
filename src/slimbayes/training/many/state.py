"""What ``fit_many`` keeps on disk, so that the same call goes on as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slimbayes.core.conversion import find_record
from slimbayes.core.likelihoods import Likelihood
from slimbayes.files import shortened
from slimbayes.training.keeping import FREE, bound, method_text, settled
from slimbayes.training.many.group import Group
from slimbayes.training.settings import Training
from slimbayes.training.state import optimizer_tensors, remove_partial, restore_optimizer
from slimbayes.verbs.checkpoint import CheckpointError

if TYPE_CHECKING:
    from slimbayes.training.many.fit import Run

STATE = "many.safetensors"
_FREE = (*FREE, "capture")  # recorded steps are the same steps


def keep(run: Run) -> None:
    """Write tensors, optimizers and histories of all networks to the folder, whole or not at all."""
    assert run.states is not None
    run.wait()
    tensors: dict[str, Tensor] = {}
    scalars: list[dict[str, Any]] = []
    for i, group in enumerate(run.groups):
        own, plain = optimizer_tensors(group.optimizer)
        own |= {f"stack.{name}": value for name, value in group.stack.tensors().items()}
        own["sums"] = group.sums
        tensors |= {f"{i}.{name}": value for name, value in own.items()}
        scalars.append({"optimizer": plain, "summed": group.summed})
    facts = {
        "step": run.step, **_identity(run), "groups": scalars, "histories": run.histories, "seconds": run.seconds(),
    }  # fmt: skip
    run.states.write(tensors, facts)


def take_up(run: Run, resume: bool) -> None:
    """Put the folder's state into the run, if there is one; without ``resume`` it is removed."""
    assert run.folder is not None and run.states is not None
    remove_partial(run.folder)
    if not resume:
        run.states.clear()
    found = run.states.read()
    if found is None:
        return
    tensors, facts = found
    path = run.states.used
    try:
        _put_back(run, path, tensors, facts)
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        what = shortened(repr(error))
        raise CheckpointError(
            f"{str(path)!r} is no state of these networks ({what}): start again with resume=False"
        ) from error


def _put_back(run: Run, path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    # Settings that are newer than the file had no other value than their default.
    facts["settings"] = settled({**bound(Training(), _FREE), **facts["settings"]})
    for key, now in _identity(run).items():
        if facts.get(key) != now:
            raise CheckpointError(
                f"cannot go on from {str(path)!r}: {_difference(key, facts.get(key), now)}; call fit_many as before, "
                f"use another folder, or start again with resume=False"
            )
    for i, group in enumerate(run.groups):
        own = {
            name.removeprefix(f"{i}."): value for name, value in tensors.items() if name.startswith(f"{i}.")
        }
        _restore(group, own, facts["groups"][i], facts["step"])
    run.step, run.histories, run.earlier = facts["step"], facts["histories"], facts["seconds"]
    run.wait()  # the groups' streams are to see what was put there


def _restore(group: Group, tensors: dict[str, Tensor], plain: dict[str, Any], step: int) -> None:
    with torch.no_grad():
        for name, value in group.stack.tensors().items():
            value.copy_(tensors[f"stack.{name}"])
        group.sums.copy_(tensors["sums"])
    restore_optimizer(group.optimizer, tensors, plain["optimizer"])
    group.summed = plain["summed"]
    group.done = min(step, group.steps)
    group.step.fill_(group.done)


def _identity(run: Run) -> dict[str, Any]:
    """What the call that goes on must share with the one that was stopped, as JSON gives it back."""
    networks: list[dict[str, Any]] = []
    for group in run.groups:
        method = method_text(find_record(group.stack.objective.model))
        shapes = {name: list(value.shape[1:]) for name, value in group.stack.tensors().items()}
        for member in group.members:
            networks.append(
                {
                    "index": member.index, "seed": member.seed, "rows": len(member.table),
                    "data": run.fingerprint(member.table.split), "likelihood": _text(member.likelihood),
                    "method": method, "tensors": shapes,
                }
            )  # fmt: skip
    networks.sort(key=lambda entry: entry["index"])
    return json.loads(json.dumps({"settings": bound(run.settings, _FREE), "networks": networks}))  # type: ignore[no-any-return]


def _text(likelihood: Likelihood) -> str:
    """A likelihood with its numbers, but for those that it learns."""
    return type(likelihood).__name__ if any(True for _ in likelihood.parameters()) else repr(likelihood)


def _difference(key: str, saved: Any, now: Any) -> str:
    if key == "settings":
        names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
        return "it has " + ", ".join(f"{n}={saved.get(n)!r} (now {now.get(n)!r})" for n in names)
    if len(saved) != len(now):
        return f"it has {len(saved)} networks, now there are {len(now)}"
    for old, new in zip(saved, now, strict=True):
        for name in new:
            if old.get(name) != new[name]:
                return f"network {new['index']} had {name} {old.get(name)!r}, now {new[name]!r}"
    return f"{key} differ"
