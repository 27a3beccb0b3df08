"""What a data set is: two splits of raw tensors, and what is needed to read them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Task = Literal["classification", "regression"]
Kind = Literal["image", "table", "text"]


class DataError(ValueError):
    """Data that are missing, damaged or of another layout; the message says which, where and what to do."""


@dataclass(frozen=True, eq=False)
class Split:
    """Raw examples in memory: images uint8 [N, C, H, W], a table float32 [N, D] or tokens int64 [N, L], and targets.

    Classes are int64 [N]; real targets are float32 [N, T] in their original units.

    >>> len(Split(torch.zeros(3, 4), torch.zeros(3, dtype=torch.long)))
    3
    """

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise DataError(
                f"{len(self.inputs)} inputs but {len(self.targets)} targets: give one target each"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: slice | Tensor) -> Split:
        """Some of the examples."""
        return Split(self.inputs[rows], self.targets[rows])

    def to(self, device: torch.device | str) -> Split:
        """The same examples on another device."""
        return Split(self.inputs.to(device), self.targets.to(device))

    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of inputs and targets."""
        return fingerprint(self.inputs, self.targets)


@dataclass(frozen=True)
class Scaling:
    """The affine map from raw to network units and back: z = (x · unit − mean) / std.

    ``unit`` is 1/255 for uint8 images. One mean and std per channel (images) or column (tables, targets). Without
    any, ``Scaling((), ())``, it leaves raw data as they are: tokens are no quantities.

    >>> scaling = Scaling(mean=(1.0, 2.0), std=(2.0, 4.0))
    >>> scaling(torch.tensor([[3.0, 2.0]])), scaling.undo(torch.tensor([[1.0, 0.0]]))
    (tensor([[1., 0.]]), tensor([[3., 2.]]))
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    unit: float = 1.0

    def __call__(self, raw: Tensor) -> Tensor:
        """Raw values in network units, float32."""
        if not self.mean:
            return raw
        mean, std = self._rows(raw)
        return (raw.float() * self.unit - mean) / std

    def undo(self, scaled: Tensor) -> Tensor:
        """Network units back to raw ones."""
        if not self.mean:
            return scaled
        mean, std = self._rows(scaled)
        return (scaled * std + mean) / self.unit

    def _rows(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if like.ndim < 2 or like.shape[1] != len(self.mean):
            raise DataError(
                f"this scaling has {len(self.mean)} columns or channels, the data are {list(like.shape)}: "
                f"give [N, {len(self.mean)}, ...]"
            )
        shape = (1, len(self.mean)) + (1,) * (like.ndim - 2)
        options: dict[str, Any] = {"device": like.device, "dtype": torch.float32}
        return torch.tensor(self.mean, **options).view(shape), torch.tensor(self.std, **options).view(shape)

    @staticmethod
    def of(raw: Tensor) -> Scaling:
        """Mean and standard deviation of raw data, per channel or column; constant columns keep their unit.

        >>> Scaling.of(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
        Scaling(mean=(2.0, 5.0), std=(1.0, 1.0), unit=1.0)
        """
        unit = 1.0 / 255.0 if raw.dtype == torch.uint8 else 1.0
        columns = raw.movedim(1, 0).flatten(1)  # [columns, N · pixels]
        mean = torch.stack([column.double().mean() for column in columns]) * unit
        std = torch.stack([column.double().std(correction=0) for column in columns]) * unit
        # The rounding of the mean gives a constant column a spread of about 1e-16 of its value, not always 0.
        std = torch.where((std > 1e-9 * mean.abs()) & (std > 0), std, torch.ones_like(std))
        return Scaling(tuple(mean.tolist()), tuple(std.tolist()), unit)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Two splits with their task, names, scaling and origin; ``slimbayes.data.load(name)`` gives one."""

    name: str
    task: Task
    kind: Kind
    train: Split
    test: Split
    scaling: Scaling  # of the inputs, from the training split (or the literature's constants)
    classes: tuple[str, ...] = ()  # classification: their names, in the order of the labels
    features: tuple[str, ...] = ()  # tables: the columns' names
    outputs: tuple[str, ...] = ()  # regression: the targets' names
    target_scaling: Scaling | None = None  # regression
    augment: tuple[str, ...] = ()  # what training may do to images: "crop", "flip"
    pad: int = 2  # of "crop": pixels on each side
    source: str = ""  # one sentence: where the data are from, and what is special about them
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train.inputs.shape[1:])

    @property
    def num_outputs(self) -> int:
        """How many numbers a network must give: one per class, or one per target."""
        return len(self.classes) if self.task == "classification" else self.train.targets.shape[1]

    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of all inputs and targets."""
        return fingerprint(self.train.inputs, self.train.targets, self.test.inputs, self.test.targets)


def fingerprint(*tensors: Tensor) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of types, shapes and contents.

    >>> fingerprint(torch.zeros(2)) == fingerprint(torch.zeros(2, 1))
    False
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]
