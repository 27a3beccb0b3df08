"""Image sets from a data root: CIFAR-10 and -100 in three layouts, MNIST in two, and SVHN's test images."""

from __future__ import annotations

import io
import itertools
import math
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimbayes.containers.archives import unpack
from slimbayes.containers.datasets import DataError, Dataset, Scaling, Split
from slimbayes.containers.files import need, read_npz, require
from slimbayes.files import read_whole
from slimbayes.lab.data.unpickle import read_pickle

Root = str | os.PathLike[str] | None
Array = np.ndarray[Any, Any]

CIFAR_HOME = "https://www.cs.toronto.edu/~kriz/cifar.html"
MNIST_HOME = "http://yann.lecun.com/exdb/mnist/ (or a mirror of its four idx files)"
SVHN_HOME = "http://ufldl.stanford.edu/housenumbers/ (as svhn_test.npz, see docs/data.md)"
CIFAR_SCALING = Scaling((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), 1 / 255)
MNIST_SCALING = Scaling((0.1307,), (0.3081,), 1 / 255)
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

CIFAR_FILES = {
    10: ("cifar10.npz", "cifar-10-batches-bin", "cifar-10-batches-py"),
    100: ("cifar100.npz", "cifar-100-binary", "cifar-100-python"),
}
_IDX = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}
_MNIST_FOLDERS = ("", "mnist/", "MNIST/raw/")
MNIST_FILES = (
    "mnist.npz",
    *(f"{folder}{_IDX['train_images']}{end}" for folder in _MNIST_FOLDERS for end in ("", ".gz")),
)


def cifar10(root: Root = None) -> Dataset:
    """CIFAR-10: 50,000 + 10,000 colour images of 32×32 pixels in 10 classes."""
    return _cifar(root, 10)


def cifar100(root: Root = None) -> Dataset:
    """CIFAR-100: 50,000 + 10,000 colour images of 32×32 pixels in 100 (fine) classes."""
    return _cifar(root, 100)


def _cifar(root: Root, number: int) -> Dataset:
    path = require(root, CIFAR_FILES[number], f"CIFAR-{number}", CIFAR_HOME)
    if path.suffix == ".npz":
        read, layout = _cifar_npz, f"{path.name}: images re-encoded as JPEG, not the original pixels"
    elif path.name.endswith("py") or path.name.endswith("python"):
        read, layout = _cifar_python, "the original python files"
    else:
        read, layout = _cifar_binary, "the original binary files"
    train, test, classes = read(path, number)
    for split in (train, test):
        _check_labels(path, split.targets, number)
    return Dataset(
        name=f"cifar{number}",
        task="classification",
        kind="image",
        train=train,
        test=test,
        scaling=CIFAR_SCALING,
        classes=classes,
        augment=("crop", "flip"),
        source=f"CIFAR-{number} (Krizhevsky, 2009), from {layout}.",
    )


def _cifar_npz(path: Path, number: int) -> tuple[Split, Split, tuple[str, ...]]:
    keys = tuple(f"{split}_{part}" for split in ("train", "test") for part in ("blob", "offsets", "labels"))
    arrays = read_npz(path, (*keys, "classes"))
    train, test = (
        _split(strips(arrays[f"{s}_blob"], arrays[f"{s}_offsets"], path), arrays[f"{s}_labels"])
        for s in ("train", "test")
    )
    return train, test, tuple(str(name) for name in arrays["classes"])


def strips(blob: Array, offsets: Array, path: Path) -> Tensor:
    """Images [N, 3, 32, 32] from JPEGs that each hold a vertical strip of them, 32 pixels wide."""
    image = need("PIL.Image", "reading JPEG strips")
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(blob) or (np.diff(offsets) <= 0).any():
        raise DataError(f"{path}: the offsets of its JPEG strips do not fit its {len(blob)} bytes: damaged")
    parts = []
    for index, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        try:
            strip = np.asarray(
                image.open(io.BytesIO(blob[start:end].tobytes()), formats=("JPEG",)).convert("RGB")
            )
            parts.append(torch.from_numpy(strip.reshape(-1, 32, 32, 3).copy()))
        except Exception as error:  # Pillow's decoders raise a dozen types
            raise DataError(f"{path}: JPEG strip {index} is damaged ({error})") from error
    return torch.cat(parts).movedim(-1, 1).contiguous()  # [N, 3, 32, 32]


def _cifar_binary(path: Path, number: int) -> tuple[Split, Split, tuple[str, ...]]:
    ten = number == 10
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] if ten else ["train.bin"]
    test_names = ["test_batch.bin"] if ten else ["test.bin"]
    train, test = (_records([path / name for name in files], number) for files in (names, test_names))
    labels = path / ("batches.meta.txt" if ten else "fine_label_names.txt")
    return train, test, _names_of(labels.read_text().split() if labels.exists() else [], number)


def _records(paths: list[Path], number: int) -> Split:
    """Records of 1 (CIFAR-10) or 2 (CIFAR-100: coarse, fine) label bytes and 3 · 32 · 32 pixels."""
    labels = 1 if number == 10 else 2
    parts = []
    for path in paths:
        raw = np.frombuffer(_bytes(path), np.uint8)
        if raw.size == 0 or raw.size % (labels + 3072):
            raise DataError(
                f"{path}: {raw.size} bytes are no whole number of records of {labels + 3072} bytes"
            )
        parts.append(raw.reshape(-1, labels + 3072))
    rows = np.concatenate(parts)
    return _split(torch.from_numpy(rows[:, labels:].copy()).view(-1, 3, 32, 32), rows[:, labels - 1])


def _cifar_python(path: Path, number: int) -> tuple[Split, Split, tuple[str, ...]]:
    ten = number == 10
    names = [f"data_batch_{i}" for i in range(1, 6)] if ten else ["train"]
    train, test = (
        _pickled([path / n for n in files]) for files in (names, ["test_batch" if ten else "test"])
    )
    meta = path / ("batches.meta" if ten else "meta")
    content = read_pickle(meta) if meta.exists() else {}
    found = (
        content.get("label_names" if ten else "fine_label_names", []) if isinstance(content, dict) else None
    )
    if not isinstance(found, list):
        raise DataError(f"{meta}: no list of class names: unpack the whole archive from {CIFAR_HOME}")
    names_found = [n.decode("utf-8", "replace") if isinstance(n, bytes) else str(n) for n in found]
    return train, test, _names_of(names_found, number)


def _pickled(paths: list[Path]) -> Split:
    images, labels = [], []
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} is missing: unpack the whole archive from {CIFAR_HOME}")
        batch = read_pickle(path)
        found = batch.get("fine_labels", batch.get("labels")) if isinstance(batch, dict) else None
        data = batch.get("data") if isinstance(batch, dict) else None
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3072,):
            raise DataError(f"{path}: no uint8 array 'data' of [N, 3072]: not a CIFAR batch")
        if not isinstance(found, list) or len(found) != len(data) or not all(map(_label, found)):
            raise DataError(f"{path}: no list of {len(data)} labels: not a CIFAR batch")
        images.append(torch.from_numpy(data.copy()).view(-1, 3, 32, 32))
        labels.extend(found)
    return _split(torch.cat(images), np.array(labels, dtype=np.int64))


def _label(value: object) -> bool:
    return isinstance(value, int) and 0 <= value < 100


def mnist(root: Root = None) -> Dataset:
    """MNIST: 60,000 + 10,000 handwritten digits of 28×28 pixels, from mnist.npz or the four idx files."""
    path = require(root, MNIST_FILES, "MNIST", MNIST_HOME)
    if path.suffix == ".npz":
        arrays = read_npz(path, tuple(_IDX))
    else:
        arrays = {key: read_idx(_either(path.parent / name)) for key, name in _IDX.items()}
    splits = []
    for part in ("train", "test"):
        images = arrays[f"{part}_images"]
        if images.ndim != 3 or images.dtype != np.uint8:
            raise DataError(
                f"{path}: {part} images are {images.dtype} {list(images.shape)}, not uint8 [N, H, W]"
            )
        splits.append(_split(torch.from_numpy(images.copy())[:, None], arrays[f"{part}_labels"]))
        _check_labels(path, splits[-1].targets, 10)
    return Dataset(
        name="mnist",
        task="classification",
        kind="image",
        train=splits[0],
        test=splits[1],
        scaling=MNIST_SCALING,
        classes=tuple(str(c) for c in range(10)),
        source="MNIST (LeCun, Cortes and Burges, 1998).",
    )


def read_idx(path: Path) -> Array:
    """An idx file of bytes, plain or gzipped: 0 0 8 d, then d big-endian sizes, then the bytes."""
    raw = _bytes(path)
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"{path}: not an idx file of bytes (it starts with {raw[:4].hex()})")
    dimensions = raw[3]
    shape = struct.unpack(f">{dimensions}I", raw[4 : 4 + 4 * dimensions])
    values = np.frombuffer(raw[4 + 4 * dimensions :], np.uint8)
    if values.size != math.prod(shape) or dimensions > 4:
        raise DataError(
            f"{path}: {values.size} bytes for the shape {list(shape)}: the file is cut or damaged"
        )
    return values.reshape(shape)


def load_images(name: str, root: Root = None) -> Tensor:
    """The images of a set that is only used as data from elsewhere: "svhn", uint8 [26032, 3, 32, 32]."""
    if name != "svhn":
        raise DataError(f"no images {name!r}: the sets without a task are 'svhn'; others by load({name!r})")
    path = require(root, ("svhn_test.npz",), "SVHN's test images", SVHN_HOME)
    arrays = read_npz(path, ("test_blob", "test_offsets"))
    return strips(arrays["test_blob"], arrays["test_offsets"], path)


def _bytes(path: Path) -> bytes:
    if not path.exists():
        raise DataError(f"{path} is missing beside the others: unpack the whole archive")
    try:
        raw = read_whole(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); get the original file") from error
    return unpack(raw, path) if path.suffix == ".gz" else raw


def _either(path: Path) -> Path:
    packed = path.with_name(path.name + ".gz")
    return packed if packed.exists() and not path.exists() else path


def _split(images: Tensor, labels: Array) -> Split:
    return Split(images, torch.from_numpy(labels.astype(np.int64)))


def _names_of(found: list[str], number: int) -> tuple[str, ...]:
    if len(found) == number:
        return tuple(found)
    return CIFAR10_CLASSES if number == 10 else tuple(f"class {c}" for c in range(number))


def _check_labels(path: Path, labels: Tensor, number: int) -> None:
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= number):
        raise DataError(
            f"{path}: a label {int(labels.max())} outside 0..{number - 1}: another file, or damaged"
        )
