"""Blocks of steps of many networks as CUDA graphs, each group's on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from slimbayes.training.many.group import Group
from slimbayes.training.monitor import Row

WARM = 3  # steps in eager code first: libraries choose their kernels, the optimizer makes its state


class Replay(Protocol):
    """Work that was recorded."""

    def replay(self) -> None:
        """Do it again, with the values that its tensors have now."""


class CudaTape:
    """Records what a function gives the GPU to do, without doing it; all on one stream, in one pool of memory.

    One pool will do for several graphs, which run one after the other.
    """

    def __init__(self, group: Group) -> None:
        self.device = group.device
        self.stream = torch.cuda.Stream(self.device)
        self.stream.wait_stream(torch.cuda.current_stream(self.device))  # the group was made there
        self.pool: Any = torch.cuda.graph_pool_handle()

    def aside(self) -> AbstractContextManager[Any]:
        """Whatever is done inside goes to the stream."""
        return torch.cuda.stream(self.stream)

    def record(self, work: Callable[[], None]) -> Replay:
        """The work as a graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            work()
        return graph


class Recorded:
    """A group whose blocks are recorded once, one of the longest length and one of a single step, and replayed.

    The graphs read the step, the order of the rows and the schedules from the device. Streams let the graphs of
    several groups overlap: the kernels of small networks leave most of a GPU idle.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.tape = CudaTape(group)
        self.seen = 0  # steps in eager code
        self.graphs: dict[int, Replay] = {}

    def room(self, until: int) -> int:
        """Steps that the next block has: those of a graph there is."""
        with self.tape.aside():
            most = self.group.room(until)
        return most if most == self.group.longest and self.seen >= WARM else 1

    def advance(self, count: int) -> None:
        """Make the next ``count`` steps; the host waits for none of them."""
        with self.tape.aside():
            if self.seen < WARM:
                self.seen += count
                self.group.block(count)
            else:
                if count not in self.graphs:
                    self.group.warm(count)
                    self.graphs[count] = self.tape.record(lambda: self.group.block(count))
                self.graphs[count].replay()
        self.group.passed(count)

    def check(self) -> None:
        """As the group's, behind the work on its stream."""
        with self.tape.aside():
            self.group.check()

    def rows_of_history(self) -> dict[int, Row]:
        """As the group's, behind the work on its stream."""
        with self.tape.aside():
            return self.group.rows_of_history()
