"""``freeze``: a converted model as plain tensors, one function for every draw."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.accelerate.late_tiling import LATE_TILING, Plan
from slimbayes.core.context import Draw, Frame
from slimbayes.core.conversion import ATTRIBUTE, Record, find_record, require_whole, unwrap
from slimbayes.core.layers.base import Converted
from slimbayes.core.layers.dropout import _Active
from slimbayes.core.layers.embedding import BayesEmbedding
from slimbayes.core.layers.ensemble import Ensembled
from slimbayes.core.layers.linear import BayesLinear, TransposedLinear
from slimbayes.core.layers.norm import _Norm, _TrailingNorm
from slimbayes.core.row_mixing import in_passes
from slimbayes.core.rows import FlatInputs, flatten_inputs, signature
from slimbayes.core.rules.base import Operation
from slimbayes.core.rules.fixed import Drop, Fixed
from slimbayes.core.rules.kernel_map import expand_groups
from slimbayes.sequences.kernels import Several
from slimbayes.verbs.checkpoint import describe_methods
from slimbayes.verbs.freezing import plain
from slimbayes.verbs.freezing.kernels import freeze_several
from slimbayes.verbs.freezing.layers import (
    Factored,
    FrozenLayer,
    Mask,
    Masked,
    Matrices,
    Members,
    Scaled,
    Tables,
)
from slimbayes.verbs.freezing.network import Frozen
from slimbayes.verbs.freezing.replay import Replay


@dataclass
class Making:
    """What one frozen model is made with: the draw that samples, and who asks for which mask."""

    frame: Frame
    seed: int

    @property
    def draws(self) -> int:
        """Functions that differ."""
        return self.frame.draws

    def mask(self, drop: Drop) -> Mask:
        """The mask of one source of dropout."""
        return Mask(*drop, self.seed, self.frame.components, self.frame.samples)


def freeze(
    model: nn.Module,
    draws: int = 8,
    seed: int = 0,
    example: Any = None,
    shared_inputs: Sequence[str | int] = (),
) -> Frozen:
    """A plain, deterministic module whose output has the draws axis, ``[draws, batch, ...]``.

    Draw d is the function f_d(x) = f(x; w_d) with w_d sampled once, from the seed: what
    ``sb.draw(model, x, samples=draws // components, noise="shared", seed=seed)`` returns in evaluation mode, whatever
    the batch. The model is left as it is, and what is frozen shares no memory with it. ``draws`` must be a multiple of
    the components of Rank1, BatchEnsemble and DeepEnsemble; the draws of a component stand next to each other.

    ``example``: inputs (a tensor, a tuple, or a dict of named ones) of the form that will come. With them the part of
    the network that no draw touches is computed once instead of once per draw, and masks of dropout are made now
    instead of at the first call. ``shared_inputs`` as in ``sb.draw``.

    >>> import slimbayes as sb
    >>> model = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(components=4))
    >>> frozen = sb.freeze(model, draws=8)
    >>> x = torch.randn(5, 3)
    >>> frozen(x).shape, torch.equal(frozen(x), frozen(x))
    (torch.Size([8, 5, 2]), True)
    """
    record = find_record(model)
    require_whole(model, "freeze")
    inner = unwrap(model)
    components = record.components
    _check(draws, seed, components)
    noisy = any(method.traits.noisy for method in record.methods) or bool(record.dropouts)
    samples = draws // components if noisy else 1
    flat = None if example is None else _flattened(model, example, shared_inputs)
    if flat is not None:
        _refuse_mixed(model, record, flat, components, samples)
    with torch.no_grad():
        plan = None if flat is None else _plan(inner, record, flat, components * samples)
        network = copy.deepcopy(inner)
        network.requires_grad_(False)
        frame = Frame(components, samples, 1, 1, "shared", Draw(components, samples, 1, "shared", seed))
        network, masked = _frozen_network(network, Making(frame, seed), plan)
    metadata = _metadata(record, draws, components, seed)
    late = None if plan is None else plan.outputs
    frozen = Frozen(
        network, draws, components * samples, masked, shared_inputs, late, _arguments(inner), metadata
    )
    if flat is not None:
        args, kwargs = flat.tile(1)
        with torch.no_grad():
            frozen(*args, **kwargs)
    return frozen


def _check(draws: int, seed: int, components: int) -> None:
    if isinstance(draws, bool) or not isinstance(draws, int) or draws < 1:
        raise ValueError(f"draws must be an integer of at least 1, got {draws!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed must be an integer, got {seed!r}: a frozen model is one choice of its draws")
    if draws % components:
        near = max(1, round(draws / components)) * components
        raise ValueError(
            f"draws={draws} is not a multiple of this model's {components} components, each of which gives as many "
            f"draws as the others; use draws={near}"
        )


def _arguments(model: nn.Module) -> list[str]:
    """The names of a network's inputs; those of a deep ensemble are its members'."""
    forward: Any = model.forward
    if isinstance(model, Ensembled):
        forward = functools.partial(model.plain_type.forward, model)
    gathered = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in inspect.signature(forward).parameters.values() if one.kind not in gathered]


def _metadata(record: Record, draws: int, components: int, seed: int) -> dict[str, Any]:
    return {"methods": describe_methods(record), "draws": draws, "components": components, "seed": seed}


def as_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs as they are handed over: a tensor, a tuple of several, or a dict of named ones."""
    if isinstance(example, dict):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    return (example,), {}


def _flattened(model: nn.Module, example: Any, shared: Sequence[str | int]) -> FlatInputs:
    args, kwargs = as_arguments(example)
    flat = flatten_inputs(model, args, kwargs, shared)
    return flat if flat.batch > 1 else flat.resized(2)  # a single example could broadcast by chance


def _refuse_mixed(model: nn.Module, record: Record, flat: FlatInputs, components: int, samples: int) -> None:
    now = Draw(components, samples, flat.batch, "shared")
    if in_passes(model, record, flat, now, "auto") and components * samples > 1:
        raise ValueError(
            "the rows of this network's batch see each other, and a frozen model runs all draws as rows of one batch: "
            "they would see those of other draws. Freeze one draw at a time (draws=1, several seeds), or predict with "
            "sb.predict, which runs the network once per draw"
        )


def _plan(model: nn.Module, record: Record, flat: FlatInputs, draws: int) -> Plan | None:
    """Where the rows are repeated for every draw, if that may happen inside the network (late tiling)."""
    key = signature(flat.leaves, flat.spec, flat.tiled, flat.batch, "shared")
    if draws == 1 or key is None:
        return None
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        return LATE_TILING.plan_for(model, flat, "shared", key)
    finally:
        for module in training:
            module.training = True


def _frozen_network(network: nn.Module, making: Making, plan: Plan | None) -> tuple[nn.Module, bool]:
    """The copy with every converted module replaced; whether it has masks or other noise that is made later."""
    replaced: dict[int, tuple[nn.Module, nn.Module]] = {}
    for module in list(network.modules()):
        made = _frozen_module(module, making)
        if made is None:
            continue
        source = _source(module)
        if plan is not None and source in plan.layers:
            made.repeats = making.draws
        replaced[id(module)] = (module, made)
    for module in list(network.modules()):
        for key, child in list(module._modules.items()):
            if child is not None and id(child) in replaced and id(module) not in replaced:
                module._modules[key] = replaced[id(child)][1]
    network.__dict__.pop(ATTRIBUTE, None)
    whole = replaced[id(network)][1] if id(network) in replaced else network
    _forbid(replaced, whole)
    return whole, any(isinstance(module, (Mask, Replay)) for module in whole.modules())


def _forbid(replaced: dict[int, tuple[nn.Module, nn.Module]], whole: nn.Module) -> None:
    """Calls of what was replaced are errors: a network may hold a layer in a list, too, where it was not found."""
    used = {id(module) for module in whole.modules()}
    for old, _ in replaced.values():
        if id(old) not in used:
            old.__dict__["forward"] = functools.partial(_unreached, _source(old))


def _unreached(name: str, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"the network calls its layer {name!r} through something that is no submodule (a list, a dict, a function), "
        f"where freeze cannot replace it: hold its layers in nn.ModuleList or nn.ModuleDict"
    )


def _check_hooks(module: nn.Module) -> None:
    """A frozen layer runs no hooks: one that changes outputs would silently be gone."""
    theirs = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if any(not type(hook).__module__.startswith("torch.nn.utils") for hook in theirs):
        raise ValueError(
            f"layer {_source(module)!r} has forward hooks, which its frozen copy would not run: remove them first "
            f"(handle.remove()), or do what they do in the network's forward"
        )


def _source(module: Any) -> str:
    if isinstance(module, Converted):
        return module.bayes.name
    if isinstance(module, Ensembled):
        return module.ensemble_name
    return str(module.source)


def _frozen_module(module: nn.Module, making: Making) -> FrozenLayer | None:
    if isinstance(module, Ensembled):
        return Members(plain.members(module))
    if isinstance(module, (_Active, Several, Converted)):
        _check_hooks(module)
    if isinstance(module, _Active):
        return Masked(nn.Identity(), {0: making.mask(Drop(module.source, module.p, module.channel_axis))})
    if not isinstance(module, (Several, Converted)):
        return None
    plain.refresh(module)
    if isinstance(module, Several):
        made = freeze_several(module, making.frame, making.mask)
    else:
        fixed = module.bayes.fixed(module, making.frame)
        made = None if fixed is None else _by_tensors(module, fixed, making)
    return made or Replay(module, making.seed, making.frame.components, making.frame.samples)


def _by_tensors(layer: Converted, fixed: Fixed, making: Making) -> FrozenLayer:
    """The plain form of what a layer is in every draw."""
    draws, weight, bias = making.draws, fixed.weight, fixed.bias
    if fixed.drops or weight is None:
        masks = {position: making.mask(drop) for position, drop in fixed.drops.items()}
        return Masked(plain.module(layer, *[None if t is None else t[0] for t in (weight, bias)]), masks)
    if fixed.statistics is not None:  # which are part of the affine map, and all that the layer does
        mean, variance = fixed.statistics
        norm: Any = layer
        scale = weight * (variance + norm.eps).rsqrt()
        shift = -mean * scale if bias is None else bias - mean * scale
        return Scaled(nn.Identity(), scale, shift, 0)
    if fixed.inner is None and fixed.outer is None:
        return _by_draw(layer, weight, bias, draws)
    r, s, b = _all_kept(draws, fixed.outer, fixed.inner, bias)
    if fixed.additive and r is not None:
        b, r = (r if b is None else r + b), None
    # transformers' Conv1D always adds a bias.
    transposed = isinstance(layer, TransposedLinear)
    own = plain.linear(weight[0].t(), None) if transposed else plain.module(layer, weight[0], None)
    return Factored(own, s, r, b, fixed.additive, layer.input_slots, layer.output_axis)


def _by_draw(layer: Operation, weight: Tensor, bias: Tensor | None, draws: int) -> FrozenLayer:
    """A weight and a bias for every draw, in the form that the layer's operation has for many."""
    weight, bias = _all_kept(draws, weight, bias)
    if isinstance(layer, BayesLinear):
        return Matrices(weight, bias)
    if isinstance(layer, TransposedLinear):
        return Matrices(weight.transpose(1, 2).contiguous(), bias)
    if isinstance(layer, _Norm):
        trailing = len(layer.normalized_shape) if isinstance(layer, _TrailingNorm) else 0
        return Scaled(plain.module(layer, None, None), weight, bias, trailing)
    if isinstance(layer, BayesEmbedding):
        if layer.padding_idx is not None:
            row = layer.weight[..., layer.padding_idx, :]
            weight[:, layer.padding_idx] = row[0] if row.dim() > 1 else row
        return Tables(weight)
    biases: Sequence[Tensor | None] = [None] * draws if bias is None else bias.unbind(0)
    return Members([plain.module(layer, w, b) for w, b in zip(weight.unbind(0), biases, strict=True)])


def _all_kept(draws: int, *values: Tensor | None) -> Any:
    """[groups, ...] as [draws, ...], in memory of their own."""
    return [None if v is None else _kept(v, draws) for v in values]


def _kept(value: Tensor, draws: int) -> Tensor:
    if value.shape[0] == 1 and draws > 1:
        value = value.expand(draws, *value.shape[1:])
    return expand_groups(value, draws).detach().clone(memory_format=torch.contiguous_format)
