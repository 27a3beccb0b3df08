"""The results file: round trips, errors that name file and key, joining."""

import json

import numpy as np
import pytest
from report.helpers_results import ALL, METHODS, classification

from slimbayes.lab.report import ReportError, Results, merge_results, read_results, write_results
from slimbayes.lab.report.results import number, plain


def small(**options):
    return classification(**({"seeds": 2, "methods": METHODS[:2], "shifts": ["noise"]} | options))


@pytest.mark.parametrize("kind", ALL)
def test_round_trip_to_six_digits(kind, tmp_path):
    document = ALL[kind](seeds=1, methods=METHODS[:2])
    path = write_results(document, tmp_path / "results.json")
    again = read_results(path)
    before, after = plain(document), again.data

    def compare(a, b):
        assert type(a) is type(b)
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                compare(a[key], b[key])
        elif isinstance(a, list):
            assert len(a) == len(b)
            for x, y in zip(a, b, strict=True):
                compare(x, y)
        elif isinstance(a, float):
            assert b == pytest.approx(a, rel=5.01e-6)
            assert float(f"{b:.6g}") == b
        else:
            assert a == b

    compare(before, after)
    assert write_results(again, tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "again.json",
        "results.json",
    ]  # no temporary file left


def test_nan_is_null_and_arrays_are_lists(tmp_path):
    document = small()
    document["methods"][0]["runs"][0]["clean"]["nll"] = float("nan")
    document["methods"][0]["runs"][0]["clean"]["brier"] = np.float32("inf")
    document["methods"][0]["runs"][0]["entropy"]["clean"] = np.arange(3)
    text = write_results(document, tmp_path / "r.json").read_text()
    assert "NaN" not in text and "Infinity" not in text
    run = json.loads(text)["methods"][0]["runs"][0]
    assert run["clean"]["nll"] is None and run["clean"]["brier"] is None
    assert run["entropy"]["clean"] == [0, 1, 2]
    literal = tmp_path / "literal.json"  # a file by another writer, with JavaScript's NaN in it
    literal.write_text(text.replace('"nll": null', '"nll": NaN', 1))
    assert read_results(literal).data["methods"][0]["runs"][0]["clean"]["nll"] is None


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = write_results(small(), tmp_path / "r.json")
    old = path.read_bytes()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("slimbayes.files.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_results(small(seeds=1), path)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON, or cut short"),
        (b"\xff\xfe\x00", "not readable as text"),
        (b"[1]", "no JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "'format' is missing"),
        (b'{"format": "other", "version": 1, "task": "regression", "methods": []}', "format is 'other'"),
        (b'{"format": "slimbayes-results", "version": 9, "task": "regression", "methods": []}', "version 9"),
        (b'{"format": "slimbayes-results", "version": 1, "task": "clustering", "methods": []}', "clustering"),
    ],
)
def test_foreign_and_damaged_files(content, words, tmp_path):
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(ReportError, match=words) as error:
        read_results(path)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ReportError, match=r"nothing\.json"):
        read_results(tmp_path / "nothing.json")


def change(document, path, value):
    for key in path[:-1]:
        document = document[key]
    if value is KeyError:
        del document[path[-1]]
    else:
        document[path[-1]] = value


RUN = ("methods", 1, "runs", 0)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("methods",), {}, "'methods' is no list"),
        (("shifts",), [1], "'shifts'"),
        (("dataset",), [1], "'dataset' is no object"),
        (("dataset", "classes"), "abc", "'dataset.classes' is no list"),
        (("methods", 1, "name"), KeyError, r"methods\[1\]\.name' is missing"),
        (("methods", 1, "name"), "Deterministic", r"methods\[1\]\.name' is 'Deterministic'"),
        (("methods", 1, "runs"), KeyError, r"methods\[1\]\.runs' is missing"),
        (("methods", 1, "runs"), 3, r"methods\[1\]\.runs' is no list"),
        ((*RUN, "seed"), KeyError, r"methods\[1\]\.runs\[0\]\.seed' is missing"),
        ((*RUN, "seed"), 1, "holds a seed twice"),
        ((*RUN, "seed"), "a", "not an integer"),
        ((*RUN, "clean"), None, r"methods\[1\]\.runs\[0\]\.clean' is missing"),
        ((*RUN, "shifted"), [1], "shifted' is no object"),
        ((*RUN, "shifted", "noise"), 1, "shifted.noise'"),
        ((*RUN, "history"), [1], "history' is no list of objects"),
        ((*RUN, "examples"), {"least": [1]}, "examples.least'"),
        ((*RUN, "reliability", "clean"), [1], "reliability.clean' is no object"),
        ((*RUN, "reliability", "clean", "count"), "x", "count' is no list of numbers"),
        ((*RUN, "reliability", "clean", "count", 1), "x", "count' holds something that is no number"),
    ],
)
def test_wrong_parts_are_named(path, value, words):
    document = small()
    change(document, path, value)
    with pytest.raises(ReportError, match=words):
        Results.of(document)


def test_absent_parts_are_allowed():
    document = small()
    keep = {"seed", "clean"}
    for method in document["methods"]:
        method["runs"] = [{k: v for k, v in run.items() if k in keep} for run in method["runs"]]
    for key in ("title", "created", "provenance", "dataset", "network", "shifts", "ood"):
        del document[key]
    results = Results.of(document)
    assert results.title == "Methods compared on unnamed data"
    assert results.seeds == [0, 1] and results.baseline["name"] == "Deterministic"


def test_merge_joins_methods_and_seeds(tmp_path):
    document = small(seeds=3, methods=METHODS[:3])
    first = json.loads(json.dumps(plain(document)))
    second = json.loads(json.dumps(plain(document)))
    first["methods"] = first["methods"][:2]
    second["methods"] = second["methods"][1:]
    first["methods"][1]["runs"] = first["methods"][1]["runs"][:1]
    second["methods"][0]["runs"] = second["methods"][0]["runs"][1:]
    paths = [write_results(part, tmp_path / f"{i}.json") for i, part in enumerate((first, second))]
    merged = merge_results(paths)
    assert [m["name"] for m in merged.methods] == [m["name"] for m in document["methods"]]
    whole = write_results(document, tmp_path / "whole.json")
    assert merged.data["methods"] == read_results(whole).data["methods"]
    assert merged.provenance["joined_from"] == [str(path) for path in paths]


def test_merge_refuses_what_does_not_belong_together(tmp_path):
    first, other = small(), small()
    other["dataset"]["fingerprint"] = "another"
    with pytest.raises(ReportError, match=r"different data .*00112233445566aa and another"):
        merge_results([first, other])
    with pytest.raises(ReportError, match="Deterministic with seed 0 is there already"):
        merge_results([first, small()])
    third = small()
    third["methods"][0]["settings"] = {"components": 99}
    with pytest.raises(ReportError, match="Deterministic has other settings"):
        merge_results([first, third])
    with pytest.raises(ReportError, match="is classification, results 2 is regression"):
        merge_results([first, ALL["cubic"](seeds=1, methods=METHODS[:1])])
    with pytest.raises(ReportError, match="no results"):
        merge_results([])
    assert len(first["methods"][0]["runs"]) == 2  # the given results are as they were


def test_number_takes_only_numbers():
    assert [number(x) for x in (1, 2.5, True, "1", None, [1], float("inf"), 1e300)] == [1.0, 2.5] + [None] * 6
