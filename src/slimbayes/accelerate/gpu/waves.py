"""How many rows a program takes: all programs should run at once, and none be left for a second wave."""

from __future__ import annotations

import functools

import torch

from slimbayes.accelerate.gpu.launch import ceil_div

_FEWEST, _MOST = 4, 64


@functools.lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; in the interpreter those of an H200.

    >>> multiprocessors(torch.device("cpu"))
    132
    """
    if device.type != "cuda":
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def rows_per_program(rows: int, across: int, fit: int, device: torch.device) -> int:
    """Rows for each of the programs in a column of the grid, ``across`` columns, where ``fit`` run on a multiprocessor.

    >>> rows_per_program(4096, 16, 12, torch.device("cpu"))
    42
    """
    down = max(1, multiprocessors(device) * fit // across)
    return min(_MOST, max(_FEWEST, ceil_div(rows, down)))
