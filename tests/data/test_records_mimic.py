"""The loader of MIMIC-III on made-up tables, against features counted by hand in plain Python."""

import gzip
from collections import Counter, defaultdict
from datetime import datetime, timedelta
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers_mimic import HEADERS, make_tables, write_tables

from slimbayes.lab.data import DataError, found, load_records
from slimbayes.lab.data.records import csvs, mimic, mimic_events
from slimbayes.lab.data.records.mimic_tables import EVENT_TABLES, parts_of

OPTIONS = {"minimum_count": 20, "dense": 4, "levels": 3}
PARTS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def tables():
    return make_tables()


@pytest.fixture(scope="module")
def root(tables, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mimic")
    write_tables(folder / "mimic3", tables)
    return folder


def moment(text):
    return datetime.fromisoformat(text)


def cases(tables, hours=24):
    """{HADM_ID: (row, prediction)} of the admissions that last longer."""
    found = {}
    for row in tables["ADMISSIONS"]:
        when = moment(row["ADMITTIME"]) + timedelta(hours=hours)
        death = row["DEATHTIME"]
        if moment(row["DISCHTIME"]) > when and not (death and moment(death) <= when):
            found.setdefault(int(row["HADM_ID"]), (row, when))
    return found


def events_of(tables):
    """{SUBJECT_ID: {(time, code, value)}} without what does not count."""
    found = defaultdict(set)
    for name, table in EVENT_TABLES.items():
        for row in tables[name]:
            wrong = any(row.get(column, "") in values for column, values in table.without.items())
            if wrong or not row.get(table.time) or not row.get(table.code):
                continue
            value = row.get(table.value, "") if table.value else ""
            when = moment(row[table.time]) + timedelta(days=1 if name == "PRESCRIPTIONS" else 0)
            number = float(np.float32(value)) if value else None
            found[row["SUBJECT_ID"]].add((when, f"{name}/{row[table.code]}", number))
    return found


def part_of(row):
    return PARTS[parts_of(np.array([int(row["SUBJECT_ID"])]))[0]]


def known_events(tables, history=True):
    """{HADM_ID: [(age in seconds, code, value)]}."""
    events = events_of(tables)
    found = {}
    for admission, (row, when) in cases(tables).items():
        first = datetime.min if history else moment(row["ADMITTIME"])
        mine = [event for event in events[row["SUBJECT_ID"]] if first <= event[0] <= when]
        found[admission] = [((when - event[0]).total_seconds(), *event[1:]) for event in mine]
    return found


def vocabulary(tables, history=True):
    """The frequent codes, and the cuts of those with values, from the training patients."""
    events, seen = events_of(tables), set()
    for row, when in cases(tables).values():
        first = datetime.min if history else moment(row["ADMITTIME"])
        if part_of(row) == "train":
            mine = {(row["SUBJECT_ID"], *e) for e in events[row["SUBJECT_ID"]] if first <= e[0] <= when}
            seen |= mine
    counts = Counter(event[2] for event in seen)
    frequent = sorted(code for code, count in counts.items() if count >= OPTIONS["minimum_count"])
    valued = Counter(event[2] for event in seen if event[3] is not None)
    chosen = sorted(frequent, key=lambda code: -valued[code])[: OPTIONS["dense"]]
    cuts = {}
    for code in chosen:
        values = [event[3] for event in seen if event[2] == code and event[3] is not None]
        if values:
            quantiles = np.unique(np.quantile(values, [1 / 3, 2 / 3]))
            cuts[code] = [cut for cut in quantiles if cut > min(values)]
    return frequent, cuts


def expected(tables, precision=86_400, older_than=-1, history=True):
    """{HADM_ID: Counter of (bag, code, level within the code)}."""
    frequent, cuts = vocabulary(tables, history)
    found = {}
    for admission, events in known_events(tables, history).items():
        found[admission] = Counter()
        for age, code, value in events:
            step = int(age // precision)
            if older_than >= 0:
                step = min(step, older_than // precision + 1)
            level = 0
            if code in cuts and value is not None:
                level = 1 + sum(cut <= value for cut in cuts[code])
            found[admission][step, code if code in frequent else "rare", level] += 1
    return found


def measured(data):
    """The same from the loader's records."""
    names, found = np.array(data.codes), {}
    first = {}  # levels of a code count from its own first one
    for part in PARTS:
        records = data.part(part)
        for code, level in zip(records.codes.tolist(), records.levels.tolist(), strict=True):
            if level:
                first[code] = min(level, first.get(code, level))
    for part in PARTS:
        records = data.part(part)
        for row, admission in enumerate(records.ids.tolist()):
            low, high = records.offsets[row : row + 2].tolist()
            ages = records.ages[records.starts[row] : records.starts[row + 1]]
            found[admission] = Counter()
            for place in range(low, high):
                code, level = int(records.codes[place]), int(records.levels[place])
                step = int(ages[records.bags[place]])
                inner = level - first[code] + 1 if level else 0
                found[admission][step, names[code], inner] += int(records.counts[place])
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": 21_600}, {"precision": 21_600, "older_than": 86_400}, {"history": False}],
    ids=["days", "six hours", "old ones together", "one stay"],
)
def test_features_are_those_counted_by_hand(root, tables, options, tmp_path, monkeypatch):
    monkeypatch.setattr(mimic, "ROWS", 97)  # pieces that end anywhere
    monkeypatch.setattr(mimic, "_PARTITIONS", 7)
    data = load_records("mimic3", root, **OPTIONS, **options, cache=tmp_path)
    frequent, _ = vocabulary(tables, options.get("history", True))
    assert data.codes == ("", "rare", *frequent)
    assert measured(data) == expected(tables, **options)


def test_cases_targets_and_context(root, tables):
    data = load_records("mimic3", root, **OPTIONS)
    wanted = cases(tables)
    born = {row["SUBJECT_ID"]: row for row in tables["PATIENTS"]}
    ages = {}
    for part in PARTS:
        records = data.part(part)
        for row, admission in enumerate(records.ids.tolist()):
            source, _ = wanted.pop(admission)
            assert part_of(source) == part
            assert int(records.targets[row]) == int(source["HOSPITAL_EXPIRE_FLAG"])
            context = dict(zip(data.context, records.context[row].tolist(), strict=True))
            assert context["female"] == (born[source["SUBJECT_ID"]]["GENDER"] == "F")
            assert context[source["ADMISSION_TYPE"].lower()] == 1
            birth = moment(born[source["SUBJECT_ID"]]["DOB"])
            years = (moment(source["ADMITTIME"]) - birth).total_seconds() / (365.25 * 86_400)
            ages[admission] = (min(years, 91.4) if years <= 89 else 91.4, context["age"])
    assert not wanted
    assert len(data.train) and len(data.validation) and len(data.test)
    order = sorted(ages.values())
    assert all(a[1] <= b[1] + 1e-6 for a, b in pairwise(order))
    assert abs(data.train.context[:, 0].mean()) < 1e-5


def test_a_patient_is_in_one_part_only(root, tables):
    data = load_records("mimic3", root, **OPTIONS)
    subject = {int(row["HADM_ID"]): row["SUBJECT_ID"] for row in tables["ADMISSIONS"]}
    sets = [{subject[i] for i in data.part(part).ids.tolist()} for part in PARTS]
    assert not (sets[0] & sets[1] or sets[0] & sets[2] or sets[1] & sets[2])


def test_codes_never_seen_in_training_are_rare(root, tables):
    data = load_records("mimic3", root, **{**OPTIONS, "minimum_count": 1})
    trained = {data.codes[code] for code in data.train.codes.unique().tolist()}
    assert trained == set(data.codes[2:])
    strange = [
        code for events in known_events(tables).values() for _, code, _ in events if code not in trained
    ]
    assert strange and (data.test.codes == 1).any()


def test_layouts_give_the_same_records(root, tables, tmp_path):
    wanted = load_records("mimic3", root, **OPTIONS).fingerprint()
    write_tables(tmp_path / "a", tables, gzipped=tuple(HEADERS), newline="\r\n", lower=True)
    assert load_records("mimic3", tmp_path / "a", **OPTIONS).fingerprint() == wanted
    other = {name: list(reversed(rows)) for name, rows in tables.items()}
    write_tables(tmp_path / "b" / "mimiciii", other, gzipped=())
    assert load_records("mimic3", tmp_path / "b", **OPTIONS).fingerprint() == wanted


def test_the_cache_is_used_and_bound_to_the_files(tables, tmp_path, monkeypatch):
    write_tables(tmp_path, tables)
    said = []
    first = load_records("mimic3", tmp_path, **OPTIONS, progress=said.append)
    assert any(text.startswith("CHARTEVENTS.csv.gz") for text in said)
    with monkeypatch.context() as patch:
        patch.setattr(mimic, "scatter", None)  # a second look does not read the tables
        again = load_records("mimic3", tmp_path, **OPTIONS)
        assert again.fingerprint() == first.fingerprint()
        with pytest.raises(TypeError):
            load_records("mimic3", tmp_path, **OPTIONS, hours=12)
    assert not list((tmp_path / "slimbayes-cache").glob("*.partial"))
    shorter = {**tables, "LABEVENTS": tables["LABEVENTS"][:10]}
    write_tables(tmp_path, shorter)
    assert load_records("mimic3", tmp_path, **OPTIONS).fingerprint() != first.fingerprint()
    assert len(list((tmp_path / "slimbayes-cache").iterdir())) == 2


def test_a_damaged_cache_says_what_to_delete(root, tmp_path):
    load_records("mimic3", root, **OPTIONS, cache=tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "train" / "codes.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"codes.bin: 0 bytes, not \d+: delete .*made again"):
        load_records("mimic3", root, **OPTIONS, cache=tmp_path)
    (folder / "facts.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        load_records("mimic3", root, **OPTIONS, cache=tmp_path)


def test_nothing_is_left_after_an_interruption(root, tmp_path, monkeypatch):
    def stop(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(mimic, "_write", stop)
    with pytest.raises(KeyboardInterrupt):
        load_records("mimic3", root, **OPTIONS, cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(root, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="pass cache="):
        load_records("mimic3", root, **OPTIONS, cache=tmp_path / "file")


def test_files_that_are_missing_are_named(tables, tmp_path):
    with pytest.raises(DataError, match=r"MIMIC-III not found.*ADMISSIONS.csv.*physionet.org"):
        load_records("mimic3", tmp_path)
    write_tables(tmp_path, {name: rows for name, rows in tables.items() if name != "LABEVENTS"})
    with pytest.raises(DataError, match=r"LABEVENTS not found.*LABEVENTS.csv.gz.*without 'LABEVENTS'"):
        load_records("mimic3", tmp_path)
    data = load_records("mimic3", tmp_path, tables=["CHARTEVENTS"], **OPTIONS)
    assert all(name.startswith("CHARTEVENTS/") for name in data.codes[2:])
    (tmp_path / "PATIENTS.csv.gz").unlink()
    with pytest.raises(DataError, match="PATIENTS not found"):
        load_records("mimic3", tmp_path, tables=["CHARTEVENTS"])


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("LABEVENTS", "VALUENUM", "VALUENUMBER", "LABEVENTS.csv: no column VALUENUM; it has ROW_ID"),
        ("LABEVENTS", ",1.5,", ",much,", "column VALUENUM: 'much' is not a number"),
        ("LABEVENTS", ",1.5,", ",1.5,,", r"row \d+ has 10 fields and the header 9"),
        ("OUTPUTEVENTS", "21", "21x", "is not a (whole number|time)"),
        ("ADMISSIONS", " 0", " x", "column .*: '.*' is not a time"),
    ],
)
def test_damage_is_named(tables, tmp_path, name, old, new, message):
    write_tables(
        tmp_path, {**tables, "LABEVENTS": [{**row, "VALUENUM": "1.5"} for row in tables["LABEVENTS"]]}
    )
    path = tmp_path / f"{name}.csv"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataError, match=message):
        load_records("mimic3", tmp_path)


def test_a_cut_gzip_file_is_named(tables, tmp_path):
    write_tables(tmp_path, tables)
    path = tmp_path / "CHARTEVENTS.csv.gz"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"CHARTEVENTS.csv.gz: damaged after row"):
        load_records("mimic3", tmp_path)
    with gzip.open(path, "wt"):
        pass
    with pytest.raises(DataError, match=r"no column .*it has no header"):
        load_records("mimic3", tmp_path)


def test_blank_lines_and_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(csvs, "_EVERY", -1.0)
    path, said = tmp_path / "A.csv", []
    path.write_text("X,Y\n1,2\n\n3,4\n\n")
    pieces = list(csvs.read_pieces(path, ("y",), rows=2, progress=said.append))
    assert [piece["y"].tolist() for piece in pieces] == [["2", "4"]]
    assert said == ["A.csv: 2 rows, 100% of the file", "A.csv: 2 rows"]


def test_tables_of_two_versions(tables, tmp_path):
    write_tables(tmp_path, {**tables, "PATIENTS": tables["PATIENTS"][:-1]})
    with pytest.raises(DataError, match=r"no patient \d+, whom ADMISSIONS has"):
        load_records("mimic3", tmp_path)
    write_tables(tmp_path, {**tables, "PATIENTS": []})
    with pytest.raises(DataError, match="a header and no rows"):
        load_records("mimic3", tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tables": ["NOTES"]}, "choose some of CHARTEVENTS"),
        ({"tables": []}, "choose some of CHARTEVENTS"),
        ({"hours": 0}, "positive numbers"),
        ({"precision": 0}, "precision=0"),
        ({"older_than": -2}, "older_than=-2"),
        ({"levels": 0}, "levels=0"),
        ({"hours": 10_000}, "nothing to predict"),
        ({"minimum_age": 200}, "nothing to predict"),
        ({"bags": 3}, "has no option 'bags'"),
    ],
)
def test_options_are_checked(root, tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        load_records("mimic3", root, cache=tmp_path, **options)


def test_found_by_its_tables(root, tables, tmp_path):
    where = lambda folder: {entry.name: entry.where for entry in found(folder)}["mimic3"]  # noqa: E731
    assert where(root) == str(root / "mimic3") and where(tmp_path) is None
    write_tables(tmp_path, tables)
    assert where(tmp_path) == str(tmp_path)


def test_minimum_age(root, tables):
    data = load_records("mimic3", root, **OPTIONS, minimum_age=18)
    born = {row["SUBJECT_ID"]: moment(row["DOB"]) for row in tables["PATIENTS"]}
    grown = {
        admission
        for admission, (row, _) in cases(tables).items()
        if (moment(row["ADMITTIME"]) - born[row["SUBJECT_ID"]]).total_seconds() / (365.25 * 86_400) >= 18
    }
    assert {i for part in PARTS for i in data.part(part).ids.tolist()} == grown


def test_samples_of_values_are_bounded(root, monkeypatch):
    monkeypatch.setattr(mimic_events, "_SAMPLE", 3)
    seen = []
    original = mimic._vocabulary

    def spy(names, statistics, options):
        seen.extend(sum(map(len, sample)) for sample in statistics.sample)
        assert (statistics.valued > 3).any()
        return original(names, statistics, options)

    monkeypatch.setattr(mimic, "_vocabulary", spy)
    load_records("mimic3", root, **OPTIONS, split=1)
    assert max(seen) == 3


def test_batches_of_mapped_records(root):
    data = load_records("mimic3", root, **OPTIONS)
    events, targets = next(iter(data.batches("train", 8)))
    assert events.codes.shape[0] == len(targets) == 8
    assert events.weights.sum(1).min() >= 0 and torch.isfinite(events.context).all()
