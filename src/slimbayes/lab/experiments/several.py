"""The processes of a session: one, or several that train and measure a network together."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from slimbayes.training import Training, make_fabric

T = TypeVar("T")


@functools.cache  # the others are started once, whatever sessions follow
def _launched(devices: int, num_nodes: int, accelerator: str, precision: str) -> Any:
    fabric = make_fabric(
        Training(devices=devices, num_nodes=num_nodes, accelerator=accelerator, precision=precision)
    )
    fabric.launch()
    return fabric


def is_first() -> bool:
    """Whether this process is the only one, or the first of several."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


class Processes:
    """This process, and after ``launch`` the others that work on the same networks.

    Fabric starts them with this program's own command, or they were started by torchrun, which then says how many they
    are. What is on disk may change between the looks of two processes, so that the first decides for all (``agreed``).

    >>> alone = Processes()
    >>> alone.number, alone.first, alone.agreed("yes"), alone.gathered(3)
    (1, True, 'yes', [3])
    """

    def __init__(self, devices: int = 1, num_nodes: int = 1) -> None:
        if devices < 1 or num_nodes < 1:
            raise ValueError(f"devices={devices}, num_nodes={num_nodes}: give at least 1 of each")
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))  # torchrun's
        if local:
            devices, num_nodes = local, int(os.environ.get("WORLD_SIZE", local)) // local
        self.devices, self.num_nodes = devices, num_nodes
        self.fabric: Any = None

    @property
    def number(self) -> int:
        """How many there are to be."""
        return self.devices * self.num_nodes

    @property
    def rank(self) -> int:
        """Which this is, from 0."""
        return 0 if self.fabric is None else int(self.fabric.global_rank)

    @property
    def first(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def launch(self, training: Training) -> None:
        """Start the others, if there are to be some and they are not there; all have the precision of ``training``."""
        if self.number > 1 and self.fabric is None:
            self.fabric = _launched(self.devices, self.num_nodes, training.accelerator, training.precision)

    def meet(self) -> None:
        """Wait until all are here."""
        if self.fabric is not None:
            self.fabric.barrier()

    def agreed(self, value: T) -> T:
        """The first process's value, in all of them."""
        return value if self.fabric is None else self.fabric.broadcast(value)

    def gathered(self, value: T) -> list[T]:
        """The values of all, by rank."""
        if self.fabric is None:
            return [value]
        found: list[Any] = [None] * self.number
        dist.all_gather_object(found, value)
        return found

    def by_first(self, act: Callable[[], object]) -> None:
        """Do something in the first process alone; what it raises is raised in all, so that none waits for another."""
        error: Exception | None = None
        if self.first:
            try:
                act()
            except Exception as found:
                error = found
        error = self.agreed(error)
        if error is not None:
            raise error
