"""What a run keeps on disk, so that a resumed one goes on as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from slimbayes.core.conversion import Record, find_record
from slimbayes.files import shortened, write_whole
from slimbayes.training.guard import Skips
from slimbayes.training.monitor import Row
from slimbayes.training.settings import Training
from slimbayes.training.state import optimizer_tensors, restore_optimizer
from slimbayes.verbs.checkpoint import CheckpointError, describe_methods
from slimbayes.verbs.provenance import MANIFEST, manifest, provenance, read_manifest

if TYPE_CHECKING:
    from slimbayes.training.loop import Run

STATE = "training.safetensors"
# A resumed run may differ in these: they do not change what a finite step computes.
FREE = (
    "devices", "num_nodes", "accelerator", "log_every", "checkpoint_every", "compile", "workers",
    "on_nonfinite", "max_skips",
)  # fmt: skip


def keep(run: Run) -> None:
    """Write the state of the run to its folder, whole or not at all; the first process does."""
    if run.states is None or not run.fabric.is_global_zero:
        return
    tensors, scalars = optimizer_tensors(run.optimizer)
    tensors |= weights_of(run)
    tensors |= {f"best.{name}": value for name, value in run.best_weights.items()}
    if run.averages is not None:
        tensors |= {f"average.{name}": value for name, value in run.averages.means.items()}
    tensors["sums"] = run.sums
    tensors["mixing_baseline"] = find_record(run.model).baseline
    facts = {
        "step": run.step, **_identity(run), "optimizer": scalars, "best": run.best, "waited": run.waited,
        "done": run.done, "seconds": run.seconds(), "history": run.history.rows, "skips": asdict(run.skips),
    }  # fmt: skip
    run.states.write(tensors, facts)


def due(run: Run, ended: bool) -> bool:
    """Whether the state is to be written after this step: as often as was asked for, or as epochs end."""
    every = run.settings.checkpoint_every
    if every is not None:
        ended = run.step == run.steps
    return run.folder is not None and (ended or (every is not None and run.step % every == 0))


def take_up(run: Run) -> list[Row]:
    """Put the folder's state into the run, if there is one, and return its history."""
    assert run.states is not None
    found = run.states.read()
    if found is None:
        return []
    tensors, facts = found
    path = run.states.used
    try:
        return _put_back(run, path, tensors, facts)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # whole, and not of a run
        what = shortened(repr(error))
        raise CheckpointError(
            f"{str(path)!r} is no state of a training run ({what}): delete it to train from the start"
        ) from error


def _put_back(run: Run, path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> list[Row]:
    # Settings that are newer than the file had no other value than their default.
    facts["settings"] = settled({**bound(Training()), **facts["settings"]})
    facts["data"] = facts.get("data") or run.fingerprint  # earlier versions did not look at streamed data
    for key, value in _identity(run).items():
        if facts.get(key) != value:
            raise CheckpointError(
                f"cannot resume from {str(path)!r}: {_difference(facts.get(key), value, key)}"
            )
    try:
        put_weights(run, tensors)
        restore_optimizer(run.optimizer, tensors, facts["optimizer"])
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{str(path)!r} holds the state of another network or method ({first}): use another folder"
        ) from error
    run.best_weights = {k: v.to(run.fabric.device) for k, v in _part(tensors, "best.").items()}
    if run.averages is not None:
        run.averages.means = {
            name: tensors[f"average.{name}"].to(value.device) for name, value in run.averages.means.items()
        }
    run.sums = tensors["sums"]
    find_record(run.model).baseline = tensors["mixing_baseline"].to(run.fabric.device)
    run.step, run.best, run.waited, run.done = (facts[k] for k in ("step", "best", "waited", "done"))
    run.earlier = facts["seconds"]
    run.skips = Skips(**facts.get("skips", {"last_finite": run.step}))  # a file from before left no step out
    rows: list[Row] = facts["history"]
    return rows


def describe(run: Run, resume: bool) -> None:
    """Write the manifest: what the run is made of, and every time that it was taken up again, with the step."""
    assert run.folder is not None
    path = run.folder / MANIFEST
    before = read_manifest(path) if resume else None
    if before is None:
        data = {
            "fingerprint": run.fingerprint or None, "num_data": run.source.num_data, "batches": run.per_epoch
        }  # fmt: skip
        config = {**run.settings.to_dict(), "method": method_text(find_record(run.model))}
        before = manifest("fit", config, data, run.settings.seed)
    if resume:
        before["resumed"] = [*before.get("resumed", ()), provenance(step=run.step)]
    write_whole(path, json.dumps(before, indent=1) + "\n")


def weights_of(run: Run) -> dict[str, Tensor]:
    """The model's and the likelihood's tensors by name."""
    found = {f"model.{name}": value for name, value in run.model.state_dict().items()}
    return found | {f"likelihood.{name}": value for name, value in run.likelihood.state_dict().items()}


def put_weights(run: Run, tensors: dict[str, Tensor]) -> None:
    """Give the model and the likelihood their tensors back."""
    run.model.load_state_dict(_part(tensors, "model."))
    run.likelihood.load_state_dict(_part(tensors, "likelihood."))


def _identity(run: Run) -> dict[str, Any]:
    """What a resumed run must share with the one that was stopped, as JSON gives it back."""
    found = {
        "settings": bound(run.settings), "num_data": run.source.num_data, "per_epoch": run.per_epoch,
        "method": method_text(find_record(run.model)), "data": run.fingerprint,
    }  # fmt: skip
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def method_text(record: Record) -> str:
    """The methods of a model with their options."""
    return "; ".join(
        f"{entry['name']}({', '.join(f'{name}={value}' for name, value in entry['options'].items())})"
        for entry in describe_methods(record)
    )


def bound(settings: Training, free: Sequence[str] = FREE) -> dict[str, Any]:
    """The settings that a resumed run must share, as JSON gives them back."""
    found = {name: value for name, value in settings.to_dict().items() if name not in free}
    return settled(json.loads(json.dumps(found)))


def settled(settings: dict[str, Any]) -> dict[str, Any]:
    """Without the epochs where the steps are given, which decide: the default of epochs was another once."""
    return {
        name: value for name, value in settings.items() if name != "epochs" or settings.get("steps") is None
    }


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _difference(saved: Any, now: Any, what: str) -> str:
    if not isinstance(saved, dict):
        return f"it was trained with {what}={saved}, now it is {now}; use the same, or another folder for a new run"
    names = [name for name in {**saved, **now} if saved.get(name) != now.get(name)]
    parts = ", ".join(f"{n}={saved.get(n)!r} (now {now.get(n)!r})" for n in names)
    return f"it was trained with {parts}; use the same settings, or another folder for a new run"
