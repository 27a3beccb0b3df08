"""What a layer may know of the draw it is in: rows, components, noise mode, key."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.compiler import constant
from slimbayes.core.keyed_noise import keyed_noise, layer_key
from slimbayes.core.noise import fresh_noise

NOISE_MODES = ("example", "shared", "mean")

# Who sees what autograd keeps; None in torch 2.6. Activation checkpointing is one of those who do.
_HOOKS: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
SEES_CHECKPOINTS = _HOOKS is not None

# Hashing is plain Python: the compiler takes the key as a constant and guards on the seed.
_constant_layer_key = constant(layer_key)


class RowError(ValueError):
    """A converted layer met an input whose first axis is not the rows of the draw."""


class Late(ABC):
    """What a draw whose network runs on the batch as it is asks of its random layers (``late.py``)."""

    @abstractmethod
    def untiled(self, layer: str, rows: int) -> bool:
        """Whether the rows that ``layer`` is handed still have to be repeated for every draw."""

    @abstractmethod
    def result(self, output: Any) -> Any:
        """The output of a random layer, on its way on."""


class Settled(ABC):
    """Weights that are known before the network runs, where a layer need not ask how they came about (``ahead.py``)."""

    @abstractmethod
    def pair(self, layer: nn.Module) -> tuple[Tensor, Tensor | None] | None:
        """The layer's weight and bias; None if it has to see for itself."""


@dataclass(frozen=True)
class Request:
    """Standard noise that a network asks for: of this size, for the use numbered ``stream`` of ``source`` in a draw."""

    kind: str
    source: str
    stream: int
    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """By which the noise is found."""
        return f"{self.source} {self.stream}"


class Supply(ABC):
    """Noise that somebody else makes: it stands in the place of a draw's seed (``training/many_noise.py``)."""

    @abstractmethod
    def noise(self, request: Request, device: torch.device) -> Tensor:
        """Standard noise as it is asked for."""


@dataclass
class Draw:
    """One folded pass: rows are ``[components, samples, batch]``, component-major."""

    components: int
    samples: int
    batch: int
    noise: str = "example"
    seed: int | Supply | None = None
    first_sample: int = 0
    first_example: int = 0
    component_ids: Tensor | None = None
    cache: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)  # noises made so far, by source
    log_probs: dict[str, Tensor] = field(default_factory=dict)
    byproducts: dict[str, Any] = field(default_factory=dict)  # what a KL of the same weights need not redo
    prefilled: dict[str, Tensor] = field(default_factory=dict)  # sampled before the network ran
    gradients: bool = False  # whether that was done for gradients
    checkpointed: bool = False  # whether a layer ran inside activation checkpointing
    noises: dict[str, Tensor] = field(default_factory=dict)  # drawn before the network ran, for one use each
    rows_seen: dict[str, list[int]] | None = None  # of every call, by layer
    late: Late | None = None  # None: the inputs are repeated before the network sees them
    settled: Settled | None = None  # of a single draw

    @property
    def rows(self) -> int:
        """Number of rows that the network sees."""
        return self.components * self.samples * self.batch

    def fits(self, rows: int) -> bool:
        """Whether these can be the rows of a layer: those of the draw, once or several times."""
        return rows != 0 and rows % self.rows == 0

    def bare(self) -> Draw:
        """The same draw with nothing sampled or seen yet."""
        return Draw(
            self.components, self.samples, self.batch, self.noise, self.seed, self.first_sample,
            self.first_example, self.component_ids, gradients=self.gradients, checkpointed=self.checkpointed,
            late=self.late,
        )  # fmt: skip


class _State(threading.local):
    def __init__(self) -> None:
        self.current: Draw | None = None
        self.finished: Draw | None = None
        self.calls = False  # whether layers have been called in this thread other than by a backward pass


_STATE = _State()
# Of the whole process: the backward pass of what ran on a GPU has threads of its own, in which nothing was drawn.
_LATEST: dict[str, Draw | None] = {"draw": None}


def repeat_rows(rows: Tensor, draws: int) -> Tensor:
    """[B, ...] to [draws·B, ...], channels_last images kept so.

    >>> repeat_rows(torch.tensor([1, 2]), 2)
    tensor([1, 2, 1, 2])
    """
    moved = rows.movedim(1, -1) if rows.dim() in (4, 5) else rows
    if rows is moved or rows.is_contiguous() or not moved.is_contiguous():
        return rows.expand(draws, *rows.shape).flatten(0, 1)
    return moved.expand(draws, *moved.shape).flatten(0, 1).movedim(-1, 1)


def late_draw() -> Draw | None:
    """The draw in progress if its random layers are to repeat their rows, else None."""
    draw = _STATE.current
    if draw is None:
        draw = _recomputed_draw()
    return None if draw is None or draw.late is None else draw


def current_draw() -> Draw | None:
    """Return the draw in progress in this thread, or None outside of one."""
    return _STATE.current


class activate:
    """Make ``draw`` the one that converted layers see inside the with block."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.outer: Draw | None = None

    def __enter__(self) -> Draw:
        self.outer = _STATE.current
        _STATE.current = self.draw
        return self.draw

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _STATE.current = self.outer
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _finish(self.draw.bare())


def _recomputed_draw() -> Draw | None:
    """The draw that activation checkpointing is running again, or None.

    Checkpointing calls layers a second time from within backward, when their draw is over. They must see its
    rows, noise mode and seed; without a seed, checkpointing itself restores torch's generator.
    """
    if torch.compiler.is_compiling():
        return None
    if torch._C._current_graph_task_id() == -1:
        _finish(None)  # not in backward: a plain call, and what it starts is no draw
    return _STATE.finished if _STATE.calls else _LATEST["draw"]


def _finish(draw: Draw | None) -> None:
    """What checkpointing may run again from now on."""
    _STATE.finished = _LATEST["draw"] = draw
    if torch._C._current_graph_task_id() == -1:  # else a draw that is itself checkpointed, run again
        _STATE.calls = True


@dataclass
class Frame:
    """The rows of one layer call: ``[components, samples, batch, extra]``, outermost first.

    ``extra`` counts what the network folded into its rows after the draw (windows, patches, time).
    """

    components: int
    samples: int
    batch: int
    extra: int
    noise: str
    draw: Draw | None
    tiled: bool = True  # False: the layer's input has the rows of one draw, the same for all

    @property
    def draws(self) -> int:
        """Number of draws, components × samples."""
        return self.components * self.samples

    def pick(self, tensor: Tensor) -> Tensor:
        """Rows of a ``[K, ...]`` tensor that take part in this draw."""
        if self.draw is None or self.draw.component_ids is None:
            return tensor
        return tensor.index_select(0, self.draw.component_ids)

    def noise_like(
        self,
        kind: str,
        source: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        per_example: bool,
    ) -> Tensor:
        """Standard noise ``[components, samples, batch or 1, *shape]``; keyed when the draw has a seed."""
        examples = self.batch if per_example else 1
        draw = self.draw
        if draw is not None and not per_example and source in draw.noises:
            return draw.noises.pop(source)
        if draw is None or draw.seed is None:
            size = (self.components, self.samples, examples, *shape)
            return fresh_noise(kind, size, dtype, device)
        if isinstance(draw.seed, Supply):
            stream = draw.calls.get(source, 0)
            draw.calls[source] = stream + 1
            size = (self.components, self.samples, examples, *shape)
            return draw.seed.noise(Request(kind, source, stream, size, dtype), device)
        component_ids = draw.component_ids
        if component_ids is None:
            component_ids = torch.arange(self.components, device=device)
        sample_ids = torch.arange(self.samples, device=device) + draw.first_sample
        example_ids = torch.arange(examples, device=device) + draw.first_example if per_example else None
        key = _constant_layer_key(draw.seed, source)
        # A layer used again gets noise of its own, as it does without a seed; what is sampled once is cached.
        stream = draw.calls.get(source, 0)
        draw.calls[source] = stream + 1
        return keyed_noise(kind, key, stream, component_ids, sample_ids, example_ids, shape, dtype, device)

    def once(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """Sample ``key`` once per draw: a module used twice, or tied to another, keeps one sample."""
        if self.draw is None:
            return make()
        known = self.ahead(key)
        if known is not None:
            return known
        cache = self.draw.cache
        if key not in cache:
            cache[key] = make()
        return cache[key]

    def ahead(self, key: str) -> Tensor | None:
        """What was sampled for ``key`` before the network ran.

        None inside activation checkpointing: it runs the layer again when the draw is over, and cannot know of which
        draw; the layer has to sample for itself, from the generator that checkpointing restores.
        """
        draw = self.draw
        if draw is None or key not in draw.prefilled:
            return None
        if not torch.compiler.is_compiling() and _runs_again(draw):
            draw.checkpointed = True
            return None
        return draw.prefilled[key]


def _runs_again(draw: Draw) -> bool:
    """Whether a layer is inside activation checkpointing: that which hooks into autograd, or turns it off."""
    if draw.gradients and not torch.is_grad_enabled():
        return True
    return _HOOKS is not None and _HOOKS(False) is not None


def choose_components(total: int, count: int, seed: int | Supply | None, device: torch.device) -> Tensor:
    """A random subset of the components, in random order; a function of the seed when there is one."""
    if seed is None:
        return torch.randperm(total, device=device)[:count]
    if isinstance(seed, Supply):
        request = Request("uniform", "components", 0, (total,), torch.float32)
        return seed.noise(request, device).argsort()[:count]
    key = _constant_layer_key(seed, "components")
    return (
        keyed_noise("uniform", key, 0, None, None, None, (total,), torch.float32, device)
        .flatten()
        .argsort()[:count]
    )


def frame(layer: str, rows: int, components: int = 1, untiled: bool = False) -> Frame:
    """Split the ``rows`` that layer ``layer`` sees into draws, examples and what is folded after them.

    ``untiled``: they are those of one draw, and stand for all.
    """
    draw = _STATE.current or _recomputed_draw()
    if draw is None:
        if rows % components != 0:
            raise RowError(
                f"layer {layer!r} got {rows} rows, which its {components} components do not divide. "
                f"Outside sb.draw rows are taken as already tiled, component-major: call "
                f"sb.draw(model, x), or pass x.repeat({components}, ...)."
            )
        return Frame(components, 1, rows // components, 1, "example", None)
    if draw.rows_seen is not None:
        draw.rows_seen.setdefault(layer, []).append(rows)
    if untiled:
        rows = rows * draw.components * draw.samples
    if not draw.fits(rows):
        raise RowError(row_message(layer, rows, draw))
    extra = rows // draw.rows
    return Frame(draw.components, draw.samples, draw.batch, extra, draw.noise, draw, not untiled)


def row_message(layer: str, rows: int, draw: Draw) -> str:
    """Explain which layer lacks the row axis, and the remedies."""
    return (
        f"layer {layer!r} got an input whose first dimension is {rows}, but this draw folds "
        f"{draw.components} components x {draw.samples} samples x {draw.batch} examples = {draw.rows} rows "
        f"into the first dimension, and the input must keep them outermost. If the input is a table shared "
        f"by the batch ([T, T] or [1, T]), expand it over the batch before this layer, or leave the layer "
        f"out with exclude={layer!r}."
    )
