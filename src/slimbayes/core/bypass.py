"""Converted layers whose weights a network reads by hand: such a layer never runs, and no draw of it is random."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slimbayes.core.context import Draw
from slimbayes.core.conversion import converted_layers
from slimbayes.core.layers.base import Converted
from slimbayes.core.probes import kept
from slimbayes.core.rows import FlatInputs, run
from slimbayes.sequences.kernels import Kernel


def check_called(model: nn.Module, flat: FlatInputs, seen: Draw) -> None:
    """Raise where the output depends on a weight whose layer was not called; ``seen`` knows who was, on these inputs.

    A layer that merely did not run this time (an expert, a layer that was dropped) leaves no trace in the output, and
    the tensor of one that did run may be tied to it. Gradients are taken only where some layer was not called.
    """
    assert seen.rows_seen is not None
    called = set(seen.rows_seen)
    layers = converted_layers(model)
    tied = {id(tensor) for _, layer in layers if _source(layer) in called for tensor in _tensors(layer)}
    missing = {
        name: (layer, own)
        for name, layer in layers
        if _source(layer) not in called and (own := [t for t in _tensors(layer) if id(t) not in tied])
    }
    found = _reached(model, flat, seen.component_ids, missing) if missing else []
    if not found:
        return
    last = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in found))
    kinds = [f"{name!r} ({type(missing[name][0]).__name__.removeprefix('Bayes')})" for name in found]
    what, leave = (
        (f"layer {kinds[0]} is", found[0])
        if len(found) == 1
        else (f"layers {', '.join(kinds[:4])}{', ...' if kinds[4:] else ''} are", f"({'|'.join(last)})$")
    )
    raise ValueError(
        f"{what} converted, but the network reads the weight by hand and never calls the layer: no draw would be "
        f"random there. Call it, self.{last[0]}(x) instead of F.linear(x, self.{last[0]}.weight), or leave it out with "
        f"exclude={leave!r}"
    )


def _source(layer: Converted) -> str:
    """By which name a draw sees the layer; a kernel runs within another."""
    return layer.layer if isinstance(layer, Kernel) else layer.bayes.name


def _tensors(layer: Converted) -> list[Tensor]:
    """The layer's own parameters: its weight, or what that is computed from (parametrizations)."""
    if isinstance(layer, Kernel):
        return [layer.weight]
    return [p for name, p in layer.named_parameters() if not name.startswith("bayes.")]


def _reached(
    model: nn.Module,
    flat: FlatInputs,
    ids: Tensor | None,
    missing: dict[str, tuple[Converted, list[Tensor]]],
) -> list[str]:
    """Names of those whose tensors have a gradient though their rules were not asked; none where it cannot be told."""
    asked: set[nn.Module] = set()

    def note(rule: nn.Module, inputs: Any) -> None:
        asked.add(rule)

    tensors = [tensor for _, own in missing.values() for tensor in own]
    frozen = [tensor for tensor in tensors if not tensor.requires_grad]
    hooks = [layer.bayes.register_forward_pre_hook(note) for layer, _ in missing.values()]
    found: list[str] = []
    try:
        with (
            contextlib.suppress(Exception),
            kept(model, flat.leaves),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            for tensor in frozen:
                tensor.requires_grad_(True)
            leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in flat.leaves]
            copied = FlatInputs(leaves, flat.spec, flat.tiled, flat.batch)
            args, kwargs = copied.tile(1)
            picked = None if ids is None else ids.clone()  # outside of inference mode, as the inputs
            now = Draw(1, 1, flat.batch, "mean", component_ids=picked, whole=True)
            output = run(model, args, kwargs, copied, now)
            # Weighted at random: the plain sum of a softmax is constant.
            total = sum(
                (y * torch.randn_like(y)).sum() for y in pytree.tree_leaves(output) if _differentiable(y)
            )
            slopes = dict(
                zip(map(id, tensors), torch.autograd.grad(total, tensors, allow_unused=True), strict=True)
            )
            found = [
                name
                for name, (layer, own) in missing.items()
                if layer.bayes not in asked and any(_slopes(slopes[id(tensor)]) for tensor in own)
            ]
    finally:
        for hook in hooks:
            hook.remove()
        for tensor in frozen:
            tensor.requires_grad_(False)
    return found


def _differentiable(y: Any) -> bool:
    return isinstance(y, Tensor) and y.requires_grad and y.is_floating_point()


def _slopes(gradient: Tensor | None) -> bool:
    """Whether anything depends on a tensor: zero times a weight, which keeps it in the graph, does not."""
    return gradient is not None and bool(gradient.isfinite().logical_and(gradient != 0).any())
