"""Processes that work for this one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def workers(
    number: int, initializer: Callable[..., None], arguments: tuple[Any, ...]
) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """A pool of fresh processes, each made ready by ``initializer(*arguments)``.

    When the block raises, an interruption included, the processes are ended at once: else the caller would wait for
    work that is in progress or about to start. They are spawned, because CUDA does not survive a fork.
    """
    pool = concurrent.futures.ProcessPoolExecutor(
        number, multiprocessing.get_context("spawn"), initializer, arguments
    )
    try:
        yield pool
    except BaseException:
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
