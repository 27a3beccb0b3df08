"""Modules under the names they had before they moved: ``slimbayes.data.uci`` is ``slimbayes.lab.data.uci``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# The longest name that fits counts.
ALIASES = {
    "slimbayes.cli": "slimbayes.lab.cli",
    "slimbayes.data": "slimbayes.lab.data",
    "slimbayes.data.archives": "slimbayes.containers.archives",
    "slimbayes.data.base": "slimbayes.containers.datasets",
    "slimbayes.data.batches": "slimbayes.containers.batches",
    "slimbayes.data.files": "slimbayes.containers.files",
    "slimbayes.data.records.bagging": "slimbayes.containers.bagging",
    "slimbayes.data.records.base": "slimbayes.containers.records",
    "slimbayes.data.streaming": "slimbayes.containers.streaming",
    "slimbayes.data.streams": "slimbayes.containers.streams",
    "slimbayes.experiments": "slimbayes.lab.experiments",
    "slimbayes.export": "slimbayes.verbs.exporting",
    "slimbayes.methods": "slimbayes.core.methods",
    "slimbayes.models": "slimbayes.lab.models",
    "slimbayes.models.mlp": "slimbayes.networks.dense",
}


def target(name: str) -> str | None:
    """Where the module of this name is now; None if it has not moved.

    >>> target("slimbayes.data.images"), target("slimbayes.core")
    ('slimbayes.lab.data.images', None)
    """
    known = name
    while known not in ALIASES:
        known, dot, _ = known.rpartition(".")
        if not dot:
            return None
    return ALIASES[known] + name[len(known) :]


class _Finder(MetaPathFinder, Loader):
    """Gives the module itself, not a second one: its classes stay one class under both names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, given: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if target(fullname) is None else ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        real = target(spec.name)
        assert real is not None
        module = importlib.import_module(real)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: it has run under its own name, and keeps that."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Make the names importable, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # before those who would find it a second time, in its folder
