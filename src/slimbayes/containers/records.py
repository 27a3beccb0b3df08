"""Records of events in memory, and batches of them padded to tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from slimbayes.containers.bagging import Bagged
from slimbayes.containers.batches import batch_count, batch_rows
from slimbayes.containers.datasets import DataError, Task, fingerprint
from slimbayes.containers.files import permutation

Part = Literal["train", "validation", "test"]


class Events(NamedTuple):
    """A batch of records, padded: the arguments of ``slimbayes.models.RecordNet``, all with the batch first."""

    codes: Tensor  # int64 [B, E]: what happened; 0 pads
    levels: Tensor  # int64 [B, E]: the level of its value; 0 for none
    weights: Tensor  # float32 [B, E]: how often; 0 pads
    bags: Tensor  # int64 [B, E]: the time step, below the record's length
    ages: Tensor  # float32 [B, T]: of every time step, in bags before the prediction
    lengths: Tensor  # int64 [B]: time steps, 1 or more
    context: Tensor  # float32 [B, C]: what is known of the whole record, in network units


@dataclass(frozen=True, eq=False)
class Records:
    """Records of different lengths end to end, with their contexts and targets.

    >>> len(Records.empty(2)), Records.empty(2).padded(torch.arange(2)).lengths.tolist()
    (2, [1, 1])
    """

    codes: Tensor  # int32 [M]
    levels: Tensor  # int32 [M]
    counts: Tensor  # int32 [M]
    bags: Tensor  # int32 [M]
    offsets: Tensor  # int64 [N + 1]: the events of each record
    ages: Tensor  # float32 [bags of all records]
    starts: Tensor  # int64 [N + 1]: the bags of each record
    context: Tensor  # float32 [N, C]
    targets: Tensor  # int64 [N]
    ids: Tensor  # int64 [N]: their numbers in the source

    def __post_init__(self) -> None:
        sizes = {
            len(self.offsets) - 1,
            len(self.starts) - 1,
            len(self.context),
            len(self.targets),
            len(self.ids),
        }
        if len(sizes) != 1:
            raise DataError(f"records of {sorted(sizes)} rows: events, contexts and targets must be as many")

    @staticmethod
    def of(bagged: Bagged, context: Tensor, targets: Tensor, ids: Tensor) -> Records:
        """Events from ``bag`` with what else is known of the records."""
        columns = {name: torch.from_numpy(column) for name, column in vars(bagged).items()}
        return Records(**columns, context=context.float(), targets=targets.long(), ids=ids.long())

    @staticmethod
    def empty(rows: int) -> Records:
        """Records without events, contexts of no columns and targets 0."""
        none, ends = torch.zeros(0, dtype=torch.int32), torch.zeros(rows + 1, dtype=torch.long)
        context, targets = torch.zeros(rows, 0), torch.zeros(rows, dtype=torch.long)
        return Records(
            none, none, none, none, ends, torch.zeros(0), ends, context, targets, torch.arange(rows)
        )

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, rows: slice | Tensor) -> Records:
        """Some of the records, by a slice, row numbers or a mask."""
        device = self.targets.device
        chosen = torch.arange(len(self), device=device)[rows]
        events, offsets = _pieces(self.offsets, chosen)
        steps, starts = _pieces(self.starts, chosen)
        codes, levels, counts, bags = (c[events] for c in (self.codes, self.levels, self.counts, self.bags))
        ages, context, targets = self.ages[steps], self.context[chosen], self.targets[chosen]
        return Records(codes, levels, counts, bags, offsets, ages, starts, context, targets, self.ids[chosen])

    def to(self, device: torch.device | str) -> Records:
        """The same records on another device."""
        return Records(*(column.to(device) for column in self._columns()))

    def padded(self, rows: Tensor) -> Events:
        """These records as tensors of one length, by their longest."""
        events, offsets = _pieces(self.offsets, rows)
        steps, starts = _pieces(self.starts, rows)
        row, place = _places(offsets)
        step_row, step_place = _places(starts)
        count, most = len(rows), int(offsets.diff().max()) if len(rows) else 0
        longest = max(1, int(starts.diff().max()) if len(rows) else 0)
        codes = self.codes.new_zeros((3, count, max(1, most)), dtype=torch.long)
        for layer, column in enumerate((self.codes, self.levels, self.bags)):
            codes[layer, row, place] = column[events].long()
        weights = self.ages.new_zeros((count, max(1, most)))
        weights[row, place] = self.counts[events].float()
        ages = self.ages.new_zeros((count, longest))
        ages[step_row, step_place] = self.ages[steps]
        lengths = starts.diff().clamp(min=1)
        return Events(codes[0], codes[1], weights, codes[2], ages, lengths, self.context[rows])

    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of all columns."""
        return fingerprint(*self._columns())

    def _columns(self) -> tuple[Tensor, ...]:
        flat = (self.codes, self.levels, self.counts, self.bags, self.offsets, self.ages, self.starts)
        return (*flat, self.context, self.targets, self.ids)


class RecordBatches:
    """Batches of records with the protocol of ``Batches``: num_data, len, epoch(number, start).

    Order depends on (seed, epoch number) alone; ranks share a global batch as they do in ``Batches``.

    >>> batches = RecordBatches(Records.empty(5), batch_size=2, shuffle=False)
    >>> [len(targets) for events, targets in batches.epoch(0, start=1)]
    [2, 1]
    """

    def __init__(
        self,
        records: Records,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world: int = 1,
        drop_last: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if batch_size < 1 or world < 1 or not 0 <= rank < world or batch_size < world:
            raise DataError(
                f"batch_size={batch_size}, rank={rank}, world={world}: a batch needs a row for every rank, "
                "and ranks count from 0 to world − 1"
            )
        self.records = records if device is None else records.to(device)
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.rank, self.world = rank, world
        self._length = batch_count(len(records), batch_size, world, drop_last)
        if self._length == 0:
            raise DataError(f"{len(records)} records give no batch of {batch_size}: use a smaller batch size")

    @property
    def num_data(self) -> int:
        """How many records there are: the N that divides the KL."""
        return len(self.records)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[tuple[Events, Tensor]]:
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> Iterator[tuple[Events, Tensor]]:
        """The batches of epoch ``number`` from batch ``start`` on: (events, targets) of this rank."""
        if number < 0 or not 0 <= start <= len(self):
            raise DataError(f"epoch {number} from batch {start}: there are batches 0 to {len(self) - 1}")
        count, device = len(self.records), self.records.targets.device
        order = torch.arange(count, device=device)
        if self.shuffle:
            order = permutation(count, self.seed, "batches.order", number, device)
        for index in range(start, len(self)):
            first, end = batch_rows(index, count, self.batch_size, self.rank, self.world)
            rows = order[first:end]
            yield self.records.padded(rows), self.records.targets[rows]


@dataclass(frozen=True, eq=False)
class RecordDataset:
    """Records in three parts, and what their numbers mean: the sibling of ``Dataset`` for timed events."""

    name: str
    train: Records
    validation: Records
    test: Records
    codes: tuple[str, ...]  # names by number; 0 is padding
    levels: int  # how many levels all codes have together, with 0 for "no value"
    context: tuple[str, ...]  # the columns of Events.context
    classes: tuple[str, ...] = ("survived", "died")
    task: Task = "classification"
    source: str = ""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def num_outputs(self) -> int:
        """One per class."""
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """What a network must know: how many codes, levels and columns of the context there are."""
        return len(self.codes), self.levels, len(self.context)

    def part(self, name: Part) -> Records:
        """The records of "train", "validation" or "test"."""
        if name not in ("train", "validation", "test"):
            raise DataError(f"no part {name!r}: choose 'train', 'validation' or 'test'")
        records: Records = getattr(self, name)
        return records

    def batches(self, part: Part, batch_size: int, **options: Any) -> RecordBatches:
        """Batches of a part, shuffled if it is "train"; options as for RecordBatches."""
        return RecordBatches(self.part(part), batch_size, **{"shuffle": part == "train", **options})

    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of all three parts."""
        parts = (self.train, self.validation, self.test)
        return fingerprint(*(column for part in parts for column in part._columns()))


def _pieces(offsets: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Where the pieces offsets[r] to offsets[r + 1] of some rows lie, and their own offsets."""
    sizes = offsets[rows + 1] - offsets[rows]
    ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    begin = torch.repeat_interleave(offsets[rows] - ends[:-1], sizes)
    return begin + torch.arange(len(begin), device=begin.device), ends


def _places(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Row and place within the row of every element."""
    row = torch.repeat_interleave(offsets.diff())
    return row, torch.arange(len(row), device=row.device) - offsets[row]
