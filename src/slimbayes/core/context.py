"""What a layer may know of the draw it is in: rows, components, noise mode, key."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slimbayes.core.keyed_noise import keyed_noise, noise_key
from slimbayes.core.noise import fresh_noise
from slimbayes.core.second_runs import Memory, draw_run_again, may_run_again, unseen

Value = TypeVar("Value")
NOISE_MODES = ("example", "shared", "mean")


class RowError(ValueError):
    """A converted layer met an input whose first axis is not the rows of the draw."""


class Late(ABC):
    """What a draw whose network runs on the batch as it is asks of its random layers."""

    @abstractmethod
    def untiled(self, layer: str, rows: int) -> bool:
        """Whether the rows that ``layer`` is handed still have to be repeated for every draw."""

    @abstractmethod
    def result(self, output: Any) -> Any:
        """The output of a random layer, on its way on."""


class Settled(ABC):
    """Weights that are known before the network runs, where a layer need not ask how they came about."""

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
    """Noise that somebody else makes: it stands in the place of a draw's seed (many networks at once, frozen ones)."""

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
    cache: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)  # noises made so far, by source
    # Indices whose law is learned: (the law, the indices, their log-probabilities).
    chosen: dict[str, Any] = field(default_factory=dict)
    byproducts: dict[str, Any] = field(default_factory=dict)  # what a KL of the same weights need not redo
    prefilled: dict[str, Any] = field(default_factory=dict)  # sampled before the network ran
    noises: dict[str, Tensor] = field(default_factory=dict)  # drawn before the network ran, for one use each
    rows_seen: dict[str, list[int]] | None = None  # of every call, by layer
    late: Late | None = None  # None: the inputs are repeated before the network sees them
    settled: Settled | None = None  # of a single draw
    first_node: int | None = None  # of its graph, by number, if there is a graph that leads back to it
    memory: Memory | None = None  # of what a second run needs, where there may be one
    again: bool = False  # this is a second run
    whole: bool = False  # the network runs on the batch as it is: other rows stand for themselves
    first_component: int = 0  # of a pass that has one component alone

    @property
    def rows(self) -> int:
        """Number of rows that the network sees."""
        return self.components * self.samples * self.batch

    def fits(self, rows: int) -> bool:
        """Whether these can be the rows of a layer: those of the draw, once or several times."""
        return rows != 0 and rows % self.rows == 0

    def end(self) -> None:
        """The network has run: nothing is left that keeps what was sampled."""
        self.cache, self.prefilled, self.noises, self.chosen, self.byproducts = {}, {}, {}, {}, {}
        self.rows_seen = None

    def remember(self) -> None:
        """A checkpoint is around the layer that runs: what was sampled is kept, and what follows can be made again."""
        assert self.first_node is not None
        self.memory = Memory(self.first_node)
        self.prefilled = {**self.cache, **self.prefilled}

    def second_run(self, known: dict[str, Any]) -> Draw:
        """The same draw for layers that run again, with what was sampled for it before the network ran."""
        return replace(self, cache={}, chosen={}, byproducts={}, prefilled=known, noises={}, again=True)

    def _notes(self) -> Memory | None:
        """What is noted for a second run: nothing in compiled code, whose graph has its recomputation inside."""
        return None if torch.compiler.is_compiling() else self.memory

    def once(self, key: str, make: Callable[[], Value]) -> Value:
        """What ``make`` gives, the same for all calls in this draw."""
        memory = self._notes()
        if self.again and memory is not None:
            return memory.make_again(key, make)
        if key not in self.cache:
            if memory is not None:
                memory.note(key)
            self.cache[key] = make()
        made: Value = self.cache[key]
        return made

    def derived(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """The same of what follows from samples, with nothing random of its own."""
        if self._notes() is None:
            return self.once(key, make)
        if key in self.cache:
            known: Tensor = self.cache[key]
            return known
        with unseen():
            made = make()
        if not self.again:
            self.cache[key] = made
        return made

    def ahead(self, key: str) -> Any:
        """What was sampled for ``key`` before the network ran, or None."""
        memory = self._notes()
        if memory is not None and self.again:
            return memory.early_again(key, self.prefilled) if key in memory.early else None
        value = self.prefilled.get(key)
        if memory is not None and value is not None and not torch.is_grad_enabled():
            memory.by_hand.add(key)
        return value

    def stream(self, source: str) -> int:
        """The number of a noise among those of one source: a layer used again gets noise of its own."""
        memory = self._notes()
        if self.again and memory is not None:
            return memory.stream_again(source)
        stream = self.calls.get(source, 0)
        self.calls[source] = stream + 1
        if memory is not None:
            memory.note_stream(source, stream)
        return stream


class _State(threading.local):
    def __init__(self) -> None:
        self.current: Draw | None = None


_STATE = _State()


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
            if draw.memory is not None and draw.seed is not None:
                draw.stream(source)  # its first, of which a second run has to make it
            return draw.noises.pop(source)
        if draw is None or draw.seed is None:
            size = (self.components, self.samples, examples, *shape)
            return fresh_noise(kind, size, dtype, device)
        # Without a seed, too, a layer used again gets noise of its own; what is sampled once is cached.
        stream = draw.stream(source)
        if isinstance(draw.seed, Supply):
            size = (self.components, self.samples, examples, *shape)
            return draw.seed.noise(Request(kind, source, stream, size, dtype), device)
        component_ids = draw.component_ids
        if component_ids is None:
            component_ids = torch.arange(self.components, device=device)
        sample_ids = torch.arange(self.samples, device=device) + draw.first_sample
        example_ids = torch.arange(examples, device=device) + draw.first_example if per_example else None
        key = noise_key(draw.seed, source)
        return keyed_noise(kind, key, stream, component_ids, sample_ids, example_ids, shape, dtype, device)

    def derived(self, key: str, make: Callable[[], Tensor]) -> Tensor:
        """The same of what follows from samples: there is nothing random in making it."""
        return make() if self.draw is None else self.draw.derived(key, make)

    def once(self, key: str, make: Callable[[], Value]) -> Value:
        """Sample ``key`` once per draw: a module used twice, or tied to another, keeps one sample."""
        if self.draw is None:
            return make()
        known: Value | None = self.draw.ahead(key)
        return self.draw.once(key, make) if known is None else known

    def ahead(self, key: str) -> Tensor | None:
        """What was sampled for ``key`` before the network ran, or None."""
        return None if self.draw is None else self.draw.ahead(key)


def choose_components(total: int, count: int, seed: int | Supply | None, device: torch.device) -> Tensor:
    """A random subset of the components, in random order; a function of the seed when there is one."""
    if seed is None:
        return torch.randperm(total, device=device)[:count]
    if isinstance(seed, Supply):
        request = Request("uniform", "components", 0, (total,), torch.float32)
        return seed.noise(request, device).argsort()[:count]
    key = noise_key(seed, "components")
    return (
        keyed_noise("uniform", key, 0, None, None, None, (total,), torch.float32, device)
        .flatten()
        .argsort()[:count]
    )


def frame(layer: str, rows: int, components: int = 1, untiled: bool = False) -> Frame:
    """Split the ``rows`` that layer ``layer`` sees into draws, examples and what is folded after them.

    ``untiled``: they are those of one draw, and stand for all.
    """
    draw = _STATE.current
    if draw is None and not torch.compiler.is_compiling():
        draw = draw_run_again()
    if draw is None:
        if rows % components != 0:
            raise RowError(
                f"layer {layer!r} got {rows} rows, which its {components} components do not divide. "
                f"Outside sb.draw rows are taken as already tiled, component-major: call "
                f"sb.draw(model, x), or pass x.repeat({components}, ...)."
            )
        return Frame(components, 1, rows // components, 1, "example", None)
    known = torch.compiler.is_compiling() or draw.memory is not None or draw.first_node is None
    if not known and may_run_again():
        draw.remember()
    if draw.rows_seen is not None:
        draw.rows_seen.setdefault(layer, []).append(rows)
    if untiled:
        rows = rows * draw.components * draw.samples
    if not draw.fits(rows):
        if draw.whole and rows:
            return Frame(1, 1, rows, 1, draw.noise, draw)
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
