"""CIFAR in three layouts, MNIST in two, SVHN, UCI: written by the test, then the real files if they are there."""

import gzip
import io
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from slimbayes.lab.data import DataError, describe, find_root, found, load, load_images, out_of_distribution
from slimbayes.lab.data.images import read_idx
from slimbayes.lab.data.unpickle import read_pickle

REAL = Path(os.environ.get("SLIMBAYES_DATA") or Path(__file__).parents[2] / "../shared/data")


@pytest.fixture
def real():
    if not (REAL / "cifar10.npz").exists():
        pytest.skip(f"no real data in {REAL}: set SLIMBAYES_DATA")
    return REAL


def pixels(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


# --- CIFAR, binary files


def test_cifar10_binary(tmp_path):
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for number, name in enumerate(names):
        labels = np.array([[number], [9 - number]], dtype=np.uint8)
        (folder / name).write_bytes(np.concatenate([labels, pixels(2, number)], 1).tobytes())
    data = load("cifar10", tmp_path)
    assert data.train.targets.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert data.test.targets.tolist() == [5, 4]
    assert torch.equal(data.test.inputs.flatten(1), torch.from_numpy(pixels(2, 5)))
    assert data.classes[3] == "cat" and data.augment == ("crop", "flip") and data.shape == (3, 32, 32)
    assert data.train.inputs[0, 1, 2, 3] == pixels(2, 0)[0, 1024 + 2 * 32 + 3]  # planes, then rows
    assert data.scaling.mean == (0.4914, 0.4822, 0.4465) and data.scaling.std == (0.2023, 0.1994, 0.2010)
    (folder / "batches.meta.txt").write_text("\n".join("abcdefghij") + "\n")
    assert load("cifar10", tmp_path).classes == tuple("abcdefghij")
    (folder / "data_batch_3.bin").write_bytes(b"\0" * 3072)
    with pytest.raises(DataError, match=r"data_batch_3\.bin: 3072 bytes .* records of 3073"):
        load("cifar10", tmp_path)
    (folder / "data_batch_3.bin").unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin is missing"):
        load("cifar10", tmp_path)


def test_cifar100_binary_has_coarse_then_fine_labels(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name, labels in (("train.bin", [[3, 77], [4, 99]]), ("test.bin", [[0, 5]])):
        rows = np.concatenate([np.array(labels, dtype=np.uint8), pixels(len(labels))], 1)
        (folder / name).write_bytes(rows.tobytes())
    data = load("cifar100", tmp_path)
    assert data.train.targets.tolist() == [77, 99] and data.num_outputs == 100
    assert torch.equal(data.train.inputs.flatten(1), torch.from_numpy(pixels(2)))
    (folder / "train.bin").write_bytes(bytes([0, 100]) + bytes(3072))
    with pytest.raises(DataError, match=r"label 100 outside 0\.\.99"):
        load("cifar100", tmp_path)


# --- CIFAR, python files


def py2(value):
    """A value as Python 2 pickled it in protocol 2: text is bytes, arrays name numpy.core."""
    if isinstance(value, bytes):
        short = len(value) < 256
        return (b"U" + bytes([len(value)]) if short else b"T" + struct.pack("<I", len(value))) + value
    if isinstance(value, int):
        return b"K" + bytes([value]) if value < 256 else b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"](" + b"".join(map(py2, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(py2(k) + py2(v) for k, v in value.items()) + b"u"
    head = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\0K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    rows, columns = value.shape
    return (
        head + b"(K\x01" + py2(rows) + py2(columns) + b"\x86" + dtype + b"\x89" + py2(value.tobytes()) + b"tb"
    )


def py2_pickle(value):
    return b"\x80\x02" + py2(value) + b"."


@pytest.mark.parametrize(
    "write", [py2_pickle, lambda v: pickle.dumps(v, protocol=2), lambda v: pickle.dumps(v, 4)]
)
def test_cifar10_python(tmp_path, write):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        batch = {
            b"batch_label": b"training batch",
            b"labels": [number, 9 - number],
            b"data": pixels(2, number),
            b"filenames": [b"one.png", b"two.png"],
        }
        (folder / name).write_bytes(write(batch))
    (folder / "batches.meta").write_bytes(write({b"label_names": [b"n%d" % i for i in range(10)]}))
    data = load("cifar10", tmp_path)
    assert data.train.targets.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
    assert torch.equal(data.train.inputs[2:4].flatten(1), torch.from_numpy(pixels(2, 1)))
    assert data.classes[9] == "n9"


def test_the_hand_written_layout_is_pickles_own():
    batch = {b"labels": [1, 300], b"data": pixels(2)}
    plain = pickle.loads(py2_pickle(batch), encoding="bytes")
    assert plain[b"labels"] == [1, 300] and (plain[b"data"] == pixels(2)).all()


def test_cifar100_python(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name in ("train", "test"):
        batch = {b"data": pixels(2), b"fine_labels": [98, 7], b"coarse_labels": [1, 2]}
        (folder / name).write_bytes(py2_pickle(batch))
    assert load("cifar100", tmp_path).test.targets.tolist() == [98, 7]
    (folder / "train").write_bytes(py2_pickle({b"data": pixels(2), b"fine_labels": [98]}))
    with pytest.raises(DataError, match="no list of 2 labels"):
        load("cifar100", tmp_path)
    (folder / "train").write_bytes(py2_pickle({b"fine_labels": [98]}))
    with pytest.raises(DataError, match="no uint8 array 'data'"):
        load("cifar100", tmp_path)
    (folder / "train").unlink()
    with pytest.raises(DataError, match="missing"):
        load("cifar100", tmp_path)


class Runs:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_would_run_a_command_does_not(tmp_path, protocol):
    witness = tmp_path / "it_ran"
    calls = [
        Runs(os.system, f"touch {witness}"),
        Runs(eval, f"open({str(witness)!r}, 'w')"),
        Runs(getattr, os, "system"),
        Runs(np.load, str(witness)),
        Runs(np.ndarray.tofile, np.zeros(1), str(witness)),
    ]
    for number, call in enumerate(calls):
        path = tmp_path / f"bad_{number}"
        try:
            path.write_bytes(pickle.dumps({"data": call}, protocol=protocol))
        except (TypeError, pickle.PicklingError):
            continue  # a module cannot be written
        with pytest.raises(DataError, match=r"not a pickle of plain data: it (asks for|has the operation)"):
            read_pickle(path)
        assert not witness.exists()
    path.write_bytes(pickle.dumps(Runs(os.system, f"touch {witness}")))
    pickle.loads(path.read_bytes())
    assert witness.exists()  # the same pickle does run where nothing is restricted


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (pickle.dumps({"a": np.array([{}], dtype=object)}, 2), "of type 'O8'"),
        (pickle.dumps({"a": np.array(["text"])}, 2), "of type 'U4'"),
        (pickle.dumps({"a": np.zeros(1, dtype="i4,i4")}, 2), "of type 'V8'"),
        (pickle.dumps({"a": (1, 2)}, 2), "it holds a tuple"),
        (pickle.dumps({"a": {1, 2}}, 2), "asks for"),
        (py2_pickle({b"a": pixels(2)}).replace(b"K\x02J", b"K\x03J"), r"shape \(3, 3072\) with 6144 numbers"),
        (py2_pickle({b"data": pixels(2)})[:500], "exhausted|expected"),
        (b"", "exhausted"),
        (b"not a pickle at all", "plain data"),
        (b"\x80\x02cnumpy\nndarray\n}b.", "plain data"),
        (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n}(U\x01aK\x01u\x86b.", "plain data"),
        (pickle.dumps([[[[[[[[[[1]]]]]]]]]]), "nested"),
        (b"\x80\x02c_codecs\nencode\nX\x01\0\0\0aX\x05\0\0\0rot13\x86R.", "encoded as"),
    ],
)
def test_odd_pickles_are_data_errors(tmp_path, raw, message):
    path = tmp_path / "odd"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=message):
        read_pickle(path)


def test_pickles_that_ask_for_all_memory_or_time(tmp_path):
    path = tmp_path / "greedy"
    path.write_bytes(b"\x80\x02]r\xff\xff\xff\x7f.")  # a memo index of two thousand million
    with pytest.raises(DataError, match="its memo jumps to 2147483647"):
        read_pickle(path)
    path.write_bytes(b"\x80\x02P1\n.")
    with pytest.raises(DataError, match="the operation PERSID"):
        read_pickle(path)
    nested = [0] * 1000
    for _ in range(6):
        nested = [nested] * 1000  # 10²¹ entries, if each were looked at
    path.write_bytes(pickle.dumps(nested, 2))
    assert len(read_pickle(path)[0][1][2][3][4][5]) == 1000


@pytest.mark.filterwarnings("ignore::DeprecationWarning:pickletools")
def test_changed_bytes_never_run_and_never_crash(tmp_path):
    """A byte changed anywhere gives the data, other data, or a DataError."""
    original = py2_pickle({b"labels": [1, 2], b"data": pixels(2)[:, :12], b"names": [b"a", b"b"]})
    rng, path = np.random.default_rng(0), tmp_path / "changed"
    refused = 0
    for _ in range(400):
        changed = bytearray(original)
        changed[rng.integers(len(changed))] = rng.integers(256)
        path.write_bytes(changed)
        try:
            read_pickle(path)
        except DataError:
            refused += 1
    assert 100 < refused < 400


def test_pickled_arrays_keep_order_and_type(tmp_path):
    path = tmp_path / "arrays"
    arrays = {
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(4, dtype=">i4"),
    }
    path.write_bytes(pickle.dumps(arrays, 2))
    for key, value in read_pickle(path).items():
        assert (value == arrays[key]).all() and value.shape == arrays[key].shape, key


# --- strips in npz


def strip_arrays(images):
    """Two JPEG strips from images [N, 32, 32, 3], as the npz layout has them."""
    blobs = []
    for part in np.array_split(images, 2):
        file = io.BytesIO()
        Image.fromarray(part.reshape(-1, 32, 3)).save(file, "JPEG", quality=95, subsampling=0)
        blobs.append(np.frombuffer(file.getvalue(), np.uint8))
    return np.concatenate(blobs), np.cumsum([0, *map(len, blobs)])


def write_strips(path, flat, parts=("train", "test"), **extra):
    images = np.broadcast_to(np.array(flat, dtype=np.uint8)[:, None, None, :], (len(flat), 32, 32, 3)).copy()
    blob, offsets = strip_arrays(images)
    arrays = {}
    for part in parts:
        arrays |= {f"{part}_blob": blob, f"{part}_offsets": offsets, f"{part}_labels": np.arange(len(flat))}
    np.savez(path, **{**arrays, **extra})


def test_cifar_npz_strips(tmp_path):
    flat = [[0, 0, 0], [255, 255, 255], [200, 30, 60], [10, 120, 240]]
    write_strips(tmp_path / "cifar10.npz", flat, classes=np.array([f"c{i}" for i in range(10)]))
    data = load("cifar10", tmp_path)
    assert data.train.inputs.shape == (4, 3, 32, 32) and data.classes[1] == "c1"
    assert (data.train.inputs.float().mean((2, 3)) - torch.tensor(flat)).abs().max() < 3
    write_strips(tmp_path / "cifar10.npz", flat, classes=np.array(["c"]), test_offsets=np.array([0, 5]))
    with pytest.raises(DataError, match=r"offsets of its JPEG strips"):
        load("cifar10", tmp_path)
    write_strips(tmp_path / "cifar10.npz", flat, classes=np.array(["c"]), test_blob=np.zeros(10, dtype=np.uint8),
                 test_offsets=np.array([0, 10]))  # fmt: skip
    with pytest.raises(DataError, match="JPEG strip 0 is damaged"):
        load("cifar10", tmp_path)
    np.savez(tmp_path / "cifar10.npz", train_blob=np.zeros(1))
    with pytest.raises(DataError, match="no array 'train_offsets'"):
        load("cifar10", tmp_path)
    (tmp_path / "cifar10.npz").write_bytes(b"PK\x03\x04 damaged")
    with pytest.raises(DataError, match=r"not a readable \.npz"):
        load("cifar10", tmp_path)


def test_svhn_is_elsewhere_for_cifar_and_mnist(tmp_path):
    write_strips(tmp_path / "svhn_test.npz", [[0, 0, 0], [200, 200, 200]], parts=("test",))
    assert load_images("svhn", tmp_path).shape == (2, 3, 32, 32)
    with pytest.raises(DataError, match="no images 'digits'"):
        load_images("digits", tmp_path)
    with pytest.raises(DataError, match="load_images"):
        load("svhn", tmp_path)
    idx_files(tmp_path)
    other = out_of_distribution(load("mnist", tmp_path), tmp_path)
    assert other.name == "svhn" and other.inputs.shape == (2, 1, 28, 28)
    assert abs(other.inputs[1].float().mean() - 200) < 3


# --- MNIST


def idx(array):
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def idx_files(folder, end="", pack=lambda raw: raw):
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (3, 28, 28), dtype=np.uint8), np.array([7, 0, 9], dtype=np.uint8)
    for name in ("train", "t10k"):
        (folder / f"{name}-images-idx3-ubyte{end}").write_bytes(pack(idx(images)))
        (folder / f"{name}-labels-idx1-ubyte{end}").write_bytes(pack(idx(labels)))
    return images


@pytest.mark.parametrize(("end", "pack"), [("", lambda raw: raw), (".gz", gzip.compress)])
@pytest.mark.parametrize("folder", ["", "mnist", "MNIST/raw"])
def test_mnist_idx(tmp_path, end, pack, folder):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    images = idx_files(tmp_path / folder, end, pack)
    data = load("mnist", tmp_path)
    assert torch.equal(data.test.inputs[:, 0], torch.from_numpy(images))
    assert data.train.targets.tolist() == [7, 0, 9] and data.scaling.mean == (0.1307,)


def test_mnist_npz_and_damage(tmp_path):
    images, labels = np.zeros((2, 28, 28), np.uint8), np.array([1, 2], np.uint8)
    arrays = {"train_images": images, "train_labels": labels, "test_images": images, "test_labels": labels}
    np.savez(tmp_path / "mnist.npz", **arrays)
    assert load("mnist", tmp_path).test.targets.tolist() == [1, 2]
    np.savez(tmp_path / "mnist.npz", **{**arrays, "test_images": images[0]})
    with pytest.raises(DataError, match="test images are uint8"):
        load("mnist", tmp_path)
    (tmp_path / "a").write_bytes(idx(images)[:-1])
    (tmp_path / "b").write_bytes(b"\0\0\x0d\x01")
    (tmp_path / "c.gz").write_bytes(gzip.compress(idx(images))[:-9])
    for name, message in (
        ("a", "1567 bytes for the shape"),
        ("b", "not an idx file"),
        ("c.gz", "damaged gzip"),
    ):
        with pytest.raises(DataError, match=message):
            read_idx(tmp_path / name)


# --- UCI


def write_uci(path):
    data = np.arange(30.0).reshape(6, 5)
    np.savez(path, **{
        "energy/data": data, "energy/features": [0, 1, 2], "energy/targets": [3], "energy/targets_all": [3, 4],
        "energy/train": np.array([[0, 1, 2, 3], [5, 4, 3, 2]], np.uint16), "energy/test": [[4, 5], [0, 1]],
    })  # fmt: skip


def test_uci_splits_and_targets(tmp_path):
    write_uci(tmp_path / "uci.npz")
    data = load("uci/energy", tmp_path, split=1)
    assert data.train.inputs[:, 0].tolist() == [25, 20, 15, 10] and data.test.targets.tolist() == [
        [3.0],
        [8.0],
    ]
    both = load("uci/energy", tmp_path, all_targets=True)
    assert both.outputs == ("heating load", "cooling load") and both.test.targets.tolist() == [
        [23, 24],
        [28, 29],
    ]
    with pytest.raises(DataError, match="splits 0 to 1"):
        load("uci/energy", tmp_path, split=2)
    with pytest.raises(DataError, match="no array 'yacht/data'"):
        load("uci/yacht", tmp_path)
    with pytest.raises(DataError, match="did you mean 'uci/yacht'"):
        load("uci/yatch", tmp_path)


# --- missing files


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "uci/boston"])
def test_missing_files_say_which_where_and_whence(tmp_path, monkeypatch, name):
    with pytest.raises(DataError, match=rf"looked in {tmp_path}.*Needed: .*\.npz.*Get it from http"):
        load(name, tmp_path)
    with pytest.raises(DataError, match="which is not a folder"):
        load(name, tmp_path / "nowhere")
    monkeypatch.delenv("SLIMBAYES_DATA", raising=False)
    with pytest.raises(DataError, match=r"no data root given: pass --data-root .* or set SLIMBAYES_DATA"):
        load(name)
    monkeypatch.setenv("SLIMBAYES_DATA", str(tmp_path))
    with pytest.raises(DataError, match=f"looked in {tmp_path}"):
        load(name)


def test_roots_and_what_is_found(tmp_path, monkeypatch):
    monkeypatch.delenv("SLIMBAYES_DATA", raising=False)
    assert find_root() is None and find_root("x") == Path("x")
    monkeypatch.setenv("SLIMBAYES_DATA", str(tmp_path))
    assert find_root() == tmp_path
    write_uci(tmp_path / "uci.npz")
    where = {entry.name: entry.where for entry in found()}
    assert where["digits"] == "embedded" and where["cifar10"] is None
    assert where["uci/yacht"] == str(tmp_path / "uci.npz") and where["imagenet"] is None
    (tmp_path / "imagenet" / "train").mkdir(parents=True)
    assert {e.name: e.where for e in found()}["imagenet"] == str(tmp_path / "imagenet")
    assert "cifar10        not found: https://www.cs.toronto.edu" in describe()


# --- the real files


@pytest.mark.parametrize(("name", "each"), [("cifar10", 5000), ("cifar100", 500)])
def test_real_cifar(real, name, each):
    if not (real / f"{name}.npz").exists():
        pytest.skip(f"no {name}.npz in {real}")
    data = load(name, real)
    assert len(data.train) == 50_000 and len(data.test) == 10_000
    assert (data.train.targets.bincount() == each).all() and (data.test.targets.bincount() == each // 5).all()
    mean = (data.train.inputs[::5].float() / 255).mean((0, 2, 3))
    known = {"cifar10": (0.4914, 0.4822, 0.4465), "cifar100": (0.5071, 0.4865, 0.4409)}[name]
    torch.testing.assert_close(mean, torch.tensor(known), atol=5e-3, rtol=0)
    assert data.classes[0] == {"cifar10": "airplane", "cifar100": "apple"}[name]


def test_real_mnist_svhn_and_uci(real):
    absent = [name for name in ("mnist.npz", "svhn_test.npz", "uci.npz") if not (real / name).exists()]
    if absent:
        pytest.skip(f"no {', '.join(absent)} in {real}")
    data = load("mnist", real)
    assert data.train.targets.bincount().tolist()[:2] == [5923, 6742] and len(data.test) == 10_000
    scaled = data.scaling(data.train.inputs)
    assert abs(scaled.mean()) < 1e-3 and abs(scaled.std() - 1) < 1e-3
    assert load_images("svhn", real).shape == (26_032, 3, 32, 32)
    sizes = {"boston": (455, 51, 13), "naval": (10_741, 1193, 16), "protein": (41_157, 4573, 9)}
    for name, size in sizes.items():
        data = load(f"uci/{name}", real, split=4)
        assert (len(data.train), len(data.test), data.shape[0]) == size
        scaled = data.scaling(data.train.inputs)
        assert scaled.isfinite().all() and scaled.abs().max() < 200
