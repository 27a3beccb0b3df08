"""Switches of the fast paths: each has a plain path as its twin, and can be turned off."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields

from slimbayes.core.paths import refresh


@dataclass
class FastPaths:
    """Which fast paths are taken. All give the plain path's result: same moments, same gradients.

    noise: unseeded noise on the CPU by the kernels in C, instead of torch's serial generator.
    factors: the KL of the rank-1 factors of all layers by one operation, on a GPU their samples too; patches likewise.
    rows: factors on rows with a backward pass of one sweep, by the kernels in C and on a GPU.
    folded: shared rank-1 factors folded into the weights where that is cheaper.
    weights: unseeded weight samples of MeanField and KTied with their KL as a by-product, by kernels.
    log_sigma: Σ log σ of a k-tied layer by interpolation instead of a pass over all weights.
    members: the members of a small deep ensemble as one batched network.
    late: what comes before the first random layer is computed once, not once per draw.
    triton: hand-written GPU kernels.
    native: CPU kernels in C, where they were compiled.
    """

    noise: bool = True
    factors: bool = True
    rows: bool = True
    folded: bool = True
    weights: bool = True
    log_sigma: bool = True
    members: bool = True
    late: bool = True
    triton: bool = True
    native: bool = True


def _from_environment() -> FastPaths:
    """All on, or all off with SLIMBAYES_FAST=0; SLIMBAYES_NATIVE=0 turns off that one."""
    on = os.environ.get("SLIMBAYES_FAST", "1") != "0"
    found = FastPaths(**{field.name: on for field in fields(FastPaths)})
    found.native = on and os.environ.get("SLIMBAYES_NATIVE", "1") != "0"
    return found


paths = _from_environment()
_LOCK = threading.Lock()
_BLOCKS: list[dict[str, bool]] = []  # that are entered, of all threads
_OUTSIDE: dict[str, bool] = {}  # the switches outside of them


@contextlib.contextmanager
def fast_paths(every: bool | None = None, **switches: bool) -> Iterator[FastPaths]:
    """Turn fast paths on or off inside the with block, in all threads: all of them, or those named.

    >>> with fast_paths(rows=False) as now:
    ...     now.rows, now.late
    (False, True)
    >>> with fast_paths(False) as now:
    ...     now.rows or now.late
    False
    """
    names = [field.name for field in fields(FastPaths)]
    unknown = [name for name in switches if name not in names]
    if unknown:
        raise ValueError(f"no fast path is called {unknown[0]!r}; there are {', '.join(names)}")
    changed = {**({} if every is None else dict.fromkeys(names, every)), **switches}
    with _LOCK:
        if not _BLOCKS:
            _OUTSIDE.update({name: getattr(paths, name) for name in names})
        _BLOCKS.append(changed)
        _set()
    try:
        yield paths
    finally:
        with _LOCK:
            _BLOCKS[:] = [block for block in _BLOCKS if block is not changed]
            _set()


def _set() -> None:
    """The switches as all blocks together say, the last first: they may end in another order in other threads."""
    for name, value in {k: v for values in (_OUTSIDE, *_BLOCKS) for k, v in values.items()}.items():
        setattr(paths, name, value)
    refresh()
