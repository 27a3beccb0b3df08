"""Hostile files, a few of them for every reader: ``python -m reliability.hostile`` tries all."""

import json
import os
import pickle
import signal
import sys
import time

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("processes are limited as Linux does", allow_module_level=True)
for extra in ("PIL", "pyarrow", "yaml", "onnx", "onnxruntime", "sklearn", "huggingface_hub"):
    pytest.importorskip(extra)

from reliability import attacks, hostile  # noqa: E402
from reliability.figures import RESULTS  # noqa: E402
from reliability.readers import READERS  # noqa: E402

# Those whose valid file takes long to make are left to the whole run.
QUICK = [name for name in READERS if not name.startswith(("run folder", "ONNX", "scikit", "CIFAR-10-C"))]
FEW = ("pickle", "torch.save", "YAML tag", "brackets", "a number of 10^5 digits", "not UTF-8", "a folder", "a pipe",
       "a link to itself", "not to be read")  # fmt: skip


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    canary = tmp_path_factory.mktemp("canary") / "canary"
    attacks_here, bomb = attacks.BOMB, 1
    attacks.BOMB = bomb
    try:
        made = attacks.everywhere(canary)
    finally:
        attacks.BOMB = attacks_here
    return canary, {name: made[name] for name in FEW}


@pytest.mark.parametrize("name", QUICK)
def test_hostile_files_do_no_harm(name, few, tmp_path):
    """In this process: nothing among these ends it, and a process for each would take minutes."""
    canary, payloads = few
    reader = READERS[name]
    reader.make(tmp_path)
    assert hostile.attempt(reader.read, tmp_path, "")["outcome"] == "read"
    for title, payload in payloads.items():
        if title == "not to be read" and os.getuid() == 0:
            continue
        if title == "brackets" and "configuration" in name:  # takes a second: tests/test_claims.py has fewer
            continue
        hostile.place(payload, tmp_path / reader.place)
        found = hostile.attempt(reader.read, tmp_path, tmp_path.name)
        assert found["outcome"] in ("read", "refused"), (title, found)
        assert not canary.exists(), title


def test_the_harness_sees_every_kind_of_harm(tmp_path, monkeypatch):
    monkeypatch.setattr(hostile, "MEMORY", 1 << 28)
    canary = tmp_path / "canary"
    content = pickle.dumps(attacks.Canary(canary))

    def refuse(folder):
        raise hostile.DOCUMENTED[0]("no name")

    for read, outcome in (
        (lambda folder: pickle.loads(content), "executed"),
        (lambda folder: os.kill(os.getpid(), signal.SIGKILL), "crashed"),
        (lambda folder: time.sleep(60), "hung"),
        (lambda folder: bytearray(3 << 27).count(1), "blew up"),
        (lambda folder: {}["x"], "unclear"),
        (refuse, "unnamed"),
        (lambda folder: None, "read"),
    ):
        monkeypatch.setattr(hostile, "WAIT", 0.5 if outcome == "hung" else 30.0)
        assert hostile.isolated(read, tmp_path, tmp_path.name, canary)["outcome"] == outcome


def test_what_was_measured_holds():
    document = json.loads((RESULTS / "hostile.json").read_text())
    assert document["details"]["wrong"] == [] and set(document["details"]["readers"]) == set(READERS)
    assert sum(sum(part.values()) for part in document["details"]["readers"].values()) > 1000
    assert all(figure["holds"] for figure in document["figures"] if figure["bound"])
