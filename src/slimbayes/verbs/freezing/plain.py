"""Converted layers as the torch layers that they once were, with given tensors."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from slimbayes.core.layers.base import Loading
from slimbayes.core.layers.ensemble import Ensembled
from slimbayes.core.layers.tensor_versions import unwatch
from slimbayes.core.rules.base import Operation
from slimbayes.sequences.kernels import Several

_OURS = ("bayes", "parametrizations")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_MARKS = ("component_tensors", "settled_token", "settled_weight", "settled_bias", "kernels", "source")


def torch_class(layer: nn.Module) -> type[nn.Module]:
    """The class that a converted layer had: the first that nothing of ours is mixed into."""
    return next(
        kind
        for kind in type(layer).__mro__
        if issubclass(kind, nn.Module) and not issubclass(kind, Loading | Operation) and kind is not nn.Module
    )


def shell(layer: nn.Module) -> Any:
    """A copy of a layer's options and buffers as torch's own class, without parameters, rules and hooks."""
    made = copy.copy(layer)
    made.__dict__ = {key: value for key, value in vars(layer).items() if key not in _MARKS}
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *_HOOKS):
        made.__dict__[name] = copy.copy(vars(layer)[name])
    for name in _HOOKS:
        made.__dict__[name].clear()
    for name in _OURS:
        made._modules.pop(name, None)
    for name, value in made._buffers.items():
        made._buffers[name] = None if value is None else value.detach().clone()
    made.__class__ = torch_class(layer)
    made.training = False
    return made


def module(layer: Operation | nn.Module, weight: Tensor | None, bias: Tensor | None) -> nn.Module:
    """A torch layer with this weight and bias, in memory of its own."""
    made = shell(layer)
    values = {"weight": weight, "bias": bias}
    for name in values:
        made.__dict__.pop(name, None)
        if name == "weight" or name in made._parameters or values[name] is not None:
            made._parameters[name] = own(values[name])
    if weight is None and "affine" in vars(made):
        made.affine = False
    result: nn.Module = made
    return result


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """torch's Linear with this weight [out, in]."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight = own(weight)  # type: ignore[assignment]
    if bias is not None:
        made.bias = own(bias)  # type: ignore[assignment]
    return made


def own(value: Tensor | None) -> nn.Parameter | None:
    """A parameter that is not trained."""
    return None if value is None else nn.Parameter(value.detach().clone(), requires_grad=False)


def refresh(layer: nn.Module) -> None:
    """Let torch's own hooks (weight_norm, spectral_norm) compute the weight that they would before a call."""
    for hook in layer._forward_pre_hooks.values():
        if type(hook).__module__.startswith("torch.nn.utils"):
            hook(layer, ())


def members(layer: Ensembled) -> list[nn.Module]:
    """The members of a deep ensemble as networks of their own."""
    original = layer.plain_type
    made = []
    for k in range(layer.members):
        member: Any = copy.deepcopy(layer)
        member.__class__ = original
        for name in ("members", "ensemble_name", "_tensor_names", "_tied", "_batched", "_in_use"):
            member.__dict__.pop(name, None)
        unwatch(member)
        known: dict[int, Tensor] = {}
        for inside in member.modules():
            for store in (inside._parameters, inside._buffers):
                for key, value in store.items():
                    if value is not None:
                        if id(value) not in known:
                            own_value = value[k].detach().clone()
                            known[id(value)] = (
                                nn.Parameter(own_value, requires_grad=False)
                                if isinstance(value, nn.Parameter)
                                else own_value
                            )
                        store[key] = known[id(value)]
        made.append(member.eval())
    return made


def recurrent(layer: Several, tensors: dict[str, Tensor], **options: Any) -> Any:
    """A torch recurrent layer or cell of the same options (others where given) with these parameters."""
    kind: Any = torch_class(layer)
    first = next(iter(tensors.values()))
    source: Any = layer
    known: dict[str, Any] = {
        name: getattr(source, name)
        for name in ("input_size", "hidden_size", "num_layers", "batch_first", "bidirectional", "proj_size")
        if name in vars(layer)
    }
    if isinstance(layer, (nn.RNN, nn.RNNCell)):
        known["nonlinearity"] = source.nonlinearity
    if not isinstance(layer, nn.LSTM):
        known.pop("proj_size", None)
    known |= options
    known["bias"] = any(name.startswith("bias") for name in tensors)
    made = kind(**known, device="meta", dtype=first.dtype)
    for name in [name for name, parameter in made._parameters.items() if parameter is not None]:
        made._parameters[name] = own(tensors[name])
        setattr(made, name, made._parameters[name])
    if isinstance(made, nn.RNNBase):
        made._init_flat_weights()
    return made.eval()
