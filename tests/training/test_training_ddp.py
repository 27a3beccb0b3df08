"""Two processes (gloo) against one with the same global batch: the same losses and weights, the KL once."""

import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("ddp_script.py")
ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def environment():
    ours = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "src"),
        "MASTER_PORT": free_port(),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
    return {**clean, **ours}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What one process saw, and what two started by torchrun did."""
    folder = tmp_path_factory.mktemp("ddp")
    threads = torch.get_num_threads()
    runpy.run_path(str(SCRIPT))["main"](1, str(folder))  # in this process, where the imports are done
    torch.set_num_threads(threads)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(SCRIPT), "2", str(folder)],
        env=environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / name).read_text()) for name in ("1-0.json", "2-0.json", "2-1.json")]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["rank1", "ktied"])
def test_two_processes_give_the_losses_of_one(found, case):
    single, first, second = found
    assert (first["rank"], second["rank"], first["world"]) == (0, 1, 2)
    assert first["process"] != second["process"]
    single, first, second = single[case], first[case], second[case]
    assert first["weights"] == second["weights"]
    assert len(single["history"]) == 16  # 4 epochs of 4 steps
    assert single["history"][-1]["nll"] < single["history"][0]["nll"] - 0.05  # it does train
    for one, two in zip(single["history"], first["history"], strict=True):
        for key in ("loss", "nll", "kl", "lr", "kl_weight"):
            assert two[key] == pytest.approx(one[key], rel=1e-5, abs=1e-5), (one["step"], key)
    assert first["history"][-1]["validation_nll"] == pytest.approx(
        single["history"][-1]["validation_nll"], rel=1e-4
    )
    assert first["weights"] == pytest.approx(single["weights"], rel=1e-3, abs=1e-4)
    # The KL enters once: what the loss holds of it is the KL itself, and the weights it led to are the same.
    assert first["kl"] == pytest.approx(single["kl"], rel=1e-4)
    step = first["history"][2]
    assert step["loss"] == pytest.approx(step["nll"] + step["kl_weight"] * step["kl"] / 96, rel=1e-5)


@pytest.mark.slow
def test_ranks_draw_noise_of_their_own(found):
    single, first, second = (each["noisy"] for each in found)
    assert first["weights"] == second["weights"]  # gradients were averaged all the same
    assert single["weights"] != first["weights"]
    assert len(first["samples"]) == 16
    assert not any(mine == theirs for mine, theirs in zip(first["samples"], second["samples"], strict=True))
    _, first, second = (each["silent"] for each in found)
    assert (
        first["samples"] == second["samples"]
    )  # as the inputs are alike, only noise told the processes apart


@pytest.mark.slow
def test_a_run_that_is_stopped_stops_in_every_process(found):
    assert [each["stopped"] for each in found] == [[6, 16]] * 3


@pytest.mark.slow
def test_the_command_line_trains_on_two_processes(tmp_path):
    command = [
        sys.executable, "-m", "slimbayes", "train", "--data", "wine", "--network", "dense(hidden=[16])",
        "--devices", "2",
        "--accelerator", "cpu", "--epochs", "3", "--batch-size", "32", "--out", str(tmp_path / "run"), "--quiet",
    ]  # fmt: skip
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Model:") == 1  # the second process is silent
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["steps"] == 3 * (facts["facts"]["num_train"] // 32)


@pytest.mark.slow
def test_processes_agree_on_a_step_that_is_not_finite(found):
    """The loss was infinite in the last process alone: none made the step, all say so, and their weights are alike."""
    for result in found:
        said = result["not finite"]
        assert (
            "the loss is not finite at step 3 " in said["stop"]["said"]
            and said["skip"]["said"] == "skipped 1"
        )
        assert (
            "the last finite step is 2" in said["stop"]["said"] and "first in the nll" in said["stop"]["said"]
        )
    _, first, second = found
    assert "process 1: first in the nll" in first["not finite"]["stop"]["said"]
    for how in ("stop", "skip"):
        assert first["not finite"][how]["weights"] == second["not finite"][how]["weights"]
