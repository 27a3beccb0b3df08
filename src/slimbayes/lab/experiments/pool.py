"""Networks of experiments trained and measured in several processes."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from slimbayes.lab.experiments.runner import Task
from slimbayes.lab.experiments.session import OutOfTime, Session
from slimbayes.lab.processes import workers


def default_jobs() -> int:
    """One process per GPU, or one."""
    return max(1, torch.cuda.device_count())


def work_together(
    tasks: list[Task], options: dict[str, Any], number: int, say: Callable[[str], None]
) -> None:
    """Train networks in several processes; what fails raises here, and what is done stays in ``work``."""
    turn = multiprocessing.get_context("spawn").Value("i", 0)
    ready = (options, turn, torch.cuda.device_count(), _threads(number))
    late: OutOfTime | None = None
    with workers(min(number, len(tasks)) or 1, _prepare, ready) as pool:
        waiting = {pool.submit(_work, task): task.job for task in tasks}
        for count, done in enumerate(concurrent.futures.as_completed(waiting), 1):
            job = waiting[done]
            try:
                seconds = done.result()
            except concurrent.futures.CancelledError:
                continue
            except OutOfTime as error:  # the others notice it too, and keep their state before they stop
                late = error
                for future in waiting:
                    future.cancel()
                continue
            say(f"{count}/{len(tasks)} {job.words()}: {seconds:.1f} s")
    if late is not None:
        raise late


_session: Session | None = None  # of a process that works for another


def _threads(processes: int) -> int:
    """Threads of each of so many processes: together as many as this one has."""
    return max(1, torch.get_num_threads() // processes)


def _prepare(options: dict[str, Any], turn: Any, gpus: int, threads: int) -> None:
    """Make a process ready; with several GPUs each takes the next one."""
    global _session
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends this one
    torch.set_num_threads(threads)
    if gpus > 1:
        with turn.get_lock():
            number, turn.value = turn.value, turn.value + 1
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = visible if len(visible) == gpus else [str(i) for i in range(gpus)]
        os.environ["CUDA_VISIBLE_DEVICES"] = names[number % gpus]  # before the first word to a GPU
    _session = Session(**options, progress=False)


def _work(task: Task) -> float:
    assert _session is not None
    return task.run(_session)
