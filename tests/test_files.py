"""Files appear whole or not at all."""

import os

import pytest

from slimbayes.files import write_whole


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
