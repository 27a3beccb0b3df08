"""The members of a small ensemble as one batched network: torch.func.vmap over their tensors.

Small networks wait for their calls, not for their arithmetic; K members in one call wait once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils import _pytree as pytree

from slimbayes.accelerate import switches
from slimbayes.core.noise import transformed
from slimbayes.core.paths import FastPath, MemberInputs

MOST = 1 << 20  # parameters of a member; larger products gain nothing from being batched
_KINDS = (nn.Linear, nn.BatchNorm1d, nn.LayerNorm)  # what has parameters and one kernel for all members


class _Inside(threading.local):
    """Whether the transform at work is a vmap of ours over whole networks, which takes another one inside."""

    vmap = False


INSIDE = _Inside()

Call = Callable[[dict[str, Tensor], tuple[Any, ...], dict[str, Any]], Any]


class Members(FastPath):
    """All members of a small ensemble in one call, tried once for each kind of call."""

    def on(self) -> bool:
        """The switch ``members``."""
        return switches.paths.members

    def members(
        self, root: nn.Module, use: Call, stacked: dict[str, Tensor], inputs: MemberInputs
    ) -> tuple[Any] | None:
        """The joined rows of all members."""
        if not allowed(root):
            return None

        def at_once(tensors: dict[str, Tensor]) -> Any:
            return run_batched(use, tensors, inputs)

        own: Any = root
        known: dict[str, bool] = own._batched
        kind = kind_of_call(root, inputs.args, inputs.kwargs)
        if kind not in known:
            known[kind] = small(root, own.plain_type) and works(root, stacked, at_once)
        return (at_once(stacked),) if known[kind] else None


def small(root: nn.Module, original: type[nn.Module]) -> bool:
    """Whether a network is small enough, and only layers with a batched kernel have parameters.

    >>> small(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), nn.Sequential), small(nn.Conv1d(1, 1, 1), nn.Conv1d)
    (True, False)
    """
    for module in root.modules():
        kind = original if module is root else type(module)
        stateful = any(True for _ in module.parameters(False)) or any(True for _ in module.buffers(False))
        if stateful and kind not in _KINDS:
            return False
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)):
            return False
    return sum(parameter.numel() for parameter in root.parameters()) <= MOST


def allowed(root: nn.Module) -> bool:
    """Whether nothing looks at the members one by one: no hooks, no tracing, no autocast, no other transform."""
    if torch.compiler.is_compiling() or (transformed() and not INSIDE.vmap):
        return False
    if torch._C._get_tracing_state() is not None or _autocasts(root):
        return False
    if hooks._global_forward_hooks or hooks._global_forward_pre_hooks:
        return False
    if hooks._global_backward_hooks or hooks._global_backward_pre_hooks:
        return False
    return not any(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        for module in root.modules()
    )


def kind_of_call(root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What may send a network another way: its modules' modes, and all of its arguments but their values.

    >>> kind_of_call(nn.ReLU(), (torch.zeros(2, 3), True), {})[-37:]
    "[('torch.float32', 2, False), 'True']"
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    kinds = [
        (str(leaf.dtype), leaf.dim(), leaf.requires_grad) if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    ]
    return f"{[module.training for module in root.modules()]} {spec} {kinds}"


def _autocasts(root: nn.Module) -> bool:
    """Whether autocast is on, which vmap takes the layers' operations apart before it can see."""
    return any(torch.is_autocast_enabled(kind) for kind in {p.device.type for p in root.parameters()})


def run_batched(call: Call, stacked: dict[str, Tensor], inputs: MemberInputs) -> Any:
    """Every member on its own rows, component-major, or with ``split`` off each on all; rows joined again."""
    rows, args, kwargs, split = inputs
    members = len(next(iter(stacked.values())))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    own = [
        i
        for i, leaf in enumerate(leaves)
        if split and isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
    ]

    def one(tensors: dict[str, Tensor], *parts: Tensor) -> Any:
        filled = list(leaves)
        for i, part in zip(own, parts, strict=True):
            filled[i] = part
        member_args, member_kwargs = pytree.tree_unflatten(filled, spec)
        return call(tensors, member_args, member_kwargs)

    parts = [leaves[i].unflatten(0, (members, rows // members)) for i in own]
    output = torch.func.vmap(one, randomness="different")(stacked, *parts)
    return pytree.tree_map(_joined, output)


def _joined(value: Tensor) -> Tensor:
    if value.dim() < 2:
        raise ValueError("an output without rows has no place in the joined ones")
    return value.flatten(0, 1)


def works(root: nn.Module, stacked: Mapping[str, Tensor], run: Callable[[dict[str, Tensor]], Any]) -> bool:
    """Whether a trial run on copies of all tensors succeeds and leaves nothing behind in the modules."""
    before = _attributes(root)
    devices = {value.device.index for value in stacked.values() if value.device.type == "cuda"}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[i for i in devices if i is not None]):
            run({name: value.clone() for name, value in stacked.items()})
    except Exception:
        return False
    return _attributes(root) == before


def _attributes(root: nn.Module) -> list[dict[str, tuple[int, int]]]:
    """What every module keeps besides its registered tensors, by identity, and how much is in it."""
    return [
        {
            name: (id(value), len(value) if isinstance(value, (list, dict, set)) else 0)
            for name, value in vars(module).items()
            if not name.startswith("_")
        }
        for module in root.modules()
    ]
