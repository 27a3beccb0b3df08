"""A training step recorded once as a CUDA graph and replayed: small networks no longer wait for Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slimbayes.core.conversion import find_record
from slimbayes.training.settings import Training

WARM = 3  # steps in eager code first: libraries choose their kernels, the optimizer makes its state


def check_recordable(model: nn.Module, settings: Training, fabric: Any) -> None:
    """Raise where a recorded step would not be the step: elsewhere than on one GPU, or with state in Python."""
    if fabric.device.type != "cuda" or fabric.world_size > 1:
        where = f"{fabric.world_size} processes on {fabric.device.type}"
        raise ValueError(f"capture=True records a step on one GPU, and this run has {where}: leave it out")
    record = find_record(model)
    if any(getattr(method, "learn_mixing", False) for method in record.methods):
        raise ValueError(
            "capture=True cannot record learn_mixing, whose baseline lives between steps: leave one of them out"
        )
    if record.step_components is not None:
        raise ValueError(
            "capture=True cannot record components_per_step, which chooses components in Python: leave one of them out"
        )


class Recorder:
    """``compute(inputs, targets, kl_weight)``, a whole step that returns a tensor, recorded after a few steps.

    Batches are copied into the recorded ones; a batch of another shape runs in eager code. The generator's seed is
    read at every replay, so ``torch.manual_seed`` before a step means the same as in eager code.
    """

    def __init__(self, compute: Callable[[Any, Tensor, Tensor], Tensor], device: torch.device) -> None:
        self.compute, self.device = compute, device
        self.seen = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.weight = torch.ones((), device=device)
        self.inputs: Any = None
        self.targets: Tensor = self.weight
        self.figures: Tensor = self.weight
        self.aside = torch.cuda.Stream(device)

    def __call__(self, inputs: Any, targets: Tensor, kl_weight: float) -> Tensor:
        """One step; returns what ``compute`` does."""
        self.weight.fill_(kl_weight)
        if self.graph is None and self.seen >= WARM:
            self._record(inputs, targets)
        self.seen += 1
        if self.graph is None or not _alike((inputs, targets), (self.inputs, self.targets)):
            return self._eagerly(inputs, targets)
        pytree.tree_map(_fill, (self.inputs, self.targets), (inputs, targets))
        self.graph.replay()
        return self.figures.clone()

    def _eagerly(self, inputs: Any, targets: Tensor) -> Tensor:
        """In a stream of its own, as torch asks of what is recorded afterwards."""
        here = torch.cuda.current_stream(self.device)
        self.aside.wait_stream(here)
        with torch.cuda.stream(self.aside):
            figures = self.compute(inputs, targets, self.weight)
        here.wait_stream(self.aside)
        return figures

    def _record(self, inputs: Any, targets: Tensor) -> None:
        self.inputs, self.targets = pytree.tree_map(_copy, (inputs, targets))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.figures = self.compute(self.inputs, self.targets, self.weight)
        self.graph = graph


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _fill(mine: Any, new: Any) -> None:
    if isinstance(mine, Tensor):
        mine.copy_(new)


def _alike(one: Any, other: Any) -> bool:
    def signature(tree: Any) -> list[Any]:
        leaves = pytree.tree_leaves(tree)
        return [(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in leaves]

    return signature(one) == signature(other)
