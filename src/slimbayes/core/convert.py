"""``bayesianize``: retype layers in place, and remember what was done and what was left alone."""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn

from slimbayes.core.conversion import ATTRIBUTE, Record
from slimbayes.core.fitness import check_not_computed, check_not_lazy, explain_network
from slimbayes.core.layers.base import Converted, constant_row, expand_saved
from slimbayes.core.layers.dropout import ACTIVE
from slimbayes.core.layers.ensemble import Ensembled, ensemble
from slimbayes.core.layers.table import converted_class
from slimbayes.core.methods import DeepEnsemble, Method
from slimbayes.core.methods.base import Shared
from slimbayes.core.rules.base import Rule
from slimbayes.core.selection import (
    NO_CLASS,
    MethodOrRules,
    Plan,
    Selection,
    check_ensemble_ties,
    follow_ties,
    make_plan,
    read_rules,
)
from slimbayes.core.sharded import gathered, same_noise, wraps
from slimbayes.core.walk import walk
from slimbayes.sequences.kernels import Several

Network = TypeVar("Network", bound=nn.Module)


def bayesianize(
    model: Network,
    method: MethodOrRules,
    include: Selection | None = None,
    exclude: Selection | None = None,
) -> Network:
    """Make a network Bayesian: its layers are retyped in place, weights and state_dict keys kept.

    ``include`` and ``exclude`` are regular expressions searched in module names, module types (exact), or
    callables on (name, module), or a list of those. ``method`` may be a list of (selector, method) rules: the
    first that matches a layer converts it; a selector of None is the method's own default. By default layers
    that multiply by a weight are converted (for EMP and ECMP: their ``patch``); norms and embeddings when
    included. Returns the same model.

    >>> import slimbayes as sb
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> net = sb.bayesianize(net, sb.Rank1(components=2))
    >>> type(net[0]).__name__
    'BayesLinear'
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"bayesianize converts a torch.nn.Module, got {type(model).__name__}")
    _check_unconverted(model)
    _check_unwrapped(model)
    check_not_lazy(model)
    rules = read_rules(method, include)
    plan = make_plan(model, rules, exclude)
    try:
        with all_or_nothing(model), same_noise(list(model.modules())):
            _apply_plan(model, plan, [rule[1] for rule in rules])
    except Exception as error:
        explain_network(model, error)
        raise
    return model


@contextlib.contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """Put every module back as it was if the block raises: a model is never left half converted."""
    stores = ("_parameters", "_buffers", "_modules")
    modules = [
        (m, type(m), {key: value.copy() if key in stores else value for key, value in vars(m).items()})
        for m in model.modules()
    ]
    trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, kind, state in modules:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(state)
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)
        raise


def _check_unconverted(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if ATTRIBUTE in module.__dict__ or isinstance(module, Converted | Several | Ensembled):
            where = f"its module {name!r} is" if name else "it is"
            raise ValueError(
                f"this {type(model).__name__} cannot be converted: {where} converted already. Convert a "
                f"fresh network, and use a list of (selector, method) rules to mix methods"
            )


def _check_unwrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if wraps(module):
            where = f"its module {name!r} is" if name else "it is"
            raise ValueError(
                f"this {type(model).__name__} cannot be converted: {where} under fully_shard already, which would not "
                f"know of the new parameters. Convert first: fully_shard(sb.bayesianize(model, method))"
            )


def _apply_plan(model: nn.Module, plan: Plan, methods: list[Method]) -> None:
    used = [methods[i] for i in (*plan.layers.values(), *plan.wholes.values())]
    base = sum(p.numel() for p in model.parameters())
    modules = dict(model.named_modules())
    check_ensemble_ties(modules, plan)
    follow_ties(model, plan, methods)
    before = {
        name: sum(p.numel() for p in modules[name].parameters()) for name in (*plan.layers, *plan.wholes)
    }
    steps = {m.traits.step_components for m in methods if m.traits.step_components is not None}
    if len(steps) > 1 or (steps and plan.wholes):
        raise ValueError(
            "components_per_step must be the same in all rules, and cannot be mixed with DeepEnsemble"
        )
    if not all(m.traits.trains_base for m in methods):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    shared = Shared()
    for name, index in plan.wholes.items():
        method = methods[index]
        assert isinstance(method, DeepEnsemble)
        if method.reinitialize is True:
            for inner, part in modules[name].named_modules(prefix=name):
                check_not_computed(
                    part,
                    inner,
                    "reset_parameters, which draws DeepEnsemble's members, misses those",
                )
        with gathered(modules[name], shared.gathered):
            ensemble(name or type(model).__name__, modules[name], method.members, method.resetter(model))
    for name, index in plan.layers.items():
        with gathered(modules[name], shared.gathered):
            _convert_layer(modules[name], name, methods[index], shared)
    _relink_aliases(model, shared)
    _find_constant_rows(model)
    for name in plan.dropouts:
        modules[name].__class__ = ACTIVE[type(modules[name])]
        modules[name].source = name or "dropout"
    _disable_fast_paths(model)
    record = Record(
        methods=tuple(methods),
        layers={**plan.layers, **plan.wholes},
        left_alone=tuple(plan.left_alone),
        base_parameters=base,
        layer_parameters=before,
        components=max((m.traits.components for m in used), default=1),
        step_components=next(iter(steps), None),
        dropouts=tuple(plan.dropouts),
        recurrent=any(isinstance(module, nn.RNNBase) for module in modules.values()),
        sequential=any(
            isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not isinstance(module, Several)
            for module in modules.values()
        ),
    )
    model.__dict__[ATTRIBUTE] = record
    silent = [f"{name} ({kind})" for name, kind, why in plan.left_alone if why.endswith(NO_CLASS)]
    if silent:
        warnings.warn(
            f"left alone: {', '.join(silent)}; classes derived from torch's recurrent and attention layers have "
            f"{NO_CLASS}",
            stacklevel=3,
        )


def _convert_layer(module: nn.Module, name: str, method: Method, shared: Shared) -> None:
    layer_class = converted_class(module)
    assert layer_class is not None
    module.__class__ = layer_class
    if isinstance(module, Several):
        shared.join(list(module.parameters()))
        module.attach(name or module.title, lambda kernel, own: _rule_of(method, kernel, own, shared))
        return
    assert isinstance(module, Converted)
    module.component_tensors = ()
    module.bayes = _rule_of(method, module, name or layer_class.title, shared)


def _rule_of(method: Method, layer: Converted, name: str, shared: Shared) -> Rule:
    rule = method.attach(layer, name, shared)
    rule.kl_temperature, rule.lr_multiplier = method.traits.temperature, method.traits.lr_multiplier
    return rule


def _relink_aliases(model: nn.Module, shared: Shared) -> None:
    """Modules that hold a second name of a parameter which now has a component axis hold the new one."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            new = None if parameter is None else shared.get(parameter, "components")
            if new is not None and new is not parameter:
                module._parameters[key] = new
                module.register_load_state_dict_pre_hook(_expand_alias)


def _find_constant_rows(model: nn.Module) -> None:
    """A padding row is never random, and is in no KL; but where a layer without padding has the same weight."""
    layers = [layer for _, layer in walk(model) if layer.weight is not None]
    rows = defaultdict(set)
    for layer in layers:
        rows[id(layer.weight)].add(constant_row(layer))
    for layer in layers:
        if len(rows[id(layer.weight)]) == 1:
            layer.bayes.constant_row = constant_row(layer)


def _expand_alias(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    for key, parameter in module._parameters.items():
        expand_saved(state_dict, prefix + key, parameter)


def _disable_fast_paths(model: nn.Module) -> None:
    # In eval mode these two hand their children's weights to one fused kernel and never call the children.
    changed: tuple[type[nn.Module], ...] = (Converted, Several, Ensembled, *ACTIVE.values())
    for module in model.modules():
        if not any(isinstance(child, changed) for child in module.modules() if child is not module):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
