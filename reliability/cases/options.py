"""Cases of options and selections: what means nothing is refused by name, what is left converts what it says."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

import slimbayes as sb
from reliability.cases import methods, networks
from reliability.cases.judging import EQUAL, REFUSED, Outcome, Wrong, attempt, same_tree
from slimbayes.core.layers.base import Converted
from slimbayes.core.layers.ensemble import Ensembled
from slimbayes.core.layers.table import WEIGHTED, converted_class
from slimbayes.sequences.kernels import Several


def values(data: Any) -> Outcome:
    """An option that cannot be so is refused in words that name it, before a network is touched or while it is."""
    kind = data.draw(st.sampled_from(sorted(methods.INVALID)))
    name = data.draw(st.sampled_from(sorted(methods.INVALID[kind])))
    value = data.draw(st.sampled_from(methods.INVALID[kind][name]))
    what = f"sb.{kind}({name}={value!r})"
    options = {**methods.NEEDED.get(kind, {}), name: value}
    done, made = attempt(lambda: getattr(sb, kind)(**options), tokens=(name, repr(value)), what=what)
    if done and isinstance(made, sb.Rank1 | sb.EMP):
        done, _ = attempt(
            lambda: sb.bayesianize(nn.Linear(2, 2), made), tokens=(name, repr(value)), what=what
        )
    if done:
        raise Wrong(f"{what}: accepted without a word, as {made!r}")
    return Outcome(REFUSED, kind)


def foreign(data: Any) -> Outcome:
    """Numbers of numpy and torch, where Python's own are meant: the same method, or a refusal by name."""
    kind, name = data.draw(
        st.sampled_from(
            [("Rank1", "components"), ("Rank1", "dropout_rate"), ("Rank1", "clip"), ("Rank1", "random_sign_init"),
             ("KTied", "rank"), ("KTied", "stddev_init"), ("MeanField", "stddev_init"), ("MeanField", "stddev_max"),
             ("EMP", "components"), ("EMP", "prior_precision"), ("EMP", "init_noise"), ("MCDropout", "rate"),
             ("DropConnect", "rate"), ("DeepEnsemble", "members"), ("Normal", "scale"), ("Cauchy", "loc")]
        )
    )  # fmt: skip
    value = data.draw(st.sampled_from(methods.FOREIGN))
    what = f"sb.{kind}({name}={value!r})"
    done, made = attempt(lambda: getattr(sb, kind)(**{name: value}), tokens=(name, repr(value)), what=what)
    if not done:
        return Outcome(REFUSED, kind)
    if isinstance(made, sb.Normal | sb.Cauchy):
        made = sb.Rank1(posterior=type(made).__name__.lower(), prior=made)
    own = value.item()
    same = getattr(sb, kind)(**{name: own})
    if isinstance(same, sb.Normal | sb.Cauchy):
        same = sb.Rank1(posterior=type(same).__name__.lower(), prior=same)
    found = []
    for method in (made, same):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 2))
        done, model = attempt(
            lambda m=method, n=net: sb.bayesianize(n, m), tokens=(name, repr(value)), what=what
        )
        if not done:
            return Outcome(REFUSED, kind)
        found.append((sb.draw(model, torch.ones(2, 2), seed=1), sb.kl(model)))
    same_tree(what, found[0], found[1])
    return Outcome(EQUAL, kind)


def _by_callable(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


SELECTORS: list[Any] = [
    "", "0", "body|0|first|step|left|words", "left|head|1|2|second", nn.Linear, _by_callable, ["0", nn.Linear],
    [nn.LayerNorm, nn.Linear], ["", nn.BatchNorm1d], nn.LayerNorm,
]  # fmt: skip
ODD: list[Any] = [
    "^$", "nothing", "(", "[", nn.BatchNorm1d, nn.Conv2d, nn.ReLU, nn.Module, [], ("1",), 3, [3], [None], {"0"}, int,
    lambda name: True, lambda name, module: 1 / 0, torch.float32,
]  # fmt: skip


def _selected(selection: Any, name: str, module: nn.Module) -> bool:
    """What a selection says of a layer, written once more."""
    if isinstance(selection, str):
        return re.search(selection, name) is not None
    if isinstance(selection, type):
        return type(module) is selection
    if callable(selection):
        return bool(selection(name, module))
    return any([_selected(one, name, module) for one in selection])


def selections(data: Any) -> Outcome:
    """``include``, ``exclude`` and rules convert exactly what they name, or say why not."""
    net = data.draw(networks.nets(("network", "linear")))
    method = data.draw(
        methods.valid().filter(lambda m: not isinstance(m, sb.DeepEnsemble | sb.Deterministic))
    )
    second = data.draw(
        methods.valid().filter(lambda m: not isinstance(m, sb.DeepEnsemble | sb.Deterministic))
    )
    include, other = (data.draw(st.sampled_from([None, *SELECTORS])) for _ in range(2))
    exclude = data.draw(st.sampled_from([None, None, None, "2|head|output", nn.LayerNorm, nn.Dropout, "1"]))
    rules = data.draw(st.sampled_from([False, False, True]))
    odd = data.draw(st.sampled_from(["", "", "", "include", "exclude", "other"]))
    if odd:
        strange = data.draw(st.sampled_from(ODD))
        include, exclude, other = (
            strange if odd == name else value
            for name, value in (("include", include), ("exclude", exclude), ("other", other))
        )
    model = copy.deepcopy(net.module)
    if rules:
        chosen: Any = [(include, method), (other, second)]
        what = f"rules {chosen}, exclude={exclude!r} on {net.kind}"
        run = lambda: sb.bayesianize(model, chosen, exclude=exclude)  # noqa: E731
    else:
        what = f"{method}, include={include!r}, exclude={exclude!r} on {net.kind}"
        run = lambda: sb.bayesianize(model, method, include=include, exclude=exclude)  # noqa: E731
    who = methods.label(method), net.kind
    before = {name: type(m) for name, m in model.named_modules()}
    allowed = (
        ZeroDivisionError() if any(_raises(s) for s in (include, exclude, other if rules else None)) else None
    )
    done, _ = attempt(run, allowed, what=what)
    if not done:
        if {name: type(m) for name, m in model.named_modules()} != before:
            raise Wrong(f"{what}: refused, and yet layers were converted")
        return Outcome(REFUSED, *who)
    expected = {}
    for name, module in net.module.named_modules():
        if converted_class(module) is None or name.endswith("out_proj"):
            continue
        for number, (selection, own) in enumerate([(include, method), (other, second)][: 2 if rules else 1]):
            hit = (
                _default(own, name, module, net.module)
                if selection is None
                else _selected(selection, name, module)
            )
            if hit and not (exclude is not None and _selected(exclude, name, module)):
                expected[name] = number
                break
    found = {n for n, m in model.named_modules() if isinstance(m, Converted | Several | Ensembled)}
    tied = {"network: tied", "network: twins"} & {net.kind}  # what shares a random weight follows it
    if found != set(expected) and not (tied and found > set(expected)):
        raise Wrong(f"{what}: converted {sorted(found)}, the selections say {sorted(expected)}")
    inputs = net.inputs(2)
    done, _ = attempt(lambda: sb.draw(model, *inputs, seed=0), what=what)
    if not done:
        return Outcome(REFUSED, *who)
    return Outcome(EQUAL, *who)


def _raises(selection: Any) -> bool:
    if not callable(selection) or isinstance(selection, type):
        return False
    try:
        selection("", nn.Linear(1, 1))
    except Exception:
        return True
    return False


def _default(method: Any, name: str, module: nn.Module, root: nn.Module) -> bool:
    """What a method takes where nothing was selected: layers with a weight, or the patches of EMP and ECMP."""
    if not isinstance(method, sb.EMP | sb.ECMP):
        return type(module) in WEIGHTED
    weighted = [n for n, m in root.named_modules() if type(m) in WEIGHTED and not n.endswith("out_proj")]
    norm = "Norm" in type(module).__name__ and getattr(module, "weight", None) is not None
    return norm or (bool(weighted) and name == weighted[-1])
