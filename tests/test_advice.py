"""One recommendation: the same sentence wherever somebody asks which method to take."""

from pathlib import Path

import pytest

from slimbayes.lab.report.choice import ADVICE, verdict
from slimbayes.lab.suite.contenders import OURS, RIVALS
from slimbayes.lab.suite.page import differences, gain
from slimbayes.lab.suite.running import read_rows

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["README.md", "docs/choosing.md", "docs/defaults.md"])
def test_pages_have_it(page):
    assert ADVICE in " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_reports_have_it_last():
    plain = {"name": "Deterministic", "runs": [{"seed": 0, "clean": {"nll": 0.5}}]}
    document = {"format": "slimbayes-results", "version": 1, "task": "classification", "methods": [plain]}
    assert verdict(document)[-1] == f"On other data: {ADVICE}"


@pytest.fixture(scope="module")
def rows():
    return read_rows(ROOT / "bench" / "results" / "suite.json")


def test_what_it_says_of_classes_was_measured(rows):
    """Lower than all else that trains one network: clean, and over clean and shifted."""
    single = {name for name in (*OURS, *RIVALS) if name != "ensemble of 5"}
    found = {name: [gain(rows, name, False, where) for where in ("clean", "shifted")] for name in single}
    assert min(single, key=lambda name: found[name][0]) == "Rank1" and found["Rank1"][0] < 0
    assert min(single, key=lambda name: sum(found[name])) == "Rank1"


def test_what_it_says_of_real_targets_was_measured(rows):
    shifted = {name: gain(rows, name, True, "shifted") for name in ("Rank1", "KTied", "BatchEnsemble")}
    assert shifted["Rank1"] == min(shifted.values()) < 0
    assert gain(rows, "KTied", True, "clean") < gain(rows, "Rank1", True, "clean")


def test_the_other_method_was_seldom_worse_than_the_plain_network(rows):
    worse = {name: sum(one.worse for one in differences(rows, name)) for name in ("Rank1", "KTied")}
    assert worse["KTied"] <= 2 < len(differences(rows, "KTied")) and worse["KTied"] < worse["Rank1"]
