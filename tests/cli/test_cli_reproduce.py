"""``slimbayes reproduce``: what it lists, runs, refuses, and how it stops."""

import json
import re

import pytest
from helpers_cli import runner

from slimbayes.lab.experiments import running
from slimbayes.lab.experiments.catalogue import ENTRIES

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def slimbayes(monkeypatch, capsys):
    monkeypatch.delenv("SLIMBAYES_DATA", raising=False)
    return runner(monkeypatch, capsys)


def test_list_shows_every_entry_and_where_results_lie(slimbayes, tmp_path):
    before = slimbayes("reproduce", "--list", "--results", tmp_path).out
    assert all(name in before for name in ENTRIES)
    assert "not run" in before and "no code yet" not in before
    done = slimbayes("reproduce", "ktied/table1", "--results", tmp_path, "--work", tmp_path / "work")
    assert "ktied/table1 at scale smoke: " in done.out
    document = json.loads((tmp_path / "ktied" / "table1.smoke.json").read_text())
    assert document["provenance"]["command"].startswith("slimbayes reproduce ktied/table1")
    assert all(check["holds"] for check in document["checks"]) and len(document["checks"]) == 4
    after = slimbayes("reproduce", "--list", "--results", tmp_path).out
    assert re.search(r"^ktied/table1 .* smoke *$", after, re.MULTILINE)
    assert f"  {tmp_path / 'ktied' / 'table1.smoke.json'}: 4 of 4 checks hold" in after.splitlines()
    (tmp_path / "ktied" / "table1.smoke.json").write_text("{")
    assert "table1.smoke.json: damaged" in slimbayes("reproduce", "--list", "--results", tmp_path).out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "which experiment?"),
        (("ktied/table1", "ktied/tabel2"), "the closest are ktied/table2"),
        (("nothing/*",), "no entry with code matches 'nothing/*'"),
        (("ktied/table1", "--scale", "huge"), "scale='huge' is unknown; use one of smoke"),
        (("ktied/table2", "--only", "resnet"), "leaves nothing of mnist, cifar100, imdb"),
        (("ktied/figure*", "--only", "mnsit"), "--only mnsit: these entries have mnist, cifar100"),
        (("ktied/figure3", "ktied/figure4", "--only", "mnist,foo"), "--only foo: these entries have"),
        (("ktied/table4", "--only", "mnist"), "only=mnist: this experiment has no settings"),
        (("ktied/table2", "--scale", "desk", "--only", "mnist"), "MNIST"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_sentence(slimbayes, tmp_path, words, said):
    done = slimbayes("reproduce", *words, "--results", tmp_path, "--work", tmp_path, "--quiet", code=1)
    assert said in " ".join(done.err.split())
    assert not list(tmp_path.rglob("*.json"))


def test_a_spent_budget_has_an_exit_code_of_its_own(slimbayes, tmp_path):
    words = ("reproduce", "ktied/table2", "--results", tmp_path, "--work", tmp_path, "--budget", "0")
    assert "the same command goes on" in slimbayes(*words, code=75).out


def test_patterns_name_entries(slimbayes, tmp_path):
    done = slimbayes("reproduce", "ktied/table[14]", "--results", tmp_path, "--work", tmp_path, "--quiet")
    assert "ktied/table1" in done.out and "ktied/table4" in done.out


def test_only_chooses_among_the_entries_of_a_pattern(slimbayes, tmp_path):
    words = ("--results", tmp_path, "--work", tmp_path, "--only", "mnist", "--quiet", "--jobs", "1")
    done = slimbayes("reproduce", "ktied/figure[45]", *words)
    assert "ktied/figure4" in done.out and "ktied/figure5" not in done.out


def test_processes_are_started_once_for_several_entries(slimbayes, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(running, "work_together", lambda jobs, *rest: started.append(len(jobs)))
    words = (
        "--only",
        "mnist",
        "--jobs",
        "2",
        "--quiet",
        "--work",
        tmp_path / "w",
        "--results",
        tmp_path / "r",
    )
    slimbayes("reproduce", "ktied/figure3", "ktied/figure4", *words)
    assert started == [1] and len(list(tmp_path.glob("r/ktied/*.json"))) == 2
