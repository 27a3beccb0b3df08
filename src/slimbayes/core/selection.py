"""Which layers a conversion changes: selections, rules, and the plan that comes of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from slimbayes.core.layers.base import Converted, require_weight
from slimbayes.core.layers.dropout import ACTIVE
from slimbayes.core.layers.table import RECURRENT, UNSUPPORTED, converted_class
from slimbayes.core.methods import DeepEnsemble, Deterministic, MCDropout, Method
from slimbayes.core.methods.base import Outline
from slimbayes.sequences.kernels import Kernel, Several

EXCLUDED = "excluded"
NO_CLASS = "no converted class yet"

Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool]
Selection = Selector | Iterable[Selector]
Choice = tuple[Selection | None, Method]
MethodOrRules = Method | Sequence[Choice]


def read_rules(method: MethodOrRules, include: Selection | None) -> list[Choice]:
    """The list of (selection, method) that the user's arguments stand for."""
    if isinstance(method, Method):
        return [(kept(include), method)]
    if isinstance(method, type) and issubclass(method, Method):
        raise TypeError(f"pass an instance, sb.{method.__name__}(), not the class {method.__name__}")
    if not isinstance(method, Sequence) or isinstance(method, str) or not method:
        raise TypeError(
            f"method must be a method such as sb.Rank1() or a list of (selector, method), got {method!r}"
        )
    for rule in method:
        if not (isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[1], Method)):
            raise TypeError(f"every rule must be a pair (selector, method), got {rule!r}")
    if include is not None:
        raise ValueError("include cannot be given beside a list of rules: put the selection into the rules")
    counts = {m.traits.components for _, m in method if m.traits.components > 1}
    if len(counts) > 1:
        raise ValueError(
            f"the rules have different numbers of components ({', '.join(map(str, sorted(counts)))}), but "
            f"one draw has one component axis; give all of them the same number"
        )
    return [(kept(selection), chosen) for selection, chosen in method]


def kept(selection: Selection | None) -> Selection | None:
    """A selection that can be used again: every layer is held against it, and an iterator is empty after the first."""
    if selection is None or isinstance(selection, str) or callable(selection):
        if selection is not None:
            _check_selector(selection)
        return selection
    if not isinstance(selection, Iterable):
        _check_selector(selection)
    several = tuple(selection)
    for item in several:
        if isinstance(item, Iterable) and not isinstance(item, (str, type)):
            kept(item)  # a selection within a selection
        else:
            _check_selector(item)
    return several


def _check_selector(item: object) -> None:
    """Raise on what selects nothing ever: broken expressions, types of no module, functions of other arguments."""
    if isinstance(item, str):
        try:
            re.compile(item)
        except re.error as error:
            raise ValueError(f"the selection {item!r} is no regular expression: {error}") from None
        return
    if isinstance(item, type):
        if not issubclass(item, nn.Module):
            raise TypeError(f"the selection {item!r} is no type of modules: give one such as nn.Linear")
        return
    if not callable(item):
        raise TypeError(
            f"the selection {item!r} is not understood: give a regular expression on module names, a module type, a "
            f"function of (name, module), or a list of those"
        )
    try:
        signature = inspect.signature(item)
    except (TypeError, ValueError):  # some of C's have none
        return
    try:
        signature.bind("", None)
    except TypeError as error:
        raise TypeError(f"the selection {item!r} must be a function of (name, module): {error}") from None


@dataclass
class Plan:
    """What each rule converts, and what stays as it is."""

    layers: dict[str, int]  # candidate name -> rule
    wholes: dict[str, int]  # module name -> rule, for deep ensembles
    left_alone: list[tuple[str, str, str]]
    dropouts: list[str]  # the network's own dropout modules that stay active in draws

    def ensembled(self, name: str) -> bool:
        """Whether a module lies in a part that has members."""
        return any(name == whole or whole == "" or name.startswith(whole + ".") for whole in self.wholes)


def _candidates(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Convertible layers, and known layers that have no converted class yet; their children are skipped."""
    known: dict[str, nn.Module] = {}
    unsupported: dict[str, nn.Module] = {}
    uncalled = _uncalled(model)
    for name, module in model.named_modules():
        if module in uncalled or any(name.startswith(outer + ".") for outer in unsupported):
            continue
        if converted_class(module) is not None:
            known[name] = module
        elif isinstance(module, UNSUPPORTED):
            unsupported[name] = module
    return known, unsupported


def _uncalled(model: nn.Module) -> set[nn.Module]:
    """Projections of attention layers, which read their weights and never call them; but not what is used elsewhere."""
    inside: set[nn.Module] = set()
    outside: set[nn.Module] = set()
    owners = {
        name: m for name, m in model.named_modules(remove_duplicate=False) if type(m) is nn.MultiheadAttention
    }
    names = {f"{name}.out_proj".lstrip(".") for name in owners}
    for name, module in model.named_modules(remove_duplicate=False):
        (inside if name in names else outside).add(module)
    return inside - outside


def make_plan(model: nn.Module, rules: list[Choice], exclude: Selection | None) -> Plan:
    """Hold every layer of the model against the rules; the first that matches takes it."""
    exclude = kept(exclude)
    known, unsupported = _candidates(model)
    outline = Outline(tuple(known.values()))
    plan = Plan({}, {}, [], [])
    dropouts = {name: m for name, m in model.named_modules() if type(m) in ACTIVE}
    _check_exclude(exclude, rules, {**known, **unsupported, **dropouts})
    matched = [False] * len(rules)
    for index, (selection, method) in enumerate(rules):
        if isinstance(method, Deterministic) and selection is None:
            matched[index] = True
        elif isinstance(method, DeepEnsemble):
            matched[index] = _plan_ensemble(model, selection, exclude, index, plan)
    for name, module in {**known, **unsupported}.items():
        if plan.ensembled(name):
            continue
        if exclude is not None and selected(exclude, name, module):
            plan.left_alone.append((name, type(module).__name__, EXCLUDED))
            continue
        choice = _first_rule(rules, name, module, outline)
        if choice is None:
            plan.left_alone.append((name, type(module).__name__, "not selected"))
            continue
        matched[choice] = True
        selection, method = rules[choice]
        if isinstance(method, Deterministic):
            plan.left_alone.append((name, type(module).__name__, "deterministic"))
            continue
        refusal = _refusal(method, module)
        if refusal is None:
            if method.traits.randomizes_weight:
                require_weight(module, name)
            plan.layers[name] = choice
        elif selection is None and name in unsupported:
            plan.left_alone.append((name, type(module).__name__, refusal))
        else:
            raise TypeError(
                f"{type(method).__name__} cannot convert layer {name!r} of type {type(module).__name__}: "
                f"{refusal}. Leave it out with exclude={name!r}, or give it another method in a list of rules"
            )
    _check_matched(rules, matched, known)
    _report_unknown(model, {**known, **unsupported}, plan)
    if any(isinstance(method, MCDropout) for _, method in rules):
        plan.dropouts = [
            name
            for name, module in dropouts.items()
            if not plan.ensembled(name) and not (exclude is not None and selected(exclude, name, module))
        ]
    return plan


def _report_unknown(model: nn.Module, layers: dict[str, nn.Module], plan: Plan) -> None:
    """Say which modules hold parameters but are of a type that nothing converts."""
    for name, module in model.named_modules():
        inside = any(name == outer or name.startswith(outer + ".") for outer in layers)
        own = any(parameter is not None for parameter in module._parameters.values())
        if own and not inside and not plan.ensembled(name):
            plan.left_alone.append((name, type(module).__name__, "no converted class for this type"))


def _first_rule(rules: list[Choice], name: str, module: nn.Module, outline: Outline) -> int | None:
    for index, (selection, method) in enumerate(rules):
        if isinstance(method, DeepEnsemble):
            continue
        chosen = (
            method.selects(name, module, outline) if selection is None else selected(selection, name, module)
        )
        if chosen:
            return index
    return None


def _refusal(method: Method, module: nn.Module) -> str | None:
    layer = converted_class(module)
    if layer is None:
        if not isinstance(module, UNSUPPORTED):
            return f"its type has {NO_CLASS}"
        kind = "an attention" if isinstance(module, nn.MultiheadAttention) else "a recurrent"
        return f"a class derived from {kind} layer has {NO_CLASS}"
    return method.refuses(layer)


def selected(selection: Selection, name: str, module: nn.Module) -> bool:
    """Whether a selection holds a layer; a type is the layer's own, that before its conversion if it was converted."""
    if isinstance(selection, str):
        return re.search(selection, name) is not None
    if isinstance(selection, type):
        if isinstance(module, Kernel):
            return issubclass(module.kind, selection)
        retyped = isinstance(module, Converted | Several)
        return isinstance(module, selection) if retyped else type(module) is selection
    if callable(selection):
        return bool(selection(name, module))
    return any(selected(item, name, module) for item in selection)


def _plan_ensemble(
    model: nn.Module, selection: Selection | None, exclude: Selection | None, index: int, plan: Plan
) -> bool:
    if selection is None:
        if exclude is not None:
            raise ValueError(
                "DeepEnsemble makes members of the whole model, so exclude needs include: name the modules "
                "that have members"
            )
        _check_rows_first("", model)
        plan.wholes[""] = index
        return True
    uncalled = _uncalled(model)
    for name, module in model.named_modules():
        if name == "" or any(name.startswith(outer + ".") or outer == "" for outer in plan.wholes):
            continue
        if next(module.parameters(), None) is None or not selected(selection, name, module):
            continue
        if exclude is None or not selected(exclude, name, module):
            if module in uncalled:
                raise TypeError(
                    f"DeepEnsemble cannot convert {name!r} by itself: an attention layer reads its weights and never "
                    f"calls it. Select the layer around it"
                )
            _check_rows_first(name, module)
            plan.wholes[name] = index
    return index in plan.wholes.values()


def _check_rows_first(name: str, module: nn.Module) -> None:
    """Members are told apart by the first axis of inputs and outputs: not in a recurrent layer's states, for one."""
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
        raise TypeError(
            f"DeepEnsemble cannot convert layer {name!r} of type {type(module).__name__} by itself: it has the batch "
            f"in its second dimension. Build it with batch_first=True, or convert the whole network or a module around "
            f"it that takes and returns tensors with the batch outermost"
        )
    if isinstance(module, nn.RNNBase):
        raise TypeError(
            f"DeepEnsemble cannot convert layer {name!r} of type {type(module).__name__} by itself: its states have "
            f"the batch in their second dimension. Convert the whole network, or a module around it that takes and "
            f"returns tensors with the batch outermost"
        )


def _check_exclude(exclude: Selection | None, rules: list[Choice], layers: dict[str, nn.Module]) -> None:
    if exclude is None or any(isinstance(method, DeepEnsemble) for _, method in rules):
        return  # an ensemble's exclusions speak of whole modules
    if not any(selected(exclude, name, module) for name, module in layers.items()):
        raise ValueError(f"exclude={exclude!r} matches no layer; the layers are: {listing(layers)}")


def listing(layers: Mapping[str, nn.Module]) -> str:
    """The first layers by name and type, for messages."""
    kinds = {name: m.title if isinstance(m, Converted) else type(m).__name__ for name, m in layers.items()}
    names = [f"{name or '(root)'} ({kind})" for name, kind in kinds.items()]
    return (", ".join(names[:8]) or "none") + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _check_matched(rules: list[Choice], matched: list[bool], known: dict[str, nn.Module]) -> None:
    for (selection, method), hit in zip(rules, matched, strict=True):
        if hit:
            continue
        what = f"the selection {selection!r}" if selection is not None else f"the default of {method!r}"
        raise ValueError(f"{what} matches no layer. The layers that can be converted are: {listing(known)}")


def check_ensemble_ties(modules: dict[str, nn.Module], plan: Plan) -> None:
    """A parameter with members inside a part and none outside could not stay tied."""
    for whole in plan.wholes:
        own = set(modules[whole].modules())
        inside = {id(p): name for name, p in modules[whole].named_parameters()}
        for name, module in modules.items():
            for key, parameter in module._parameters.items():
                if module not in own and parameter is not None and id(parameter) in inside:
                    raise ValueError(
                        f"{inside[id(parameter)]!r} of module {whole!r} is tied to {key!r} of module {name!r}"
                        ", which DeepEnsemble would leave without members: select a module that holds both, "
                        "convert the whole model, or untie the two"
                    )


def _weights(module: nn.Module) -> list[nn.Parameter]:
    """The weights of a layer: one, or those of its kernels; of an attention layer that of its child too."""
    own = module._parameters
    names = ["weight"]
    if type(module) in RECURRENT:
        names = [n for n in own if n.startswith("weight_")]
    elif type(module) is nn.MultiheadAttention:
        own = {**own, **module.out_proj._parameters}
        names = [n for n in own if n.endswith("weight")]
    return [weight for weight in map(own.get, names) if weight is not None]


def follow_ties(model: nn.Module, plan: Plan, methods: list[Method]) -> None:
    """Modules tied to a weight that becomes random share its posterior, so they are converted with it."""
    owners: dict[int, list[str]] = {}
    modules = dict(model.named_modules())
    inside = {f"{n}.out_proj".lstrip(".") for n, m in modules.items() if type(m) is nn.MultiheadAttention}
    for name, module in modules.items():
        for weight in _weights(module) if name not in inside else []:
            owners.setdefault(id(weight), []).append(name)
    for name, index in list(plan.layers.items()):
        if not methods[index].traits.randomizes_weight:
            continue
        for other in dict.fromkeys([n for weight in _weights(modules[name]) for n in owners[id(weight)]]):
            if plan.layers.get(other) == index:
                continue
            if other in plan.layers:
                refusal: str | None = "another rule took it"
            elif (other, type(modules[other]).__name__, EXCLUDED) in plan.left_alone:
                refusal = "it is excluded"
            else:
                refusal = _refusal(methods[index], modules[other])
            if refusal is not None:
                raise ValueError(
                    f"layers {name!r} and {other!r} share one weight, which {type(methods[index]).__name__} "
                    f"would make random in both, but {other!r} ({type(modules[other]).__name__}) cannot "
                    f"follow: {refusal}. Exclude {name!r}, or untie the two"
                )
            plan.layers[other] = index
            plan.left_alone = [row for row in plan.left_alone if row[0] != other]
    # In the model's order, whichever layer led: the first gives a tied tensor its name, the key of its noise.
    plan.layers = {name: plan.layers[name] for name in modules if name in plan.layers}
