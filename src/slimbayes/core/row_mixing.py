"""Whether the rows of a network's batch see each other, found out once for each kind of input.

A draw that repeats the batch for every component and sample ("rows") is right only where every row goes its own way.
A graph network, a contrastive loss or attention over the batch would see the rows of other draws. So a few rows run
alone, three times over, and between two copies that were changed: the middle copy must come out the same each time.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slimbayes.core.context import Draw, RowError, row_message
from slimbayes.core.conversion import Record, unwrap
from slimbayes.core.memory import out_of_memory
from slimbayes.core.noise import transformed
from slimbayes.core.probes import evaluating, kept
from slimbayes.core.rows import PLAIN, FlatInputs, run

_COPIES = 3
_FEW = 2  # rows that are enough to see each other, where a batch may be cut
_LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Verdict:
    """Whether rows are mixed; and a layer with the first dimension of its input, if that does not follow the batch."""

    mixed: bool
    table: tuple[str, int] | None = None


def in_passes(model: nn.Module, record: Record, flat: FlatInputs, now: Draw, layout: str) -> bool:
    """Whether this draw runs the network once per component and sample, instead of once on all rows.

    Compiled code, which looks at no values, takes what an earlier eager call has found.
    """
    if torch.compiler.is_compiling():
        return layout == "passes" or (layout == "auto" and record.mixed)
    verdict = flat.verdict
    if verdict is None:
        kind = _kind(flat)
        verdict = flat.verdict = record.verdicts.get(kind) or _visit(model, record, flat, kind)
    if layout == "passes" or (layout == "auto" and verdict.mixed):
        return True
    if verdict.table is not None:
        layer, rows = verdict.table
        record.verdicts.pop(_kind(flat), None)  # an error may be mended: the next draw looks again
        raise RowError(row_message(layer, rows, now))
    return False


def _kind(flat: FlatInputs) -> tuple[Any, ...] | None:
    """What a verdict depends on: how many inputs, their types and dimensions, and which have the batch axis.

    Not the sizes: sequences and graphs have another one in every batch. None for inputs with a state of their own (a
    cache), which a visit would change.
    """
    parts: list[Any] = [flat.batch == 1]
    for i, leaf in enumerate(flat.leaves):
        if isinstance(leaf, Tensor):
            parts.append((i in flat.tiled, leaf.dim(), leaf.dtype))
        elif isinstance(leaf, (bool, str)):
            parts.append(leaf)
        elif leaf is None or isinstance(leaf, PLAIN):
            parts.append(type(leaf))
        else:
            return None
    if len(parts) > 2:
        parts.append(str(flat.spec))
    return tuple(parts)


def _visit(model: nn.Module, record: Record, flat: FlatInputs, kind: tuple[Any, ...] | None) -> Verdict:
    """Run the network as a probe and keep the verdict. One that raises alone says so in the draw itself."""
    inner = unwrap(model)
    if kind is None or not _may_run(model, inner, flat):
        return Verdict(record.mixed)
    with torch.no_grad(), evaluating(inner), _uncompiled(), _no_batch_statistics(inner):
        found = _few_rows(inner, record, flat) if _may_be_cut(inner, flat) else None
        if found is None:
            found = _compared(inner, record, flat)
    if found is None:
        # A second failure is not the user's slip any more: this network takes no probe.
        tried = kind in record.unprobed
        record.unprobed.add(kind)
        if not tried:
            return Verdict(False)
        found = Verdict(False)
    record.verdicts[kind] = found
    record.mixed = record.mixed or found.mixed
    return found


def _may_run(model: nn.Module, inner: nn.Module, flat: FlatInputs) -> bool:
    """Whether a pass beside the user's own disturbs nobody: processes with sharded weights, tracers, graph captures."""
    if model is not inner and type(model).__name__ in ("DataParallel", "FullyShardedDataParallel"):
        return False
    if transformed() or torch._C._get_tracing_state() is not None:
        return False
    on_gpu = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in flat.leaves)
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return False
    tensors = [*inner.parameters(), *inner.buffers()]
    return not any(type(t).__name__ == "DTensor" or t.is_meta for t in tensors)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Parts of the network that are compiled run as they were written: nothing is compiled for a probe's shapes."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def _no_batch_statistics(model: nn.Module) -> Iterator[None]:
    """Norms that take the batch's statistics in eval mode hand on what they get: such statistics are no mixing."""
    hooks = [
        module.register_forward_hook(lambda norm, given, output: given[0])
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _may_be_cut(model: nn.Module, flat: FlatInputs) -> bool:
    """Whether a few rows will do.

    Not where integers may be numbers of rows: beyond the end they would be errors, which on a GPU end the process.
    Numbers of rows are below their count, and reach into its upper half.
    """
    held = [value for module in model.modules() for value in vars(module).values()]
    held += [buffer for module in model.modules() for buffer in module._buffers.values()]
    for leaf in [*flat.leaves, *held]:
        whole = isinstance(leaf, Tensor) and leaf.dtype in (torch.int64, torch.int32) and leaf.numel() > 1
        if whole and flat.batch // 2 <= int(leaf.max()) < flat.batch:
            return False
    return flat.batch > _FEW


def _few_rows(model: nn.Module, record: Record, flat: FlatInputs) -> Verdict | None:
    few = None
    with contextlib.suppress(Exception):  # inputs that cannot be cut
        few = flat.resized(_FEW)
    return None if few is None else _compared(model, record, few)


def _compared(model: nn.Module, record: Record, flat: FlatInputs) -> Verdict | None:
    """The verdict on these inputs; None where the network does not even run on them alone."""
    single = _draw(record, flat, 1)
    try:
        alone = _run(model, flat, single)
    except Exception:
        return None
    from slimbayes.core.bypass import check_called  # needed once for each kind of inputs

    check_called(model, flat, single)
    copied = _draw(record, flat, _COPIES)
    try:
        plain = _run(model, _tiled(flat, flat), copied)
    except RowError:
        return Verdict(False)  # which the draw itself will raise
    except Exception as error:
        return None if out_of_memory(error) else Verdict(True)
    table = _table(single, copied)
    changed = None
    with contextlib.suppress(Exception):  # values that the network refuses say nothing of its rows
        changed = _run(model, _tiled(_changed(flat), flat), _draw(record, flat, _COPIES))
    mixed = _differ(alone, plain, plain if changed is None else changed, flat.batch)
    if mixed and not _repeatable(model, record, flat, alone):
        # Its own noise is another in each pass; where passes are of the same size it is the same.
        mixed = changed is not None and _differ(None, plain, changed, flat.batch)
    return Verdict(mixed, table)


def _draw(record: Record, flat: FlatInputs, copies: int) -> Draw:
    """Copies of one component, without noise, which take whatever rows their layers meet."""
    ids = None
    if record.components > 1:
        device = next(leaf.device for leaf in flat.leaves if isinstance(leaf, Tensor))
        ids = torch.zeros(1, dtype=torch.int64, device=device)
    return Draw(1, copies, flat.batch, "mean", component_ids=ids, whole=True, rows_seen={})


def _run(model: nn.Module, flat: FlatInputs, now: Draw, seed: int = 0) -> Any:
    """The output under this seed, for noise of the network's own; nothing of the network is left changed."""
    args, kwargs = flat.tile(1)
    with kept(model, flat.leaves):
        torch.default_generator.manual_seed(seed)
        for device in {leaf.device for leaf in flat.leaves if isinstance(leaf, Tensor) and leaf.is_cuda}:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        return run(model, args, kwargs, flat, now)


def _tiled(outer: FlatInputs, middle: FlatInputs) -> FlatInputs:
    """The rows of ``middle`` between two copies of ``outer``; still said to be a batch of one copy."""
    leaves = [
        torch.cat([a, b, a]) if i in middle.tiled else b
        for i, (a, b) in enumerate(zip(outer.leaves, middle.leaves, strict=True))
    ]
    return FlatInputs(leaves, middle.spec, middle.tiled, middle.batch)


def _changed(flat: FlatInputs) -> FlatInputs:
    """Other rows of the same sort: numbers shrunk by up to a quarter, integers and truth values of the first row."""
    generator = torch.Generator().manual_seed(0)

    def change(leaf: Tensor) -> Tensor:
        if leaf.is_floating_point() or leaf.is_complex():
            share = torch.rand(leaf.shape, generator=generator).mul_(0.25).add_(0.75)
            share = share.to(leaf.device, leaf.dtype)
            return leaf * share if bool((leaf != 0).any()) else share
        first = leaf[:1].expand_as(leaf)
        if leaf.dtype == torch.bool or not torch.equal(first, leaf):
            return first.contiguous()
        return torch.full_like(leaf, int(leaf.min()))

    return flat.map_tiled(change, flat.batch)


def _table(single: Draw, copied: Draw) -> tuple[str, int] | None:
    """A layer that met as many rows of three copies as of one, or anything else but three times as many."""
    assert single.rows_seen is not None and copied.rows_seen is not None
    for layer, calls in single.rows_seen.items():
        for rows, more in zip(calls, copied.rows_seen.get(layer, []), strict=False):
            if more != _COPIES * rows:
                return layer, rows
    return None


def _repeatable(model: nn.Module, record: Record, flat: FlatInputs, alone: Any) -> bool:
    """Whether the network gives the same again under other random numbers."""
    again = _run(model, flat, _draw(record, flat, 1), seed=1)
    pairs = zip(pytree.tree_leaves(alone), pytree.tree_leaves(again), strict=False)
    return all(a.shape == b.shape and not _apart(a, b, b, 1e-2) for a, b in pairs if isinstance(a, Tensor))


def _differ(alone: Any, plain: Any, changed: Any, batch: int) -> bool:
    """Whether the middle copy among equal ones is other than alone, or other than among changed ones.

    Outputs without rows (a loss, a table) are let be beside others: alone, as mean or as sum over equal copies.
    """
    copies, spec = pytree.tree_flatten(plain)
    others, other_spec = pytree.tree_flatten(changed)
    ones, one_spec = (copies, spec) if alone is None else pytree.tree_flatten(alone)
    if not spec == other_spec == one_spec:
        return True
    unfolded = dimensions = 0
    for one, copy, other in zip(ones, copies, others, strict=True):
        if not (isinstance(one, Tensor) and isinstance(copy, Tensor) and isinstance(other, Tensor)):
            continue
        if copy.shape != other.shape or copy.dim() != one.dim():
            return True
        dimensions = max(dimensions, copy.dim())
        if alone is None:  # of equal passes: rows on the first axis, if there are any
            axes = [0] if copy.dim() and copy.shape[0] % (_COPIES * batch) == 0 else []
        else:
            axes = [i for i in range(copy.dim()) if copy.shape[i] != one.shape[i]]
        if not axes:
            if (
                alone is not None
                and _apart(one, copy, copy, 1e-2)
                and _apart(_COPIES * one, copy, copy, 1e-2)
            ):
                return True
            continue
        rows, rest = divmod(copy.shape[axes[0]], _COPIES)
        if len(axes) > 1 or rest or (alone is not None and rows != one.shape[axes[0]]):
            return True
        if axes == [0] and rows % batch:
            return True
        unfolded += axes == [0]
        middle, beside = copy.narrow(axes[0], rows, rows), other.narrow(axes[0], rows, rows)
        edge = other.narrow(axes[0], 0, rows)
        if _apart(middle, beside, edge, 1e-3) or (alone is not None and _apart(one, middle, edge, 1e-2)):
            return True
    return unfolded == 0 and dimensions > 0  # a scalar alone is an error of its own (``unfold``)


def _apart(a: Tensor, b: Tensor, elsewhere: Tensor, share: float) -> bool:
    """Whether a and b differ by more than rounding: seen against their size, and against how far ``elsewhere`` is."""
    if a.is_complex():
        a, b, elsewhere = (torch.view_as_real(t.resolve_conj()) for t in (a, b, elsewhere))
    if not a.is_floating_point():
        # Rounding may turn a choice: only passes of one size are the same to the last bit.
        return share < 1e-2 and not torch.equal(a, b)
    low = a.dtype in _LOW or a.is_cuda or torch.is_autocast_enabled(a.device.type)
    share, unit = (10 * share, 2.0**-6) if low else (share, 2.0**-16)
    a, b, elsewhere = a.double(), b.double(), elsewhere.double()
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
        return True
    a, b, elsewhere = (torch.nan_to_num(t, posinf=0.0, neginf=0.0) for t in (a, b, elsewhere))
    if not a.numel():
        return False
    reach = share * (a - elsewhere).abs().max() + unit * a.abs().max()
    return bool((a - b).abs().max() > reach)
