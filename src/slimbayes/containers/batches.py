"""Batches that live on the device: their order and augmentation are functions of (seed, epoch, batch)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from slimbayes.containers.datasets import DataError, Scaling, Split
from slimbayes.containers.files import permutation
from slimbayes.core.keyed_noise import layer_key, philox

AUGMENTATIONS = ("crop", "flip")


class Batches:
    """Batches of one split, scaled, shuffled and augmented on its device.

    Nothing advances between epochs: order and augmentation depend on (seed, epoch number, position in the
    epoch) alone, so a run resumed at batch ``start`` sees the same tensors bit for bit. With ``world`` ranks,
    rank r gets rows [⌊r·b/world⌋, ⌊(r+1)·b/world⌋) of every global batch of b rows, augmented as without
    ranks. Where ``world`` does not divide b, ranks differ by one row: weight their means by their rows. A
    last batch with fewer rows than ranks is dropped on all of them, so that no rank is left without a row.

    Args:
        split: raw examples; moved to ``device`` once (images stay uint8 there).
        batch_size: rows of a global batch, over all ranks.
        scaling: of the inputs; None leaves them raw, as float32.
        target_scaling: of real targets; None leaves them as they are.
        seed: of order and augmentation.
        shuffle: a new order every epoch; False keeps the split's.
        augment: any of "crop" (zero padding of raw pixels, then a crop at a random offset) and "flip"
            (left to right, half of the time).
        rank, world: this process and how many there are.
        drop_last: leave out a last short batch.
        device: where the batches are made; None is where the split is.
        pad: of "crop", in pixels on each side.
        channels_last: give images in torch.channels_last layout.

    >>> split = Split(torch.arange(10.0)[:, None], torch.zeros(10, dtype=torch.long))
    >>> batches = Batches(split, batch_size=4, shuffle=False)
    >>> [inputs[:, 0].tolist() for inputs, targets in batches.epoch(0, start=1)]
    [[4.0, 5.0, 6.0, 7.0], [8.0, 9.0]]
    """

    def __init__(
        self,
        split: Split,
        batch_size: int,
        scaling: Scaling | None = None,
        target_scaling: Scaling | None = None,
        seed: int = 0,
        shuffle: bool = True,
        augment: tuple[str, ...] = (),
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        pad: int = 2,
        channels_last: bool = False,
    ) -> None:
        _check(split, batch_size, tuple(augment), rank, world, pad)
        self.split = split if device is None else split.to(device)
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.scaling, self.target_scaling = scaling, target_scaling
        self.augment, self.pad, self.channels_last = tuple(augment), pad, channels_last
        self.rank, self.world = rank, world
        self._length = batch_count(len(split), batch_size, world, drop_last)
        if self._length == 0:
            raise DataError(
                f"{len(split)} examples give no batch of {batch_size} rows for {world} ranks"
                f"{' with drop_last' if drop_last else ''}: use a smaller batch size"
            )

    @property
    def num_data(self) -> int:
        """How many examples the split has: the N that divides the KL."""
        return len(self.split)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of epoch ``number`` from batch ``start`` on: (inputs, targets) of this rank."""
        if number < 0 or not 0 <= start <= len(self):
            raise DataError(f"epoch {number} from batch {start}: there are batches 0 to {len(self) - 1}")
        order = self.order(number)
        # For the whole epoch at once: sixty small kernels per epoch, not per batch.
        words = (
            draws(self.seed, number, torch.arange(len(order), device=order.device)) if self.augment else order
        )
        for index in range(start, len(self)):
            first, end = self.rows(index)
            yield self._examples(order[first:end], words[..., first:end])

    def order(self, number: int) -> Tensor:
        """The row of the split at every position of epoch ``number``, on the split's device."""
        count, device = len(self.split), self.split.inputs.device
        if not self.shuffle:
            return torch.arange(count, device=device)
        return permutation(count, self.seed, "batches.order", number, device)

    def rows(self, index: int) -> tuple[int, int]:
        """First position of this rank's part of batch ``index``, and the one after its last."""
        return batch_rows(index, len(self.split), self.batch_size, self.rank, self.world)

    def _examples(self, rows: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = self.split.inputs[rows], self.split.targets[rows]
        if self.augment:
            inputs = augmented(inputs, self.augment, words, self.pad)
        if self.scaling is not None:
            inputs = self.scaling(inputs)
        elif inputs.dtype is torch.uint8:  # pixels; whole numbers of other types are indices, and stay so
            inputs = inputs.float()
        if self.channels_last and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        if self.target_scaling is not None:
            targets = self.target_scaling(targets)
        return inputs, targets


def batch_count(count: int, batch_size: int, world: int, drop_last: bool) -> int:
    """Batches of an epoch; a last short one counts if it has a row for every rank.

    >>> batch_count(10, 4, 2, drop_last=False), batch_count(9, 4, 2, drop_last=False)
    (3, 2)
    """
    whole, rest = divmod(count, batch_size)
    return whole + int(rest >= world and not drop_last)


def batch_rows(index: int, count: int, batch_size: int, rank: int, world: int) -> tuple[int, int]:
    """First position of a rank's part of a batch of the epoch, and the one after its last.

    >>> batch_rows(1, 10, 4, rank=1, world=2)
    (6, 8)
    """
    first = index * batch_size
    size = min(batch_size, count - first)
    low, high = (r * size // world for r in (rank, rank + 1))
    return first + low, first + high


def draws(seed: int, epoch: int, positions: Tensor) -> Tensor:
    """Three random 32-bit words [3, N] per position: for the offset down, the offset right and the flip.

    >>> draws(0, 0, torch.arange(5)).shape
    torch.Size([3, 5])
    """
    zero = torch.zeros((), dtype=torch.long, device=positions.device)
    words = philox((positions, zero + epoch, zero, zero), layer_key(seed, "batches.augment"))
    return torch.stack(words[:3])


def augmented(images: Tensor, names: tuple[str, ...], words: Tensor, pad: int = 2) -> Tensor:
    """Crop and flip images [N, C, H, W], each by its own three ``words``, of ``draws``.

    With offsets a, b uniform on {−pad, …, pad} and a fair bit f:
    out[i, j] = image[i + a, j′ + b], j′ = W − 1 − j if f else j, and 0 outside the image.

    >>> image = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3)
    >>> augmented(image, ("flip",), torch.tensor([[0], [0], [1 << 31]]))[0, 0].tolist()
    [[3, 2, 1], [6, 5, 4], [9, 8, 7]]
    """
    count, channels, height, width = images.shape
    device = images.device
    y = torch.arange(height, device=device).expand(count, -1)  # [N, H]
    x = torch.arange(width, device=device).expand(count, -1)  # [N, W]
    if "flip" in names:
        x = torch.where((words[2] >> 31)[:, None] == 1, width - 1 - x, x)
    if "crop" in names:
        side = 2 * pad + 1
        y = y + (words[0] * side >> 32)[:, None] - pad
        x = x + (words[1] * side >> 32)[:, None] - pad
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None]  # [N, H, W]
    source = y.clamp(0, height - 1)[:, :, None] * width + x.clamp(0, width - 1)[:, None]  # [N, H, W]
    index = source.flatten(1)[:, None].expand(-1, channels, -1)  # [N, C, H·W]
    moved = images.flatten(2).gather(2, index).view(images.shape)  # [N, C, H, W]
    return moved * inside[:, None]


def _check(split: Split, batch_size: int, augment: tuple[str, ...], rank: int, world: int, pad: int) -> None:
    if len(split) == 0:
        raise DataError("the split is empty: there is nothing to batch")
    if batch_size < 1 or world < 1 or not 0 <= rank < world or batch_size < world:
        raise DataError(
            f"batch_size={batch_size}, rank={rank}, world={world}: a batch needs a row for every rank, "
            "and ranks count from 0 to world − 1"
        )
    unknown = [name for name in augment if name not in AUGMENTATIONS]
    if unknown:
        raise DataError(f"augment={augment}: {unknown[0]!r} is not one of {', '.join(AUGMENTATIONS)}")
    if augment and split.inputs.ndim != 4:
        raise DataError(f"augment={augment} is for images [N, C, H, W]; these are {list(split.inputs.shape)}")
    if pad < 0:
        raise DataError(f"pad={pad}: give a number of pixels, 0 or more")
