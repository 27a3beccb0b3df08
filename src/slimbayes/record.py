"""What a converted model remembers about its conversion."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.apply.base import Rule
from slimbayes.apply.bulk import Group, find_groups, fingerprint
from slimbayes.budget import Footprint
from slimbayes.late import Plan
from slimbayes.layers.base import Converted
from slimbayes.methods.base import Method

ATTRIBUTE = "_slimbayes"


Layers = list[tuple[str, Converted]]


@dataclass
class Survey:
    """What a walk through the modules found, and by what the next one sees that nothing has changed since.

    Layers are held weakly: a network of one layer would else hold itself.
    """

    outline: tuple[list[Any], ...]
    layers: list[tuple[str, weakref.ref[Converted]]]
    groups: list[Group] | None = None
    groups_of: list[Any] = field(default_factory=list)

    def found(self) -> Layers | None:
        """The converted layers with their names; None if one of them is gone."""
        alive = [(name, layer()) for name, layer in self.layers]
        return None if any([layer is None for _, layer in alive]) else alive  # type: ignore[return-value]


@dataclass
class Record:
    """Methods, which layers each converted, and what was left alone (name, type, reason)."""

    methods: tuple[Method, ...]
    layers: dict[str, int]
    left_alone: tuple[tuple[str, str, str], ...]
    base_parameters: int
    layer_parameters: dict[str, int]
    components: int
    step_components: int | None
    dropouts: tuple[str, ...]
    rows_checked: bool = False
    checkpointed: bool = False  # a layer ran inside activation checkpointing: nothing is sampled ahead of it
    late: dict[Any, Plan | None] = field(default_factory=dict)  # how to tile late, by signature of the inputs
    footprints: dict[Any, Footprint | None] = field(default_factory=dict)  # memory of a pass, likewise
    mixing: list[Tensor] = field(default_factory=list)  # log-probabilities [draws] of the last draw's indices
    byproducts: dict[str, Any] = field(default_factory=dict)  # of the last draw, for the KL that follows it
    baseline: Tensor = field(default_factory=lambda: torch.zeros(()))  # running nll, for learned mixing
    survey: Survey | None = None  # the converted layers, as last seen

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        # The last draw's log-probabilities belong to its graph, not to a copy of the model.
        return replace(
            self,
            layers=dict(self.layers),
            layer_parameters=dict(self.layer_parameters),
            late={},  # a copy may be changed
            footprints={},
            mixing=[],
            byproducts={},
            baseline=torch.zeros(()),
            survey=None,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "byproducts": {}, "survey": None}


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch.compile and DistributedDataParallel wrappers.

    >>> unwrap(nn.Linear(1, 1))
    Linear(in_features=1, out_features=1, bias=True)
    """
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in (
            "DistributedDataParallel",
            "DataParallel",
            "FullyShardedDataParallel",
        ):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def find_record(model: nn.Module) -> Record:
    """The record of a converted model, or of the one converted network inside it."""
    model = unwrap(model)
    found: Record | None = model.__dict__.get(ATTRIBUTE)
    if found is not None:
        return found
    inside = [(name, m.__dict__[ATTRIBUTE]) for name, m in model.named_modules() if ATTRIBUTE in m.__dict__]
    if not inside:
        raise ValueError(
            f"this {type(model).__name__} has not been converted; call sb.bayesianize(model, method) first "
            f"(sb.Deterministic() keeps the network as it is)"
        )
    if len(inside) > 1:
        names = ", ".join(repr(name) for name, _ in inside)
        raise ValueError(
            f"this {type(model).__name__} holds several converted networks ({names}); convert the whole "
            f"model with one call and a list of (selector, method) rules instead"
        )
    record: Record = inside[0][1]
    return record


def converted_layers(model: nn.Module) -> Layers:
    """Every converted layer with its name, each once."""
    inner = unwrap(model)
    known = None if torch.compiler.is_compiling() else _survey(inner)
    layers = None if known is None else known.found()
    return _walk(inner) if layers is None else layers


def factor_groups(model: nn.Module) -> list[Group]:
    """The noisy rank-1 factors of the model, by what they have in common."""
    return layers_and_groups(model)[1]


def layers_and_groups(model: nn.Module) -> tuple[Layers, list[Group]]:
    """``converted_layers`` and ``factor_groups`` by one look at the model."""
    inner = unwrap(model)
    known = None if torch.compiler.is_compiling() else _survey(inner)
    layers = None if known is None else known.found()
    if known is None or layers is None:
        layers = _walk(inner)
        return layers, find_groups([layer.bayes for _, layer in layers])
    rules = [layer.bayes for _, layer in layers]
    now = fingerprint(rules)
    if known.groups is None or known.groups_of != now:
        known.groups, known.groups_of = find_groups(rules), now
    return layers, known.groups


def _walk(model: nn.Module) -> Layers:
    """``converted_layers`` by a walk through the modules, in the order of ``named_modules``.

    Without that generator: every step walks the network, and the compiler traces every instruction of the walk.
    """
    found: Layers = []
    seen: set[nn.Module] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        converted = isinstance(module, Converted)
        if converted:
            found.append((name, module))  # type: ignore[arg-type]
        children = [
            (f"{name}.{key}" if name else key, child)
            for key, child in module._modules.items()
            if child is not None and not (converted and key == "bayes")  # a rule holds no layers
        ]
        waiting.extend(children[::-1])
    return found


def _survey(model: nn.Module) -> Survey | None:
    """What is known of the model's layers, if it is converted itself: looked up again where it has changed."""
    record: Record | None = model.__dict__.get(ATTRIBUTE)
    if record is None:
        return None
    now = outline(model)
    known = record.survey
    if known is None or known.outline != now:
        known = Survey(now, [(name, weakref.ref(layer)) for name, layer in _walk(model)])
        record.survey = known
    return known


def outline(model: nn.Module) -> tuple[list[int], list[type], list[str]]:
    """Every module's identity, once, and its type, and the names under which they are held; rules as a whole.

    >>> [len(part) for part in outline(nn.Sequential(nn.ReLU(), nn.ReLU()))]
    [3, 3, 2]
    """
    found = {id(model): model}
    names: list[str] = []
    waiting = [model]
    while waiting:
        children = waiting.pop()._modules
        if children:
            names += children
            for child in children.values():
                if child is not None and id(child) not in found:
                    found[id(child)] = child
                    if Rule not in type(child).__mro__:  # isinstance of an abstract class takes longer
                        waiting.append(child)
    return list(found), [type(module) for module in found.values()], names
