"""What a network must be like to be converted and run, and what to say of one that is not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from slimbayes.core.context import RowError

SEVERAL = (
    "layer {!r} has several weights, of which spectral_norm takes the norm as of one: use it before the conversion, "
    "with a method that keeps one weight, or leave the layer out"
)


def check_not_lazy(model: nn.Module) -> None:
    """A lazy layer has no weights before its first call, so that nothing can be spread around them."""
    for name, module in model.named_modules():
        lazy: Any = module
        if isinstance(lazy, LazyModuleMixin) and lazy.has_uninitialized_params():  # type: ignore[misc]
            raise ValueError(
                f"layer {name!r} ({type(module).__name__}) is lazy, and has no weights before it is first called: run "
                f"the network once on some inputs, model(x), and convert it then"
            )


def computed(module: nn.Module) -> list[str]:
    """Tensors that a layer computes from others: under ``weight_norm``, ``spectral_norm``, ``prune``, parametrizations.

    >>> computed(nn.Linear(2, 2)), computed(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    ([], ['weight'])
    """
    if parametrize.is_parametrized(module):
        return list(module.parametrizations)  # type: ignore[arg-type]
    hooks = [type(hook).__module__ for hook in module._forward_pre_hooks.values()]
    if not any([name.startswith("torch.nn.utils.") for name in hooks]):
        return []
    return [name for name, value in vars(module).items() if isinstance(value, Tensor)]


def check_not_computed(module: nn.Module, name: str, needs: str) -> None:
    """Raise for a layer that computes its weight: ``needs`` says what the method would do with it."""
    if computed(module):
        raise ValueError(
            f"layer {name!r} ({type(module).__name__}) computes its {computed(module)[0]} from other tensors "
            f"(weight_norm, spectral_norm, prune or a parametrization), and {needs}: make it a parameter first "
            f"(torch.nn.utils.remove_weight_norm, remove_spectral_norm, prune.remove, "
            f"parametrize.remove_parametrizations), or leave the layer out with exclude={name!r}"
        )


def check_norm_of_several(layer: Any, name: str) -> None:
    """Raise for a layer of several weights, whose spectral norm is taken as of one."""
    if not layer.component_tensors or not parametrize.is_parametrized(layer, "weight"):
        return
    if any(["SpectralNorm" in type(part).__name__ for part in layer.parametrizations["weight"]]):
        raise ValueError(SEVERAL.format(name))


def check_not_meta(model: nn.Module, error: Exception | None = None) -> None:
    """A network on the meta device gives no values, whatever its inputs are."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(
                f"{name} of this {type(model).__name__} is on the meta device, where tensors have no values: give "
                f'the model memory, model.to_empty(device="cpu") or another device, and load its weights'
            ) from error


def explain_network(model: nn.Module, error: Exception) -> None:
    """Raise with the reason where what the network is like explains an error of its conversion or of a draw."""
    if torch.compiler.is_compiling():
        return
    check_not_meta(model, error)
    if isinstance(error, NotImplementedError):
        for name, parameter in model.named_parameters():
            if type(parameter) not in (Tensor, nn.Parameter):
                layer, _, which = name.rpartition(".")
                raise TypeError(
                    f"the {which} of layer {layer!r} is a {type(parameter).__name__}, which does not know an operation "
                    f"that this method needs. If it is quantised: convert and train before, and quantise what is "
                    f"frozen, sb.export.quantize(sb.freeze(model)); or leave it out with exclude={layer!r}"
                ) from error
    if isinstance(error, RowError):
        late = [(name, m) for name, m in model.named_modules() if getattr(m, "batch_first", True) is False]
        if late and "batch_first" not in str(error):
            name, module = late[0]
            raise RowError(
                f"{error} {type(module).__name__} {name!r} has batch_first=False, which makes the batch the second "
                f"dimension of its inputs: build it with batch_first=True and hand the batch over first"
            ) from error
