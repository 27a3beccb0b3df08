"""Data from elsewhere: inputs that a model of this data set should be unsure about."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slimbayes.containers.datasets import Dataset
from slimbayes.containers.files import locate, need, permutation

_MOST = 1000  # patches of the photographs


@dataclass(frozen=True, eq=False)
class OutOfDistribution:
    """Raw inputs of the data set's shape that belong to none of its classes, or lie far from it."""

    name: str
    description: str
    inputs: Tensor

    def __len__(self) -> int:
        return len(self.inputs)


def out_of_distribution(
    dataset: Dataset, root: str | os.PathLike[str] | None = None
) -> OutOfDistribution | None:
    """Data from elsewhere that fit the network's input, or None.

    MNIST and CIFAR: street-view house numbers (svhn_test.npz) if the data root has them. Other images, and
    these without a root: patches of scikit-learn's two photographs. Tables with classes: the test columns
    permuted independently and stretched ×2 about the mean. Regression: every test column moved outwards by
    one training range, past all training values.

    >>> from slimbayes.lab.data import load
    >>> out_of_distribution(load("digits")).inputs.shape[1:]
    torch.Size([1, 8, 8])
    """
    if dataset.kind == "text":
        return None
    if dataset.kind == "table":
        return _far(dataset) if dataset.task == "regression" else _shuffled(dataset)
    if dataset.name in ("mnist", "cifar10", "cifar100") and locate(root, ("svhn_test.npz",)) is not None:
        from slimbayes.lab.data.images import load_images

        images = load_images("svhn", root)
        return OutOfDistribution(
            "svhn", "street-view house numbers (test set)", fitted(images, dataset.shape)
        )
    channels, height, width = dataset.shape
    if channels not in (1, 3) or min(height, width) > 200:
        return None
    return OutOfDistribution(
        "photographs", "patches of two photographs (scikit-learn)", _patches(channels, height, width)
    )


def fitted(images: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Images [N, 3, ...] in another shape: grey by ITU-R 601 luma, resized by antialiased bilinear filtering.

    >>> fitted(torch.full((1, 3, 4, 4), 100, dtype=torch.uint8), (1, 2, 2)).flatten().tolist()
    [100, 100, 100, 100]
    """
    values = images.float()
    if shape[0] == 1 and images.shape[1] == 3:
        weights = torch.tensor([0.299, 0.587, 0.114], device=images.device).view(1, 3, 1, 1)
        values = (values * weights).sum(1, keepdim=True)
    if tuple(values.shape[-2:]) != tuple(shape[-2:]):
        values = F.interpolate(values, size=shape[-2:], mode="bilinear", antialias=True, align_corners=False)
    return values.round().clamp(0, 255).to(torch.uint8)


def _patches(channels: int, height: int, width: int) -> Tensor:
    """Overlapping patches [N, C, H, W] of the photographs, reduced so that a patch shows some structure."""
    need("PIL", "reading scikit-learn's photographs")
    photographs = need("sklearn.datasets", "out-of-distribution patches").load_sample_images().images
    found = []
    for photograph in photographs:
        image = torch.from_numpy(photograph.copy()).movedim(-1, 0)[None]  # [1, 3, 427, 640]
        factor = 4 if height <= 16 else 2 if height <= 64 else 1
        image = fitted(image, (channels, image.shape[-2] // factor, image.shape[-1] // factor))
        steps = max(1, height // 2), max(1, width // 2)
        windows = image[0].unfold(1, height, steps[0]).unfold(2, width, steps[1])  # [C, rows, columns, H, W]
        found.append(windows.flatten(1, 2).movedim(1, 0))  # [rows · columns, C, H, W]
    patches = torch.cat(found)
    return patches[permutation(len(patches), 0, "patches")[:_MOST]].contiguous()


def _shuffled(dataset: Dataset) -> OutOfDistribution:
    inputs = dataset.test.inputs
    columns = [
        inputs[permutation(len(inputs), 0, "shuffled", column).to(inputs.device), column]
        for column in range(inputs.shape[1])
    ]
    mean = torch.tensor(dataset.scaling.mean, device=inputs.device) / dataset.scaling.unit
    stretched = mean + 2 * (torch.stack(columns, 1) - mean)
    return OutOfDistribution("shuffled", "columns shuffled and stretched ×2", stretched)


def _far(dataset: Dataset) -> OutOfDistribution:
    train, inputs = dataset.train.inputs, dataset.test.inputs
    low, high = train.amin(0), train.amax(0)
    middle = (low + high) / 2
    outwards = torch.where(inputs >= middle, high - low, low - high)
    return OutOfDistribution("far", "every column moved outwards by one training range", inputs + outwards)
