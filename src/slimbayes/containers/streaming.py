"""Streams of images as data sets and as batches."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from slimbayes.containers.batches import batch_count, batch_rows
from slimbayes.containers.datasets import DataError, Kind, Scaling, Task
from slimbayes.containers.files import find_root, missing
from slimbayes.containers.streams import ImageStream, ImageTree, OnError, Place, Resample, TarShards
from slimbayes.files import read_text

_LARGEST_NAMES = 64 << 20  # bytes of classes.txt

IMAGENET_HOME = "https://www.image-net.org/download.php"
IMAGENET_SCALING = Scaling((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 1 / 255)
IMAGENET_FILES = ("imagenet", "imagenet/train", "train", "train-*.tar")


class StreamBatches:
    """Batches of a stream with the protocol of ``Batches``: num_data, len, epoch(number, start).

    The position in the epoch, not the worker or the rank, decides order, crops and flips: ranks put together
    are the global batch, and a resumed epoch goes on with the same tensors, whatever ``workers`` is. Images
    that could not be read under on_error="skip" are left out of their batch and counted in ``skipped``; a
    batch of which no image can be read is an error all the same.
    """

    def __init__(
        self,
        stream: ImageStream,
        batch_size: int,
        scaling: Scaling = IMAGENET_SCALING,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        workers: int = 0,
        channels_last: bool = False,
    ) -> None:
        if batch_size < 1 or world < 1 or not 0 <= rank < world or batch_size < world:
            raise DataError(
                f"batch_size={batch_size}, rank={rank}, world={world}: a batch needs a row for every rank, "
                "and ranks count from 0 to world − 1"
            )
        self.stream, self.batch_size, self.scaling, self.device = stream, batch_size, scaling, device
        self.rank, self.world, self.workers, self.channels_last = rank, world, workers, channels_last
        self.skipped = 0
        self._length = batch_count(len(stream), batch_size, world, drop_last)
        if self._length == 0:
            raise DataError(f"{len(stream)} images give no batch of {batch_size}: use a smaller batch size")

    @property
    def num_data(self) -> int:
        """How many images the stream has."""
        return len(self.stream)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch ``number`` from batch ``start`` on: (scaled images, labels) of this rank."""
        if number < 0 or not 0 <= start <= len(self):
            raise DataError(f"epoch {number} from batch {start}: there are batches 0 to {len(self) - 1}")
        pinned = self.device is not None and torch.device(self.device).type == "cuda"
        loader: Any = DataLoader(
            _Readings(self.stream),
            batch_sampler=_Places(self, number, start),
            num_workers=self.workers,
            collate_fn=_collate,
            pin_memory=pinned,
            worker_init_fn=_patient,
        )
        for images, labels, errors in loader:
            if errors and (self.stream.on_error == "raise" or len(labels) == 0):
                raise DataError(
                    f"{errors[0]}; put the file back as it was and go on with resume=True (--resume), or leave out "
                    f"images that cannot be read: on_error='skip' (--data-option on_error=skip)"
                )
            self.skipped += len(errors)
            yield self._ready(images), labels.to(self.device, non_blocking=True)

    def rows(self, index: int) -> tuple[int, int]:
        """First position of this rank's part of batch ``index``, and the one after its last."""
        return batch_rows(index, len(self.stream), self.batch_size, self.rank, self.world)

    def _ready(self, images: Tensor) -> Tensor:
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return self.scaling(images.to(self.device, non_blocking=True)).contiguous(memory_format=layout)


def _patient(worker: int) -> None:
    """Let a first SIGTERM pass in a reader.

    A scheduler sends it to all processes, and the run needs its batches to end after a whole step. A second one, as a
    loader sends it that waits in vain, ends the reader.
    """

    def note(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, note)


class _Places(Sampler[list[Place]]):
    """The readings of every batch, made when they are asked for: an epoch may have a million."""

    def __init__(self, batches: StreamBatches, number: int, start: int) -> None:
        self.batches, self.number, self.start = batches, number, start

    def __len__(self) -> int:
        return len(self.batches) - self.start

    def __iter__(self) -> Iterator[list[Place]]:
        order = self.batches.stream.order(self.number)
        for index in range(self.start, len(self.batches)):
            first, end = self.batches.rows(index)
            rows = order[first:end].tolist()
            yield [Place(row, self.number, first + offset) for offset, row in enumerate(rows)]


class _Readings(TorchDataset[Any]):
    """Images, or the text of the error: an exception that crosses from a worker drags its traceback along."""

    def __init__(self, stream: ImageStream) -> None:
        self.stream = stream

    def __getitem__(self, place: Place) -> tuple[Tensor, int] | str:
        try:
            return self.stream[place]
        except DataError as error:
            return str(error)


def _collate(items: list[tuple[Tensor, int] | str]) -> tuple[Tensor, Tensor, list[str]]:
    good = [item for item in items if not isinstance(item, str)]
    images = torch.stack([image for image, _ in good]) if good else torch.empty(0)
    labels = torch.tensor([label for _, label in good], dtype=torch.long)
    return images, labels, [item for item in items if isinstance(item, str)]


@dataclass(frozen=True, eq=False)
class StreamedDataset:
    """A training and a test stream of images: the streamed sibling of ``Dataset``."""

    name: str
    train: ImageStream
    test: ImageStream
    scaling: Scaling = IMAGENET_SCALING
    task: Task = "classification"
    kind: Kind = "image"
    source: str = ""

    @property
    def classes(self) -> tuple[str, ...]:
        """Their names, in the order of the labels."""
        return self.train.classes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return (3, self.train.size, self.train.size)

    @property
    def num_outputs(self) -> int:
        """One per class."""
        return len(self.classes)

    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of all names and labels; images are not read for it."""
        digest = hashlib.sha256()
        for part in (self.train, self.test):
            for row in range(len(part)):
                digest.update(f"{part.title(row)} {part.label(row)}\n".encode())
            digest.update(b"\n")
        return digest.hexdigest()[:16]

    def batches(self, part: str, batch_size: int, **options: Any) -> StreamBatches:
        """Batches of "train" or "test"; options as for StreamBatches."""
        if part not in ("train", "test"):
            raise DataError(f"no part {part!r}: choose 'train' or 'test'")
        return StreamBatches(
            self.train if part == "train" else self.test, batch_size, self.scaling, **options
        )


def stream(
    name: str | os.PathLike[str] = "imagenet",
    root: str | os.PathLike[str] | None = None,
    size: int = 224,
    seed: int = 0,
    on_error: OnError = "raise",
    resample: Resample = "bilinear",
) -> StreamedDataset:
    """ImageNet, or any folder like it, read as it is used.

    Two layouts: a tree (train/<class>/*.jpg, and val/ or test/ likewise) or tar shards (train-000000.tar,
    ..., val-000000.tar, ... with key.jpg and key.cls). A file classes.txt beside the shards names the
    classes, one a line.

    Args:
        name: "imagenet" for the data root's folder of that name (or the root itself), or a folder's path.
        root: the data root.
        size: of the square that the network gets, in pixels.
        seed: of order and crops.
        on_error: "raise" or "skip" damaged images.
        resample: how crops are resized, "bilinear" or "bicubic".
    """
    folder = _folder(name, root)
    common: dict[str, Any] = {"size": size, "on_error": on_error, "resample": resample}
    shards, test_shards = _shards(folder, "train"), _shards(folder, "val") or _shards(folder, "test")
    train: ImageStream
    test: ImageStream
    if shards:
        names = folder / "classes.txt"
        lines = _lines(names) if names.exists() else []
        classes = tuple(line.strip() for line in lines if line.strip()) or None
        train = TarShards(shards, seed=seed, classes=classes, **common)
        if not test_shards:
            raise DataError(f"{folder}: train-*.tar but neither val-*.tar nor test-*.tar")
        test = TarShards(test_shards, train=False, classes=train.classes, **common)
    else:
        train = ImageTree(folder / "train", seed=seed, **common)
        second = next((folder / n for n in ("val", "test") if (folder / n).is_dir()), folder / "val")
        test = ImageTree(second, train=False, classes=train.classes, **common)
    text = f"{folder.name}: {len(train)} + {len(test)} images in {len(train.classes)} classes, streamed."
    return StreamedDataset(Path(name).name, train, test, source=text)


def _lines(path: Path) -> list[str]:
    try:
        return read_text(path, _LARGEST_NAMES).splitlines()
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read ({error}): write the names of the classes, one a line"
        ) from error


def _folder(name: str | os.PathLike[str], root: str | os.PathLike[str] | None) -> Path:
    if str(name) != "imagenet":
        return Path(name)
    base = find_root(root)
    found = [f for f in ((base / "imagenet", base) if base is not None else ()) if _looks_right(f)]
    if not found:
        raise missing(
            root, ("imagenet/train/<class>/*.jpg", "imagenet/train-*.tar"), "ImageNet", IMAGENET_HOME
        )
    return found[0]


def _looks_right(folder: Path) -> bool:
    return (folder / "train").is_dir() or bool(_shards(folder, "train"))


def _shards(folder: Path, part: str) -> list[Path]:
    return sorted(folder.glob(f"{part}-*.tar"))
