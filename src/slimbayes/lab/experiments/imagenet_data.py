"""ImageNet for the papers' entries: a folder tree or tar shards, and for smoke tests a tree that is made up."""

from __future__ import annotations

import os
import shutil
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from slimbayes.containers.files import need
from slimbayes.containers.streaming import IMAGENET_SCALING
from slimbayes.containers.streams import Resample
from slimbayes.lab.data import Scaling, StreamedDataset, stream
from slimbayes.lab.data.corruptions import CORRUPTIONS, SEVERITIES
from slimbayes.lab.experiments.session import Session

TREE = "imagenet-tree"  # the made-up one, in the work folder
CLASSES, TRAIN, TEST = 8, 9, 8  # of it: classes, and images of each
RAW = Scaling((0.0,) * 3, (1.0,) * 3)  # pixels as they are, 0 to 255


@dataclass(frozen=True)
class Size:
    """What a scale makes of ImageNet, for all papers."""

    data: str
    pixels: int
    types: tuple[str, ...]  # of corruptions
    severities: tuple[int, ...]
    chunk: int  # rows of one pass in evaluation
    workers: int  # of each process: they decode images


SIZES = {
    "smoke": Size(TREE, 32, ("brightness", "contrast"), (3, 5), 96, 0),
    "paper": Size("imagenet", 224, CORRUPTIONS, SEVERITIES, 2048, 8),
}


@dataclass(frozen=True, eq=False)
class Streamed:
    """The streamed sibling of ``Prepared``: what ``Session.trained`` asks of data."""

    data: StreamedDataset
    key: str

    @property
    def num_train(self) -> int:
        """The N that divides the KL."""
        return len(self.data.train)


_opened: weakref.WeakKeyDictionary[Session, dict[Resample, StreamedDataset]] = weakref.WeakKeyDictionary()


def prepare(
    session: Session, scaling: Scaling = IMAGENET_SCALING, resample: Resample = "bilinear"
) -> Streamed:
    """The images of a session's scale, listed once: random crops for training, the centre for testing."""
    check_scale(session)
    size, opened = SIZES[session.scale], _opened.setdefault(session, {})
    if resample not in opened:
        place: str | Path = size.data
        if size.data == TREE:
            place = session.work / TREE
            session.processes.by_first(lambda: make_tree(session.work / TREE))
        data = stream(place, session.data_root, size.pixels, resample=resample)
        session.used[size.data] = {"fingerprint": data.fingerprint(), "source": data.source}
        opened[resample] = data
    other = [] if scaling == IMAGENET_SCALING else [repr(scaling)]
    other += [] if resample == "bilinear" else [resample]
    return Streamed(replace(opened[resample], scaling=scaling), ", ".join([f"{size.pixels} pixels", *other]))


def check_scale(session: Session) -> None:
    """Raise at scales that have no ImageNet."""
    if session.scale not in SIZES:
        raise ValueError(
            f"ImageNet at scale {session.scale}: its networks are trained at scale paper alone, with ImageNet "
            "(imagenet/train and imagenet/val, or tar shards) under --data-root; smoke runs the same code on a few "
            "made-up images"
        )


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
