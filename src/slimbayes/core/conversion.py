"""What a converted model remembers about its conversion."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.layers.base import Converted
from slimbayes.core.memory import Footprint
from slimbayes.core.methods.base import Method
from slimbayes.core.modes import Modes
from slimbayes.core.paths import attach_now
from slimbayes.core.priors import Prior
from slimbayes.core.rules.base import Rule
from slimbayes.core.sharded import have_company, is_shared_out
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
    # ``shared_priors``, of the parameters that no rule converted, follows from the methods.
    recurrent: bool = False  # it holds layers that no compiler takes
    sequential: bool = False  # it holds recurrent or attention layers that are not converted
    verdicts: dict[Any, Any] = field(
        default_factory=dict
    )  # whether rows are mixed (``row_mixing.py``), likewise
    unprobed: set[Any] = field(default_factory=set)  # inputs on which a probe failed once
    mixed: bool = False  # whether they are for any inputs, for compiled code
    unsplit: set[Any] = field(
        default_factory=set
    )  # inputs with as many rows as all draws, found to serve every row
    footprints: dict[Any, Footprint | None] = field(default_factory=dict)  # memory of a pass, likewise
    baseline: Tensor = field(default_factory=lambda: torch.zeros(()))  # running nll, for learned mixing
    survey: Survey | None = None  # the modules, as last seen
    modes: Modes = field(default_factory=Modes)  # in which threads run it

    def __post_init__(self) -> None:
        attach_now()
        given = [method.traits.shared_prior for method in self.methods]
        self.shared_priors: tuple[Prior, ...] = tuple([prior for prior in given if prior is not None])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()  # what an older release has left out

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        return replace(
            self,
            layers=dict(self.layers),
            layer_parameters=dict(self.layer_parameters),
            verdicts={},  # a copy may be changed
            unprobed=set(),
            mixed=False,
            unsplit=set(),
            footprints={},
            baseline=torch.zeros(()),
            survey=None,
            modes=Modes(),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "survey": None, "verdicts": {}, "unprobed": set()}


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


def ruled_layers(model: nn.Module) -> list[tuple[Rule, Converted]]:
    """Every converted layer with its rule: ``converted_layers`` as what asks all of them takes it."""
    inner = unwrap(model)
    known = _survey(inner)
    if known is None:
        return [(layer.bayes, layer) for _, layer in walk(inner)]
    # Not by attribute: a module's own modules take a detour, once for every layer and step.
    pairs: list[Any] = [(layer._modules.get("bayes"), layer) for _, layer in known.converted(inner)]
    return [(layer.bayes if rule is None else rule, layer) for rule, layer in pairs]


def hooked(model: nn.Module) -> bool:
    """Whether something may change weights between a look at them and the call of the layer that they belong to."""
    if nn.modules.module._global_forward_pre_hooks:
        return True
    return any([bool(module._forward_pre_hooks) for module in every_module(unwrap(model))])


def every_module(model: nn.Module) -> list[nn.Module]:
    """Every module of the model, each once."""
    known = _survey(model)
    return modules(model) if known is None else [model, *known.below]


def shared_out(model: nn.Module) -> bool:
    """Whether processes share out the model's parameters: nothing can be read of them before a layer runs."""
    if not have_company():
        return False
    inner = unwrap(model)
    known = _survey(inner)
    return is_shared_out(modules(inner)) if known is None else known.shared_out


def require_whole(model: nn.Module, verb: str) -> None:
    """Raise where processes share out the parameters that ``verb`` reads."""
    if shared_out(model):
        raise ValueError(
            f"sb.{verb} reads whole weights, which processes share out among themselves here (fully_shard or "
            f"parallelize_module): call sb.save on all of them, and sb.load the file into the plain network"
        )


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
