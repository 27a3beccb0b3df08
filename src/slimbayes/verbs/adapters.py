"""``adapt``: a frozen, pretrained network with a few new parameters; and what of a model is base, and what adapter."""

from __future__ import annotations

import hashlib
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor, nn

from slimbayes.core.conversion import converted_layers
from slimbayes.core.convert import all_or_nothing, bayesianize
from slimbayes.core.layers.base import Loading
from slimbayes.core.layers.ensemble import Ensembled
from slimbayes.core.selection import MethodOrRules, Selection, kept, listing, selected
from slimbayes.core.sharded import whole

Network = TypeVar("Network", bound=nn.Module)


def adapt(
    model: Network,
    method: MethodOrRules,
    include: Selection | None = None,
    exclude: Selection | None = None,
    train: Selection | None = None,
) -> Network:
    """Freeze a pretrained network and convert it: only what the method adds is trained, and what ``train`` selects.

    What a method adds: the factors of Rank1 and BatchEnsemble, the spreads of MeanField and KTied, the versions of
    EMP and ECMP, the members of DeepEnsemble. The weights stay: under MeanField and KTied they are the means.
    ``train`` selects modules whose own parameters are trained too, a new head for one; ``include`` and ``exclude``
    are those of ``sb.bayesianize``: texts are regular expressions found anywhere in a name, so that "1" is in "10" too
    and r"^1$" is not. Save with ``sb.save(model, path, adapter_only=True)``. Returns the same model.

    >>> import slimbayes as sb
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    >>> model = sb.adapt(net, [("1", sb.EMP(components=3)), ("2", sb.KTied())], train="2")
    >>> [name for name, p in model.named_parameters() if not p.requires_grad]
    ['0.weight', '0.bias']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"adapt takes a pretrained torch.nn.Module, got {type(model).__name__}")
    train = kept(train)
    with all_or_nothing(model):
        bayesianize(model, method, include, exclude)
        wanted = {id(parameter) for parameter in _own_parameters(model)}
        if train is not None:
            chosen = [m for name, m in model.named_modules() if selected(train, name, m)]
            if not any(next(m.parameters(), None) is not None for m in chosen):
                raise ValueError(
                    f"train={train!r} matches no module with parameters; the modules are: "
                    f"{listing({name: m for name, m in model.named_modules() if name})}"
                )
            wanted |= {id(parameter) for module in chosen for parameter in module.parameters()}
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in wanted)
    return model


def _own_parameters(model: nn.Module) -> list[Tensor]:
    """The parameters that a conversion added: those of the rules, versions, and members."""
    found: list[Tensor] = []
    for _, layer in converted_layers(model):
        found += layer.bayes.parameters()
        if layer.bayes.mixing_law() is not None:
            found += [tensor for tensor in (layer.weight, layer.bias) if tensor is not None]
    for module in model.modules():
        if isinstance(module, Ensembled):
            found += module.parameters()
    return found


@torch.no_grad()
def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The frozen parameters of the network before its conversion, by name: what an adapter does not hold.

    One that has a component axis belongs to the base while its components are copies of one tensor, which is then
    the one returned.

    >>> import slimbayes as sb
    >>> model = sb.adapt(nn.Linear(3, 2), sb.Rank1(components=4))
    >>> {name: tuple(value.shape) for name, value in base_tensors(model).items()}
    {'weight': (2, 3), 'bias': (2,)}
    """
    added = {id(parameter) for _, layer in converted_layers(model) for parameter in layer.bayes.parameters()}
    versions = _with_components(model)
    base: dict[str, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, nn.Parameter) or value.requires_grad or id(value) in added:
            continue
        if id(value) not in versions:
            base[name] = value.detach()
        elif bool((value == value[:1]).all()):
            base[name] = value.detach()[0]
    return base


@torch.no_grad()
def other_base(model: nn.Module, known: dict[str, str]) -> list[str]:
    """The names among ``known`` whose tensor the model lacks, or has with another fingerprint."""
    state = model.state_dict(keep_vars=True)
    versions = _with_components(model)
    other = []
    for name, expected in known.items():
        value = state.get(name)
        if isinstance(value, Tensor) and id(value) in versions:
            value = value[0] if bool((value == value[:1]).all()) else None
        if not isinstance(value, Tensor) or fingerprint(value) != expected:
            other.append(name)
    return other


def _with_components(model: nn.Module) -> set[int]:
    """The parameters that conversion gave an axis of components or members."""
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, Ensembled):
            found |= {id(parameter) for parameter in module.parameters()}
        elif isinstance(module, Loading):
            found |= {id(attrgetter(name)(module)) for name in module.component_tensors}
    return found


def fingerprint(value: Tensor) -> str:
    """A digest of a tensor's type, shape and numbers.

    >>> fingerprint(torch.zeros(2)) == fingerprint(torch.zeros(2)), fingerprint(torch.zeros(2, 1))[:6]
    (True, 'e8e0f0')
    """
    value = whole(value.detach()).cpu().contiguous()
    digest = hashlib.sha256(f"{value.dtype} {tuple(value.shape)}".encode())
    digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]
