"""Tensors of which each thread may see its own version, so that several run one network with different tensors.

To put a member's tensors into the modules and the stack back, as ``torch.func.functional_call`` does, is seen by
whoever looks at these modules meanwhile: other threads' predictions, what saves them, what looks at their buffers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import nn


class InUse(threading.local):
    """What stands for a tensor in this thread, by the tensor's id; None where nothing does."""

    versions: dict[int, Any] | None = None

    def __init__(self) -> None:
        self.versions = None

    def __reduce__(self) -> tuple[type[InUse], tuple[()]]:
        return InUse, ()  # a copy of the network, also in another process, is in nobody's use

    @contextlib.contextmanager
    def using(self, versions: dict[int, Any]) -> Iterator[None]:
        """Let these stand for the tensors inside the with block, in this thread."""
        outer, self.versions = self.versions, versions
        try:
            yield
        finally:
            self.versions = outer


class Store(dict[str, Any]):
    """A module's parameters or buffers, of which a thread sees the versions that it uses.

    >>> layer = nn.Linear(3, 1)
    >>> in_use = watch(layer)
    >>> with in_use.using({id(layer.bias): "another"}):
    ...     layer.bias
    'another'
    >>> layer.bias.shape
    torch.Size([1])
    """

    in_use = InUse()

    def __getitem__(self, name: str) -> Any:
        value, versions = dict.__getitem__(self, name), self.in_use.versions
        return value if versions is None else versions.get(id(value), value)

    def __setitem__(self, name: str, value: Any) -> None:
        versions = self.in_use.versions
        if versions is not None and name in self and id(dict.__getitem__(self, name)) in versions:
            versions[id(dict.__getitem__(self, name))] = value
        else:
            dict.__setitem__(self, name, value)

    def get(self, name: str, default: Any = None) -> Any:
        """What this thread sees, or the default."""
        return self[name] if name in self else default  # noqa: SIM401  # which is this

    def copy(self) -> dict[str, Any]:
        """A plain dict of what this thread sees."""
        return {name: self[name] for name in self}

    def items(self) -> Any:
        """Names and what this thread sees."""
        return dict.items(self) if self.in_use.versions is None else self.copy().items()

    def values(self) -> Any:
        """What this thread sees."""
        return dict.values(self) if self.in_use.versions is None else self.copy().values()


def watch(root: nn.Module) -> InUse:
    """Let threads see versions of all tensors of a network, where they use them."""
    in_use = InUse()
    for module in root.modules():
        for name in ("_parameters", "_buffers"):
            store = Store(vars(module)[name])
            store.in_use = in_use
            vars(module)[name] = store
    return in_use


def unwatch(root: nn.Module) -> None:
    """Plain dicts again."""
    for module in root.modules():
        for name in ("_parameters", "_buffers"):
            vars(module)[name] = dict(vars(module)[name])
