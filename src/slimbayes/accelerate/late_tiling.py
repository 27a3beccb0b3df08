"""Late tiling: a network runs on the batch as it is, and its first random layers repeat it for every draw.

What comes before them is then computed once per example instead of once per draw. That is right only where
the network keeps what it computed before a random layer apart from what it computed after it (no skip
connection across), and reads no number of rows early. So nothing is assumed: a small pass both ways, in which
the output of every random layer is changed for every draw and row, shows whether the two agree.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slimbayes.accelerate import switches
from slimbayes.core.context import Draw, Late, activate, repeat_rows
from slimbayes.core.conversion import every_module, find_record, unwrap
from slimbayes.core.draws import prepare
from slimbayes.core.layers.ensemble import Ensembled
from slimbayes.core.memory import out_of_memory
from slimbayes.core.paths import FastPath
from slimbayes.core.probes import kept
from slimbayes.core.rows import FlatInputs, autocasts, signature
from slimbayes.core.sharded import is_shared_out

_SHARE = 0.25  # of a value, added or taken away: enough to tell draws apart, whatever their own spread


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


class LateTiling(FastPath):
    """What comes before the first random layers, once per example instead of once per draw."""

    def __init__(self) -> None:
        self.plans: weakref.WeakKeyDictionary[nn.Module, dict[Any, Plan | None]] = weakref.WeakKeyDictionary()

    def on(self) -> bool:
        """By ``late``."""
        return switches.paths.late

    def run(
        self, model: nn.Module, flat: FlatInputs, now: Draw, evaluated: bool, course: Any
    ) -> tuple[Any] | None:
        """The output where the network allows late tiling."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return None
        inner = unwrap(model)
        if not evaluated and any([module.training for module in every_module(inner)]):
            return None
        key = signature(flat.leaves, flat.spec, flat.tiled, flat.batch, now.noise)
        plans = self.plans.setdefault(inner, {})
        if key is None or (key not in plans and now.rows < 2 * now.components * min(flat.batch, 2)):
            return None  # a probe would have more rows
        plan = self.plan_for(inner, flat, now.noise, key)
        if plan is None:
            return None
        args, kwargs = flat.tile(1)
        late = replace(now, late=plan, cache={}, calls={}, chosen={}, byproducts={}, noises={})
        try:
            prepare(model, late, course)
            with activate(late):
                return (plan.finish(model(*args, **kwargs), now.components * now.samples),)
        except Exception as error:
            if out_of_memory(error):
                raise
            plans[key] = None  # the plain pass runs, or says what is wrong
            return None

    def plan_for(self, model: nn.Module, flat: FlatInputs, noise: str, key: tuple[Any, ...]) -> Plan | None:
        """How to tile late for inputs with this signature, probed once; None where that is not safe."""
        plans = self.plans.setdefault(model, {})
        if key not in plans:
            plans[key] = probe(model, flat.resized, find_record(model).components, flat.batch, noise)
        return plans[key]


LATE_TILING = LateTiling()


def probe(
    model: nn.Module,
    resized: Callable[[int], Any],
    components: int,
    batch: int,
    noise: str,
) -> Plan | None:
    """Run both ways on a few rows and return the plan, or None where late tiling is not safe.

    ``resized(n)`` gives the inputs (FlatInputs) of n rows. Nothing of the model or of torch's generators is
    left changed.
    """
    if isinstance(model, nn.DataParallel) or is_shared_out(model.modules()):
        return None  # processes would have to agree on when to probe
    with torch.no_grad(), kept(model, resized(1).leaves), contextlib.suppress(Exception):
        return _compare(model, resized, components, batch, noise)
    return None


def _compare(
    model: nn.Module,
    resized: Callable[[int], Any],
    components: int,
    batch: int,
    noise: str,
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
        or autocasts(whole.device.type)
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
