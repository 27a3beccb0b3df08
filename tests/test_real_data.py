"""Short runs on real data: MNIST, CIFAR-10, UCI and SVHN from a data root; skipped, and said so, without one."""

import csv
import os
from pathlib import Path

import pytest
import torch

import slimbayes as sb
from slimbayes.lab.compare import evaluate_run
from slimbayes.lab.config import RunConfig
from slimbayes.lab.runs import load_run, train_run
from slimbayes.training import Training

ROOT = Path(os.environ.get("SLIMBAYES_DATA") or Path(__file__).parents[1] / ".." / "shared" / "data")


def needs(*names):
    absent = [name for name in names if not (ROOT / name).exists()]
    return pytest.mark.skipif(
        bool(absent), reason=f"{', '.join(absent)} not under the data root: set SLIMBAYES_DATA"
    )


@pytest.mark.uncounted
@pytest.mark.slow
@needs("mnist.npz")
def test_mnist_mlp(tmp_path):
    training = Training(steps=200, batch_size=128, lr=2e-3, kl_weight=0.1, log_every=20)
    config = RunConfig(
        "mnist", network="dense(hidden=[100])", method="KTied(rank=2)", training=training, draws=8
    )
    run, result = train_run(config, tmp_path, data_root=str(ROOT), progress=False)
    assert result.history[-1]["nll"] < 0.5 * result.history[0]["nll"]
    found = evaluate_run(run, tmp_path, data_root=str(ROOT), shifts=("rotation",), max_test=1000)
    metrics = found["methods"][0]["runs"][0]
    assert metrics["clean"]["accuracy"] > 0.9
    assert metrics["shifted"]["rotation"]["5"]["nll"] > 2 * metrics["clean"]["nll"]


@pytest.mark.uncounted
@pytest.mark.slow
@needs("cifar10.npz", "svhn_test.npz")
def test_cifar10_small_wrn(tmp_path):
    training = Training(steps=60, batch_size=32, lr=1e-2, log_every=10)
    config = RunConfig(
        "cifar10", network="wrn(depth=10, width=1)", method="Rank1(components=2)", training=training, draws=4
    )
    _, result = train_run(config, tmp_path, data_root=str(ROOT), progress=False)
    assert result.history[-1]["nll"] < result.history[0]["nll"] - 0.2
    found = evaluate_run(
        load_run(tmp_path), tmp_path, data_root=str(ROOT), shifts=("fog", "jpeg_compression"), max_test=100
    )
    metrics = found["methods"][0]["runs"][0]
    assert metrics["clean"]["accuracy"] > 0.15
    assert set(metrics["shifted"]) == {"fog", "jpeg_compression"}
    assert found["ood"]["name"].lower().startswith("svhn")


@needs("uci.npz")
def test_uci_regression(tmp_path):
    training = Training(epochs=40, batch_size=32, lr=1e-2)
    config = RunConfig(
        "uci/yacht", network="dense(hidden=[50])", method="EMP(components=5)", training=training
    )
    run, _ = train_run(config, tmp_path, data_root=str(ROOT), progress=False)
    metrics = evaluate_run(run, tmp_path, data_root=str(ROOT), shifts=())["methods"][0]["runs"][0]["clean"]
    spread = sb.data.load("uci/yacht", root=ROOT).test.targets.std().item()
    assert metrics["rmse"] < 0.5 * spread
    assert metrics["coverage_90"] > 0.6


def test_breast_cancer_from_a_csv_file(tmp_path):
    """Embedded in scikit-learn, written to a file, read back as a user's own."""
    data = pytest.importorskip("sklearn.datasets").load_breast_cancer()
    order = torch.randperm(len(data.data), generator=torch.Generator().manual_seed(0)).tolist()
    with open(tmp_path / "bc.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*data.feature_names, "benign"])
        writer.writerows([*data.data[i], ("no", "yes")[data.target[i]]] for i in order)
    training = Training(epochs=15, batch_size=32, lr=3e-3, weight_decay=1e-2)
    config = RunConfig(
        str(tmp_path / "bc.csv"),
        {"target": "benign"},
        method="BatchEnsemble(components=4)",
        training=training,
    )
    run, _ = train_run(config, tmp_path / "run", progress=False)
    metrics = evaluate_run(run, tmp_path / "run", shifts=("missing",))["methods"][0]["runs"][0]
    assert metrics["clean"]["accuracy"] > 0.92 and metrics["clean"]["auroc"] > 0.97
    assert metrics["shifted"]["missing"]["5"]["nll"] > metrics["clean"]["nll"]
