"""Contenders in processes of their own, timed in turn."""

import io
import json
import sys
from dataclasses import replace

from slimbayes.lab.bench import beside
from slimbayes.lab.bench.beside import measure_beside, serve
from slimbayes.lab.bench.results import read_results
from slimbayes.lab.bench.running import environment, run_bench
from slimbayes.lab.bench.settings import REFERENCE, BenchConfig
from slimbayes.lab.bench.worker import Job

JOB = Job("own", "tiny", "train", "eager", ("rank1", "emp"), threads=1, rounds=2, seconds=0.0)
ORDERS = (
    {"order": "warm"},
    {"order": "build"},
    {"order": "steps", "seconds": 0.0},
    {"order": "time", "steps": 2},
)


def said(job, orders=ORDERS):
    answers = []
    serve(job, io.StringIO("".join(json.dumps(order) + "\n" for order in orders)), answers.append)
    return answers


def test_real_processes(tmp_path):
    config = BenchConfig(
        ("tiny",), ("rank1",), ("train",), ("eager",), rounds=2, seconds=0.0, threads=1, beside=True
    )
    events = []
    path = tmp_path / "bench-cpu.json"
    found = run_bench(config, path, say=lambda job, event: events.append(event))
    assert [cell["method"] for cell in found.cells] == [REFERENCE, "rank1"]
    for cell in found.cells:
        assert "error" not in cell, cell
        assert cell["rounds"] == 2 and cell["ratio"] > 0 and cell["peak_bytes"] > 0
        assert cell["first_seconds"] is None and cell["rows"] == 64
    assert found.cells[0]["ratio"] == 1.0
    assert {"event": "round", "done": 2, "of": 2} in events
    assert "torch" in found.runs[0]["versions"]
    assert read_results(path).cells == found.cells


def test_what_a_process_answers():
    warm, built, steps, spent = said(replace(JOB, contenders=("rank1",)))
    assert warm == {} and built["units"] == 64 and built["parameters"] > 0
    assert steps["steps"] >= 1 and spent["seconds"] > 0
    (_, failed) = said(replace(JOB, contenders=("nobody",)))
    assert "nobody" in failed["error"]


class Scripted:
    """A process that answers at once: a step takes ``seconds``, or it fails where it is told to."""

    def __init__(self, name, seconds, dies=None):
        self.name, self.seconds, self.dies, self.error = name, seconds, dies, None
        self.order, self.ended = "", False
        self.process = self

    def ask(self, order, **more):
        self.order = order

    def answer(self):
        if self.error is None and self.order == self.dies:
            self.error = "died"
        if self.error is not None:
            return {}
        cell = {
            "parameters": 10,
            "rows": 8,
            "peak_bytes": 4,
            "first_seconds": None,
            "units": 8,
            "where": {"a": 1},
        }
        return {"warm": {}, "build": cell, "steps": {"steps": 3}, "time": {"seconds": self.seconds}}[
            self.order
        ]

    def kill(self):
        self.error = "killed"

    def end(self):
        self.ended = True


def scripted(monkeypatch, job=JOB, **dies):
    made = {}

    def process(name, *others):
        seconds = {REFERENCE: 1.0, "rank1": 1.5}.get(name, 3.0)
        made[name] = Scripted(name, seconds, dies.get(name))
        return made[name]

    monkeypatch.setattr(beside, "Process", process)
    cells, where = measure_beside(job, sys.executable, {})
    assert all(each.ended for each in made.values())
    return {cell["method"]: cell for cell in cells}, where


def test_ratios(monkeypatch):
    cells, where = scripted(monkeypatch)
    assert where == {"a": 1}
    assert cells["rank1"]["ratio"] == 1.5 and cells["emp"]["ratio"] == 3.0
    assert cells["emp"]["memory_ratio"] == 1.0 and "units" not in cells["emp"] and "where" not in cells["emp"]


def test_one_that_fails_leaves_its_message_and_the_others_go_on(monkeypatch):
    for moment in ("warm", "build", "steps", "time"):
        cells, _ = scripted(monkeypatch, emp=moment)
        assert cells["emp"] == {
            "group": "own", "network": "tiny", "phase": "train", "mode": "eager", "method": "emp", "error": "died"
        }  # fmt: skip
        assert cells["rank1"]["ratio"] == 1.5


def test_without_the_reference_there_is_no_ratio(monkeypatch):
    cells, _ = scripted(monkeypatch, deterministic="build")
    assert cells["rank1"]["error"] == "the deterministic network failed: died"


def test_what_the_budget_ends_is_not_recorded(tmp_path):
    job = replace(JOB, contenders=("rank1",), budget=0.3)  # no process starts in that
    cells, _ = measure_beside(job, sys.executable, environment(job))
    assert cells == []


def test_a_process_that_dies_says_why():
    job = replace(JOB, contenders=("rank1",))
    cells, _ = measure_beside(job, "/bin/false", environment(job))
    assert [cell["error"].startswith("the ") for cell in cells] == [True, True]
    assert "ended with code" in cells[0]["error"]
