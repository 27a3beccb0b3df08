"""A user's .npz file or folder of images as a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from slimbayes.containers.datasets import DataError, Dataset, Scaling, Split, Task
from slimbayes.containers.files import (
    as_fraction,
    npz_keys,
    random_split,
    read_npz,
    stratified_split,
)
from slimbayes.containers.streams import ImageTree
from slimbayes.lab.data.inputs import finite, read_image

_MOST_BYTES = 8 << 30
MOST_CLASSES = 1 << 22


def load_npz(path: Path, task: Task | None = None, test: float | str = 0.2, seed: int = 0) -> Dataset:
    """An .npz with 'inputs' and 'targets', and 'test_inputs', 'test_targets' or a fraction to test on.

    Inputs are uint8 [N, C, H, W] (or [N, H, W]) for images, numbers [N, D] for tables. Integer targets [N]
    are classes from 0 on (named by 'classes' if there), others are real. Pickled objects are refused.
    """
    keys = npz_keys(path)
    own_test = "test_inputs" in keys
    wanted = ("inputs", "targets") + (("test_inputs", "test_targets") if own_test else ())
    arrays = read_npz(path, wanted + (("classes",) if "classes" in keys else ()))
    whole = _npz_split(path, arrays["inputs"], arrays["targets"], task)
    discrete = whole.targets.ndim == 1
    if own_test:
        train, held_out = whole, _npz_split(path, arrays["test_inputs"], arrays["test_targets"], task)
        if held_out.inputs.shape[1:] != train.inputs.shape[1:] or held_out.targets.ndim != train.targets.ndim:
            raise DataError(
                f"{path}: test_inputs or test_targets are of another shape or type than the others"
            )
    else:
        number = _count(test, len(whole))
        kept, held = (
            stratified_split(whole.targets, number, seed)
            if discrete
            else random_split(len(whole), number, seed)
        )
        train, held_out = whole[kept], whole[held]
    return _dataset(path, train, held_out, _names(path, arrays.get("classes")))


def _names(path: Path, classes: np.ndarray[Any, Any] | None) -> tuple[str, ...]:
    if classes is None:
        return ()
    if classes.ndim != 1:
        raise DataError(f"{path}: 'classes' is {list(classes.shape)}; give one name for each class, [C]")
    return tuple(map(str, classes))


def _count(test: float | str, rows: int) -> int:
    fraction = as_fraction(test)
    if fraction is None:
        raise DataError(f"test={test!r}: give a fraction of the rows between 0 and 1")
    return max(1, round(fraction * rows))


def _npz_split(
    path: Path, inputs: np.ndarray[Any, Any], targets: np.ndarray[Any, Any], task: Task | None
) -> Split:
    if inputs.ndim == 0 or targets.ndim == 0:
        raise DataError(f"{path}: inputs and targets are single numbers: give one row for each example")
    if len(inputs) == 0 or len(inputs) != len(targets):
        raise DataError(
            f"{path}: {len(inputs)} inputs and {len(targets)} targets: give as many, at least one"
        )
    if 0 in inputs.shape or 0 in targets.shape:
        raise DataError(
            f"{path}: inputs are {list(inputs.shape)} and targets {list(targets.shape)}: nothing to learn from"
        )
    image = inputs.dtype == np.uint8 and inputs.ndim in (3, 4)
    if not image and inputs.ndim != 2:
        what = f"{inputs.dtype} {list(inputs.shape)}"
        raise DataError(f"{path}: inputs are {what}; give uint8 [N, C, H, W] or numbers [N, D]")
    x = torch.from_numpy(inputs[:, None] if inputs.ndim == 3 else inputs) if image else finite(path, inputs)
    discrete = targets.dtype.kind in "biu" if task is None else task == "classification"
    if not discrete:
        return Split(x, finite(path, targets.reshape(len(targets), -1)))
    if targets.ndim != 1 or targets.dtype.kind not in "biu" or int(targets.min()) < 0:
        raise DataError(
            f"{path}: targets of classes are integers [N] from 0 on; these are {targets.dtype} "
            f"{list(targets.shape)}"
        )
    if int(targets.max()) >= MOST_CLASSES:
        raise DataError(
            f"{path}: a label {int(targets.max())}: classes are numbered from 0 on, without gaps; number them anew"
        )
    return Split(x, torch.from_numpy(targets.astype(np.int64)))


def _dataset(path: Path, train: Split, test: Split, classes: tuple[str, ...]) -> Dataset:
    discrete = train.targets.ndim == 1
    if discrete:
        number = 1 + max(int(train.targets.max()), int(test.targets.max()))
        classes = classes or tuple(str(c) for c in range(number))
        if len(classes) < number:
            raise DataError(f"{path}: a label {number - 1}, but {len(classes)} class names")
    image = train.inputs.ndim == 4
    return Dataset(
        name=path.stem,
        task="classification" if discrete else "regression",
        kind="image" if image else "table",
        train=train,
        test=test,
        scaling=Scaling.of(train.inputs),
        classes=classes if discrete else (),
        features=() if image else tuple(f"x{c + 1}" for c in range(train.inputs.shape[1])),
        outputs=() if discrete else tuple(f"y{c + 1}" for c in range(train.targets.shape[1])),
        target_scaling=None if discrete else Scaling.of(train.targets),
        source=f"{path.name}: {len(train)} + {len(test)} examples.",
    )


def load_folder(path: Path, size: int | None = None, test: float | str = 0.2, seed: int = 0) -> Dataset:
    """A folder of images in memory: <class>/*.png, or train/<class>/*.png with test/ or val/ beside it.

    All images must have one shape; with ``size`` they are resized to size × size pixels. Larger sets are
    streamed: ``slimbayes.data.stream(path)``.
    """
    second = next((path / n for n in ("test", "val") if (path / n).is_dir()), None)
    if (path / "train").is_dir() and second is not None:
        tree = ImageTree(path / "train")
        train = _tree(tree, size, None)
        held_out = _tree(ImageTree(second, classes=tree.classes), size, tuple(train.inputs.shape[1:]))
    else:
        tree = ImageTree(path)
        whole = _tree(tree, size, None)
        rows = stratified_split(whole.targets, _count(test, len(whole)), seed)
        train, held_out = whole[rows[0]], whole[rows[1]]
    return _dataset(path, train, held_out, tree.classes)


def _tree(tree: ImageTree, size: int | None, shape: tuple[int, ...] | None) -> Split:
    images: list[Tensor] = []
    for file in tree.files:
        image = read_image(tree.folder / file)
        if size is not None:
            values = F.interpolate(image[None].float(), (size, size), mode="bilinear", antialias=True)
            image = values[0].round().clamp(0, 255).to(torch.uint8)
        if shape is None:
            shape = tuple(image.shape)
            if image.numel() * len(tree) > _MOST_BYTES:
                raise DataError(
                    f"{tree.folder}: too large for memory: use slimbayes.data.stream({str(tree.folder)!r})"
                )
        if tuple(image.shape) != shape:
            raise DataError(
                f"{tree.folder / file} is {list(image.shape)}, others are {list(shape)}: give size=... to "
                "resize, and images of one mode (grey or colour)"
            )
        images.append(image)
    return Split(torch.stack(images), torch.from_numpy(tree.labels))
