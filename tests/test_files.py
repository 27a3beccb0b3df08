"""Files appear whole or not at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import slimbayes as sb
from slimbayes.files import write_whole
from slimbayes.training.state import read_state, write_state


def test_text_bytes_and_folders(tmp_path):
    write_whole(tmp_path / "a" / "b" / "c.txt", "größer\n")
    write_whole(tmp_path / "c.bin", b"\x00\xff")
    assert (tmp_path / "a" / "b" / "c.txt").read_bytes() == "größer\n".encode()
    assert (tmp_path / "c.bin").read_bytes() == b"\x00\xff"
    write_whole(str(tmp_path / "c.bin"), b"new")
    assert (tmp_path / "c.bin").read_bytes() == b"new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c.bin"]


@pytest.mark.parametrize("broken", ["write", "fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, broken):
    path = tmp_path / "results.json"
    path.write_text("old")
    content: object = "new"
    if broken == "write":
        content = 5  # not bytes

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    if broken != "write":
        monkeypatch.setattr(os, broken, fail)
    with pytest.raises((OSError, TypeError)):
        write_whole(path, content)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.json"]


def test_an_interrupt_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a.txt", "text")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_state_can_be_read_while_another_process_replaces_it(tmp_path):
    """Every reading gives one whole state or another, never a mixture."""
    path = tmp_path / "training.safetensors"
    write_state(path, {"w": torch.zeros(1000)}, {"step": 0})
    code = (
        "import sys, torch; from pathlib import Path; from slimbayes.training.state import write_state\n"
        "for step in range(1, 400):\n"
        "    write_state(Path(sys.argv[1]), {'w': torch.full((1000,), float(step))}, {'step': step})"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(sb.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], env=environment)
    seen = set()
    while writer.poll() is None:
        tensors, facts = read_state(path)
        assert (tensors["w"] == facts["step"]).all()
        seen.add(facts["step"])
    assert writer.returncode == 0 and len(seen) > 20
