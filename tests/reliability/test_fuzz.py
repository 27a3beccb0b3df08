"""The readers that are fuzzed, by a few hundred mutations of valid files: ``python -m reliability.fuzz`` does more."""

import json
from pathlib import Path

import pytest

from reliability import fuzz
from reliability.figures import RESULTS
from reliability.mutations import Mutator
from reliability.targets import TARGETS

EXECUTIONS = {"checkpoint": 150, "config": 80, "csv": 300, "npz": 300}


@pytest.mark.parametrize("name", fuzz.NAMES)
def test_damaged_files_are_read_or_refused(name):
    found = fuzz.plain(name, executions=EXECUTIONS[name], seed=2)
    assert found.found == {} and found.executions >= EXECUTIONS[name]
    assert 0 < found.accepted < found.executions  # valid files are among them, and others


def test_valid_files_are_accepted(tmp_path):
    for name, target in TARGETS.items():
        seeds = target.seeds()
        read = [target.read(seed, tmp_path) is not None for seed in seeds]
        assert all(read) if name == "checkpoint" else sum(read) >= 3, name


def test_an_undocumented_error_is_a_finding():
    findings = fuzz.Findings((ValueError,))

    def read(data: bytes, folder: Path) -> object:
        raise {b"a": KeyError("x"), b"b": ValueError("x"), b"c": ValueError("x" * 10_000)}[data]

    for data in (b"a", b"a", b"b", b"c"):
        findings.call(read, data, Path())
    assert sorted(key.split()[0] for key in findings.found) == ["AssertionError", "KeyError"]


def test_mutations_depend_on_the_seed_alone():
    first, second, other = (Mutator([b"abcdef" * 9], ("word",), seed) for seed in (0, 0, 1))
    ours = [first.next() for _ in range(50)]
    assert ours == [second.next() for _ in range(50)] != [other.next() for _ in range(50)]


def test_what_was_measured_holds():
    document = json.loads((RESULTS / "fuzz.json").read_text())
    assert set(document["details"]["targets"]) == set(fuzz.NAMES)
    for found in document["details"]["targets"].values():
        assert found["engine"] == "atheris" and found["findings"] == {} and found["seconds"] >= 600
    assert all(figure["holds"] for figure in document["figures"])
