"""From timed events to bags: which time step an event falls into, and which level its value has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from slimbayes.containers.datasets import DataError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Bagging:
    """How time is cut into bags, counted back from the moment of the prediction.

    An event of age a seconds is in bag ⌊a / precision⌋; with ``older_than`` ≥ 0, bags past
    ⌊older_than / precision⌋ are one. These are "bagging time precision" and "bagging aggregate older than" of
    Table 7 of Dusenberry et al. (2020), https://arxiv.org/abs/2005.07186: 86,400 s, and −1 or 90 days.

    >>> Bagging(precision=3600, older_than=7200).steps(np.array([10, 3600, 7300, 10_800, 99_999])).tolist()
    [0, 1, 2, 3, 3]
    """

    precision: int = 86_400
    older_than: int = -1

    def __post_init__(self) -> None:
        if self.precision < 1:
            raise DataError(f"precision={self.precision}: give the length of a bag in seconds, 1 or more")
        if self.older_than < -1:
            raise DataError(f"older_than={self.older_than}: give seconds, or -1 to keep all bags apart")

    def steps(self, ages: Array) -> Array:
        """The bag of every age in seconds, 0 being the last one before the prediction."""
        steps = ages.astype(np.int64) // self.precision
        return steps if self.older_than < 0 else np.minimum(steps, self.older_than // self.precision + 1)


@dataclass(frozen=True, eq=False)
class Bagged:
    """Events in bags, all records end to end: what ``bag`` returns.

    Record n has the events offsets[n] to offsets[n + 1] and the bags starts[n] to starts[n + 1], the oldest
    first. ``counts`` says how often the same code had the same level in the same bag.
    """

    codes: Array  # int32 [M]
    levels: Array  # int32 [M]
    counts: Array  # int32 [M]
    bags: Array  # int32 [M]: the bag's number within the record
    offsets: Array  # int64 [N + 1]
    ages: Array  # float32 [bags]: ⌊age / precision⌋ of every bag
    starts: Array  # int64 [N + 1]


def bag(
    records: int, record: Array, ages: Array, codes: Array, levels: Array, bagging: Bagging = Bagging()
) -> Bagged:
    """Put events into bags, and equal ones of a bag together; bags without events are left out.

    Args:
        records: how many records there are, with or without events.
        record: of every event, the number of its record.
        ages: of every event, in seconds before the prediction; not below 0.
        codes: what happened, from 1 on.
        levels: the level of its value, 0 for none.
        bagging: the length of a bag, and what is too old to be told apart.

    >>> events = [np.array(column) for column in ([0, 0, 0, 1], [90, 80, 5, 0], [1, 1, 1, 2], [0, 0, 0, 3])]
    >>> found = bag(2, *events, bagging=Bagging(precision=60))
    >>> found.counts.tolist(), found.bags.tolist(), found.offsets.tolist(), found.ages.tolist()
    ([2, 1, 1], [0, 1, 0], [0, 2, 3], [1.0, 0.0, 0.0])
    """
    if len(ages) and int(ages.min()) < 0:
        raise DataError(
            f"an event lies {-int(ages.min())} s after the prediction: leave out what comes later"
        )
    steps = bagging.steps(ages)
    order = np.lexsort((levels, codes, -steps, record))
    record, steps, codes, levels = record[order], steps[order], codes[order], levels[order]
    new_bag = _changes(record, steps)
    new_event = new_bag | _changes(codes, levels)
    first = np.flatnonzero(new_event)
    counts = np.diff(np.append(first, len(codes)))
    starts = _offsets(record[new_bag], records)
    number = np.cumsum(new_bag)[first] - 1 - starts[record[first]]
    return Bagged(
        codes[first].astype(np.int32),
        levels[first].astype(np.int32),
        counts.astype(np.int32),
        number.astype(np.int32),
        _offsets(record[first], records),
        steps[new_bag].astype(np.float32),
        starts,
    )


def _changes(*columns: Array) -> Array:
    """Where a row differs from the one before it; the first one does."""
    changed = np.ones(len(columns[0]), dtype=bool)
    if len(changed):
        changed[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return changed


def _offsets(record: Array, records: int) -> Array:
    return np.concatenate([[0], np.cumsum(np.bincount(record, minlength=records))]).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Levels:
    """Values as levels: which part of the training values of its code a value lies in.

    Code c with the distinct cuts q₁ < … < q_m, quantiles of its training values, has m + 1 levels: value v has
    level first[c] + #{i : q_i ≤ v}. Level 0 stands for "no value". The reference gives each of the most frequent
    codes five ids; how values fall into them is not published.

    >>> levels = Levels.of(np.array([1, 1, 1, 1]), np.array([1.0, 2.0, 3.0, 4.0]), size=3, parts=2)
    >>> levels(np.array([1, 1, 1, 2]), np.array([0.0, 9.0, np.nan, 5.0])).tolist(), levels.total
    ([1, 2, 0, 0], 3)
    """

    cuts: Array  # float64 [size, parts − 1], filled up with infinity
    first: Array  # int64 [size]: the first level of every code, 0 for those without values
    total: int  # levels of all codes, with the one for "no value"

    @staticmethod
    def of(codes: Array, values: Array, size: int, parts: int = 5) -> Levels:
        """Cuts at the quantiles 1/parts, …, of the finite training values of each code below ``size``."""
        if parts < 1:
            raise DataError(f"levels={parts}: give 1 or more for each code")
        cuts, first, total = np.full((size, parts - 1), np.inf), np.zeros(size, dtype=np.int64), 1
        known = np.isfinite(values)
        codes, values = codes[known], values[known].astype(np.float64)
        for code, part in by_code(codes, values):
            chosen = np.unique(np.quantile(part, np.arange(1, parts) / parts)) if parts > 1 else part[:0]
            chosen = chosen[chosen > part.min()]  # a cut at the smallest value would leave a level empty
            cuts[code, : len(chosen)] = chosen
            first[code], total = total, total + len(chosen) + 1
        return Levels(cuts, first, total)

    def __call__(self, codes: Array, values: Array) -> Array:
        """The level of every value, int32; 0 where it is not finite or its code has none."""
        above = np.zeros(len(codes), dtype=np.int32)
        for column in self.cuts.T:
            above += column[codes] <= values
        first = self.first[codes]
        return np.where(np.isfinite(values) & (first > 0), first + above, 0).astype(np.int32)


def by_code(codes: Array, values: Array) -> Iterator[tuple[int, Array]]:
    """Every code that occurs, ascending, and its values in their order.

    >>> [(code, part.tolist()) for code, part in by_code(np.array([3, 1, 3]), np.array([5, 6, 7]))]
    [(1, [6]), (3, [5, 7])]
    """
    order = np.argsort(codes, kind="stable")
    found, begin = np.unique(codes[order], return_index=True)
    ends = np.append(begin[1:], len(codes))
    for code, first, stop in zip(found.tolist(), begin, ends, strict=True) if len(found) else ():
        yield code, values[order[first:stop]]


def carried(
    record: Array, ages: Array, codes: Array, values: Array, bagging: Bagging
) -> tuple[Array, Array, Array, Array]:
    """The events, and the last value of every code again in each later bag in which the code does not occur.

    >>> events = [np.array(column) for column in ([0, 0], [200, 190], [1, 1], [5.0, 6.0])]
    >>> _, ages, _, values = carried(*events, bagging=Bagging(precision=60))
    >>> ages.tolist(), values.tolist()
    ([200, 190, 120, 60, 0], [5.0, 6.0, 6.0, 6.0, 6.0])
    """
    order = np.lexsort((-ages, codes, record))
    columns = record[order], ages[order], codes[order], values[order]
    steps = bagging.steps(columns[1])
    following = np.full(len(steps), -1)
    if len(steps):
        same = ~_changes(columns[0], columns[2])[1:]
        following[:-1] = np.where(same, steps[1:], -1)
    copies = np.maximum(steps - following - 1, 0)
    source = np.repeat(np.arange(len(steps)), copies)
    place = np.arange(len(source)) - np.repeat(np.cumsum(copies) - copies, copies)
    later = (steps[source] - 1 - place) * bagging.precision
    again = columns[0][source], later, columns[2][source], columns[3][source]
    joined = tuple(np.concatenate(pair) for pair in zip(columns, again, strict=True))
    return joined[0], joined[1], joined[2], joined[3]
