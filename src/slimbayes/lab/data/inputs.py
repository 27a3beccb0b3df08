"""Inputs to predict on: tables, image files and arrays, checked against what the model was trained on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimbayes.containers.archives import check_ordinary
from slimbayes.containers.datasets import DataError, Dataset
from slimbayes.containers.files import need, npz_keys, read_npz
from slimbayes.containers.streams import FORMATS, SUFFIXES, centre_crop, decode
from slimbayes.files import shortened
from slimbayes.lab.data.columns import read_table


def read_inputs(
    path: str | os.PathLike[str], facts: Dataset | Mapping[str, Any]
) -> tuple[Tensor, tuple[str, ...]]:
    """Raw inputs of a file or folder, and a name for each: a row number, or a file name.

    Images: a folder of png or jpg files, one image, or an .npz with uint8 'inputs' or 'images'. Tables: CSV
    or Parquet with the model's columns in any order, or an .npz with 'inputs' [N, D]. Texts: an .npz with
    whole numbers 'inputs' [N, length]. A wrong shape, a missing column, NaN or an empty file is a DataError.

    Args:
        path: what to read.
        facts: the data set that the model knows, or a mapping with its "kind", "shape" and "features"; with
            "crop" images of any size are resized and cropped as ``stream`` does for testing.

    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "rows.csv"
    >>> _ = file.write_text("y,x\\n2,1\\n")
    >>> read_inputs(file, {"kind": "table", "shape": [2], "features": ["x", "y"]})
    (tensor([[1., 2.]]), ('1',))
    """
    path = Path(path)
    kind, shape, features = _facts(facts)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder (looked in {path.parent.absolute()})")
    if path.suffix.lower() == ".npz":
        inputs = _array(path, kind, shape)
    elif kind == "text":
        raise DataError(
            f"{path}: this model wants tokens: an .npz with whole numbers 'inputs' [N, {shape[0]}]"
        )
    elif kind == "table":
        if path.is_dir():
            raise DataError(f"{path} is a folder; this model wants a table: a CSV, Parquet or .npz file")
        inputs, _ = read_table(path, features)
    else:
        crop = not isinstance(facts, Dataset) and bool(facts.get("crop"))
        return _images(path, shape, crop)
    return inputs, tuple(str(row + 1) for row in range(len(inputs)))


def _facts(facts: Dataset | Mapping[str, Any]) -> tuple[str, tuple[int, ...], Sequence[str]]:
    if isinstance(facts, Dataset):
        return facts.kind, facts.shape, facts.features
    return str(facts["kind"]), tuple(int(n) for n in facts["shape"]), tuple(facts.get("features") or ())


def _array(path: Path, kind: str, shape: tuple[int, ...]) -> Tensor:
    keys = npz_keys(path)
    key = next((name for name in ("inputs", "images") if name in keys), None)
    if key is None:
        raise DataError(f"{path}: no array 'inputs' or 'images'; it has {shortened(', '.join(keys))}")
    array = read_npz(path, (key,))[key]
    if kind == "image" and array.ndim == 3 and len(shape) == 3 and shape[0] == 1:
        array = array[:, None]  # grey images [N, H, W]
    check_shape(path, tuple(array.shape), shape)
    if kind == "image":
        if array.dtype != np.uint8:
            raise DataError(f"{path}: {key!r} is {array.dtype}; give images as uint8, 0 to 255")
        return torch.from_numpy(array)
    if kind == "text":
        if array.dtype.kind not in "iu" or (len(array) and int(array.min()) < 0):
            raise DataError(f"{path}: {key!r} is {array.dtype}; give tokens as whole numbers from 0 on")
        return torch.from_numpy(array.astype(np.int64))
    return finite(path, array)


def finite(path: Path, array: np.ndarray[Any, Any]) -> Tensor:
    """Numbers [N, D] as float32; NaN, infinity and other types are a DataError."""
    if array.dtype.kind not in "biuf":
        raise DataError(f"{path}: an array of {array.dtype}; give numbers")
    with np.errstate(over="ignore"):  # 1e300 becomes infinite, and is reported below
        values = array.astype(np.float32)
    bad = ~np.isfinite(values)
    if bad.any():
        row, column = (int(n) for n in np.argwhere(bad.reshape(len(array), -1))[0])
        raise DataError(
            f"{path}: {int(bad.sum())} values are NaN or infinite, the first in row {row + 1}, column "
            f"{column + 1}: drop those rows, or fill them in (impute) before"
        )
    return torch.from_numpy(values)


def check_shape(path: Path, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise unless ``found`` is [N, *shape] with N of 1 or more."""
    if found[1:] != shape or len(found) < 2:
        raise DataError(
            f"{path}: the inputs are {list(found)}, the model wants [N, {', '.join(map(str, shape))}]"
        )
    if found[0] == 0:
        raise DataError(f"{path}: it has no rows")


def _images(path: Path, shape: tuple[int, ...], crop: bool) -> tuple[Tensor, tuple[str, ...]]:
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix.lower() in SUFFIXES)
        if not files:
            raise DataError(f"{path}: no images ({', '.join(SUFFIXES)}) in this folder")
    else:
        files = [path]
    # Streamed sets have images of many sizes: the model learnt on their centres, and gets those here too.
    images = [
        centre_crop(decode(_bytes(f), str(f)), shape[-1]) if crop else read_image(f, shape) for f in files
    ]
    return torch.stack(images), tuple(f.name for f in files)


def _bytes(path: Path) -> bytes:
    check_ordinary(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def read_image(path: Path, shape: tuple[int, ...] | None = None) -> Tensor:
    """One image file as uint8 [C, H, W]: grey has one channel, all else three; another shape is an error."""
    image = need("PIL.Image", "reading images")
    check_ordinary(path)
    try:
        with image.open(path, formats=FORMATS) as opened:
            picture = opened.convert("L" if opened.mode in ("1", "L", "LA") else "RGB")
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError, struct.error, ...
        raise DataError(f"{path}: damaged or not an image ({error})") from error
    pixels = torch.from_numpy(np.array(picture))
    pixels = pixels[None] if pixels.ndim == 2 else pixels.movedim(-1, 0).contiguous()  # [C, H, W]
    if shape is not None and tuple(pixels.shape) != shape:
        wanted, found = (" × ".join(map(str, s)) for s in (shape, tuple(pixels.shape)))
        raise DataError(
            f"{path}: the image is {found} (channels × height × width), the model wants {wanted}: "
            "convert it before"
        )
    return pixels
