"""Packed files are measured before they are unpacked, and tar shards read without a step outside."""

import gzip
import tarfile

import numpy as np
import pytest

from reliability import attacks
from slimbayes.containers import archives as limits
from slimbayes.containers.archives import lines, unpack
from slimbayes.lab.data import DataError, TarShards, load
from slimbayes.lab.data.images import read_idx
from slimbayes.lab.data.records.csvs import read_pieces

CLAIMS = ("a shape of 2^60", "a shape of 2^33 rows", "a negative shape")


@pytest.mark.parametrize("case", [
    "pickled inputs", "pickled classes", "a pickle as a member", "a shape of 2^60", "a shape of 2^33 rows",
    "a negative shape", "text of 4 GB", "a header of brackets", "a header of code", "a label of 2^62",
    "a label of 2^63", "no examples", "no columns", "images without pixels",
])  # fmt: skip
def test_hostile_archives(case, tmp_path, monkeypatch):
    monkeypatch.setattr(attacks, "BOMB", 1)
    (tmp_path / "a.npz").write_bytes(attacks.archives(tmp_path / "canary")[case])
    # Refused by what it claims, before memory is taken for that.
    message = r"a\.npz: '\w+\.npy' claims" if case in CLAIMS else r"a\.npz"
    with pytest.raises(DataError, match=message):
        load(tmp_path / "a.npz")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("order", ["<", ">"])
def test_text_of_numbers_that_are_no_characters(order, tmp_path):
    rows = {"inputs": np.zeros((4, 2)), "targets": np.array([0, 1, 0, 1])}
    names = np.array(["a", "bc\U0010ffff"]).astype(f"{order}U3")
    np.savez(tmp_path / "a.npz", **rows, classes=names)
    assert load(tmp_path / "a.npz").classes == ("a", "bc\U0010ffff")
    damaged = np.frombuffer(bytes(range(200, 224)), f"{order}U3")
    np.savez(tmp_path / "a.npz", **rows, classes=damaged)
    with pytest.raises(DataError, match=r"a\.npz: 'classes' is text with numbers"):
        load(tmp_path / "a.npz")


def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "LARGEST_ANYWAY", 1 << 20)
    inputs, targets = np.zeros((1 << 19, 1), np.float32), np.arange(1 << 19) % 2
    np.savez_compressed(tmp_path / "a.npz", inputs=inputs, targets=targets)
    with pytest.raises(DataError, match="more than 100 times the file: if you trust it"):
        load(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", inputs=inputs, targets=targets)
    assert len(load(tmp_path / "a.npz").train) > 0


def test_gzip_bombs(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "LARGEST_GZIP", 1000)
    monkeypatch.setattr(limits, "LARGEST_LINE", 1000)
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(1001)))
    with pytest.raises(DataError, match=r"a\.gz: it unpacks to more than 1,000"):
        read_idx(tmp_path / "a.gz")
    two = gzip.compress(b"a" * 600) + gzip.compress(b"b" * 300)
    assert unpack(two, tmp_path) == b"a" * 600 + b"b" * 300
    for damaged in (two[:-9], two[:30], two[:12] + b"\xff" + two[13:], two + b"x"):
        with pytest.raises(DataError, match="damaged gzip"):
            unpack(damaged, tmp_path)
    with pytest.raises(DataError, match="more than"):
        unpack(gzip.compress(b"a" * 600) * 2, tmp_path)
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(b"X\n1\n" + b"1" * 1001))
    with pytest.raises(DataError, match="a line of more than 1,000"):
        list(read_pieces(tmp_path / "t.csv.gz", ("X",)))
    with gzip.open(tmp_path / "t.csv.gz", "rt") as text:
        assert next(lines(text, tmp_path)) == "X\n"


def test_hostile_shards(tmp_path):
    pytest.importorskip("PIL")
    from reliability.readers import picture

    found = {}
    for case, payload in attacks.shards(picture()).items():
        (tmp_path / "s.tar").write_bytes(payload)
        try:
            shards = TarShards([tmp_path / "s.tar"], size=4)
            found[case] = [shards[row][0].shape for row in range(len(shards))]
        except DataError as error:
            assert "s.tar" in str(error)
    # Names lead nowhere: members are read where they lie.
    assert set(found) == {"path traversal", "absolute names", "markup in names"}


def test_a_shard_that_goes_in_a_circle(tmp_path, monkeypatch):
    """A header whose size is negative leads back: some versions of tarfile follow it for ever."""
    pytest.importorskip("PIL")
    from reliability.readers import picture

    (tmp_path / "s.tar").write_bytes(attacks.tar(("k.png", picture(), {}), ("k.cls", b"0", {})))
    with tarfile.open(tmp_path / "s.tar") as archive:
        member = archive.getmembers()[0]
    monkeypatch.setattr(tarfile.TarFile, "__iter__", lambda self: iter([member, member]))
    with pytest.raises(DataError, match="do not follow one another"):
        TarShards([tmp_path / "s.tar"], size=4)


def test_a_million_columns_and_names(tmp_path):
    (tmp_path / "a.csv").write_bytes(b",".join(b"c%d" % i for i in range(100_000)) + b"\n1\n")
    with pytest.raises(DataError, match="the header has 100000") as caught:
        load(tmp_path / "a.csv", target="y")
    assert len(str(caught.value)) < 500


def test_nothing_but_quotes(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'""')
    with pytest.raises(DataError, match=r"a\.csv: the file is empty"):
        load(tmp_path / "a.csv", target="y")


def test_labels_that_are_long_numbers(tmp_path):
    (tmp_path / "a.csv").write_text(
        "x,y\n" + "".join(f"{i},{'9' * 5000 if i % 2 else 7}\n" for i in range(8))
    )
    assert [len(name) for name in load(tmp_path / "a.csv", target="y", task="classification").classes] == [
        1,
        5000,
    ]
