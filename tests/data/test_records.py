"""Bags, levels, contexts and batches of records, against loops; PhysioNet 2012 and IMDB from small and real files."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from slimbayes.data import Bagging, DataError, RecordBatches, Records, load, load_records, shifts_for
from slimbayes.data import out_of_distribution as foreign
from slimbayes.data.records import Levels, bag, carried
from slimbayes.data.records.context import SUMMARIES, standardized, summaries
from slimbayes.data.records.physionet_text import PARAMETERS, STATICS
from slimbayes.data.registry import found

ROOT = Path(os.environ.get("SLIMBAYES_DATA") or Path(__file__).parents[2] / ".." / "shared" / "data")


def needs(name):
    return pytest.mark.skipif(
        not (ROOT / name).exists(), reason=f"{name} not under the data root: set SLIMBAYES_DATA"
    )


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


def write_physionet(path, records=60, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 30, records)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    minute = np.concatenate([np.sort(rng.integers(0, 2881, size)) for size in sizes])
    static = np.stack([rng.integers(20, 90, records), *rng.integers(-1, 2, (2, records))], 1).astype(
        np.float32
    )
    arrays = {
        "record_id": np.arange(records) + 1000, "set_id": np.arange(records) % 2, "label": rng.integers(0, 2, records),
        "static": np.concatenate([static, rng.integers(1, 5, (records, 1))], 1).astype(np.float32),
        "static_names": np.array(["Age", "Gender", "Height", "ICUType"]), "offsets": offsets,
        "minute": minute.astype(np.uint16), "param": rng.integers(0, 3, offsets[-1]).astype(np.uint8),
        "value": rng.normal(size=offsets[-1]).astype(np.float32), "param_names": np.array(["GCS", "HR", "pH"]),
    }  # fmt: skip
    np.savez(path, **arrays)
    return arrays


def test_physionet_from_a_small_file(tmp_path):
    arrays = write_physionet(tmp_path / "physionet2012_ab.npz")
    data = load_records("physionet2012", tmp_path, validation=6, precision=3600)
    assert (len(data.train), len(data.validation), len(data.test)) == (24, 6, 30)
    assert data.codes == ("", "GCS", "HR", "pH") and data.num_outputs == 2
    assert (data.test.ids % 2 == 1).all() and (data.train.ids % 2 == 0).all()
    where = dict(zip(data.context, data.train.context.T, strict=True))
    for row, record in enumerate((data.train.ids - 1000).tolist()):
        assert data.train.targets[row] == arrays["label"][record]
        assert where["Gender known"][row] == (arrays["static"][record, 1] != -1)
        assert where[f"ICUType {arrays['static'][record, 3]:g}"][row] == 1
        inside = slice(*arrays["offsets"][record : record + 2])
        steps = (172_800 - 60 * arrays["minute"][inside].astype(int)) // 3600
        wanted = Counter(zip(steps.tolist(), (arrays["param"][inside] + 1).tolist(), strict=True))
        seen = Counter()
        for place in range(*data.train.offsets[row : row + 2].tolist()):
            step = data.train.ages[data.train.starts[row] + data.train.bags[place]]
            seen[int(step), int(data.train.codes[place])] += int(data.train.counts[place])
        assert seen == wanted
    plain = load_records("physionet2012", tmp_path, validation=6, summary=())
    assert len(plain.context) == 3 + 3 + 4 and plain.fingerprint() != data.fingerprint()
    other = load_records("physionet2012", tmp_path, validation=6, split=1)
    assert other.validation.ids.tolist() != data.validation.ids.tolist()


def test_physionet_scales_by_training_records_alone(tmp_path):
    options = {"validation": 6, "levels": 3}
    arrays = write_physionet(tmp_path / "physionet2012_ab.npz")
    first = load_records("physionet2012", tmp_path, **options)
    test = np.repeat(arrays["set_id"] == 1, np.diff(arrays["offsets"]))
    arrays["value"] = np.where(test, arrays["value"] * 50 + 9, arrays["value"]).astype(np.float32)
    np.savez(tmp_path / "physionet2012_ab.npz", **arrays)
    second = load_records("physionet2012", tmp_path, **options)
    assert first.train.fingerprint() == second.train.fingerprint()
    assert first.test.fingerprint() != second.test.fingerprint()


def test_physionet_errors(tmp_path):
    with pytest.raises(DataError, match=r"physionet2012_ab.npz.*physionet.org"):
        load_records("physionet2012", tmp_path)
    arrays = write_physionet(tmp_path / "physionet2012_ab.npz")
    for options, message in (
        ({"summary": ("median",)}, "'median' is not one of first"),
        ({"validation": 30}, "leaves one split empty"),
        ({"precision": 0}, "precision=0"),
    ):
        with pytest.raises(DataError, match=message):
            load_records("physionet2012", tmp_path, **{"validation": 6, **options})
    np.savez(tmp_path / "physionet2012_ab.npz", **{**arrays, "minute": arrays["minute"][:-1]})
    with pytest.raises(DataError, match="do not fit together"):
        load_records("physionet2012", tmp_path, validation=6)
    with pytest.raises(DataError, match="choose physionet2012 or mimic3"):
        load_records("mimic4")
    with pytest.raises(DataError, match=r"use slimbayes.data.load_records\('mimic3', root\)"):
        load("mimic3")
    data_names = [entry.name for entry in found(tmp_path) if entry.where]
    assert "physionet2012" in data_names and "imdb" not in data_names


def write_text(folder, arrays):
    """The arrays of an .npz as the challenge's text files; statics first, then events."""
    for number, name in enumerate("ab"):
        (folder / f"set-{name}").mkdir(parents=True)
        rows = np.flatnonzero(arrays["set_id"] == number)
        lines = [f"{arrays['record_id'][row]},6,1,5,-1,{arrays['label'][row]}" for row in rows]
        header = "RecordID,SAPS-I,SOFA,Length_of_stay,Survival,In-hospital_death"
        (folder / f"Outcomes-{name}.txt").write_text("\n".join([header, *lines]) + "\n")
        for row in rows:
            record = arrays["record_id"][row]
            text = ["Time,Parameter,Value", f"00:00,RecordID,{record}"]
            text += [
                f"00:00,{n},{v:g}" for n, v in zip(arrays["static_names"], arrays["static"][row], strict=True)
            ]
            for place in range(arrays["offsets"][row], arrays["offsets"][row + 1]):
                hours, minutes = divmod(int(arrays["minute"][place]), 60)
                name_of = arrays["param_names"][arrays["param"][place]]
                text.append(f"{hours:02}:{minutes:02},{name_of},{float(arrays['value'][place])!r}")
            text += ["47:00,,3", "47:00,Weight,-1"]  # a blank parameter, and a weight that was not taken
            (folder / f"set-{name}" / f"{record}.txt").write_text("\n".join(text) + "\n")


def as_published(arrays, seed=0):
    """The arrays with the challenge's own parameters and statics."""
    rng = np.random.default_rng(seed)
    static = arrays["static"]
    return {
        **arrays, "param_names": np.array(PARAMETERS), "static_names": np.array(STATICS),
        "param": rng.integers(0, len(PARAMETERS), len(arrays["param"])),
        "static": np.concatenate([static, rng.integers(40, 99, (len(static), 1))], 1).astype(np.float32),
    }  # fmt: skip


def test_physionet_text_files_give_the_same_records(tmp_path):
    arrays = as_published(write_physionet(tmp_path / "physionet2012_ab.npz"))
    order = np.argsort(arrays["set_id"], kind="stable")  # text files are read set by set
    pieces = [np.arange(*arrays["offsets"][row : row + 2]) for row in order]
    for name in ("minute", "param", "value"):
        arrays[name] = arrays[name][np.concatenate(pieces)]
    arrays["offsets"] = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])])
    arrays |= {name: arrays[name][order] for name in ("record_id", "set_id", "label", "static")}
    np.savez(tmp_path / "physionet2012_ab.npz", **arrays)
    write_text(tmp_path / "text" / "physionet2012", arrays)
    whole, text = (
        load_records("physionet2012", root, validation=6) for root in (tmp_path, tmp_path / "text")
    )
    assert whole.fingerprint() == text.fingerprint() and whole.context == text.context
    folder = tmp_path / "text" / "physionet2012"
    damaged = folder / "set-a" / f"{arrays['record_id'][0]}.txt"
    good = damaged.read_text()
    for bad, message in (
        (good + "12:00,Hair,3\n", r"line \d+: '12:00,Hair,3' is no time, parameter and value"),
        (good + "noon,HR,3\n", "is no time"),
        (good.replace("RecordID", "HR"), "no RecordID"),
        (good.replace("RecordID,1", "RecordID,9"), "no record 9"),
    ):
        damaged.write_text(bad)
        with pytest.raises(DataError, match=message):
            load_records("physionet2012", tmp_path / "text", validation=6)
    (folder / "Outcomes-a.txt").write_text("RecordID,Survival\n1,2\n")
    with pytest.raises(DataError, match="no columns RecordID and In-hospital_death"):
        load_records("physionet2012", tmp_path / "text")
    (folder / "Outcomes-a.txt").write_text("RecordID,In-hospital_death\n1\n")
    with pytest.raises(DataError, match=r"Outcomes-a\.txt: damaged"):
        load_records("physionet2012", tmp_path / "text")
    (folder / "Outcomes-a.txt").unlink()
    with pytest.raises(DataError, match=r"Outcomes-a\.txt not found"):
        load_records("physionet2012", tmp_path / "text")


@needs("physionet2012_ab.npz")
def test_physionet_itself():
    data = load_records("physionet2012", ROOT)
    assert (len(data.train), len(data.validation), len(data.test)) == (3200, 800, 4000)
    assert int(data.test.targets.sum()) == 568 and int(data.train.targets.sum()) == 443
    assert len(data.codes) == 38 and torch.isfinite(data.train.context).all()
    assert data.train.context.abs().max() < 40


def test_imdb_from_a_small_file(tmp_path):
    tokens = np.array([1, 5, 6, 7, 1, 9, 1, 3, 4, 30], dtype=np.uint16)
    arrays = {
        "tokens": tokens,
        "offsets": np.array([0, 4, 6, 10]),
        "labels": np.array([1, 0, 1], dtype=np.uint8),
    }
    np.savez(tmp_path / "imdb.npz", **{f"{p}_{k}": v for p in ("train", "test") for k, v in arrays.items()})
    data = load("imdb", tmp_path, length=3, words=20)
    assert data.train.inputs.tolist() == [[5, 6, 7], [0, 1, 9], [3, 4, 2]]
    assert data.train.inputs.dtype == torch.int64 and data.shape == (3,) and data.classes[1] == "positive"
    assert data.scaling(data.train.inputs) is data.scaling.undo(data.train.inputs) is data.train.inputs
    assert shifts_for(data) == () and foreign(data) is None
    for options in ({"length": 0}, {"words": 2}):
        with pytest.raises(DataError, match="3 words or more"):
            load("imdb", tmp_path, **options)
    np.savez(
        tmp_path / "imdb.npz", **{f"{p}_{k}": v[:-1] for p in ("train", "test") for k, v in arrays.items()}
    )
    with pytest.raises(DataError, match="train_offsets do not fit"):
        load("imdb", tmp_path)


@needs("imdb.npz")
def test_imdb_itself():
    data = load("imdb", ROOT)
    assert data.train.inputs.shape == data.test.inputs.shape == (25_000, 80)
    assert int(data.train.inputs.max()) < 20_000 and data.train.targets.bincount().tolist() == [
        12_500,
        12_500,
    ]
