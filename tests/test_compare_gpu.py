"""A comparison on a GPU: training, shifts, figures and examples on one device."""

import pytest
import torch

from slimbayes.lab.compare import compare, evaluate_run
from slimbayes.lab.config import CompareConfig, Contender, RunConfig
from slimbayes.lab.predictions import predict_table
from slimbayes.lab.runs import load_run, train_run
from slimbayes.training import Training

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", ["digits", "cubic", "wine"])
def test_on_a_gpu(name, tmp_path):
    contenders = (Contender("Deterministic", "Deterministic()"), Contender("Rank1", "Rank1(components=2)"))
    training = Training(epochs=2, batch_size=16, accelerator="cuda")
    config = CompareConfig(name, contenders=contenders, seeds=(0,), draws=4, max_test=50, training=training)
    results = compare(config, tmp_path, progress=False)
    for method in results["methods"]:
        assert method["runs"][0]["clean"]["nll"] > 0
        assert method["runs"][0]["examples"]["least"]


def test_a_run_is_trained_and_read_on_a_gpu(tmp_path):
    config = RunConfig(
        "wine", method="Rank1(components=2)", training=Training(epochs=2, batch_size=16), draws=4
    )
    run, _ = train_run(config, tmp_path, progress=False)
    assert run.device.type == "cuda"
    again = load_run(tmp_path)
    assert again.device.type == "cuda" and load_run(tmp_path, device="cpu").device.type == "cpu"
    found = evaluate_run(again, tmp_path, shifts=("noise",))
    assert found["methods"][0]["runs"][0]["shifted"]["noise"]["5"]["nll"] > 0
    rows = torch.rand(3, 13)
    on_gpu, on_cpu = (
        predict_table(load_run(tmp_path, device=d), rows)["confidence"] for d in ("cuda", "cpu")
    )
    assert on_gpu == pytest.approx(on_cpu, abs=1e-4)
