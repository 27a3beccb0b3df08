"""PhysioNet 2012 from made-up files of its layouts, and from the real one where there is a data root."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from slimbayes.lab.data import DataError, load, load_records
from slimbayes.lab.data.records.physionet_text import PARAMETERS, STATICS
from slimbayes.lab.data.registry import found

ROOT = Path(os.environ.get("SLIMBAYES_DATA") or Path(__file__).parents[2] / ".." / "shared" / "data")


def needs(name):
    return pytest.mark.skipif(
        not (ROOT / name).exists(), reason=f"{name} not under the data root: set SLIMBAYES_DATA"
    )


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
    assert data.shape == (4, data.levels, len(data.context))
    with pytest.raises(DataError, match="no part 'tests'"):
        data.part("tests")
    more = load_records("physionet2012", tmp_path, validation=6, precision=3600, carry=True)
    assert more.train.counts.sum() > data.train.counts.sum() and torch.equal(
        more.train.context, data.train.context
    )
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
    for path in [*folder.glob("set-*/*.txt")]:
        path.unlink()
    (folder / "Outcomes-a.txt").write_text("RecordID,In-hospital_death\n")
    with pytest.raises(DataError, match="hold no records"):
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
