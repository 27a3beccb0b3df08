"""Trained runs in folders: loaded bit for bit, damaged ones refused, predictions as tables."""

import csv
import dataclasses
import json
import math
import shutil
import sys

import numpy as np
import pytest
import torch

import slimbayes as sb
from slimbayes.lab.compare import evaluate_run
from slimbayes.lab.config import RunConfig, read_config
from slimbayes.lab.data import DataError
from slimbayes.lab.predictions import predict_table, write_table
from slimbayes.lab.runs import (
    Facts,
    held_out_for_noise,
    load_run,
    make_model,
    precision_of,
    samples_for,
    train_run,
)
from slimbayes.training import Training
from slimbayes.verbs.checkpoint import CheckpointError
from slimbayes.verbs.method_text import SpecError

pytestmark = pytest.mark.usefixtures("on_cpu")

TRAINING = Training(epochs=3, lr=0.02, batch_size=31)
WINE = RunConfig("wine", {}, "dense(hidden=[8])", "Rank1(components=2)", None, 6, TRAINING)
DIABETES = RunConfig("diabetes", {}, "dense(hidden=[8])", "MeanField(stddev_init=0.1)", 0.2, 5, TRAINING)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(run, folder) of a classification and a regression."""
    found = {}
    for config in (WINE, DIABETES):
        folder = tmp_path_factory.mktemp(config.data)
        found[config.data] = train_run(config, folder, progress=False)[0], folder
    return found


def raw(name):
    return sb.data.load(name).test.inputs[:9]


@pytest.fixture
def copied(trained, tmp_path):
    """A copy of the wine run's folder, to be damaged."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("run.json", "model.safetensors", "config.yaml", "history.csv"):
        (folder / name).write_bytes((trained["wine"][1] / name).read_bytes())
    return folder


@pytest.mark.parametrize("name", ["wine", "diabetes"])
def test_a_loaded_run_predicts_the_same_bit_for_bit(trained, name):
    run, folder = trained[name]
    torch.manual_seed(123)
    state = torch.get_rng_state()
    again = load_run(folder)
    assert torch.equal(torch.get_rng_state(), state)
    assert again.config.to_dict() == run.config.to_dict()
    assert again.facts == run.facts and again.samples == run.samples
    x = run.facts.scaling(raw(name))
    first, second = (
        sb.predict(r.model, x, samples=r.samples, seed=3, likelihood=r.likelihood) for r in (run, again)
    )
    assert torch.equal(first.draws, second.draws) and torch.equal(first.mean, second.mean)
    if name == "diabetes":
        assert float(run.likelihood.log_precision.detach()) != 0.0  # it was learned
        assert torch.equal(first.variance, second.variance)
        assert torch.equal(first.interval(0.9)[0], second.interval(0.9)[0])
    assert predict_table(run, raw(name)) == predict_table(again, raw(name))
    assert read_config(RunConfig, folder / "config.yaml") == again.config


@pytest.mark.parametrize("value", [-20.0, -3.14159, 0.3, 1e-7, 2.718281, 15.5])
def test_a_learned_precision_survives_the_file(value):
    """What is written is the precision; its logarithm must be the same float32 again."""
    learned = sb.Gaussian(learn="global")
    learned.log_precision.data.fill_(value)
    again = sb.Gaussian(precision=json.loads(json.dumps(precision_of(learned))))
    draws = torch.randn(3, 4, 1)
    first, second = (likelihood.components(draws)[1].detach() for likelihood in (learned, again))
    assert torch.equal(first, second.expand_as(first)) or torch.equal(second, first.expand_as(second))


def test_run_json_says_what_was_trained(trained):
    run, folder = trained["wine"]
    content = json.loads((folder / "run.json").read_text())
    assert content["parameters"] == sum(p.numel() for p in run.model.parameters())
    assert content["base_parameters"] == 13 * 8 + 8 + 2 * 8 + 8 * 3 + 3
    assert content["steps"] == 3 * (len(sb.data.load("wine").train) // 31) and content["seconds"] > 0
    assert content["facts"]["classes"] == list(sb.data.load("wine").classes)
    assert content["provenance"]["versions"]["torch"] == torch.__version__
    assert not list(folder.glob("*.partial"))


def test_facts_round_trip():
    for name in ("wine", "diabetes", "digits"):
        facts = Facts.of(sb.data.load(name))
        assert Facts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts
        assert facts.num_outputs == sb.data.load(name).num_outputs


def test_models_are_functions_of_the_seed():
    first, same, other = (make_model(WINE, (13,), 3, seed) for seed in (0, 0, 1))
    assert torch.equal(first.output.weight, same.output.weight)
    assert not torch.equal(first.output.weight, other.output.weight)


@pytest.mark.parametrize(
    ("method", "draws", "samples"),
    [
        ("Rank1(components=4)", 32, 8),
        ("Rank1(components=4)", 3, 1),
        ("Rank1(components=3, posterior='delta')", 32, 1),
        ("MeanField", 32, 32),
        ("DeepEnsemble(members=2)", 32, 1),
        ("BatchEnsemble(components=2)", 32, 1),
        ("Deterministic", 32, 1),
        ("MCDropout", 5, 5),
    ],
)
def test_samples_per_component(method, draws, samples):
    model = make_model(dataclasses.replace(WINE, method=method), (13,), 3, 0)
    assert samples_for(model, draws) == samples


# Damage ----------------------------------------------------------------------------------------------------


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"no trained model in .*run.json is missing.*train one: slimbayes train"
    ):
        load_run(tmp_path / "absent")
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(CheckpointError, match="its training has not finished: slimbayes train --resume"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "5",
        "null",
        '"x"',
        '{"format": "slimbayes-run"}',
        "\0",
        '{"format": "slimbayes-run", "version": 1}',
    ],
)
def test_a_damaged_run_json(copied, text):
    (copied / "run.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"run.json' is damaged .*: train again"):
        load_run(copied)


def test_bytes_that_are_no_text(copied):
    (copied / "run.json").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_run(copied)


@pytest.mark.parametrize("change", [{"format": "other"}, {"version": 3}])
def test_another_format(copied, change):
    content = {**json.loads((copied / "run.json").read_text()), **change}
    (copied / "run.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="is of another format: update slimbayes"):
        load_run(copied)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("facts", "scaling"), {"mean": [0.0]}),
        (("facts", "scaling"), None),
        (("facts", "shape"), "x"),
        (("facts", "shape"), [13, "x"]),
        (("facts", "classes"), 5),
        (("facts", "task"), "other"),
        (("facts", "extra"), 5),
        (("facts",), []),
        (("config", "method"), "Rank9"),
        (("config", "training"), {"lr": "x"}),
        (("config",), None),
        (("precision",), "x"),
    ],
)
def test_damaged_entries(copied, where, value):
    content = json.loads((copied / "run.json").read_text())
    inner = content
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    if where == ("precision",):
        content["facts"]["task"] = "regression"
    (copied / "run.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"run.json' is damaged"):
        load_run(copied)


def test_weights_that_are_missing_or_damaged(copied):
    path = copied / "model.safetensors"
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        load_run(copied)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        load_run(copied)


def test_weights_of_another_network(copied):
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        load_run(copied, network="dense(hidden=[9])")


def test_an_earlier_run_in_the_folder_does_not_pass_for_this_one(copied, monkeypatch):
    def fail(*arguments, on_start, **options):
        on_start()
        raise RuntimeError("stopped")

    monkeypatch.setattr("slimbayes.lab.runs.fit", fail)
    with pytest.raises(RuntimeError, match="stopped"):
        train_run(WINE, copied, progress=False)
    with pytest.raises(CheckpointError, match="has not finished"):
        load_run(copied)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"training": dataclasses.replace(TRAINING, early_stopping=2)}, "early_stopping needs validation"),
        ({"method": "KTied(rank=1)"}, None),
    ],
)
def test_a_refused_run_leaves_the_folder_as_it_was(trained, tmp_path, change, message):
    folder = tmp_path / "run"
    shutil.copytree(trained["wine"][1], folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    config = dataclasses.replace(WINE, **change)
    with pytest.raises(ValueError, match=message or "trained with method=Rank1"):
        train_run(config, folder, progress=False, resume=message is None)
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("change", ["method", "data"])
def test_a_run_is_not_resumed_as_another(tmp_path, change):
    config = RunConfig("wine", {}, "dense(hidden=[8])", "MCDropout(rate=0.05)", None, 4, TRAINING)
    train_run(config, tmp_path, progress=False)
    if change == "method":
        other, message = (
            dataclasses.replace(config, method="MCDropout(rate=0.5)"),
            r"method=MCDropout\(rate=0.05,",
        )
    else:
        other, message = dataclasses.replace(config, data_options={"split": 1}), "trained with data="
    with pytest.raises(CheckpointError, match=message):
        train_run(other, tmp_path, resume=True, progress=False)


@pytest.mark.parametrize("data", ["wine", "diabetes"])
def test_double_precision_from_training_to_prediction(tmp_path, data):
    training = dataclasses.replace(TRAINING, precision="64-true")
    config = RunConfig(data, {}, "dense(hidden=[8])", "Rank1(components=2)", 0.2, 4, training)
    run, result = train_run(config, tmp_path, progress=False)
    assert result.history[-1]["validation_nll"] > 0
    again = load_run(tmp_path)
    assert again.dtype == run.dtype == torch.float64
    found = evaluate_run(again, tmp_path, shifts=("noise",))["methods"][0]["runs"][0]
    assert found["shifted"]["noise"]["1"]["nll"] > 0
    rows = sb.data.load(data).test.inputs[:3]
    first, second = predict_table(again, rows), predict_table(run, rows)
    for name, column in first.items():
        assert column == (
            second[name] if isinstance(column[0], str) else pytest.approx(second[name], rel=1e-12)
        ), name


def test_changed_data_are_noticed(tmp_path):
    rows = [f"{i},{i % 7},{'ab'[i % 2]}" for i in range(60)]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["x,z,y", *rows]))
    config = RunConfig(str(path), {"target": "y"}, "dense(hidden=[4])", "Deterministic()", None, 1, TRAINING)
    run, _ = train_run(config, tmp_path / "run", progress=False)
    evaluate_run(run, tmp_path / "run", shifts=())
    path.write_text("\n".join(["x,z,y", *sorted(rows)]))
    with pytest.raises(DataError, match=r"not those the model was trained on.*name them with --data"):
        evaluate_run(run, tmp_path / "run", shifts=())
    found = evaluate_run(run, tmp_path / "run", data=str(path), data_options={"target": "y"}, shifts=())
    assert found["dataset"]["num_test"] == 12


CODE = "from torch import nn\ndef make(shape, outputs):\n    return nn.Linear(shape[0], outputs)\n"


def test_own_code_is_imported_only_when_it_is_named(tmp_path, monkeypatch):
    (tmp_path / "network_of_a_saved_run.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    config = dataclasses.replace(WINE, network="network_of_a_saved_run:make")
    run, _ = train_run(config, tmp_path / "run", progress=False)
    del sys.modules["network_of_a_saved_run"]
    with pytest.raises(SpecError, match="code of its own, and a saved run does not start code by itself"):
        load_run(tmp_path / "run")
    assert "network_of_a_saved_run" not in sys.modules
    again = load_run(tmp_path / "run", network="network_of_a_saved_run:make")
    assert predict_table(again, raw("wine")) == predict_table(run, raw("wine"))
    del sys.modules["network_of_a_saved_run"]


# Predictions -----------------------------------------------------------------------------------------------


def test_class_predictions_are_those_of_predict(trained):
    run, _ = trained["wine"]
    table = predict_table(run, raw("wine"), level=0.8, seed=4)
    found = sb.predict(
        run.model, run.facts.scaling(raw("wine")), samples=3, seed=4
    )  # 2 components × 3 = 6 draws
    assert list(table) == [
        "row", "prediction", "confidence", "lower", "upper", "entropy", "expected_entropy", "mutual_information",
        *(f"p({name})" for name in run.facts.classes),
    ]  # fmt: skip
    best = found.mean.argmax(1)
    assert table["row"] == list(range(9))
    assert table["prediction"] == [run.facts.classes[i] for i in best]
    probabilities = found.draws.softmax(-1)  # [6, 9, 3]
    assert table["confidence"] == pytest.approx(probabilities.mean(0).max(1).values.tolist(), rel=1e-5)
    chosen = torch.stack([probabilities[:, i, c] for i, c in enumerate(best)], 1)  # [6, 9]
    for name, level in (("lower", 0.1), ("upper", 0.9)):
        assert table[name] == pytest.approx(chosen.quantile(level, 0).tolist(), rel=1e-4)
    mean = probabilities.mean(0)
    entropy = -(mean * mean.log()).sum(1)
    expected = -(probabilities * probabilities.log()).sum(-1).mean(0)
    assert table["entropy"] == pytest.approx(entropy.tolist(), rel=1e-4)
    assert table["mutual_information"] == pytest.approx((entropy - expected).tolist(), abs=1e-5)
    assert sum(table[f"p({name})"][0] for name in run.facts.classes) == pytest.approx(1.0, abs=1e-5)


def test_regression_is_in_the_targets_units(trained):
    run, _ = trained["diabetes"]
    data = sb.data.load("diabetes")
    table = predict_table(run, raw("diabetes"), level=0.5, seed=1, names=[f"patient {i}" for i in range(9)])
    found = sb.predict(run.model, run.facts.scaling(raw("diabetes")), samples=5, seed=1)
    outputs = found.draws[:, :, 0]  # [5, 9]
    mean, std = data.target_scaling.mean[0], data.target_scaling.std[0]
    assert mean == pytest.approx(data.train.targets.mean().item(), rel=1e-5)
    assert std == pytest.approx(data.train.targets.std(correction=0).item(), rel=1e-5)
    assert table["row"] == [f"patient {i}" for i in range(9)]
    assert table["mean"] == pytest.approx((outputs.mean(0) * std + mean).tolist(), rel=1e-4)
    noise = math.exp(-0.5 * float(run.likelihood.log_precision.detach()))
    assert table["aleatoric_std"] == pytest.approx([noise * std] * 9, rel=1e-4)
    epistemic = outputs.var(0, correction=0).sqrt() * std
    assert table["epistemic_std"] == pytest.approx(epistemic.tolist(), rel=1e-3)
    total = (torch.tensor(noise * std) ** 2 + epistemic**2).sqrt()
    assert table["std"] == pytest.approx(total.tolist(), rel=1e-4)
    # The mixture of five Normals holds half of its mass in the interval.
    normal = torch.distributions.Normal(outputs.T * std + mean, noise * std)  # [9, 5]
    lower, upper = (torch.tensor(table[name])[:, None] for name in ("lower", "upper"))
    inside = (normal.cdf(upper) - normal.cdf(lower)).mean(1)
    torch.testing.assert_close(inside, torch.full((9,), 0.5), rtol=0, atol=2e-3)


def test_chunks_do_not_matter(trained):
    run, _ = trained["wine"]
    whole, cut = predict_table(run, raw("wine")), predict_table(run, raw("wine"), chunk=4)
    assert whole["prediction"] == cut["prediction"]
    assert whole["entropy"] == pytest.approx(cut["entropy"], rel=1e-5)


@pytest.mark.parametrize("name", ["wine", "diabetes"])
def test_files_hold_the_table(trained, tmp_path, name):
    run, _ = trained[name]
    table = predict_table(run, raw(name))
    for suffix in (".csv", ".json", ".npz"):
        write_table(table, tmp_path / f"out{suffix}")
    with open(tmp_path / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    listed = json.loads((tmp_path / "out.json").read_text())
    arrays = np.load(tmp_path / "out.npz", allow_pickle=False)
    assert len(rows) == len(listed) == 9 and list(rows[0]) == list(listed[0]) == list(arrays) == list(table)
    for column, values in table.items():
        assert [row[column] for row in listed] == values == arrays[column].tolist()
        if isinstance(values[0], float):
            assert [float(row[column]) for row in rows] == pytest.approx(values, rel=1e-5)
        else:
            assert [row[column] for row in rows] == [str(value) for value in values]
    assert not list(tmp_path.glob("*.partial"))


def test_wrong_inputs(trained, tmp_path):
    run, _ = trained["wine"]
    x = raw("wine")
    broken = x.clone()
    broken[4, 2] = math.nan
    for inputs, options, message in (
        (x[:, :5], {}, r"shape \[5\] each, the model was trained on \[13\]"),
        (x[0], {}, r"shape \[\] each"),
        (x[:0], {}, "nothing to predict"),
        (broken, {}, "row 4 of the inputs holds NaN or infinity"),
        (x, {"level": 0.0}, "level=0.0 must lie between 0 and 1"),
        (x, {"level": math.nan}, "level=nan must lie"),
    ):
        with pytest.raises((DataError, ValueError), match=message):
            predict_table(run, inputs, **options)
    with pytest.raises(
        ValueError, match=r"cannot write .*out.txt': give a name that ends in one of .csv, .json, .npz"
    ):
        write_table(predict_table(run, x), tmp_path / "out.txt")
    assert not list(tmp_path.iterdir())


def test_a_default_run_with_real_targets_holds_out_rows_for_its_noise(tmp_path):
    data = sb.data.load("diabetes")
    for name, config, expected in (
        ("asked", RunConfig(data="diabetes", method="Deterministic()"), 0.1),
        ("given", RunConfig(data="diabetes", method="Deterministic()", validation=0.25), 0.25),
        ("classes", RunConfig(data="wine", method="Deterministic()"), None),
    ):
        short = dataclasses.replace(config, training=Training(epochs=1))
        folder = tmp_path / name
        run, _ = train_run(short, folder, progress=False, hold_out=True)
        assert run.config.validation == read_config(RunConfig, folder / "config.yaml").validation == expected
        again, _ = train_run(run.config, folder, progress=False, resume=True)
        assert again.config == run.config
    assert (
        held_out_for_noise(dataclasses.replace(data, train=data.train[:200])) is None
    )  # too few to say more
