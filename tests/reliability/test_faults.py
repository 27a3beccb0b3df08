"""Disturbed training runs: one disturbance of every kind, and the harness itself, which must see what is wrong."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reliability.faults import SHARES, Case, figures, plan
from reliability.figures import read_figures
from reliability.runs import audit, equal, history, state_step

ROOT = Path(__file__).parents[2]


EVERY = os.environ.get("SLIMBAYES_RELIABILITY_ALL") == "1"


@pytest.mark.slow
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(4, id="four kinds"),
        pytest.param(
            len(SHARES),
            id="all kinds",
            marks=pytest.mark.skipif(not EVERY, reason="half a minute: set SLIMBAYES_RELIABILITY_ALL=1"),
        ),
    ],
)
def test_a_disturbance_of_every_kind(tmp_path, count):
    # In a process of its own: this one may have threads, which do not survive a fork.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV"))}
    env = {
        **clean,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    words = [sys.executable, "-m", "reliability.faults", "--disturbances", str(count), "--out", str(tmp_path)]
    done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_figures(tmp_path / "faults.json")
    assert [figure["holds"] for figure in found["figures"]] == [True] * 4
    kinds = found["details"]["kinds"]
    assert [kind for kind, entry in kinds.items() if entry["disturbances"]] == list(SHARES)[:count]
    assert all(
        entry["good"] == entry["disturbances"] == 1 for kind, entry in kinds.items() if entry["disturbances"]
    )


def test_two_hundred_have_the_shares():
    kinds = plan(200, seed=0)
    assert {kind: kinds.count(kind) for kind in SHARES} == SHARES
    assert kinds != plan(200, seed=1) and kinds == plan(200, seed=0)


def test_what_was_measured_holds():
    found = read_figures(ROOT / "reliability" / "results" / "faults.json")
    assert [figure["holds"] for figure in found["figures"]] == [True] * 4
    assert len(found["details"]["cases"]) == 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run that has ended."""
    from slimbayes.lab.config import RunConfig
    from slimbayes.lab.runs import train_run
    from slimbayes.training import Training

    folder = tmp_path_factory.mktemp("faults") / "run"
    training = Training(epochs=3, accelerator="cpu", batch_size=32, checkpoint_every=2, log_every=2)
    train_run(RunConfig(data="wine", network="dense(hidden=[4])", training=training), folder, progress=False)
    return folder


@pytest.mark.parametrize(
    "name",
    ["training.safetensors", "training.previous.safetensors", "model.safetensors", "history.csv", "run.json",
     "config.yaml", "manifest.json"],
)  # fmt: skip
def test_a_half_written_file_is_seen(folder, tmp_path, name):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert audit(copy) == ([], [])
    raw = (copy / name).read_bytes()
    for length in (len(raw) // 2, len(raw) - 3):
        cut = raw[:length] if name != "config.yaml" else raw[:length] + b"\n  : ["
        (copy / name).write_bytes(cut)
        half, partial = audit(copy)
        assert len(half) == 1 and half[0].startswith(f"{name}: ") and not partial, length
    assert audit(copy, [copy / name]) == ([], [])
    (copy / f"{name}.ab12.partial").write_bytes(b"")
    assert len(audit(copy)[1]) == 1


def test_a_difference_is_seen(folder, tmp_path):
    assert equal(folder, folder) == "" and state_step(folder) > 0
    changes = {
        "model.safetensors": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]),
        "history.csv": lambda raw: raw.replace(b"0.", b"0.1", 1),
        "run.json": lambda raw: raw.replace(b'"best": {}', b'"best": {"step": 1}'),
    }
    for name, change in changes.items():
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        (copy / name).write_bytes(change((copy / name).read_bytes()))
        assert equal(copy, folder) != ""
    assert "examples_per_second" not in history(folder)[0]


def test_one_bad_case_is_enough():
    good = [Case(i, "SIGKILL", "", resumed=2, equal=True) for i in range(3)]
    assert all(figure.holds for figure in figures(good))
    assert not all(figure.holds for figure in figures([*good, Case(3, "SIGKILL", "", resumed=2)]))
    assert not all(
        figure.holds
        for figure in figures([*good, Case(3, "SIGKILL", "", resumed=2, equal=True, half=("x",))])
    )
    late = Case(
        3, "SIGKILL", "", resumed=2, equal=True, wrong="went on from step 2, and the state was of step 4"
    )
    assert [figure.holds for figure in figures([*good, late])] == [False, True, True, True]
