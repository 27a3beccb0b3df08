"""What is measured, what is kept, what happens when a worker dies; the command line; the epoch script."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from helpers_cli import runner

from slimbayes.lab.bench import running
from slimbayes.lab.bench.results import BenchError, Results, read_results
from slimbayes.lab.bench.running import jobs, run_bench
from slimbayes.lab.bench.settings import CONTENDERS, PEERS, REFERENCE, SEQUENCES, BenchConfig, limit

ROOT = Path(__file__).parents[2]
TINY = BenchConfig(
    ("tiny",), ("rank1", "emp"), ("train",), ("eager",), rounds=1, seconds=0.0, threads=1, device="cpu"
)


@pytest.fixture
def slimbayes(monkeypatch, capsys):
    return runner(monkeypatch, capsys)


def fake_worker(calls, deaths=()):
    """A worker that measures nothing; it dies of the contenders named."""

    def work(job, python, say):
        calls.append((job, python))
        for name in job.contenders:
            if name in deaths:
                return None, name, "the worker ended with code -9: killed"
        where = {"group": job.group, "network": job.network, "phase": job.phase, "mode": job.mode}
        made = [{**where, "method": name, "ratio": 1.0} for name in (REFERENCE, *job.contenders)]
        return {"cells": made, "where": {"versions": {}}}, "", None

    return work


def test_a_real_worker(tmp_path):
    events = []
    path = tmp_path / "bench-cpu.json"
    found = run_bench(TINY, path, say=lambda job, event: events.append(event))
    assert [cell["method"] for cell in found.cells] == [REFERENCE, "rank1", "emp"]
    assert all("error" not in cell for cell in found.cells), found.cells
    assert {"event": "build", "method": "emp"} in events
    run = found.runs[0]
    assert run["threads"] == 1 and "torch" in run["versions"]
    assert read_results(path).cells == found.cells


def test_what_is_there_is_kept(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(running, "_worker", fake_worker(calls))
    path = tmp_path / "bench-cpu.json"
    run_bench(BenchConfig(("tiny",), ("rank1",), ("train",), ("eager",)), path)
    assert [job.contenders for job, _ in calls] == [("rank1",)]
    run_bench(TINY, path)
    assert calls[-1][0].contenders == ("emp",) and len(calls) == 2
    run_bench(TINY, path)
    assert len(calls) == 2  # nothing is missing
    run_bench(TINY, path, fresh=True)
    assert calls[-1][0].contenders == ("rank1", "emp")


def test_figures_of_another_machine_are_not_mixed_in(tmp_path, monkeypatch):
    path = Results("cpu", "another machine").write(tmp_path / "bench-cpu.json")
    with pytest.raises(BenchError, match="another machine"):
        run_bench(TINY, path)


def test_a_contender_that_kills_the_worker_is_recorded_and_the_others_go_on(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(running, "_worker", fake_worker(calls, deaths=("rank1",)))
    found = run_bench(TINY, tmp_path / "a.json")
    assert found.find("own", "tiny", "train", "eager", "rank1")["error"].startswith("the worker ended")
    assert found.find("own", "tiny", "train", "eager", "emp")["ratio"] == 1.0
    assert len(calls) == 2


def test_death_in_the_rounds_is_everyones(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "_worker", lambda *rest: (None, "", "the worker ended with code -11:"))
    found = run_bench(TINY, tmp_path / "a.json")
    assert [cell["error"] for cell in found.cells] == ["the worker ended with code -11:"] * 2


def test_a_worker_that_dies_leaves_its_last_words(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'@bench {"event": "build", "method": "emp"}\'\necho no >&2\nexit 3\n')
    python.chmod(0o755)
    found = run_bench(TINY, tmp_path / "a.json", python=str(python))
    cells = {cell["method"]: cell["error"] for cell in found.cells}
    assert cells["emp"] == "the worker ended with code 3: no"


def test_the_budget(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(running, "_worker", fake_worker(calls))
    found = run_bench(BenchConfig(("tiny",), budget=1.0), tmp_path / "a.json")
    assert found.cells == [] and calls == []
    run_bench(BenchConfig(("tiny",), budget=1000.0), tmp_path / "a.json")
    assert all(990 < job.budget <= 1000 for job, _ in calls)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.undo()
    monkeypatch.setattr(running, "GRACE", -11.0)  # one second after the start
    found = run_bench(BenchConfig(("tiny",), budget=12.0), tmp_path / "b.json", python=str(python))
    assert found.cells == []  # nothing is known of those it had no time for


def test_jobs_of_peers_hold_their_counterparts():
    config = BenchConfig(("mlp", "wrn-16-4"), modes=("eager",), peers=sys.executable)
    found = [job for job in jobs(config, Results("cpu")) if job.group == "peers"]
    assert {(job.network, job.phase) for job in found} == {("mlp", "train"), ("mlp", "predict")}
    assert set(found[0].contenders) == {*PEERS, "meanfield-shared", "meanfield-flipout", "batchensemble"}


def test_many_draws_are_measured_of_patches_alone():
    config = BenchConfig(("wrn-28-4",), modes=("eager", "compiled"), peers=sys.executable)
    found = list(jobs(config, Results("cpu")))
    assert [(job.phase, job.mode) for job in found] == [("many", "eager"), ("many", "compiled")]
    assert {job.contenders for job in found} == {("emp", "ecmp")}
    assert limit("cuda", "wrn-28-4", "many", "compiled", "emp", "time") == 1.05
    assert limit("cuda", "wrn-28-4", "many", "eager", "ecmp", "time") == 1.05
    assert limit("cuda", "wrn-28-4", "many", "eager", "emp", "memory") == 1.05


def test_everything_is_measured_by_default():
    found = list(jobs(BenchConfig(), Results("cpu")))
    assert {job.network for job in found} == {"mlp", "lenet", "wrn-16-2", "wrn-16-4", "lstm", "resnet-18"}
    assert {job.mode for job in found} == {"eager", "compiled"}
    whole = [job for job in found if job.phase != "head" and job.network != "lstm"]
    assert all(set(job.contenders) == set(CONTENDERS) for job in whole)
    sequences = [job for job in found if job.network == "lstm"]
    assert {job.mode for job in sequences} == {"eager"}  # no compiler takes them
    assert all(set(job.contenders) == set(SEQUENCES) for job in sequences)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"networks": ("alexnet",)}, "unknown network 'alexnet'"),
        ({"methods": ("rank2",)}, "unknown method 'rank2'"),
        ({"phases": ("sleep",)}, "unknown phase"),
        ({"modes": ("jit",)}, "unknown mode"),
        ({"modes": ("graphs",)}, "is for GPUs"),
        ({"rounds": 0}, "at least 1"),
        ({"device": "mps"}, "cpu or cuda"),
        ({"peers": "/nowhere/python"}, "make bench-peers"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, change, words):
    with pytest.raises(BenchError, match=words):
        run_bench(BenchConfig(**change), tmp_path / "a.json")


def test_command(slimbayes, tmp_path):
    path = tmp_path / "bench-cpu.json"
    words = (
        "bench", "--device", "cpu", "--networks", "tiny", "--methods", "rank1,emp", "--phases", "train", "--modes",
        "eager", "--rounds", "2", "--threads", "1", "--output", path,
    )  # fmt: skip
    shown = slimbayes(*words).out
    assert "Rank1" in shown and str(path) in shown.replace("\n", "")
    assert path.with_suffix(".svg").is_file() and path.with_suffix(".png").is_file()
    assert len(json.loads(path.read_text())["cells"]) == 3
    assert "contenders" not in slimbayes(*words, "--quiet", "--no-plot").out
    slimbayes("bench", "--device", "cpu", "--output", path, "--page", tmp_path / "speed.md")
    assert "Rank1" in (tmp_path / "speed.md").read_text()
    assert "unknown network" in slimbayes("bench", "--device", "cpu", "--networks", "x", code=1).err


def test_quick(slimbayes, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(running, "_worker", fake_worker(calls))
    monkeypatch.setattr("slimbayes.lab.bench.table.print_table", lambda *rest: None)
    slimbayes("bench", "--device", "cpu", "--quick", "--no-plot", "--output", tmp_path / "a.json")
    assert {(job.network, job.mode, job.rounds) for job, _ in calls} == {("mlp", "eager", 5)}


def test_epoch_script(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("epoch", ROOT / "bench" / "epoch.py")
    epoch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(epoch)
    path = tmp_path / "epoch-gpu.json"
    words = [
        "--images", "32", "--size", "8", "--depth", "10", "--width", "1", "--batch", "8", "--components", "2",
        "--epochs", "1", "--device", "cpu", "--output", str(path),
    ]  # fmt: skip
    assert epoch.main([*words, "--modes", "eager"]) == 0
    content = json.loads(path.read_text())
    assert [run["method"] for run in content["runs"]] == list(epoch.METHODS)
    assert all(run["epoch_seconds"] > 0 and "error" not in run for run in content["runs"]), content["runs"]
    epoch.main([*words, "--modes", "eager", "--methods", "rank1"])
    assert len(json.loads(path.read_text())["runs"]) == 4  # the others are kept


def test_augmentation_crops_and_flips():
    import torch

    spec = importlib.util.spec_from_file_location("epoch", ROOT / "bench" / "epoch.py")
    epoch = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(epoch)
    pixels = torch.randint(256, (3, 6, 6, 3), dtype=torch.uint8)
    images = epoch.Images(pixels, torch.arange(3))
    plan = torch.tensor([[2, epoch.PAD, epoch.PAD, 0], [1, epoch.PAD, epoch.PAD, 1], [0, 0, 0, 0]])
    x, y = images.batch(plan)
    back = (x * 64 + 120).round().to(torch.uint8)
    assert y.tolist() == [2, 1, 0] and x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(back[0], pixels[2].permute(2, 0, 1))
    assert torch.equal(back[1], pixels[1].permute(2, 0, 1).flip(-1))
    assert torch.equal(back[2][:, 4:, 4:], pixels[0].permute(2, 0, 1)[:, :2, :2]) and not back[2][:, :4].any()
