"""Image sets too large for memory: folder trees and WebDataset tar shards, decoded as they are read."""

from __future__ import annotations

import io
import itertools
import math
import os
import random
import tarfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from slimbayes.containers.archives import check_ordinary
from slimbayes.containers.datasets import DataError
from slimbayes.containers.files import need, permutation
from slimbayes.files import shortened

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # Pillow goes by content, and for some others starts another program
MOST_CLASSES = 1 << 22
_LABEL = 100  # bytes of a .cls member
OnError = Literal["raise", "skip"]
Resample = Literal["bilinear", "bicubic"]
_RESAMPLING = {"bilinear": 2, "bicubic": 3}  # Pillow's numbers


class Place(NamedTuple):
    """One reading of one image: its row in the set, the epoch, and its position there, which key its crop."""

    row: int
    epoch: int = 0
    position: int = 0


class ImageStream(TorchDataset[tuple[Tensor, int]], ABC):
    """Images by row, decoded, cropped and flipped when asked for; a map-style torch Dataset.

    ``stream[Place(row, epoch, position)]`` is (uint8 [3, size, size], label), a function of these three and
    the seed alone, in whichever DataLoader worker or rank it is made.
    """

    starts: list[int]  # where the files begin in the row numbers, and the end
    locality: int  # how many neighbours in the files' order a shuffle mixes; 0 is all

    def __init__(
        self,
        classes: tuple[str, ...],
        size: int,
        train: bool,
        seed: int,
        on_error: OnError,
        resample: Resample,
    ) -> None:
        if size < 1 or on_error not in ("raise", "skip"):
            raise DataError(
                f"size={size}, on_error={on_error!r}: give pixels of 1 or more, 'raise' or 'skip'"
            )
        if resample not in _RESAMPLING:
            raise DataError(f"resample={resample!r} is unknown; use one of {', '.join(_RESAMPLING)}")
        self.classes, self.size, self.train, self.seed, self.on_error = classes, size, train, seed, on_error
        self.resample: Resample = resample
        self.starts, self.locality = [0], 0

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def title(self, row: int) -> str:
        """The name of an image in its set, without reading it."""

    @abstractmethod
    def label(self, row: int) -> int:
        """The class of an image, without reading it."""

    @abstractmethod
    def read(self, row: int) -> tuple[bytes, str]:
        """The encoded image, and what to call it in an error."""

    def __getitem__(self, place: Place | int) -> tuple[Tensor, int]:
        place = Place(*place) if isinstance(place, tuple) else Place(place, 0, place)
        image = decode(*self.read(place.row))
        if self.train:
            key = f"{self.seed}:{place.epoch}:{place.position}"
            return random_crop(image, self.size, random.Random(key), self.resample), self.label(place.row)
        return centre_crop(image, self.size, self.resample), self.label(place.row)

    def order(self, epoch: int) -> Tensor:
        """The row at every position of an epoch: shuffled for training, within windows if locality asks."""
        count = len(self)
        if not self.train:
            return torch.arange(count)
        if not self.locality or self.locality >= count:
            return permutation(count, self.seed, "stream.order", epoch)
        return self._windows(epoch)

    def _windows(self, epoch: int) -> Tensor:
        """Shards in random order, then a shuffle inside windows of about ``locality`` consecutive images."""
        blocks = [torch.arange(first, end) for first, end in itertools.pairwise(self.starts)]
        shards = permutation(len(blocks), self.seed, "stream.shards", epoch)
        rows = torch.cat([blocks[shard] for shard in shards.tolist()])
        parts = [
            window[permutation(len(window), self.seed, f"stream.window.{number}", epoch)]
            for number, window in enumerate(rows.split(self.locality))
        ]
        return torch.cat(parts)


class ImageTree(ImageStream):
    """A folder per class with images in it (root/<class>/*.jpg); labels by the sorted folder names.

    Args:
        folder: e.g. imagenet/train.
        size: of the square that the network gets, in pixels.
        train: random crops and flips, shuffled; else the centre, in order.
        seed: of order and crops.
        classes: the training set's, so that a validation tree has the same labels.
        on_error: what batches do with a damaged image: "raise" its DataError, or "skip" it and count.
        resample: how crops are resized, "bilinear" or "bicubic".
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        size: int = 224,
        train: bool = True,
        seed: int = 0,
        classes: tuple[str, ...] | None = None,
        on_error: OnError = "raise",
        resample: Resample = "bilinear",
    ) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise DataError(f"{folder}: no such folder; an image tree is {folder}/<class>/*.jpg")
        found = tuple(sorted(entry.name for entry in self.folder.iterdir() if entry.is_dir()))
        names = found if classes is None else classes
        unknown = sorted(set(found) - set(names))
        if not found or unknown:
            what = (
                f"the folder {unknown[0]!r} is none of the {len(names)} classes" if unknown else "no folders"
            )
            raise DataError(f"{folder}: {what}; an image tree is {folder}/<class>/*.jpg")
        super().__init__(names, size, train, seed, on_error, resample)
        self.files: list[str] = []  # relative paths: text is small beside a million Path objects
        labels: list[int] = []
        for name in found:
            files = sorted(f for f in os.listdir(self.folder / name) if f.lower().endswith(SUFFIXES))
            self.files += [f"{name}/{file}" for file in files]
            labels += [names.index(name)] * len(files)
        if not self.files:
            raise DataError(f"{folder}: no images ({', '.join(SUFFIXES)}) in its {len(found)} folders")
        self.labels = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.files)

    def title(self, row: int) -> str:
        """The file's path in its folder."""
        return self.files[row]

    def label(self, row: int) -> int:
        """The class of an image: the place of its folder's name among the sorted ones."""
        return int(self.labels[row])

    def read(self, row: int) -> tuple[bytes, str]:
        """The file's bytes and its path."""
        path = self.folder / self.files[row]
        check_ordinary(path)
        try:
            return path.read_bytes(), str(path)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error})") from error


class TarShards(ImageStream):
    """WebDataset shards: tar files with members key.jpg and key.cls (the label as text), neighbours by key.

    The members' places are read once from the tar headers, so that any image can be reached: order, ranks and
    resumption work as for a tree. Training shuffles shards, and images inside windows of ``locality``, which
    keeps reading nearly sequential.

    Args:
        shards: the tar files, in order.
        size, train, seed, on_error, resample: as for ImageTree.
        classes: names by label; None counts them from the largest label.
        locality: window of the shuffle, in images; 0 shuffles everything.
    """

    def __init__(
        self,
        shards: list[str | os.PathLike[str]] | list[Path] | list[str],
        size: int = 224,
        train: bool = True,
        seed: int = 0,
        classes: tuple[str, ...] | None = None,
        on_error: OnError = "raise",
        locality: int = 10_000,
        resample: Resample = "bilinear",
    ) -> None:
        self.paths = [Path(shard) for shard in shards]
        if not self.paths:
            raise DataError("no tar shards given: name files such as train-000000.tar")
        entries = [_entries(path) for path in self.paths]
        self.members = [name for part in entries for name, *_ in part]
        # Arrays, not a million tuples: workers share their memory.
        self.table = np.array(
            [(number, *entry[1:]) for number, part in enumerate(entries) for entry in part], dtype=np.int64
        ).reshape(-1, 4)  # shard, offset, size, label
        largest = int(self.table[:, 3].max(initial=-1))
        if largest < 0:
            raise DataError(f"{self.paths[0]}: no pairs of key.jpg and key.cls in {len(self.paths)} shards")
        names = tuple(str(c) for c in range(largest + 1)) if classes is None else classes
        if largest >= len(names):
            raise DataError(f"{self.paths[0]}: a label {largest}, but {len(names)} class names")
        super().__init__(names, size, train, seed, on_error, resample)
        self.locality = locality
        self.starts = list(itertools.accumulate(map(len, entries), initial=0))

    def __len__(self) -> int:
        return len(self.members)

    def title(self, row: int) -> str:
        """The member's name in its shard."""
        return self.members[row]

    def label(self, row: int) -> int:
        """The number in key.cls."""
        return int(self.table[row, 3])

    def read(self, row: int) -> tuple[bytes, str]:
        """The member's bytes, and "shard: member"."""
        shard, offset, size, _ = self.table[row].tolist()
        path, name = self.paths[shard], self.members[row]
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                raw = file.read(size)
        except OSError as error:
            raise DataError(f"{path}: {name}: cannot be read ({error})") from error
        if len(raw) < size:
            raise DataError(f"{path}: {name}: the shard ends inside this member: it was cut off")
        return raw, f"{path}: {name}"


def _entries(path: Path) -> list[tuple[str, int, int, int]]:
    """(member, offset, size, label) of every image of a shard, in order."""
    images: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    name = "(the first member)"
    last, room = -1, 0
    try:
        check_ordinary(path)
        room = path.stat().st_size
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.offset <= last or member.size < 0:
                    raise ValueError("its members do not follow one another")  # it would be read in a circle
                last = member.offset
                if not member.isreg() or member.issparse():  # links and devices are no data of this file
                    continue
                name = member.name
                if member.offset_data + member.size > room:
                    raise ValueError("the member ends after the file")
                folder, _, base = name.rpartition("/")
                stem, _, suffix = base.partition(".")
                key = f"{folder}/{stem}"
                if f".{suffix.lower()}" in SUFFIXES:
                    images[key] = (name, member.offset_data, member.size)
                elif suffix.lower() == "cls":
                    labels[key] = _class_in(tar, member)
    except DataError:
        raise
    except (
        tarfile.TarError,
        LookupError,
        MemoryError,
        OSError,
        OverflowError,
        EOFError,
        ValueError,
    ) as error:
        what = shortened(error) or type(error).__name__
        raise DataError(
            f"{path}: damaged at or after the member {shortened(name)!r} ({what}): copy the shard again from where it "
            f"came"
        ) from error
    lonely = sorted(images.keys() ^ labels.keys())
    if lonely or any(label < 0 for label in labels.values()):
        what = (
            f"{shortened(lonely[0].lstrip('/'))!r} lacks its image or its .cls label"
            if lonely
            else "a negative label"
        )
        raise DataError(f"{path}: {what}: every image needs key.jpg and key.cls")
    return [(*images[key], labels[key]) for key in images]


def _class_in(tar: tarfile.TarFile, member: tarfile.TarInfo) -> int:
    """The number in a .cls member."""
    extracted = tar.extractfile(member) if member.size <= _LABEL else None
    label = int(extracted.read()) if extracted is not None else MOST_CLASSES
    if label >= MOST_CLASSES:
        raise ValueError(f"no label below {MOST_CLASSES:,}: classes are numbered from 0 on")
    return label


def decode(raw: bytes, name: str) -> Any:
    """A Pillow RGB image from encoded bytes; a damaged one is a DataError with its name."""
    image = need("PIL.Image", "decoding images")
    try:
        return image.open(io.BytesIO(raw), formats=FORMATS).convert("RGB")
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        raise DataError(f"{name}: damaged or not an image ({error})") from error


def random_crop(image: Any, size: int, source: random.Random, resample: Resample = "bilinear") -> Tensor:
    """Random-resized crop and flip: 8 to 100 % of the area, aspect 3/4 to 4/3, as for ImageNet training."""
    width, height = image.size
    box = None
    for _ in range(10):
        area = source.uniform(0.08, 1.0) * width * height
        aspect = math.exp(source.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            x, y = source.randint(0, width - w), source.randint(0, height - h)
            box = (x, y, x + w, y + h)
            break
    if box is None:  # a very long image: the largest centred square
        side = min(width, height)
        x, y = (width - side) // 2, (height - side) // 2
        box = (x, y, x + side, y + side)
    pixels = _pixels(image.resize((size, size), resample=_RESAMPLING[resample], box=box))
    return pixels.flip(-1) if source.random() < 0.5 else pixels


def centre_crop(image: Any, size: int, resample: Resample = "bilinear") -> Tensor:
    """The centre after resizing the shorter side to size · 256/224, as for ImageNet evaluation."""
    width, height = image.size
    factor = round(size * 256 / 224) / min(width, height)
    wide, high = max(size, round(width * factor)), max(size, round(height * factor))
    x, y = (wide - size) // 2, (high - size) // 2
    resized = image.resize((wide, high), resample=_RESAMPLING[resample])
    return _pixels(resized.crop((x, y, x + size, y + size)))


def _pixels(image: Any) -> Tensor:
    return torch.from_numpy(np.asarray(image).copy()).movedim(-1, 0).contiguous()  # [3, H, W]
