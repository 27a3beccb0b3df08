"""``merge`` and ``unmerge``: the posterior mean folded into a plain network's weights, and taken out again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slimbayes.analysis.layers import root_of
from slimbayes.core.context import Draw, Frame
from slimbayes.core.conversion import ATTRIBUTE, Record, converted_layers, find_record, require_whole, unwrap
from slimbayes.core.layers.base import Converted
from slimbayes.core.layers.dropout import ACTIVE
from slimbayes.core.layers.ensemble import Ensembled
from slimbayes.core.layers.linear import BayesBilinear, TransposedLinear
from slimbayes.core.rules.base import stored
from slimbayes.core.rules.fixed import Fixed
from slimbayes.sequences.attention import BayesMultiheadAttention
from slimbayes.sequences.kernels import Kernel, Several

Network = TypeVar("Network", bound=nn.Module)
Place = tuple[dict[str, Any], str]  # a module's store of parameters or buffers, and a name in it

_KEPT = "_slimbayes_merged"
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_RETYPED: tuple[type[nn.Module], ...] = (Converted, Several, Ensembled, *ACTIVE.values())
# What conversion gives to a module beside its class, its rule and its tensors.
_ADDED = (
    "component_tensors", "kernels", "source", "members", "ensemble_name", "_tensor_names", "_tied", "_batched",
    "_in_use", "settled_token", "settled_weight", "settled_bias",
)  # fmt: skip
_CHANGED = ("_qkv_same_embed_dim", "_flat_weights")


@dataclass
class _Taken:
    """What ``merge`` took from a module: its class, its rule, and attributes."""

    module: nn.Module
    kind: type[nn.Module]
    rule: nn.Module | None
    attributes: dict[str, Any]


@dataclass
class _Merged:
    """All that ``unmerge`` puts back."""

    record: Record
    modules: list[_Taken] = field(default_factory=list)
    tensors: list[tuple[Place, Tensor, torch.dtype]] = field(default_factory=list)


@torch.no_grad()
def merge(model: Network, component: int | None = None, keep: bool = True) -> Network:
    """Fold the posterior mean into the weights and make the network plain, in place: ``sb.draw(noise="mean")``.

        Rank1: W ← W ∘ r_k s_kᵀ, b ← b_k      MeanField, KTied: the means      EMP, ECMP: W ← Σ_k p_k W_k

    Layers have torch's own classes again and the state_dict the keys and shapes from before the conversion. Of
    methods whose draws axis counts components (Rank1, BatchEnsemble, DeepEnsemble) one is chosen: ``component``. A mean
    network has no spread left: keep the Bayesian one for its uncertainty. What was there is kept beside the network,
    outside its state_dict, until ``sb.unmerge`` puts it back; ``keep=False`` forgets it. Returns the same model.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(components=4))
    >>> x = torch.ones(1, 3)
    >>> expected = sb.draw(net, x, noise="mean")[1]
    >>> net = sb.merge(net, component=1)
    >>> type(net).__name__, bool(torch.allclose(net(x), expected))
    ('Linear', True)
    >>> sb.unmerge(net).bayes.components
    4
    """
    record = find_record(model)
    require_whole(model, "merge")
    root = root_of(model)
    chosen = _chosen(record, component)
    values = dict(_folded(root, chosen))
    merged = _Merged(record)
    _check_ties(root, values)
    for store, key, old in _places(root):
        if id(old) in values:
            merged.tensors.append(((store, key), old, old.dtype))
            store[key] = values[id(old)][1]
    for module in list(root.modules()):
        if isinstance(module, _RETYPED):
            merged.modules.append(_retype(module))
    del root.__dict__[ATTRIBUTE]
    record.survey = None
    root.__dict__.pop(_KEPT, None)
    if keep:
        root.__dict__[_KEPT] = merged
    return model


@torch.no_grad()
def unmerge(model: Network) -> Network:
    """Put back what ``sb.merge`` took: the same parameters, bit for bit, where the network is now. In place.

    Parameters that the merged network had of its own are lost; those that no layer's posterior changed are the same
    objects in both, and what was done to them in between stays.
    """
    inner = unwrap(model)
    root = next((m for m in inner.modules() if _KEPT in m.__dict__), None)
    if root is None:
        raise ValueError(
            f"this {type(inner).__name__} is not merged, or was merged with keep=False: there is nothing to put back"
        )
    if any(ATTRIBUTE in m.__dict__ for m in inner.modules()):
        raise ValueError(
            f"this {type(inner).__name__} was converted again after sb.merge: merge it once more, or load the first "
            f"conversion from a checkpoint"
        )
    merged: _Merged = root.__dict__[_KEPT]
    changed = sorted({key for (store, key), _, dtype in merged.tensors if store[key].dtype != dtype})
    if changed:
        raise ValueError(
            f"the merged network has another dtype than before ({', '.join(changed[:4])}), and what would be put back "
            f"has not: undo that first, with network.to(dtype)"
        )
    for (store, key), old, _ in merged.tensors:
        old.data = old.data.to(store[key].device)
        store[key] = old
    for taken in merged.modules:
        module = taken.module
        module.__class__ = taken.kind
        module.__dict__.update(taken.attributes)
        if taken.rule is not None:
            device = next((p.device for p in module.parameters()), None)
            module._modules["bayes"] = taken.rule.to(device).train(module.training)
    del root.__dict__[_KEPT]
    root.__dict__[ATTRIBUTE] = merged.record
    return model


def _chosen(record: Record, component: int | None) -> int:
    if component is None and record.components > 1:
        raise ValueError(
            f"this model has {record.components} components, and one plain network is one of them: name it, with "
            f"component=0 for the first"
        )
    chosen = 0 if component is None else component
    if isinstance(chosen, bool) or not isinstance(chosen, int) or not 0 <= chosen < record.components:
        raise ValueError(
            f"component={component!r} is none of this model's: they are 0 to {record.components - 1}"
        )
    return chosen


def _places(root: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Where every parameter and buffer is held, each place once."""
    stores = [store for module in root.modules() for store in (module._parameters, module._buffers)]
    return [(store, key, value) for store in stores for key, value in store.items() if value is not None]


def _folded(root: nn.Module, component: int) -> Iterator[tuple[int, tuple[str, Tensor, int]]]:
    """By the id of the old tensor: its layer, the new tensor, and how many layers made one (places that hold it)."""
    made: dict[int, tuple[str, Tensor, int]] = {}
    for name, old, new in _new_tensors(root, component):
        if id(old) not in made:
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new.clone(), requires_grad=old.requires_grad)
            made[id(old)] = (name, new, 1)
            continue
        first, known, count = made[id(old)]
        if not torch.equal(known, new):
            raise ValueError(
                f"layers {first!r} and {name!r} share one tensor and have other factors on it, which one plain tensor "
                f"cannot hold: untie the two before the conversion, or convert one of them only"
            )
        made[id(old)] = (first, known, count + 1)
    yield from made.items()


def _new_tensors(root: nn.Module, component: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(layer, old, new) for every tensor that the posterior mean or the choice of a component changes."""
    for module in root.modules():
        if isinstance(module, Ensembled):
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            for name in module._tensor_names:
                yield f"{module.ensemble_name}.{name}", tensors[name], tensors[name][component].clone()
    for name, layer in converted_layers(root):
        chosen = torch.tensor([component], device=getattr(layer.weight, "device", None))
        draw = Draw(1, 1, 1, "mean", component_ids=chosen)
        fixed = layer.bayes.mean(layer, Frame(1, 1, 1, 1, "mean", draw))
        for which, new in zip(("weight", "bias"), plain_tensors(layer, fixed), strict=True):
            old = getattr(layer, which, None)
            if new is None or old is None or new.is_set_to(old):
                continue
            store, key = stored(layer, which)
            if store.get(key) is None:
                raise ValueError(
                    f"layer {name!r} computes its {which} (weight_norm, pruning or the like), so nothing can be folded "
                    f"into it; remove that first"
                )
            yield name, store[key], new
        if fixed.statistics is not None:
            buffers: Any = layer._buffers
            for key, value in zip(("running_mean", "running_var"), fixed.statistics, strict=True):
                yield name, buffers[key], value[0]
            yield name, buffers["num_batches_tracked"], buffers["num_batches_tracked"].amax(0)


def _check_ties(root: nn.Module, values: dict[int, tuple[str, Tensor, int]]) -> None:
    """A weight that rank-1 factors change must not be held by a layer that has none."""
    versions = {
        id(old) for _, _, old in _places(root) if id(old) in values and old.shape != values[id(old)][1].shape
    }
    held: dict[int, int] = {}
    for _, _, old in _places(root):
        held[id(old)] = held.get(id(old), 0) + 1
    for key, (name, _, count) in values.items():
        if key not in versions and held[key] != count:
            raise ValueError(
                f"the weight of layer {name!r} is tied to another layer's, which has no factors of its own: folded "
                f"into it they would change both. Untie the two before the conversion, or exclude {name!r}"
            )


def plain_tensors(layer: Converted, fixed: Fixed) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias with which the plain layer does what this one does in a single draw."""
    weight, bias, s, r = (
        None if t is None else t.squeeze(0) for t in (fixed.weight, fixed.bias, fixed.inner, fixed.outer)
    )
    if weight is None or (r is None and s is None):
        return weight, bias
    if not fixed.additive:
        return scaled_weight(layer, r, s), bias
    if bias is None or not layer.is_matrix or isinstance(layer, Kernel):
        raise TypeError(
            f"additive factors of layer {layer.bayes.name!r} cannot be folded: that takes a Linear layer with a bias, "
            f"b ← b + r + W s"
        )
    shift = 0.0 if s is None else layer.compute((s.unsqueeze(0),), weight, None).squeeze(0)
    return weight, bias + shift + (0.0 if r is None else r)


def scaled_weight(layer: Converted, r: Tensor | None, s: Tensor | None) -> Tensor:
    """W ∘ r sᵀ in the layout of the layer's weight, for factors [out] and [in].

    >>> import slimbayes as sb
    >>> layer = sb.bayesianize(nn.Conv2d(2, 4, 3, groups=2), sb.Rank1())
    >>> scaled_weight(layer, torch.ones(4), torch.tensor([2.0, 3.0])).div(layer.weight)[:, 0, 0, 0]
    tensor([2., 2., 3., 3.], grad_fn=<SelectBackward0>)
    """
    weight: Tensor = layer.weight
    if isinstance(layer, BayesBilinear):  # [out, in1, in2], and s has both inputs
        if s is not None:
            first, second = s.split([layer.in1_features, layer.in2_features])
            weight = weight * first[:, None] * second
        return weight if r is None else weight * r[:, None, None]
    reverse = isinstance(layer, (TransposedLinear, *_TRANSPOSED))  # [in, out/groups, ...]
    groups = int(getattr(layer, "groups", 1))
    for factor, leads in ((r, not reverse), (s, reverse)):
        if factor is None:
            continue
        if leads:
            matrix = factor.unsqueeze(1)
        else:  # the second axis counts the channels of one group
            matrix = factor.view(groups, -1).repeat_interleave(weight.shape[0] // groups, 0)
        weight = weight * matrix.reshape(*matrix.shape, *[1] * (weight.dim() - 2))
    return weight


def _retype(module: nn.Module) -> _Taken:
    """Give a module its class from before the conversion, and take what came with it."""
    kind = type(module)
    rule = module._modules.pop("bayes", None) if isinstance(module, Converted | Several) else None
    own = vars(module)
    taken = {key: own[key] for key in (*_ADDED, *_CHANGED) if key in own and not key.startswith("settled_")}
    for key in _ADDED:
        own.pop(key, None)
    module.__class__ = kind.plain_type if issubclass(kind, Ensembled) else kind.__bases__[-1]
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
        module.flatten_parameters()
    if issubclass(kind, BayesMultiheadAttention):
        vars(module)["_qkv_same_embed_dim"] = module.kdim == module.embed_dim == module.vdim
    return _Taken(module, kind, rule, taken)
