"""What a converted model remembers about its conversion."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.accelerate.factor_groups import Group, find_groups
from slimbayes.accelerate.late_tiling import Plan
from slimbayes.accelerate.patch_lookahead import Places
from slimbayes.core.memory import Footprint
from slimbayes.core.methods.base import Method
from slimbayes.core.walk import Layers, Survey, modules, walk

ATTRIBUTE = "_slimbayes"


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
    recurrent: bool = False  # it holds layers that no compiler takes
    sequential: bool = False  # it holds recurrent or attention layers that are not converted
    rows_checked: bool = False
    checkpointed: bool = False  # a layer ran inside activation checkpointing: nothing is sampled ahead of it
    late: dict[Any, Plan | None] = field(default_factory=dict)  # how to tile late, by signature of the inputs
    unsplit: set[Any] = field(
        default_factory=set
    )  # inputs with as many rows as all draws, found to serve every row
    footprints: dict[Any, Footprint | None] = field(default_factory=dict)  # memory of a pass, likewise
    mixing: list[Tensor] = field(default_factory=list)  # log-probabilities [draws] of the last draw's indices
    byproducts: dict[str, Any] = field(default_factory=dict)  # of the last draw, for the KL that follows it
    baseline: Tensor = field(default_factory=lambda: torch.zeros(()))  # running nll, for learned mixing
    survey: Survey | None = None  # the modules, as last seen
    places: Places = field(default_factory=Places)  # of what the passes of predictions choose

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        # The last draw's log-probabilities belong to its graph, not to a copy of the model.
        return replace(
            self,
            layers=dict(self.layers),
            layer_parameters=dict(self.layer_parameters),
            late={},  # a copy may be changed
            unsplit=set(),
            footprints={},
            mixing=[],
            byproducts={},
            baseline=torch.zeros(()),
            survey=None,
            places=Places(),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "byproducts": {}, "survey": None}


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside torch.compile and DistributedDataParallel wrappers.

    >>> unwrap(nn.Linear(1, 1))
    Linear(in_features=1, out_features=1, bias=True)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a converted torch.nn.Module is needed, got {type(model).__name__} {model!r:.40}")
    while ATTRIBUTE not in model.__dict__:  # what was converted itself is no wrapper
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in (
            "DistributedDataParallel",
            "DataParallel",
            "FullyShardedDataParallel",
        ):
            inner = model.module
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


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
    known = _survey(inner)
    return walk(inner) if known is None else known.converted(inner)


def factor_groups(model: nn.Module) -> list[Group]:
    """The noisy rank-1 factors of the model, by what they have in common."""
    return layers_and_groups(model)[1]


def layers_and_groups(model: nn.Module) -> tuple[Layers, list[Group]]:
    """``converted_layers`` and ``factor_groups`` by one look at the model."""
    inner = unwrap(model)
    known = _survey(inner)
    if known is None:
        layers = walk(inner)
        return layers, find_groups([layer.bayes for _, layer in layers])
    layers = known.converted(inner)
    return layers, known.factor_groups(layers)


def every_module(model: nn.Module) -> list[nn.Module]:
    """Every module of the model, each once."""
    known = _survey(model)
    return modules(model) if known is None else [model, *known.below]


def _survey(model: nn.Module) -> Survey | None:
    """What is known of the model's modules, if it is converted itself: looked up again where it has changed."""
    if torch.compiler.is_compiling():
        return None
    record: Record | None = model.__dict__.get(ATTRIBUTE)
    if record is None:
        return None
    known = record.survey
    if known is None or not known.holds(model):
        record.survey = known = Survey(model)
    return known
