"""Processes that work for this one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def workers(
    number: int, initializer: Callable[..., None], arguments: tuple[Any, ...]
) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """A pool of fresh processes, each made ready by ``initializer(*arguments)``.

    When the block raises, an interruption included, the processes are ended at once: else the caller would wait for
    work that is in progress or about to start. They end with the caller, too, however it was ended. They are spawned,
    because CUDA does not survive a fork.
    """
    pool = concurrent.futures.ProcessPoolExecutor(
        number, multiprocessing.get_context("spawn"), _begin, (initializer, arguments)
    )
    try:
        yield pool
    except BaseException:
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(initializer: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_caller, daemon=True).start()
    initializer(*arguments)


def _end_with_caller() -> None:
    """A caller that was killed ends nobody, and its processes would train on, and then wait for ever."""
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os._exit(1)
