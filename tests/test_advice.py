"""One recommendation: the same sentence wherever somebody asks which method to take."""

from pathlib import Path

import pytest

from slimbayes.lab.report.choice import ADVICE, verdict
from slimbayes.lab.suite.contenders import OURS, RIVALS, suits
from slimbayes.lab.suite.page import differences, gain
from slimbayes.lab.suite.pairs import PAIRS
from slimbayes.lab.suite.running import EVERYTHING, Cell, described, read_rows

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


SINGLE = {name for name in (*OURS, *RIVALS) if name != "ensemble of 5"}  # what trains one network


@pytest.mark.parametrize("regression", [False, True], ids=["classes", "real targets"])
def test_what_it_says_was_measured(rows, regression):
    clean, shifted = (
        {name: gain(rows, name, regression, where) for name in SINGLE} for where in ("clean", "shifted")
    )
    assert min(clean, key=clean.get) == "Rank1" and max(clean["Rank1"], shifted["Rank1"]) < 0
    less = {name for name in SINGLE if shifted[name] < shifted["Rank1"]}
    assert all(gain(rows, name, False, "clean") > 0 for name in less), less


def test_the_other_method_gains_less_and_is_seldom_worse(rows):
    own = differences(rows, "KTied")
    assert sum(one.worse for one in own) <= 2 < 0.1 * len(own)
    for regression in (False, True):
        assert gain(rows, "Rank1", regression, "clean") < gain(rows, "KTied", regression, "clean") < 0


def test_what_was_measured_are_today_s_defaults(rows):
    old = {
        (row["pair"], row["contender"])
        for row in rows
        if row["contender"] in OURS
        and row["is"] != described(Cell(row["pair"], row["contender"], row["seed"]))
    }
    assert not old, "measure these again: slimbayes suite --output bench/results/suite.json"


def test_every_pair_has_five_seeds_of_everything(rows):
    seeds = {}
    for row in rows:
        seeds.setdefault((row["pair"], row["contender"]), set()).add(row["seed"])
    wanted = {(pair, name) for pair in PAIRS for name in EVERYTHING if suits(name, PAIRS[pair])}
    assert set(seeds) == wanted
    assert {key for key, found in seeds.items() if len(found) < 5} == set()


def test_figures_in_the_text_of_the_page_are_those_of_its_rows(rows):
    text = " ".join((ROOT / "docs" / "defaults.md").read_text(encoding="utf-8").split())
    clean, shifted = (-100 * gain(rows, "KTied", False, where) for where in ("clean", "shifted"))
    new = 100 * gain(rows, "KTied", False, "shifted", "judging")
    assert (
        f"`KTied` is {clean:.1f} % below the plain network and {shifted:.1f} % below it under shift" in text
    )
    assert f"did not show on classes (+{new:.1f} %)" in text
    assert abs(gain(rows, "ensemble of 5", False, "clean") - gain(rows, "Rank1", False, "clean")) < 0.01
    assert gain(rows, "EMP", False, "clean") < 0 and abs(gain(rows, "ECMP", False, "clean")) < 0.001
