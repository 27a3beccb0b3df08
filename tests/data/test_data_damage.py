"""Files with changed, cut or added bytes give their data, other data, or a DataError: nothing else."""

import gzip
import io
import random
import struct
import tarfile

import numpy as np
import pytest
from PIL import Image

from slimbayes.lab.data import DataError, TarShards, load, read_inputs
from slimbayes.lab.data.images import read_idx


def written(write):
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def png(value):
    return written(lambda file: Image.new("RGB", (5, 4), (value, 0, 0)).save(file, "PNG"))


def tar():
    def write(file):
        with tarfile.open(fileobj=file, mode="w") as archive:
            for number in range(2):
                for name, raw in ((f"{number}.cls", b"1"), (f"{number}.png", png(number))):
                    info = tarfile.TarInfo(name)
                    info.size = len(raw)
                    archive.addfile(info, io.BytesIO(raw))

    return written(write)


def parquet():
    arrow, module = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"a": [1.0, 2.0, 3.0, 4.0], "y": ["u", "v", "u", "v"]})
    return written(lambda file: module.write_table(table, file))


def every_image(path):
    shards = TarShards([path], size=4)
    return [shards[row] for row in range(len(shards))]


IDX = b"\0\0\x08\x03" + struct.pack(">3I", 2, 3, 3) + bytes(18)
NPZ = {"inputs": np.arange(8.0).reshape(4, 2), "targets": np.array([0, 1, 0, 1])}
CASES = {
    "csv": (
        lambda: b'a,b,"c d"\n1,2,x\n3,"4",y\n5,6,x\n7,8,y\n',
        lambda path: load(path, target="c d", test=0.5),
    ),
    "npz": (lambda: written(lambda file: np.savez(file, **NPZ)), lambda path: load(path, test=0.5)),
    "parquet": (parquet, lambda path: load(path, target="y", test=0.5)),
    "idx": (lambda: IDX, read_idx),
    "gz": (lambda: gzip.compress(IDX), read_idx),
    "tar": (tar, every_image),
    "png": (lambda: png(9), lambda path: read_inputs(path, {"kind": "image", "shape": [3, 4, 5]})),
}


def changed(raw, source):
    out = bytearray(raw)
    for _ in range(source.choice([1, 1, 2, 5])):
        kind, place = source.random(), source.randrange(len(out))
        if kind < 0.6:
            out[place] = source.randrange(256)
        elif kind < 0.8:
            out = out[: place + 1]
        else:
            out[place:place] = bytes([source.choice(b',;"\n\r\0x-9')])
    return bytes(out)


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
@pytest.mark.parametrize("name", CASES)
def test_damage_is_a_data_error(tmp_path, name):
    make, read = CASES[name]
    raw, path, source = make(), tmp_path / f"file.{name}", random.Random(1)
    path.write_bytes(raw)
    read(path)
    refused = 0
    for _ in range(80):
        path.write_bytes(changed(raw, source))
        try:
            read(path)
        except DataError as error:
            assert str(path) in str(error) or "split" in str(error)
            refused += 1
    assert refused > 20
