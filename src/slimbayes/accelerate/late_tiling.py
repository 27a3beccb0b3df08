"""Late tiling: a network runs on the batch as it is, and its first random layers repeat it for every draw.

What comes before them is then computed once per example instead of once per draw. That is right only where
the network keeps what it computed before a random layer apart from what it computed after it (no skip
connection across), and reads no number of rows early. So nothing is assumed: a small pass both ways, in which
the output of every random layer is changed for every draw and row, shows whether the two agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slimbayes.core.context import Draw, Late, activate, repeat_rows
from slimbayes.core.layers.ensemble import Ensembled

_SHARE = 0.25  # of a value, added or taken away: enough to tell draws apart, whatever their own spread

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class LateError(RuntimeError):
    """The two passes of a probe differ in what they did."""


@dataclass(frozen=True)
class Plan(Late):
    """Which random layers are handed rows that are not repeated yet, and which outputs none has reached."""

    layers: frozenset[str]
    outputs: tuple[bool, ...]

    def untiled(self, layer: str, rows: int) -> bool:
        """Whether ``layer`` is to repeat its rows."""
        return layer in self.layers

    def result(self, output: Any) -> Any:
        """The output of a random layer, as it is."""
        return output

    def finish(self, output: Any, draws: int) -> Any:
        """Repeat the outputs that came without passing a random layer."""
        if not any(self.outputs):
            return output
        leaves, spec = pytree.tree_flatten(output)
        if len(leaves) != len(self.outputs):
            raise LateError("the network returned another structure")
        repeated = [
            repeat_rows(leaf, draws) if repeat else leaf
            for leaf, repeat in zip(leaves, self.outputs, strict=True)
        ]
        return pytree.tree_unflatten(repeated, spec)


class _Probe(Late):
    """A pass that notes the rows every random layer meets, and tells its draws and rows apart.

    Given the rows of the early pass, a layer that meets ``draws`` times fewer is one that has to repeat them:
    other than by its rows alone, this is never in doubt.
    """

    def __init__(self, draws: int, early: list[tuple[str, int]] | None = None) -> None:
        self.draws = draws
        self.early = early
        self.calls: list[tuple[str, int]] = []
        self.layers: dict[str, bool] = {}
        self.generator = torch.Generator().manual_seed(0)

    def untiled(self, layer: str, rows: int) -> bool:
        """Whether ``layer`` is to repeat its rows; the same in all its calls."""
        if self.early is None:
            self.calls.append((layer, rows))
            return False
        number = len(self.calls)
        if number >= len(self.early) or self.early[number][0] != layer:
            raise LateError(f"layer {layer!r} is called out of turn")
        whole = self.early[number][1]
        self.calls.append((layer, whole))
        if rows not in (whole, whole // self.draws):
            raise LateError(f"layer {layer!r} meets {rows} rows")
        if self.layers.setdefault(layer, rows != whole) != (rows != whole):
            raise LateError(f"layer {layer!r} meets repeated rows and others")
        return rows != whole

    def result(self, output: Any) -> Any:
        """The output with every element changed, by the place it has: y + ¼ n (1 + |y|), n standard normal."""
        return pytree.tree_map(self._changed, output)

    def _changed(self, y: Any) -> Any:
        if not isinstance(y, Tensor) or not y.is_floating_point() or y.dim() == 0:
            return y
        noise = torch.randn(y.shape, generator=self.generator).to(y.device, y.dtype)
        return y + _SHARE * noise * (1 + y.abs())


def signature(
    leaves: list[Any], spec: Any, tiled: set[int], batch: int, noise: str
) -> tuple[Any, ...] | None:
    """What a verdict depends on: shapes other than the batch's, types, plain values, precision, noise mode.

    A batch of one is a case of its own: it broadcasts. None for inputs with a state of their own (a cache),
    which a probe would change.
    """
    parts: list[Any] = [noise, batch == 1, torch.get_float32_matmul_precision()]
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            device = leaf.device.type
            shape = leaf.shape[1:] if i in tiled else leaf.shape
            parts.append((i in tiled, tuple(shape), leaf.dtype, device, _autocast(device)))
        elif leaf is None or isinstance(leaf, _PLAIN):
            parts.append((type(leaf), leaf))
        else:
            return None
    if len(leaves) > 1:
        parts.append(str(spec))
    return tuple(parts)


def _autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def probe(
    model: nn.Module,
    resized: Callable[[int], Any],
    components: int,
    batch: int,
    noise: str,
    check_rows: bool,
) -> Plan | None:
    """Run both ways on a few rows and return the plan, or None where late tiling is not safe.

    ``resized(n)`` gives the inputs (FlatInputs) of n rows. Nothing of the model or of torch's generators is
    left changed.
    """
    parameter = next(model.parameters(), None)
    if type(parameter).__name__ == "DTensor" or isinstance(model, nn.DataParallel):
        return None  # sharded: processes would have to agree on when to probe
    with torch.no_grad(), kept(model, resized(1).leaves), contextlib.suppress(Exception):
        return _compare(model, resized, components, batch, noise, check_rows)
    return None


def _compare(
    model: nn.Module,
    resized: Callable[[int], Any],
    components: int,
    batch: int,
    noise: str,
    check_rows: bool,
) -> Plan | None:
    # Members of an ensemble are run one by one, and their samples are copies: that takes two to see.
    several = any(isinstance(module, Ensembled) for module in model.modules())
    samples = 2 if components == 1 or several else 1
    draws = components * samples
    flat = resized(min(batch, 2))
    first = _Probe(draws)
    args, kwargs = flat.tile(draws)
    with activate(Draw(components, samples, flat.batch, noise, 0, late=first)):
        early = model(*args, **kwargs)
    if any(rows % (draws * flat.batch) for _, rows in first.calls):
        return None
    second = _Probe(draws, first.calls)
    args, kwargs = flat.tile(1)
    with activate(Draw(components, samples, flat.batch, noise, 0, late=second)):
        late = model(*args, **kwargs)
    if second.calls != first.calls:
        return None
    outputs = _same_outputs(early, late, draws)
    if outputs is None:
        return None
    if check_rows:
        # Rows follow the batch, and none is a table that they happen to divide: with one example more, every
        # layer meets as many more.
        more = resized(flat.batch + 1)
        grown = [(name, rows // flat.batch * more.batch) for name, rows in first.calls]
        third = _Probe(draws, grown)
        args, kwargs = more.tile(1)
        with activate(Draw(components, samples, more.batch, noise, 0, late=third)):
            model(*args, **kwargs)
        if third.calls != grown or third.layers != second.layers:
            return None
    return Plan(frozenset(name for name, untiled in second.layers.items() if untiled), outputs)


def _same_outputs(early: Any, late: Any, draws: int) -> tuple[bool, ...] | None:
    """Which leaves of the late output have to be repeated to equal the early one's; None if they do not."""
    expected, spec = pytree.tree_flatten(early)
    found, other = pytree.tree_flatten(late)
    if spec != other:
        return None
    repeated: list[bool] = []
    for whole, leaf in zip(expected, found, strict=True):
        if not isinstance(whole, Tensor) or not isinstance(leaf, Tensor):
            if type(whole) is not type(leaf) or isinstance(whole, Tensor):
                return None
            repeated.append(False)
            continue
        short = whole.dim() > 0 and leaf.shape != whole.shape
        if short:
            leaf = repeat_rows(leaf, draws)
        if leaf.shape != whole.shape or leaf.dtype != whole.dtype or not _close(whole, leaf, draws):
            return None
        repeated.append(short)
    return tuple(repeated)


def _close(whole: Tensor, leaf: Tensor, draws: int) -> bool:
    """Equal but for rounding, which is small beside the differences that the probe makes between draws."""
    if not whole.is_floating_point():
        return bool(torch.equal(whole, leaf))
    a, b = whole.double(), leaf.double()
    if not bool(torch.isfinite(a).all()):
        return False
    low = (
        whole.dtype in (torch.bfloat16, torch.float16)
        or _autocast(whole.device.type)
        or (whole.device.type == "cuda" and torch.backends.cudnn.allow_tf32)
    )
    share, unit = (0.05, 2.0**-8) if low else (1e-3, 2.0**-19)
    if whole.dtype == torch.float64:
        share, unit = 1e-6, 2.0**-40
    scale = a.abs().max() if a.numel() else a.new_zeros(())
    spread = a.new_zeros(())
    if a.dim() > 0 and a.shape[0] % draws == 0 and a.numel():
        by_draw = a.unflatten(0, (draws, -1))
        spread = (by_draw - by_draw.mean(0)).abs().max()
    error = (a - b).abs().max() if a.numel() else a.new_zeros(())
    return bool(error <= share * spread + unit * scale)


@contextlib.contextmanager
def kept(model: nn.Module, leaves: list[Any]) -> Iterator[None]:
    """Put buffers and torch's generators back as they were."""
    before = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            for store, name, buffer, value in before:
                store[name] = buffer
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
