"""What is known of a whole record: statics and summaries of its values, in network units."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slimbayes.containers.bagging import Array

SUMMARIES = ("first", "last", "mean", "min", "max", "count")
_TAIL = 0.005  # values beyond these training quantiles are cut: a pH of 735 is a slip of the keyboard


def summaries(
    records: int, record: Array, times: Array, codes: Array, values: Array, size: int, kinds: Sequence[str]
) -> Array:
    """Summaries of the values of every code in every record, [records, size, kinds]; NaN where there are none.

    "first" and "last" are by time, and by place among equal times; "count" is log(1 + n).

    >>> events = [np.array(column) for column in ([0, 0, 0], [5, 9, 7], [1, 1, 1], [3.0, 4.0, 8.0])]
    >>> summaries(2, *events, size=2, kinds=("last", "max"))[:, 1].tolist()
    [[4.0, 8.0], [nan, nan]]
    """
    known = np.isfinite(values)
    key, times, values = (record * size + codes)[known], times[known], values[known].astype(np.float64)
    order = np.lexsort((times, key))
    key, values = key[order], values[order]
    cells, begin, counts = np.unique(key, return_index=True, return_counts=True)
    found = np.full((records * size, len(kinds)), np.nan)
    for column, kind in enumerate(kinds):
        if kind == "count":
            found[:, column] = 0.0
        found[cells, column] = _summary(kind, values, begin, counts)
    return found.reshape(records, size, len(kinds))


def _summary(kind: str, values: Array, begin: Array, counts: Array) -> Array:
    if kind in ("first", "last") or not len(begin):
        return values[begin if kind == "first" else begin + counts - 1]
    found: Array
    if kind == "count":
        found = np.log1p(counts)
    elif kind == "mean":
        found = np.add.reduceat(values, begin) / counts
    else:
        found = (np.minimum if kind == "min" else np.maximum).reduceat(values, begin)
    return found


def standardized(columns: Array, training: Array) -> Array:
    """Columns [N, C] by the mean and deviation of the training rows, tails cut; NaN becomes 0, the mean.

    z = (clip(x, q₀.₀₀₅, q₀.₉₉₅) − m) / s, with q, m and s of the training rows that have a value. A column
    without spread there keeps its unit.

    >>> standardized(np.array([[1.0], [3.0], [np.nan], [2.5]]), np.array([0, 1])).round(3).ravel().tolist()
    [-1.0, 1.0, 0.0, 0.505]
    """
    found = np.zeros(columns.shape, dtype=np.float32)
    for number, column in enumerate(columns.T):
        seen = column[training]
        seen = seen[np.isfinite(seen)]
        if not len(seen):
            continue
        low, high = np.quantile(seen, [_TAIL, 1 - _TAIL])
        inner = np.clip(seen, low, high)
        spread = inner.std()
        unit = spread if spread > 1e-9 * max(1.0, abs(inner.mean())) else 1.0
        scaled = (np.clip(column, low, high) - inner.mean()) / unit
        found[:, number] = np.where(np.isfinite(column), scaled, 0.0)
    return found
