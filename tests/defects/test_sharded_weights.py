"""FSDP2 and tensor parallel on two processes (gloo) against one: losses, KL, gradients, a step, predictions, files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("sharded_script.py")
ROOT = Path(__file__).parents[2]
FIGURES = ("loss", "kl", "gradients", "weights", "kl again", "prediction", "parameters")
FILES = ("loaded", "loaded in parts")
EXACT = ("BatchEnsemble", "DeepEnsemble")  # methods without noise

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two processes saw: all cases in one launch."""
    folder = tmp_path_factory.mktemp("sharded")
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    ours = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [*paths, str(ROOT / "src")])),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(SCRIPT), str(folder)],
        env={**clean, **ours}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def need_fsdp(found):
    if found[0]["unsupported"]:
        pytest.skip(f"FSDP2 of torch {torch.__version__} does not run on CPUs: {found[0]['unsupported']}")


def check(case, figures, files=True):
    far = {name: figures[name] for name in FIGURES + FILES * files if not figures[name] < 2e-5}
    assert not far, (case, far)


@pytest.mark.parametrize("network", ["dense", "batch norm", "group norm", "attention", "recurrent"])
def test_fsdp_is_the_whole_batch_in_one_process(found, network):
    need_fsdp(found)
    for rank, each in enumerate(found):
        cases = {name: own for name, own in each["fsdp"].items() if name.startswith(f"{network}, ")}
        assert len(cases) >= 10
        for name, figures in cases.items():
            check((rank, name), figures, files=network == "dense")
            if rank and not name.endswith(EXACT):
                assert figures["noise"] > 0.0, name  # every process has noise of its own


@pytest.mark.parametrize("kind", ["tensor parallel", "both"])
def test_tensor_parallel_is_the_network_in_one_process(found, kind):
    if kind == "both":
        need_fsdp(found)
    for rank, each in enumerate(found):
        assert len(each[kind]) >= 4
        for name, figures in each[kind].items():
            check((rank, kind, name), figures)
            assert figures["noise"] < 1e-6, name  # the processes see one network: its noise is one


def test_a_kl_that_is_drawn_is_one_for_all_processes(found):
    for each in found:
        first, second = each["monte carlo"]["numbers"]
        assert first == second > 0.0
        assert each["monte carlo"]["gradient"] > 0.0


def test_what_cannot_work_says_which_order_does(found):
    said = found[0]["said"]
    assert "fully_shard(sb.bayesianize(model, method))" in said["convert after fully_shard"]
    for style in ("columns", "rows"):
        assert "layer '1'" in said[f"{style} after conversion"]
        assert (
            "sb.bayesianize(parallelize_module(model, mesh, plan), method)"
            in said[f"{style} after conversion"]
        )
    for verb in ("freeze", "merge", "compress"):
        assert said[verb].startswith(f"sb.{verb} reads whole weights") and "sb.load" in said[verb]
