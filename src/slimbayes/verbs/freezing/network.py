"""A frozen model: the network with every draw's tensors fixed, run on all draws at once."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slimbayes.core.context import Draw, RowError


@dataclass
class Call:
    """One call of a frozen model: its batch, how often each mask has been used so far, and the draw of other noise."""

    batch: Any  # an integer, or a symbol while a program is traced
    used: dict[str, int] = field(default_factory=dict)
    draw: Draw | None = None

    def number(self, source: str) -> int:
        """The number of this use of ``source``; the next one has the next."""
        count = self.used.get(source, 0)
        self.used[source] = count + 1
        return count


CALL: ContextVar[Call | None] = ContextVar("slimbayes_frozen_call", default=None)  # one for each thread


class Frozen(nn.Module):
    """f_d(x) for d = 1 … draws: outputs ``[draws, batch, ...]``, the same in every call, nothing random.

    ``network`` is the model's own code with plain tensors in the place of everything random. Of ``draws`` functions
    ``distinct`` differ; the others are copies, as samples of a method without noise are. It stays in evaluation mode.
    """

    def __init__(
        self,
        network: nn.Module,
        draws: int,
        distinct: int,
        masked: bool,
        shared_inputs: Sequence[str | int],
        late: tuple[bool, ...] | None,
        arguments: Sequence[str],
        metadata: dict[str, Any],
    ) -> None:
        super().__init__()
        self.network = network
        self.draws = draws
        self.distinct = distinct
        self.masked = masked
        self.shared_inputs = tuple(shared_inputs)
        self.late = late  # None: inputs are repeated here; else which outputs no draw has touched
        self.arguments = tuple(arguments)  # names of the network's inputs, in order
        self.metadata = metadata
        super().train(False)

    def train(self, mode: bool = True) -> Frozen:
        """Nothing: a frozen model is for prediction."""
        return self

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Outputs [draws, batch, ...], in the network's own structure."""
        leaves, spec = pytree.tree_flatten((inputs, named))
        whole = self._whole(inputs, named)
        batch = _batch(leaves, whole)
        if self.late is None:
            leaves = [
                repeat_rows(leaf, self.distinct) if i not in whole and _has_rows(leaf, batch) else leaf
                for i, leaf in enumerate(leaves)
            ]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        if not self.masked:
            return self._unfold(self.network(*args, **kwargs), batch)
        token = CALL.set(Call(batch))
        try:
            return self._unfold(self.network(*args, **kwargs), batch)
        finally:
            CALL.reset(token)

    def _whole(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> set[int]:
        """Positions, among the leaves of all inputs, of what is never repeated."""
        if not self.shared_inputs:
            return set()
        names = self.arguments
        found: set[int] = set()
        start = 0
        for key, value in [*enumerate(inputs), *named.items()]:
            count = len(pytree.tree_leaves(value))
            name = names[key] if isinstance(key, int) and key < len(names) else key
            if key in self.shared_inputs or name in self.shared_inputs:
                found.update(range(start, start + count))
            start += count
        return found

    def _unfold(self, output: Any, batch: Any) -> Any:
        leaves, spec = pytree.tree_flatten(output)
        unfolded = 0
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor) or leaf.dim() == 0:
                continue
            if self.late is not None and i < len(self.late) and self.late[i]:
                leaf = repeat_rows(leaf, self.distinct)
            if leaf.shape[0] % (self.distinct * batch) == 0:
                rows = leaf.shape[0] // self.distinct
                leaves[i] = self._copied(leaf.unflatten(0, (self.distinct, rows)))
                unfolded += 1
        if not unfolded:
            shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
            raise RowError(
                f"no output of the frozen model has the {self.distinct} x {batch} rows of its draws in its first "
                f"dimension (output shapes: {shapes}); the network must keep the batch outermost"
            )
        return pytree.tree_unflatten(leaves, spec)

    def _copied(self, y: Tensor) -> Tensor:
        """[distinct, B, ...] to [draws, B, ...], the copies of a component next to each other."""
        copies = self.draws // self.distinct
        return y if copies == 1 else y.repeat_interleave(copies, 0)


def repeat_rows(rows: Tensor, draws: int) -> Tensor:
    """[B, ...] to [draws·B, ...], by an operation that asks nothing of the layout in memory, which tracing would note.

    >>> repeat_rows(torch.tensor([1, 2]), 2)
    tensor([1, 2, 1, 2])
    """
    return rows.repeat(draws, *[1] * (rows.dim() - 1))


def _batch(leaves: list[Any], whole: set[int]) -> Any:
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and i not in whole:
            if leaf.dim() == 0:
                raise ValueError("the first input is a scalar; inputs need a batch axis first")
            return leaf.shape[0]
    raise ValueError("a frozen model got no tensor input to take the batch size from")


def _has_rows(leaf: Any, batch: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and bool(leaf.shape[0] == batch)


def fixed(size: Any) -> int:
    """A size as a number; an error where it is a symbol of a traced program, which no stored mask can follow."""
    if isinstance(size, torch.SymInt):
        known: int | None = size.node.maybe_as_int()
        if known is None:
            raise ValueError(
                "this network draws dropout masks of the size of its inputs, which are fixed in a frozen model: export "
                "it with a dynamic batch only, not with dynamic lengths or image sizes"
            )
        return known
    return int(size)
