"""Beside every result: versions, configuration, the data's fingerprint, seed, commit, command, hardware."""

import json

import pytest
import torch
from helpers_cli import runner
from torch import nn

import slimbayes as sb
from slimbayes.containers.datasets import fingerprint
from slimbayes.verbs.provenance import FORMAT, read_manifest

pytestmark = pytest.mark.usefixtures("on_cpu")
SHORT = ("--network", "dense(hidden=[4])", "--epochs", "1", "--quiet")
ORIGIN = {"versions", "commit", "command", "hardware", "created"}


@pytest.fixture
def slimbayes(monkeypatch, capsys):
    return runner(monkeypatch, capsys)


def read(path):
    return json.loads(path.read_text())


def check_origin(found, command):
    assert found.keys() >= ORIGIN - {"created"}
    assert found["versions"]["torch"] == torch.__version__ and "slimbayes" in found["versions"]
    assert command in found["command"] and "cores" in found["hardware"]


def test_fit_writes_a_manifest_and_notes_every_resumption(tmp_path):
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    model = sb.bayesianize(nn.Linear(3, 2), sb.MeanField())
    options = {"epochs": 2, "batch_size": 10, "seed": 7, "folder": tmp_path, "progress": False}
    seen = []
    sb.fit(model, (x, y), callback=lambda step, row: seen.append(read(tmp_path / "manifest.json")), **options)
    found = read_manifest(tmp_path / "manifest.json")
    assert seen[0] == found, "it is there from the start, for a run that is killed too"
    check_origin(found, "")
    assert (found["format"], found["kind"], found["seed"]) == (FORMAT, "fit", 7)
    assert found["config"]["lr"] == 1e-3 and found["config"]["method"].startswith("MeanField(")
    assert found["data"] == {"fingerprint": fingerprint(x, y), "num_data": 20, "batches": 2}
    assert "resumed" not in found
    for _ in range(2):
        sb.fit(model, (x, y), resume=True, **options)
    found = read_manifest(tmp_path / "manifest.json")
    assert [each["step"] for each in found["resumed"]] == [4, 4]
    assert found["resumed"][0].keys() >= ORIGIN
    sb.fit(model, (x, y), **options)
    assert "resumed" not in read_manifest(tmp_path / "manifest.json"), "a new run, a new manifest"


def test_a_damaged_manifest_is_written_anew(tmp_path):
    x, y = torch.randn(20, 3), torch.randint(2, (20,))
    model = sb.bayesianize(nn.Linear(3, 2), sb.MeanField())
    options = {"epochs": 1, "batch_size": 10, "folder": tmp_path, "progress": False}
    sb.fit(model, (x, y), **options)
    (tmp_path / "manifest.json").write_text('{"format": ')
    sb.fit(model, (x, y), resume=True, **options)
    assert [each["step"] for each in read_manifest(tmp_path / "manifest.json")["resumed"]] == [2]


def test_data_of_a_loader_have_no_fingerprint(tmp_path):
    model = sb.bayesianize(nn.Linear(3, 2), sb.MeanField())
    batches = [(torch.randn(5, 3), torch.randint(2, (5,)))]
    sb.fit(model, batches, num_data=5, epochs=1, folder=tmp_path, progress=False)
    assert read(tmp_path / "manifest.json")["data"]["fingerprint"] is None


def test_train_evaluate_and_predict(tmp_path, slimbayes):
    run = tmp_path / "run"
    slimbayes("train", "--data", "wine", "--out", run, "--seed", "3", *SHORT)
    wine = sb.data.load("wine")
    document = read(run / "run.json")
    check_origin(document["provenance"], "slimbayes train")
    assert document["config"]["training"]["seed"] == 3 == read(run / "manifest.json")["seed"]
    assert document["facts"]["fingerprint"] == wine.fingerprint()
    assert read(run / "manifest.json")["data"]["fingerprint"] == wine.train.fingerprint()

    slimbayes("evaluate", run, "--shifts", "none")
    results = read(run / "results.json")
    check_origin(results["provenance"], "slimbayes evaluate")
    assert results["provenance"]["seeds"] == [3] and results["provenance"]["config"]["data"] == "wine"
    assert results["dataset"]["fingerprint"] == wine.fingerprint()

    table = tmp_path / "new.csv"
    row = ",".join(str(float(value)) for value in wine.test.inputs[0])
    table.write_text(",".join(f'"{name}"' for name in wine.features) + "\n" + row + "\n")
    slimbayes("predict", run, table, "--out", tmp_path / "said.csv", "--seed", "5", "--draws", "8")
    found = read_manifest(tmp_path / "said.manifest.json")
    check_origin(found, "slimbayes predict")
    assert (found["kind"], found["seed"]) == ("predict", 5)
    assert found["config"]["run"]["draws"] == 8 and found["config"]["level"] == 0.9
    assert found["data"]["rows"] == 1 and len(found["data"]["fingerprint"]) == 16
    assert found["weights"]["file"] == "model.safetensors" and len(found["weights"]["sha256"]) == 64
    assert found["trained_on"] == {"name": "wine", "fingerprint": wine.fingerprint()}


def test_compare(tmp_path, slimbayes):
    words = ("--shifts", "none", "--seeds", "2", "--draws", "2", "--jobs", "1", "--methods", "Deterministic")
    slimbayes("compare", "--data", "wine", "--out", tmp_path, *words, *SHORT)
    results = read(tmp_path / "results.json")
    check_origin(results["provenance"], "slimbayes compare")
    assert len(results["provenance"]["seeds"]) == 2 and results["provenance"]["config"]["data"] == "wine"
    assert results["dataset"]["fingerprint"] == sb.data.load("wine").fingerprint()


def test_reproduce(tmp_path, slimbayes):
    slimbayes("reproduce", "ktied/table1", "--results", tmp_path, "--work", tmp_path / "work", "--quiet")
    (path,) = tmp_path.rglob("table1*.json")
    made = read(path)["provenance"]
    check_origin(made, "slimbayes reproduce ktied/table1")
    assert made.keys() >= {"fingerprints", "seeds"} and "settings" in read(path)


def test_bench(tmp_path, monkeypatch):
    from slimbayes.lab.bench import BenchConfig, run_bench, running

    job = type("Job", (), {"group": "own"})()
    cell = {"group": "own", "network": "mlp", "phase": "train", "mode": "eager", "method": "rank1"}
    monkeypatch.setattr(running, "jobs", lambda config, results: [job])
    where = {"versions": {"torch": torch.__version__, "slimbayes": sb.__version__}, "hardware": "2 cores"}
    monkeypatch.setattr(running, "_measured", lambda *rest: ([cell], where))
    config = BenchConfig(networks=("mlp",), modes=("eager",), peers=None, budget=1000.0)
    run_bench(config, tmp_path / "bench.json", False, lambda job, event: None)
    (made,) = read(tmp_path / "bench.json")["runs"]
    check_origin(made, "")
    assert made["seed"] == 0 and made["data"] and made["config"]["networks"] == ["mlp"]
    assert not made["config"].keys() & {"peers", "budget"}
