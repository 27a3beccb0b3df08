"""Each command from end to end, on embedded data and a table of one's own."""

import csv
import json
import re
import subprocess
import sys

import pytest
import torch
import yaml
from helpers_cli import runner

import slimbayes as sb
from slimbayes.lab.config import CompareConfig, RunConfig, from_dict, read_config
from slimbayes.lab.report import choose, read_results
from slimbayes.verbs.method_text import full_text

pytestmark = pytest.mark.usefixtures("on_cpu")

COMMANDS = (
    "compare", "train", "evaluate", "predict", "export", "report", "info", "reproduce", "bench", "suite",
)  # fmt: skip
TINY = (
    "--data", "wine", "--network", "dense(hidden=[8])", "--seeds", "2", "--epochs", "3", "--batch-size", "31",
    "--max-test", "20", "--shifts", "noise", "--draws", "4", "--jobs", "1", "--quiet",
)  # fmt: skip


@pytest.fixture
def slimbayes(monkeypatch, capsys):
    return runner(monkeypatch, capsys)


def write_wine(path, target=True):
    data = sb.data.load("wine")
    names = [name.replace("/", " ") for name in data.features]
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "cultivar"] if target else names)
        for split in (data.train, data.test):
            for row, label in zip(split.inputs.tolist(), split.targets.tolist(), strict=True):
                writer.writerow([*row, f"kind {'abc'[label]}"] if target else row)


def test_help(slimbayes):
    whole = slimbayes("--help").out
    for command in COMMANDS:
        assert command in whole
        text = slimbayes(command, "--help").out
        assert "Examples:" in text and f"slimbayes {command}" in text.partition("Examples:")[2]
        assert slimbayes(command, "-h").out == text
    assert "Usage" in slimbayes(code=2).out  # no arguments: the help, as typer does


def test_version_of_the_module():
    done = subprocess.run(
        [sys.executable, "-m", "slimbayes", "--version"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, f"slimbayes {sb.__version__}\n"), done.stderr


def test_info(slimbayes, tmp_path):
    text = slimbayes("info", "--data-root", tmp_path).out
    assert torch.__version__ in text and "digits" in text and "Extras" in text and "cifar10" in text
    assert "CPU kernels" in text


def test_compare_writes_results_and_page(slimbayes, tmp_path):
    done = slimbayes(
        "compare", *TINY, "--methods", "Deterministic,MCDropout", "-m", "KTied(rank=1)", "--out", tmp_path
    )
    results = read_results(tmp_path / "results.json")
    content = json.loads((tmp_path / "results.json").read_text())
    assert [m["label"] for m in content["methods"]] == ["Deterministic", "MCDropout", "KTied(rank=1)"]
    assert [run["seed"] for run in content["methods"][0]["runs"]] == [0, 1] and results is not None
    assert "KTied(rank=1)" in (tmp_path / "report.html").read_text()
    for label in ("Deterministic", "MCDropout", "KTied"):
        assert label in done.out
    assert "report.html" in done.out and not list(tmp_path.rglob("*.partial"))
    assert done.out.rstrip().endswith(choose(results).text)  # which to take, last on the screen
    again = slimbayes(
        "compare", *[w for w in TINY if w != "--quiet"], "--methods", "Deterministic,MCDropout", "--out", tmp_path,
        "--resume", "--no-page",
    )  # fmt: skip
    assert "4 runs of 4 kept from before" in again.out


def test_compare_without_shifts(slimbayes, tmp_path):
    words = ["none" if word == "noise" else word for word in TINY]
    slimbayes("compare", *words, "--methods", "Deterministic", "--out", tmp_path)
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["shifts"] == [] and content["methods"][0]["runs"][0]["shifted"] == {}
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize("command", ["compare", "train"])
def test_configurations_are_saved_and_replayed(slimbayes, tmp_path, command):
    kind = CompareConfig if command == "compare" else RunConfig
    path = tmp_path / "a" / "config.yaml"
    more = (
        ["--seeds", "2", "--max-test", "9", "--validation", "0.2"]
        if command == "compare"
        else ["--seed", "4", "--validation", "0.1"]
    )
    words = [
        "--data", "a very long name of a file, with spaces, that no terminal shows in one line/" + "x" * 90 + ".csv",
        "--data-option", "target=y", "--data-option", "ignore=[a, b]", "-m", "Rank1(components=3)", "--lr", "1e-3",
        "--epochs", "7", "--set", "milestones=[0.5, 0.9]", "--set", "schedule=steps", "--set", "weight_decay=1e-4",
        "--draws", "5", "--compile", *more,
    ]  # fmt: skip
    shown = slimbayes(command, *words, "--save-config", path, "--dry-run").out
    saved = read_config(kind, path)
    assert from_dict(kind, yaml.safe_load(shown)) == saved  # what is shown can be saved and read
    assert saved.data_options == {"target": "y", "ignore": ["a", "b"]} and saved.draws == 5
    training = saved.training
    assert (training.lr, training.epochs, training.milestones) == (0.001, 7, (0.5, 0.9))
    assert (training.schedule, training.weight_decay, training.compile) == ("steps", 1e-4, True)
    again = slimbayes(command, "--config", path, "--dry-run").out
    assert again == shown
    over = from_dict(
        kind, yaml.safe_load(slimbayes(command, "--config", path, "--epochs", 8, "--dry-run").out)
    )
    assert over.training.epochs == 8 and over.training.lr == 0.001
    if command == "compare":
        assert [c.label for c in saved.contenders] == ["Deterministic", "Rank1(components=3)"]
        assert saved.seeds == (0, 1) and saved.validation == 0.2
    else:
        assert saved.method == full_text("Rank1(components=3)") and training.seed == 4


def test_train_evaluate_predict_report(slimbayes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_wine(tmp_path / "wine.csv")
    done = slimbayes(
        "train", "--data", "wine.csv", "--data-option", "target=cultivar", "--network", "dense(hidden=[8])",
        "-m", "Rank1(components=2)", "--epochs", "20", "--lr", "0.02", "--batch-size", "30", "--validation", "0.2",
        "--early-stopping", "30", "--out", "run[a]", "--quiet",
    )  # fmt: skip
    assert re.search(r"Rank1\(components=2\): [\d,]+ parameters \(\+[\d.]+ %\), \d+ steps in", done.out)
    assert "validation_accuracy" in done.out and "next: slimbayes evaluate run[a]" in done.out
    assert {path.name for path in (tmp_path / "run[a]").iterdir()} >= {
        "config.yaml", "history.csv", "model.safetensors", "run.json", "training.safetensors",
    }  # fmt: skip

    shown = slimbayes("evaluate", "run[a]", "--shifts", "noise,scale", "--page", "--draws", "8").out
    content = json.loads((tmp_path / "run[a]" / "results.json").read_text())
    nll = content["methods"][0]["runs"][0]["shifted"]["scale"]["5"]["nll"]
    assert f"{nll:.3f}" in shown and (tmp_path / "run[a]" / "report.html").exists()
    assert content["methods"][0]["draws"] == 8
    slimbayes("evaluate", "run[a]", "--shifts", "none", "--out", "clean")
    assert json.loads((tmp_path / "clean" / "results.json").read_text())["shifts"] == []

    write_wine(tmp_path / "new.csv", target=False)
    shown = slimbayes("predict", "run[a]", "new.csv", "--out", "deep/out.csv", "--level", "0.5").out
    assert "178 predictions: deep/out.csv" in shown
    with open(tmp_path / "deep" / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    data = sb.data.load("wine")
    labels = torch.cat([data.train.targets, data.test.targets]).tolist()
    right = sum(row["prediction"] == f"kind {'abc'[label]}" for row, label in zip(rows, labels, strict=True))
    assert right > 0.8 * 178  # the names of the classes are those of the file
    assert rows[0]["row"] == "1" and 0 <= float(rows[0]["lower"]) <= float(rows[0]["upper"]) <= 1
    first = (tmp_path / "deep" / "out.csv").read_bytes()
    slimbayes("predict", "run[a]", "new.csv", "--out", "deep/out.csv", "--level", "0.5")
    assert (tmp_path / "deep" / "out.csv").read_bytes() == first  # the same seed, the same file
    slimbayes("predict", "run[a]", "new.csv", "--out", "deep/out.csv", "--level", "0.5", "--seed", "1")
    assert (tmp_path / "deep" / "out.csv").read_bytes() != first

    slimbayes("report", "run[a]/results.json", "--out", "page")
    assert (tmp_path / "page" / "report.html").exists()


def test_a_folder_of_images_and_an_archive(slimbayes, tmp_path):
    image = pytest.importorskip("PIL.Image")
    import numpy as np

    run = tmp_path / "run"
    slimbayes(
        "train", "--data", "digits", "--network", "dense(hidden=[16])", "-m", "MCDropout", "--steps", "60",
        "--lr", "0.01", "--out", run, "--quiet",
    )  # fmt: skip
    raw = sb.data.load("digits").test.inputs[:3]
    (tmp_path / "images").mkdir()
    for i, pixels in enumerate(raw):
        image.fromarray(pixels[0].numpy()).save(tmp_path / "images" / f"{i}.png")
    np.savez(tmp_path / "images.npz", images=raw.numpy())
    slimbayes("predict", run, tmp_path / "images", "--out", tmp_path / "a.json")
    slimbayes("predict", run, tmp_path / "images.npz", "--out", tmp_path / "b.json")
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert [row.pop("row") for row in first] == ["0.png", "1.png", "2.png"]
    assert [row.pop("row") for row in second] == ["1", "2", "3"]
    assert first == second
    (tmp_path / "images" / "x.png").write_bytes(b"no image")
    done = slimbayes("predict", run, tmp_path / "images", "--out", tmp_path / "c.json", code=1)
    assert "x.png: damaged or not an image" in done.err and not (tmp_path / "c.json").exists()


def test_resume_takes_the_settings_of_the_folder(slimbayes, tmp_path):
    out = tmp_path / "r"
    first = ["train", "--data", "wine", "--network", "dense(hidden=[4])", "-m", "MCDropout(rate=0.2)"]
    slimbayes(*first, "--epochs", "2", "--data-option", "split=1", "--out", out, "--quiet")
    before = (out / "config.yaml").read_text()
    slimbayes("train", "--resume", "--out", out, "--quiet")
    assert (out / "config.yaml").read_text() == before and "MCDropout(rate=0.2, " in before


def test_data_options_come_on_top(slimbayes, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("data: rows.csv\ndata_options: {target: y, test: 0.3}\n")
    shown = yaml.safe_load(slimbayes("train", "--config", path, "--data-option", "test=0.5", "--dry-run").out)
    assert shown["data_options"] == {"target": "y", "test": 0.5}
    words = ("train", "--config", path, "--data", "wine", "--data-option", "split=1", "--dry-run")
    assert yaml.safe_load(slimbayes(*words).out)["data_options"] == {"split": 1}
    words = ("train", "--config", path, "--data", "wine", "--dry-run")
    assert yaml.safe_load(slimbayes(*words).out)["data_options"] == {}


def test_a_network_in_the_folder_one_works_in(slimbayes, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    (tmp_path / "own_network.py").write_text(
        "from torch import nn\ndef make(shape, outputs):\n    return nn.Linear(shape[0], outputs)\n"
    )
    words = [
        "train",
        "--data",
        "wine",
        "--network",
        "own_network:make",
        "--epochs",
        "1",
        "--out",
        "r",
        "--quiet",
    ]
    slimbayes(*words)
    assert "give --network 'own_network:make'" in slimbayes("evaluate", "r", code=1).err
    slimbayes("evaluate", "r", "--network", "own_network:make", "--shifts", "none")
