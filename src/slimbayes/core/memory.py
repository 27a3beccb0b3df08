"""How much memory a pass takes, how many examples and samples fit into what there is, and what says that it ended."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_SHARE_OF_DEVICE, _SHARE_OF_HOST = 0.6, 0.25  # of the memory that is free
_MOST_OF_HOST = 4 << 30  # a pass of more gains nothing on a CPU
_MARGIN = 1.25  # over what is traced: allocators round up, kernels have workspaces
_SMALL = 200  # rows per component, some eight traces: fewer are run without one

Moment = tuple[float, float, float, float]


@dataclass(frozen=True)
class Footprint:
    """Bytes alive after each operation of a pass: constant + per_sample·S + per_example·B + per_row·S·B."""

    moments: tuple[Moment, ...]

    def peak(self, samples: int, examples: int) -> float:
        """Most bytes alive at a time.

        >>> Footprint(((100.0, 1.0, 0.0, 0.0), (0.0, 0.0, 0.0, 8.0))).peak(samples=5, examples=10)
        400.0
        """
        return max(
            (c + s * samples + b * examples + r * samples * examples for c, s, b, r in self.moments),
            default=0.0,
        )

    @property
    def prefix(self) -> bool:
        """Whether more is computed once per example than is sampled once per draw."""
        return max((m[2] for m in self.moments), default=0.0) > max((m[1] for m in self.moments), default=0.0)

    def fold(self, samples: int, batch: int, budget: float) -> tuple[int, int]:
        """Examples and samples of one pass that stay within ``budget`` bytes; at least one of each.

        All examples first, because weights are sampled for every pass; all samples first where what comes
        before the first random layer would be computed again for every pass.

        >>> Footprint(((0.0, 0.0, 0.0, 8.0),)).fold(samples=10, batch=100, budget=1600.0)
        (100, 2)
        """
        if self.prefix:
            examples = largest(batch, lambda n: self.peak(samples, n) <= budget)
            return examples, largest(samples, lambda n: self.peak(n, examples) <= budget)
        examples = largest(batch, lambda n: self.peak(1, n) <= budget)
        return examples, largest(samples, lambda n: self.peak(n, examples) <= budget)


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest n in 1..most that fits, for a test that fails from some n on; 1 where none does.

    >>> largest(10, lambda n: n * n < 50)
    7
    """
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


class _Trace(TorchDispatchMode):
    """Which tensors are made, and which of them are alive together."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[int] = []
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.together: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        given = {_storage(leaf)._cdata for leaf in pytree.tree_leaves((args, kwargs)) if _plain(leaf)}
        made = [
            _storage(leaf)
            for leaf in pytree.tree_leaves(output)
            if _plain(leaf) and _storage(leaf)._cdata not in given
        ]
        if made:
            self.alive = {key: value for key, value in self.alive.items() if not value[0].expired()}
            for storage in made:
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = (StorageWeakRef(storage), len(self.sizes))
                    self.sizes.append(storage.nbytes())
            self.together.append(tuple(sorted(index for _, index in self.alive.values())))
        return output


def _plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided


def _storage(leaf: Tensor) -> Any:
    return leaf.untyped_storage()


def footprint(run: Callable[[int, int], Any], batch: int, samples: int) -> Footprint:
    """The memory of ``run(samples, examples)``, from three small passes.

    A tensor that is three times as large for three times the examples has a part for each of them, and
    likewise for samples. Where more of them mean other operations, every tensor is taken to have one.
    """
    few_samples, few_examples = min(samples, 2), min(batch, 2)
    first = _traced(run, few_samples, few_examples)
    wide = first if batch == 1 else _traced(run, few_samples, 3 * few_examples)
    many = first if samples == 1 else _traced(run, 2 * few_samples, few_examples)
    by_example = [True] * len(first.sizes)
    if len(first.sizes) == len(wide.sizes):
        by_example = [_grows(a, b, 3) for a, b in zip(first.sizes, wide.sizes, strict=True)]
    by_sample = [True] * len(first.sizes)
    if len(first.sizes) == len(many.sizes):
        by_sample = [_grows(a, b, 2) for a, b in zip(first.sizes, many.sizes, strict=True)]
    moments: set[Moment] = set()
    for alive in first.together:
        parts = [0.0] * 4
        for i in alive:
            share = first.sizes[i] / (few_samples if by_sample[i] else 1)
            parts[by_sample[i] + 2 * by_example[i]] += share / (few_examples if by_example[i] else 1)
        moments.add((_MARGIN * parts[0], _MARGIN * parts[1], _MARGIN * parts[2], _MARGIN * parts[3]))
    return Footprint(tuple(_dominant(moments)))


def _traced(run: Callable[[int, int], Any], samples: int, examples: int) -> _Trace:
    trace = _Trace()
    with trace:
        run(samples, examples)
    return trace


def _grows(small: int, large: int, factor: int) -> bool:
    """Whether a size is nearer to ``factor`` times the other than to the other."""
    return large > small * math.sqrt(factor)


def _dominant(moments: set[Moment]) -> list[Moment]:
    """Those that can be the peak of some pass: none is below another in every part."""
    kept: list[Moment] = []
    for moment in sorted(moments, key=sum, reverse=True):
        if not any(all(a <= b for a, b in zip(moment, other, strict=True)) for other in kept):
            kept.append(moment)
    return kept


def small(rows: int, components: int) -> bool:
    """Whether a prediction is too small for a trace to pay."""
    return rows <= _SMALL * components


def budget(device: torch.device) -> float | None:
    """Bytes that one pass may take on a device; None where that is not known.

    >>> available = budget(torch.device("cpu"))
    >>> available is None or available > 0
    True
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return _SHARE_OF_DEVICE * (free + cached)
    if device.type == "cpu":
        available = host_memory()
        return None if available is None else min(_SHARE_OF_HOST * available, _MOST_OF_HOST)
    return None


def host_memory() -> int | None:
    """Bytes that the host can still give, where the system says so."""
    try:
        with open("/proc/meminfo", "rb", buffering=0) as file:  # every prediction asks: without a text layer
            for line in file.read(512).splitlines():
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None


def device_of(leaves: list[Any], model: nn.Module) -> torch.device:
    """Where a pass runs: the first parameter's device, or the first input's."""
    for parameter in model.parameters():
        return parameter.device
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            return leaf.device
    return torch.device("cpu")


def exhausted(error: BaseException, components: int, device: torch.device) -> str:
    """What to say when not even one example of every component fits."""
    free = budget(device)
    left = "" if free is None else f" (about {free / 2**20:.0f} MiB may be used there)"
    return (
        f"predict ran out of memory on {device}{left} with the smallest pass there is: 1 example x "
        f"{components} components x 1 sample = {components} rows. Free memory held elsewhere, move the model "
        f"to a device with more, use a smaller dtype, or cut the inputs themselves (shorter sequences, "
        f"smaller images). The allocator said: {error}"
    )


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host ran out of memory.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory")), out_of_memory(ValueError())
    (True, False)
    """
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
