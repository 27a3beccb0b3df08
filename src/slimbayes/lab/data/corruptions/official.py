"""The official corrupted test sets, CIFAR-10-C and CIFAR-100-C, read from their .npy files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slimbayes.containers.datasets import DataError
from slimbayes.lab.data.corruptions.tables import place

_WHERE = (
    "download CIFAR-10-C from Zenodo record 2535967 or CIFAR-100-C from Zenodo record 3555552, "
    "unpack the .tar file, and give the folder that holds the .npy files"
)
_IMAGES = 10_000  # per severity


def load_official(folder: str | os.PathLike[str], name: str, severity: int) -> tuple[Tensor, Tensor]:
    """The 10,000 official test images of one corruption and severity, and their classes.

    Rows (severity − 1) · 10,000 onwards of ``name.npy`` [50000, 32, 32, 3]; only these are read from disk.

    Returns:
        Images uint8 [10000, 3, 32, 32] and classes int64 [10000].

    >>> load_official("nowhere", "fog", 1)
    Traceback (most recent call last):
    slimbayes.containers.datasets.DataError: no file fog.npy in nowhere: download CIFAR-10-C from ...
    """
    start = place(name, severity) * _IMAGES
    rows = slice(start, start + _IMAGES)
    images = _opened(Path(folder), f"{name}.npy", np.dtype(np.uint8), ((5 * _IMAGES, 32, 32, 3),))
    labels = _opened(Path(folder), "labels.npy", None, ((5 * _IMAGES,), (_IMAGES,)))
    classes = np.array(labels[rows] if len(labels) > _IMAGES else labels, dtype=np.int64)
    pixels = np.ascontiguousarray(images[rows].transpose(0, 3, 1, 2))  # [10000, 3, 32, 32]
    return torch.from_numpy(pixels), torch.from_numpy(classes)


def _opened(
    folder: Path, file: str, dtype: np.dtype[np.uint8] | None, shapes: tuple[tuple[int, ...], ...]
) -> np.ndarray:
    path = folder / file
    if not path.is_file():
        raise DataError(f"no file {file} in {folder}: {_WHERE}")
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path} is damaged or not a .npy file ({error}): {_WHERE}") from error
    if not isinstance(array, np.ndarray):  # np.load reads archives too
        raise DataError(f"{path} is an archive, not a .npy file: {_WHERE}")
    kind_fits = array.dtype == dtype if dtype is not None else array.dtype.kind in "iu"
    if array.shape not in shapes or not kind_fits:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise DataError(
            f"{path} holds {array.dtype} {list(array.shape)}, not {dtype or 'integers'} {wanted}: {_WHERE}"
        )
    return array
