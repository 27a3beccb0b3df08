"""What can happen to a run from outside, and what it says then: a signal, memory that ends, processes that die."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from slimbayes.core.conversion import find_record
from slimbayes.core.memory import out_of_memory
from slimbayes.training.settings import Training
from slimbayes.training.step import TrainingError

_TAKING = (
    "multiprocessing/resource_sharer.py",
    "multiprocessing/reduction.py",
    "multiprocessing/reductions.py",
)
EXIT_CODE = 128 + signal.SIGTERM  # 143: what a shell says of a process that this signal ended


class Terminated(SystemExit):
    """How a run ends that was sent SIGTERM, when its state is on disk: the process exits with code 143."""

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_CODE)
        self.message = message

    def __str__(self) -> str:
        return self.message


class Ending:
    """Notes SIGTERM while a run trains, so that it can keep its state first; the handler before comes back.

    Only in the main thread, and only where the signal would end the process at once: who has a handler of their own,
    or ignores the signal, keeps it.

    >>> with Ending() as ending:
    ...     signal.raise_signal(signal.SIGTERM)
    ...     ending.received
    True
    >>> signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    True
    """

    def __init__(self, watch: bool = True) -> None:
        self.received = False
        self.watch = watch
        self.placed = False

    def __enter__(self) -> Ending:
        main = threading.current_thread() is threading.main_thread()
        if self.watch and main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)
            self.placed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.placed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self.placed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def agreed(self, fabric: Any, meeting: bool) -> bool:
        """Whether the run is to end now: in all processes of it, after the same step, when they meet anyway."""
        if fabric.world_size == 1 or not self.watch:
            return self.received
        if not meeting:
            return False
        asked = torch.tensor(float(self.received), device=fabric.device)
        return bool(fabric.all_reduce(asked, reduce_op="sum") > 0)

    def end(self, message: str, first: bool = True) -> Terminated:
        """What to raise when the state is on disk; says so on stderr in the first process.

        A process that works for another one takes exceptions for results: there the signal does its work.
        """
        if first:
            print(message, file=sys.stderr, flush=True)
        if multiprocessing.parent_process() is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
        return Terminated(message)


def stopped_words(step: int, steps: int, folder: Path | None) -> str:
    """What a run says that SIGTERM ended."""
    return (
        f"SIGTERM: stopped after step {step} of {steps}, with the state in {str(folder)!r}; the same call with "
        f"resume=True (slimbayes train --resume) goes on from there"
    )


def explained(error: Exception, step: int, run: Any) -> TrainingError | None:
    """What is wrong and what helps, for errors whose own text does not say; None for all others."""
    if isinstance(error, TrainingError):
        return None
    again = _again(run.folder, run.states is not None and run.states.path.exists())
    if out_of_memory(error):
        return TrainingError(too_large(error, step, run.settings, run.model, run.fabric.device, again))
    if dead_worker(error):
        return TrainingError(
            f"a process that reads the data died before step {step} ({_first_line(error)}). If the system ended it "
            f"for want of memory, lower workers={run.settings.workers} (num_workers of a DataLoader), which "
            f"changes nothing that is computed; {again}"
        )
    if run.fabric.world_size > 1 and _lost_peer(error):
        return TrainingError(
            f"process {run.fabric.global_rank} of {run.fabric.world_size} lost another one at step {step}, which died "
            f"or cannot be reached (its own output says why): start them all again; {again} ({_first_line(error)})"
        )
    return None


def too_large(
    error: BaseException, step: int, settings: Training, model: nn.Module, device: torch.device, again: str
) -> str:
    """Which settings make a training step smaller, of those that this run can still change."""
    record = find_record(model)
    components = record.step_components or record.components
    knobs = [f"batch_size={settings.batch_size}"]
    if settings.samples > 1:
        knobs.append(f"samples={settings.samples}")
    if components > 1:
        few = any(hasattr(method, "components_per_step") for method in record.methods)
        knobs.append(f"components_per_step={components} of the method" if few else f"components={components}")
    others = ["give more devices, which share the batch"]
    if settings.precision in ("32-true", "64-true"):
        others.insert(
            0, "set precision='bf16-mixed'" if device.type == "cuda" else "set precision='bf16-true'"
        )
    each = settings.batch_size // max(1, settings.devices * settings.num_nodes)
    rows = each * components * settings.samples
    return (
        f"step {step} ran out of memory on {device}: {each} examples x {components} components x {settings.samples} "
        f"samples = {rows} rows at a time. Lower {', '.join(knobs)}, or {', or '.join(others)}. A run with other "
        f"settings starts anew; as it is, with more memory, {again}. The allocator said: {_first_line(error)}"
    )


class ReaderDied(RuntimeError):
    """A process that reads the data for this one is gone."""


def dead_worker(error: BaseException) -> bool:
    """Whether an error says that a process of a DataLoader died: in its words, or amid what it was handing over.

    >>> dead_worker(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "))
    True
    >>> dead_worker(RuntimeError("Caught RuntimeError in DataLoader worker process 0."))
    False
    """
    # A loader raises wherever the run is when the process dies: inside some other code, that may raise in turn.
    return any(isinstance(found, ReaderDied) or _lost_reader(found) for found in _chain(error))


def release(error: BaseException) -> None:
    """Let go of the loader that an error's frames hold: while it lives, it raises anew for every reader that ends."""
    for found in _chain(error):
        traceback.clear_frames(found.__traceback__)


def _chain(error: BaseException) -> list[BaseException]:
    """An error, and those that it came from."""
    found, rest = [], [error]
    while rest:
        one = rest.pop()
        if one not in found:
            found.append(one)
            rest += [each for each in (one.__cause__, one.__context__) if each is not None]
    return found


def _lost_reader(error: BaseException) -> bool:
    if isinstance(error, RuntimeError) and "DataLoader worker (pid" in str(error):
        return True
    if not isinstance(error, (OSError, EOFError, RuntimeError)):
        return False
    trace = error.__traceback__
    while trace is not None:  # where a tensor's memory is taken over from its maker
        if trace.tb_frame.f_code.co_filename.endswith(_TAKING):
            return True
        trace = trace.tb_next
    return False


def _lost_peer(error: BaseException) -> bool:
    if isinstance(error, getattr(torch.distributed, "DistError", ())):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in text for word in ("gloo", "nccl", "connection closed", "connection reset", "processgroup")
    )


def _again(folder: Path | None, kept: bool) -> str:
    if folder is None:
        return "nothing was saved: give folder= to be able to resume"
    if not kept:
        return f"no state was saved in {str(folder)!r} yet, so the run starts from the beginning"
    return f"resume=True (--resume) goes on from the last state in {str(folder)!r}, which is whole"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
