"""A trained run becomes one ONNX file, and predictions from it have the same table as those from its folder."""

import csv

import pytest
import torch
from helpers_cli import runner

import slimbayes as sb
from slimbayes.lab.config import RunConfig
from slimbayes.lab.exported_runs import export_run, load_served
from slimbayes.lab.predictions import predict_table
from slimbayes.lab.runs import load_run, train_run
from slimbayes.training import Training

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture
def slimbayes(monkeypatch, capsys):
    return runner(monkeypatch, capsys)


def trained(folder, data, method, draws=4):
    config = RunConfig(data, {}, "dense(hidden=[4])", method, None, draws, Training(steps=20))
    train_run(config, folder, progress=False)
    return folder


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_export_and_predict(slimbayes, tmp_path):
    run = trained(tmp_path / "run", "wine", "BatchEnsemble(components=2)")
    data = sb.data.load("wine")
    with open(tmp_path / "new.csv", "w", newline="") as file:
        csv.writer(file).writerows([list(data.features), *data.test.inputs[:7].tolist()])
    shown = slimbayes("export", run, "--out", tmp_path / "wine.onnx").out
    assert "2 draws" in shown and "compared with PyTorch's" in shown  # without noise one for each component
    for source, out in ((run, "a.csv"), (tmp_path / "wine.onnx", "b.csv")):
        slimbayes("predict", source, tmp_path / "new.csv", "--out", tmp_path / out)
    a, b = read(tmp_path / "a.csv"), read(tmp_path / "b.csv")
    assert a[0].keys() == b[0].keys() and len(a) == len(b) == 7
    for one, other in zip(a, b, strict=True):
        assert one["prediction"] == other["prediction"]
        for key in set(one) - {"prediction", "row"}:
            assert abs(float(one[key]) - float(other[key])) < 1e-4, key
    done = slimbayes("predict", tmp_path / "wine.onnx", tmp_path / "new.csv", "--draws", "9", code=1)
    assert "--draws 9" in done.err and "fixed draws" in done.err
    assert "no exported model" in slimbayes("predict", tmp_path / "no.onnx", tmp_path / "new.csv", code=1).err
    assert "ends in .onnx" in slimbayes("export", run, "--out", tmp_path / "wine.pt", code=1).err
    frozen = sb.freeze(sb.bayesianize(torch.nn.Linear(3, 2), sb.Rank1(components=2)), 2)
    sb.export.to_onnx(frozen, torch.randn(2, 3), tmp_path / "bare.onnx")
    done = slimbayes("predict", tmp_path / "bare.onnx", tmp_path / "new.csv", code=1)
    assert "does not say what its inputs and outputs mean" in " ".join(done.err.split())


def test_real_targets_keep_their_units(tmp_path):
    folder = trained(tmp_path / "run", "diabetes", "MeanField()", draws=6)
    run = load_run(folder, device="cpu")
    assert export_run(run, tmp_path / "model.onnx", seed=2) == 6
    served, raw = load_served(tmp_path / "model.onnx"), sb.data.load("diabetes").test.inputs[:9]
    wanted = sb.predict(
        run.model, run.prepared(raw), samples=6, noise="shared", seed=2, likelihood=run.likelihood
    )
    found = served.predictive(raw, chunk=10)  # one example at a time
    for name in ("mean", "variance", "epistemic"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=1e-4, atol=1e-5)
    table = predict_table(served, raw)
    assert (
        50 < min(table["mean"]) < max(table["mean"]) < 300
    )  # of the disease's measure, not of its scaled one
