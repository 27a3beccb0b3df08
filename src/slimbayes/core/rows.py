"""What a draw hands to a network and gets back: inputs, repeated as rows or refused, errors that say so, outputs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from slimbayes.core.context import Draw, RowError, activate, repeat_rows
from slimbayes.core.conversion import Record, find_record, unwrap
from slimbayes.core.memory import out_of_memory
from slimbayes.sequences.kernels import Several

_ONE = pytree.tree_flatten(((0,), {}))[1]  # of one tensor and nothing else


PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)


@dataclass
class FlatInputs:
    """The leaves of all inputs, the positions of those that have the batch axis, and its length."""

    leaves: list[Any]
    spec: Any
    tiled: set[int]
    batch: int
    verdict: Any = None  # whether their rows are mixed, once that was asked (``row_mixing.py``)

    def map_tiled(self, change: Callable[[Tensor], Tensor], batch: int) -> FlatInputs:
        """The same inputs with every tensor that has the batch axis changed to another batch."""
        leaves = [change(leaf) if i in self.tiled else leaf for i, leaf in enumerate(self.leaves)]
        return FlatInputs(leaves, self.spec, self.tiled, batch, self.verdict)

    def tile(self, draws: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with the batch repeated for every draw: [draws·B, ...], draws outermost."""
        flat = self
        if self.spec is _ONE:
            return (self.leaves[0] if draws == 1 else repeat_rows(self.leaves[0], draws),), {}
        if draws > 1:
            flat = self.map_tiled(lambda leaf: repeat_rows(leaf, draws), self.batch)
        args, kwargs = pytree.tree_unflatten(flat.leaves, self.spec)
        return args, kwargs

    def numel(self) -> int:
        """How many numbers the tensors with the batch axis hold."""
        return sum(self.leaves[i].numel() for i in self.tiled)

    def resized(self, batch: int) -> FlatInputs:
        """A few rows of these inputs: the first, repeated where there are too few, and the last ones."""
        last = min(batch, self.batch) - 1

        def change(leaf: Tensor) -> Tensor:
            return torch.cat([leaf[:1]] * (batch - last) + [leaf[len(leaf) - last :]])

        return self.map_tiled(change, batch)


def flatten_inputs(
    model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], shared: Sequence[str | int]
) -> FlatInputs:
    """Find the batch axis: the first dimension of the first tensor and of all others of that length."""
    if (
        len(inputs) == 1 and not named and not shared and type(inputs[0]) is Tensor
    ):  # most networks, most calls
        x = inputs[0]
        if x.dim() and x.shape[0] and not x.is_meta:
            return FlatInputs([x], _ONE, {0}, x.shape[0])
    _refuse_packed(inputs, named)
    leaves, spec = pytree.tree_flatten((inputs, named))
    whole = _whole_leaves(model, inputs, named, shared)
    batch = _batch_size(leaves, whole)
    if any([isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves]):
        check_meta(leaves)
    tiled = {
        i
        for i, leaf in enumerate(leaves)
        if i not in whole and isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
    }
    return FlatInputs(leaves, spec, tiled, batch)


def _refuse_packed(inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """A packed sequence mixes the examples of a batch: it has no axis to repeat."""
    for name, value in [*enumerate(inputs), *named.items()]:
        values: Any = value.values() if isinstance(value, dict) else value
        if isinstance(value, PackedSequence) or not isinstance(value, (dict, list, tuple)):
            values = (value,)
        if any([isinstance(item, PackedSequence) for item in values]):
            raise TypeError(
                f"input {name!r} is a PackedSequence, which mixes the examples of the batch: no draw can repeat them. "
                f"Hand over padded sequences [batch, time, ...] and their lengths, a tensor [batch], and pack "
                f"inside the network: pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)"
            )


def _whole_leaves(
    model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], shared: Sequence[str | int]
) -> set[int]:
    """Positions, among the flattened inputs, of what is never tiled."""
    if isinstance(shared, (str, int)):
        shared = (shared,)
    if not shared:
        return set()
    positions = list(inspect.signature(unwrap(model).forward).parameters)
    places: list[str | int] = []
    for item in shared:
        known = item in named or (isinstance(item, int) and 0 <= item < len(inputs))
        if isinstance(item, str) and not known and item in positions[: len(inputs)]:
            item, known = positions.index(item), True
        if not known:
            raise ValueError(f"shared_inputs names {item!r}, but no such input was passed")
        places.append(item)
    whole: set[int] = set()
    start = 0
    for key, value in [*enumerate(inputs), *named.items()]:
        count = len(pytree.tree_leaves(value))
        if key in places:
            whole.update(range(start, start + count))
        start += count
    return whole


def _batch_size(leaves: list[Any], whole: set[int]) -> int:
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and i not in whole:
            if leaf.dim() == 0:
                raise ValueError("the first input is a scalar; inputs need a batch axis first")
            if leaf.shape[0] == 0:
                raise ValueError(f"the batch is empty: the first input has shape {tuple(leaf.shape)}")
            return int(leaf.shape[0])
    raise ValueError("draw got no tensor input to take the batch size from")


def check_meta(leaves: list[Any]) -> None:
    """A tensor without values gives none, which not all layers notice; some of torch's crash on it."""
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.is_meta:
            raise ValueError(
                f"input {i} of shape {tuple(leaf.shape)} is on the meta device, where tensors have no values: a draw "
                f"needs values, and the model on a device that has them"
            )


def run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], flat: FlatInputs, now: Draw) -> Any:
    """The network's output in this draw; an error says what the network was handed."""
    if torch.compiler.is_compiling():
        with activate(now):
            return model(*args, **kwargs)
    watched = now.rows > flat.batch and find_record(model).sequential
    try:
        with activate(now), no_single_sequence(model, now) if watched else contextlib.nullcontext():
            return model(*args, **kwargs)
    except Exception as error:
        explain(error, flat.leaves, flat.tiled, now)
        raise


@contextlib.contextmanager
def no_single_sequence(model: nn.Module, now: Draw) -> Iterator[None]:
    """Refuse a sequence without a batch in layers that are not converted: its steps would be taken for examples.

    Repeated for the draws, [T, ·] would be one sequence that is longer. Converted layers see it by their rows. A
    network that hands over its rows one by one calls the layer for each.
    """
    seen: dict[nn.Module, list[tuple[int, ...]]] = {}

    def look(module: nn.Module, given: tuple[Any, ...]) -> None:
        if given and isinstance(given[0], Tensor) and given[0].dim() == 2:
            seen.setdefault(module, []).append(tuple(given[0].shape))

    kinds = (nn.RNNBase, nn.MultiheadAttention)
    hooks = [
        module.register_forward_pre_hook(look)
        for module in unwrap(model).modules()
        if isinstance(module, kinds) and not isinstance(module, Several)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for module, shapes in seen.items():
        steps = sum(shape[0] for shape in shapes)
        # Members of an ensemble have one call each, or all of them one, in which each sees its own rows.
        if any(steps * times == now.rows and len(shapes) * times < now.rows for times in (1, now.components)):
            raise RowError(
                f"a {type(module).__name__} that is not converted got one sequence without a batch, of shape "
                f"{shapes[0]}: its steps would run on from draw to draw. Give the sequence a batch, x.unsqueeze(0)"
            )


def explain(error: Exception, leaves: list[Any], tiled: set[int], now: Draw) -> None:
    """Say beside an error of the network's, or of torch's, what the network was handed: rows it never saw before."""
    if isinstance(error, RowError) or out_of_memory(error):
        return
    given = [
        f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
        + (f" as {now.rows} rows" if i in tiled else " as it is")
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for i, leaf in enumerate(leaves)
    ]
    note = (
        f"This was a draw of {now.components} components x {now.samples} samples of {now.batch} examples, the first "
        f"dimension of the first input: the batch comes first, and is repeated. The network got {'; '.join(given)}."
    )
    add = getattr(error, "add_note", None)
    if add is not None:
        add(note)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])


def may_be_split(record: Record, leaves: list[Any], tiled: set[int], now: Draw) -> tuple[Any, ...]:
    """What to remember of inputs that are not repeated and still have as many rows as all draws together; or ()."""
    if now.rows == now.batch or len(tiled) == len(leaves) or torch.compiler.is_compiling():
        return ()
    found = [
        (i, tuple(leaf.shape))
        for i, leaf in enumerate(leaves)
        if i not in tiled and isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == now.rows
    ]
    key = (now.batch, now.components, now.samples, *found)
    return key if found and key not in record.unsplit else ()


def unfold(output: Any, draws: int, batch: int) -> Any:
    """What the network gave back, its rows split into draws: [draws, B, ...]."""
    if type(output) is Tensor and output.dim() > 0 and output.shape[0] % (draws * batch) == 0:
        return (
            output.unsqueeze(0)
            if draws == 1
            else output.view(draws, output.shape[0] // draws, *output.shape[1:])
        )
    leaves, spec = pytree.tree_flatten(output)
    unfolded = 0
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] % (draws * batch) == 0:
            leaves[i] = leaf.unflatten(0, (draws, leaf.shape[0] // draws))
            unfolded += 1
    if not unfolded:
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        raise RowError(
            f"no output of the model has the {draws * batch} rows of this draw in its first dimension "
            f"(output shapes: {shapes}); the network must keep the batch outermost, or run once per draw "
            f'with layout="passes", which stacks outputs of any shape'
        )
    return pytree.tree_unflatten(leaves, spec)


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
            parts.append((i in tiled, tuple(shape), leaf.dtype, device, autocasts(device)))
        elif leaf is None or isinstance(leaf, PLAIN):
            parts.append((type(leaf), leaf))
        else:
            return None
    if len(leaves) > 1:
        parts.append(str(spec))
    return tuple(parts)


def autocasts(device: str) -> bool:
    """Whether autocast is on for this kind of device."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
