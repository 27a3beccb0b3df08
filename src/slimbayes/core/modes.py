"""Who runs a network in which mode: a prediction evaluates it, whatever mode it is in, and threads share its flags."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

Flags = tuple[list[nn.Module], list[nn.Module]]


class Modes:
    """Predictions and training passes of one network, by thread: those of one kind run together, never with the other.

    The first prediction puts the network into eval mode and the last puts it back. Passes are those of ``sb.draw``: of
    what calls the network by itself, and of ``train()`` and ``eval()``, nothing is known.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ended = threading.Condition(self.lock)
        self.waiting = 0  # threads
        self.evaluations: dict[int, int] = {}  # of every thread
        self.passes: dict[int, int] = {}
        self.before: list[Flags] = []  # as every thread found them, to be put back in turn
        self.passing = Passing(self)

    def __reduce__(self) -> tuple[type[Modes], tuple[()]]:
        return Modes, ()  # a copy of the network is run by nobody

    @contextlib.contextmanager
    def evaluating(self, root: nn.Module, modules: list[nn.Module]) -> Iterator[None]:
        """Put these modules, all of the root's, into eval mode; they get their own modes back after the last."""
        with self.lock:
            counted = bool(self.evaluations) or any([module.training for module in modules])
            if counted:
                self.enter(self.evaluations, self.passes)
        try:
            if counted:
                with self.lock:
                    self.before.append(switch_off(root, modules))
            yield
        finally:
            if counted:
                with self.lock:
                    if self.leave(self.evaluations):
                        while self.before:
                            switch_back(self.before.pop())

    def enter(self, own: dict[int, int], others: dict[int, int]) -> None:
        """Count this thread in when the other kind has ended; it does not wait for what it is itself inside of."""
        me = threading.get_ident()
        while others and me not in own and me not in others:
            self.waiting += 1
            self.ended.wait()
            self.waiting -= 1
        own[me] = own.get(me, 0) + 1

    def leave(self, own: dict[int, int]) -> bool:
        """Count this thread out; whether it was the last of its kind."""
        me = threading.get_ident()
        if own[me] == 1:
            del own[me]
        else:
            own[me] -= 1
        if self.waiting and not own:
            self.ended.notify_all()
        return not own


class Passing:
    """A pass in the network's own mode, for which it must not be evaluated by another thread."""

    def __init__(self, modes: Modes) -> None:
        self.modes = modes

    def __enter__(self) -> None:
        with self.modes.lock:
            self.modes.enter(self.modes.passes, self.modes.evaluations)

    def __exit__(self, *error: object) -> None:
        with self.modes.lock:
            self.modes.leave(self.modes.passes)


def switch_off(root: nn.Module, modules: list[nn.Module]) -> Flags:
    """Put these modules, all of the root's, into eval mode; those that were in training mode, and the others."""
    on = [module for module in modules if module.training]
    if not on:
        return [], []
    # What train() does but for its look at every attribute that is set: a fifth of a small network's prediction.
    off = [module for module in modules if not module.training]
    kinds: list[Any] = [type(module) for module in modules]
    if all(map(_is_plain, kinds)) and not any(["train" in vars(module) for module in modules]):
        for module in on:
            module.__dict__["training"] = False
    else:
        root.eval()
    return on, off


def switch_back(before: Flags) -> None:
    """Every module's own mode again, also where ``eval()`` or the network itself has changed it."""
    on, off = before
    for modules, mode in ((on, True), (off, False)):
        for module in modules:
            if module.training is not mode:
                module.__dict__["training"] = mode


@contextlib.contextmanager
def evaluating_alone(root: nn.Module, modules: list[nn.Module]) -> Iterator[None]:
    """The same where no other thread can see it: in code that is compiled."""
    before = switch_off(root, modules)
    try:
        yield
    finally:
        switch_back(before)


@functools.cache
def _is_plain(kind: Any) -> bool:
    """Whether the mode of modules of this class is their flag and nothing else."""
    own = kind.train is nn.Module.train and kind.eval is nn.Module.eval
    return own and not issubclass(kind, torch.jit.ScriptModule)
