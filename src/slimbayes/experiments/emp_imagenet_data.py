"""ImageNet for the EMP paper's entries: a folder tree or tar shards, and for smoke tests a tree that is made up."""

from __future__ import annotations

import os
import shutil
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slimbayes.data import StreamedDataset, stream
from slimbayes.data.files import need
from slimbayes.experiments.emp_corruptions import TYPES
from slimbayes.experiments.session import Session

TREE = "imagenet-tree"  # the made-up one, in the work folder
CLASSES, TRAIN, TEST = 8, 9, 8  # of it: classes, and images of each


@dataclass(frozen=True)
class Size:
    """What a scale makes of ImageNet."""

    data: str
    network: str
    pixels: int
    epochs: int
    batch_size: int
    seeds: int
    samples: tuple[int, ...]  # numbers of draws whose averages are measured: one run has them all
    corrupted: int  # draws on corrupted images
    types: tuple[str, ...]  # of corruptions
    severities: tuple[int, ...]
    chunk: int  # rows of one pass in evaluation
    workers: int  # of each process: they decode images


SIZES = {
    "smoke": Size(
        TREE, "wrn(depth=10, width=1)", 32, 1, 24, 1, (1, 2, 3, 4), 2, ("brightness", "contrast"), (3, 5), 96, 0
    ),
    "paper": Size(
        "imagenet", "resnet18", 224, 100, 256, 1, (1, 20, 100, 200), 100, TYPES, (1, 2, 3, 4, 5), 2048, 8
    ),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Streamed:
    """The streamed sibling of ``Prepared``: what ``Session.trained`` asks of data."""

    data: StreamedDataset
    key: str

    @property
    def num_train(self) -> int:
        """The N that divides the KL."""
        return len(self.data.train)


_opened: weakref.WeakKeyDictionary[Session, Streamed] = weakref.WeakKeyDictionary()


def prepare(session: Session) -> Streamed:
    """The images of a session's scale, listed once: random crops for training, the centre for testing."""
    if session not in _opened:
        size = SIZES[session.scale]
        place: str | Path = size.data
        if size.data == TREE:
            place = session.work / TREE
            session.processes.by_first(lambda: make_tree(session.work / TREE))
        data = stream(place, session.data_root, size.pixels)
        session.used[size.data] = {"fingerprint": data.fingerprint(), "source": data.source}
        _opened[session] = Streamed(data, f"{size.pixels} pixels")
    return _opened[session]


def make_tree(folder: Path) -> None:
    """A small tree of JPEG files, train/<class>/ and val/<class>/: noise around a colour of its class.

    It appears whole or not at all, and is the same on every machine up to the JPEG encoder.
    """
    if folder.is_dir():
        return
    image = need("PIL.Image", "writing the images of a smoke test")
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a call that was killed
    for part, count in (("train", TRAIN), ("val", TEST)):
        for label in range(CLASSES):
            place = partial / part / f"class-{label}"
            place.mkdir(parents=True)
            for number in range(count):
                pixels = _picture(label, number + (1000 if part == "val" else 0))
                image.fromarray(pixels).save(place / f"{number:03}.jpg", quality=90)
    try:
        os.replace(partial, folder)
    except OSError:
        shutil.rmtree(partial)
        if not folder.is_dir():  # else another process was first
            raise


def _picture(label: int, number: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Of a size of its own; colours overlap, so that nothing learns to be sure."""
    random = np.random.default_rng([label, number])
    colour = 128 + 60 * np.cos(2 * np.pi * (label / CLASSES + np.arange(3) / 3))
    shape = (36 + number % 7, 44 - number % 5, 3)
    noisy = colour + random.normal(0, 30, 3) + random.normal(0, 40, shape)
    return np.clip(noisy, 0, 255).astype(np.uint8)
