"""Bags, levels, contexts and batches of records, against loops."""

from collections import Counter

import numpy as np
import pytest
import torch

from slimbayes.lab.data import Bagging, DataError, RecordBatches, Records
from slimbayes.lab.data.records import Levels, bag, carried
from slimbayes.lab.data.records.context import SUMMARIES, standardized, summaries


def made_up(count=400, records=12, codes=6, seed=0):
    """Events in random order: record, age, code, value (some missing); some records have none."""
    rng = np.random.default_rng(seed)
    values = np.where(rng.random(count) < 0.3, np.nan, rng.normal(size=count).round(1))
    return rng.integers(1, records, count), rng.integers(0, 500, count), rng.integers(1, codes, count), values


@pytest.mark.parametrize("older_than", [-1, 0, 130, 10_000])
def test_bags_are_those_of_a_loop(older_than):
    record, ages, codes, values = made_up()
    levels = np.nan_to_num(values).round().astype(np.int64) + 5
    bagging = Bagging(60, older_than)
    found = bag(12, record, ages, codes, levels, bagging)
    wanted = Counter()
    for r, a, c, v in zip(record, ages, codes, levels, strict=True):
        step = a // 60 if older_than < 0 else min(a // 60, older_than // 60 + 1)
        wanted[r, step, c, v] += 1
    seen = Counter()
    for r in range(12):
        steps = found.ages[found.starts[r] : found.starts[r + 1]]
        assert (np.diff(steps) < 0).all()  # the oldest first, each once
        for place in range(found.offsets[r], found.offsets[r + 1]):
            key = (r, steps[found.bags[place]], found.codes[place], found.levels[place])
            seen[key] += found.counts[place]
    assert seen == wanted


def test_an_event_after_the_prediction_is_an_error():
    with pytest.raises(DataError, match="3 s after the prediction"):
        bag(1, np.array([0]), np.array([-3]), np.array([1]), np.array([0]))


def test_no_events_at_all():
    none = np.zeros(0, dtype=np.int64)
    found = bag(3, none, none, none, none)
    assert found.offsets.tolist() == [0, 0, 0, 0] and len(found.ages) == 0
    assert all(len(column) == 0 for column in carried(none, none, none, none, Bagging(60)))
    assert Levels.of(none, np.zeros(0), size=4).total == 1
    assert np.isnan(summaries(2, none, none, none, np.zeros(0), 3, ("last", "min", "mean"))).all()


def test_carried_values_are_those_of_a_loop():
    record, ages, codes, values = made_up()
    bagging = Bagging(60)
    found = carried(record, ages, codes, values, bagging)
    plain = sorted(zip(record, ages, codes, np.nan_to_num(values, nan=99), strict=True))
    wanted = list(plain)
    for r in range(12):
        for c in range(6):
            mine = [event for event in plain if event[0] == r and event[2] == c]
            for step in range(9):
                before = [event for event in mine if event[1] // 60 > step]
                if before and not any(event[1] // 60 == step for event in mine):
                    youngest = min(event[1] for event in before)
                    values_then = {event[3] for event in before if event[1] == youngest}
                    if len(values_then) == 1:
                        wanted.append((r, step * 60, c, values_then.pop()))
    columns = (*found[:3], np.nan_to_num(found[3], nan=99))
    seen = Counter(zip(*columns, strict=True))
    assert not Counter(wanted) - seen
    assert (
        len(set(zip(record, ages, codes, strict=True))) > 390
    )  # few ties, which may be carried in either order


def test_levels_are_parts_of_the_training_values():
    rng = np.random.default_rng(0)
    codes, values = rng.integers(1, 4, 3000), rng.normal(size=3000)
    values[codes == 3] = 7.0  # a constant has one level
    levels = Levels.of(codes, values, size=6, parts=5)
    seen = levels(codes, values)
    assert levels.total == 1 + 5 + 5 + 1
    for code in (1, 2):
        counts = np.bincount(seen[codes == code] - levels.first[code])
        assert len(counts) == 5 and counts.max() - counts.min() <= 2
    assert set(seen[codes == 3]) == {11}
    far = levels(np.array([1, 1, 2, 4, 5]), np.array([-1e9, 1e9, np.nan, 1.0, np.inf]))
    assert far.tolist() == [1, 5, 0, 0, 0]
    assert Levels.of(codes, values, size=6, parts=1).total == 4


def test_a_frequent_value_does_not_leave_levels_empty():
    codes, values = np.ones(100, dtype=np.int64), np.array([0.0] * 70 + [1.0] * 30)
    levels = Levels.of(codes, values, size=2, parts=4)
    assert np.bincount(levels(codes, values)).tolist() == [0, 70, 30]


def test_summaries_are_those_of_a_loop():
    record, times, codes, values = made_up()
    times = np.random.default_rng(1).permutation(len(times))  # no ties
    found = summaries(12, record, times, codes, values, 6, SUMMARIES)
    for r in range(12):
        for c in range(6):
            mine = (record == r) & (codes == c) & np.isfinite(values)
            cell = dict(zip(SUMMARIES, found[r, c], strict=True))
            assert cell["count"] == pytest.approx(np.log1p(mine.sum()))
            if not mine.any():
                assert np.isnan(cell["last"]) and np.isnan(cell["mean"])
                continue
            ordered = values[mine][np.argsort(times[mine])]
            wanted = ordered[0], ordered[-1], ordered.mean(), ordered.min(), ordered.max()
            assert found[r, c, :5] == pytest.approx(wanted)


def test_scaling_is_of_the_training_rows_alone():
    rng = np.random.default_rng(0)
    columns = rng.normal(3, 2, (500, 2))
    columns[0, 0] = 1e6  # a slip
    columns[5, 1] = np.nan
    train = np.arange(300)
    first = standardized(columns, train)
    assert abs(first[train].mean(0)).max() < 0.02 and abs(first[train].std(0) - 1).max() < 0.02
    assert first[0, 0] < 4 and first[5, 1] == 0
    other = columns.copy()
    other[300:] *= 10
    assert (standardized(other, train)[:300] == first[:300]).all()
    assert (standardized(np.full((4, 1), np.nan), np.arange(2)) == 0).all()
    assert standardized(np.full((4, 1), 7.0), np.arange(2)).tolist() == [[0.0]] * 4


def some_records(seed=0):
    record, ages, codes, values = made_up(seed=seed)
    levels = Levels.of(codes, values, 6, 3)
    bagged = bag(12, record, ages, codes, levels(codes, values), Bagging(60))
    return Records.of(bagged, torch.arange(24.0).view(12, 2), torch.arange(12) % 2, torch.arange(12) + 100)


def unpadded(events, row):
    real = events.weights[row] > 0
    columns = (events.codes, events.levels, events.bags, events.weights)
    return list(zip(*(column[row][real].tolist() for column in columns), strict=True))


def test_padded_rows_hold_the_records():
    records = some_records()
    rows = torch.tensor([5, 0, 11])
    events = records.padded(rows)
    for place, row in enumerate(rows.tolist()):
        inside = slice(int(records.offsets[row]), int(records.offsets[row + 1]))
        flat = (records.codes, records.levels, records.bags, records.counts)
        wanted = list(zip(*(column[inside].tolist() for column in flat), strict=True))
        assert unpadded(events, place) == wanted
        steps = records.ages[records.starts[row] : records.starts[row + 1]].tolist()
        assert events.ages[place, : len(steps)].tolist() == steps
        assert events.lengths[place] == max(1, len(steps))  # record 0 has no events
        assert (events.codes[place][events.weights[place] == 0] == 0).all()
    assert events.context.tolist() == records.context[rows].tolist()


def test_a_selection_is_the_same_records():
    records = some_records()
    chosen = records[torch.tensor([7, 2])]
    assert chosen.ids.tolist() == [107, 102] and chosen.targets.tolist() == [1, 0]
    for mine, theirs in zip(
        chosen.padded(torch.arange(2)), records.padded(torch.tensor([7, 2])), strict=True
    ):
        assert torch.equal(mine, theirs)
    assert records[2:4].ids.tolist() == [102, 103]
    assert records.to("cpu").fingerprint() == records.fingerprint()
    assert Records.empty(2).padded(torch.arange(2)).codes.tolist() == [[0], [0]]
    assert records[torch.arange(12)].fingerprint() == records.fingerprint() != some_records(1).fingerprint()
    with pytest.raises(DataError, match="must be as many"):
        Records(*records._columns()[:-1], torch.arange(3))


def test_epochs_repeat_and_ranks_share_them():
    records = some_records()
    batches = RecordBatches(records, 5, seed=3)
    first = [targets for _, targets in batches.epoch(1)]
    assert [len(targets) for targets in first] == [5, 5, 2] and batches.num_data == 12
    events = [e for e, _ in batches.epoch(1, start=1)]
    again = [e for e, _ in batches.epoch(1)][1:]
    assert all(
        torch.equal(a, b) for x, y in zip(events, again, strict=True) for a, b in zip(x, y, strict=True)
    )
    contexts = lambda source, number: torch.cat([e.context for e, _ in source.epoch(number)])  # noqa: E731
    assert not torch.equal(contexts(batches, 0), contexts(batches, 1))
    ranks = [RecordBatches(records, 4, seed=3, rank=rank, world=2) for rank in (0, 1)]
    halves = [[e.context for e, _ in source.epoch(0)] for source in ranks]
    joined = torch.cat([torch.cat(pair) for pair in zip(*halves, strict=True)])
    assert torch.equal(joined, contexts(RecordBatches(records, 4, seed=3), 0))
    for options in (
        {"batch_size": 0},
        {"batch_size": 4, "rank": 2, "world": 2},
        {"batch_size": 1, "world": 2},
    ):
        with pytest.raises(DataError, match="a row for every rank"):
            RecordBatches(records, **options)
    with pytest.raises(DataError, match="smaller batch size"):
        RecordBatches(records, 13, drop_last=True)
    with pytest.raises(DataError, match="batches 0 to 2"):
        next(batches.epoch(0, start=4))
