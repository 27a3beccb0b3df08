"""Cases of what is done to a whole model: saved, frozen, merged, compressed, copied, counted."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import slimbayes as sb
from reliability.cases import methods, networks
from reliability.cases.draws import built, converted
from reliability.cases.judging import EQUAL, REFUSED, Outcome, Wrong, attempt, refusal_of, same_tree
from slimbayes.core.conversion import find_record

OPTIONS: dict[str, Any] = {"samples": 2, "seed": 5}


def _runs(net: networks.Net) -> bool:
    """Whether the plain network takes its own inputs: torch refuses some paddings on small ones."""
    return refusal_of(lambda: net.module(*net.inputs(2), **net.call)) is None


def saved(data: Any) -> Outcome:
    """Saved and loaded into the plain network, or copied, a model draws the same, bit for bit."""
    done, net, method, model, who = built(data)
    if not done or not _runs(net):
        return Outcome(REFUSED, *who)
    what = f"save and load of {method} on {net.kind}"
    inputs = net.inputs(2)
    before = sb.draw(model, *inputs, **OPTIONS, **net.call)
    if data.draw(st.booleans()):
        same_tree(
            f"deepcopy of {what}", sb.draw(copy.deepcopy(model), *inputs, **OPTIONS, **net.call), before, 0.0
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        done, _ = attempt(lambda: sb.save(model, path), what=what)
        if not done:
            return Outcome(REFUSED, *who)
        again = sb.load(copy.deepcopy(net.module), path).eval()
    same_tree(what, sb.draw(again, *inputs, **OPTIONS, **net.call), before, 0.0)
    return Outcome(EQUAL, *who)


def frozen(data: Any) -> Outcome:
    """A frozen model is the shared-noise draws of its seed, for any batch."""
    done, net, method, model, who = built(data)
    if not done or not _runs(net):
        return Outcome(REFUSED, *who)
    components = find_record(model).components
    draws = data.draw(st.sampled_from([*[components, 2 * components] * 8, 0, components + 1, 2.5, "a", True]))
    seed = data.draw(st.sampled_from([*[0, 5] * 6, None, "a"]))
    what = f"freeze(draws={draws!r}, seed={seed!r}) of {method} on {net.kind} {net.module}"
    done, made = attempt(lambda: sb.freeze(model, draws, seed), what=what)
    if not done:
        return Outcome(REFUSED, *who)
    if not isinstance(seed, int) or isinstance(draws, bool | float | str) or draws < 1 or draws % components:
        raise Wrong(f"{what}: accepted without a word")
    inputs = net.inputs(data.draw(st.integers(1, 3)))
    with torch.no_grad():
        expected = sb.draw(model, *inputs, samples=draws // components, noise="shared", seed=seed, **net.call)
        same_tree(what, made(*inputs, **net.call), expected, 1e-8)
    return Outcome(EQUAL, *who)


def merged(data: Any) -> Outcome:
    """A merged network is the mean of its component in torch's own classes, and comes back bit for bit."""
    done, net, method, model, who = built(data)
    if not done or not _runs(net):
        return Outcome(REFUSED, *who)
    components = find_record(model).components
    component = data.draw(st.sampled_from([*[0, components - 1] * 8, None, components, -1, "a", 1.5]))
    what = f"merge(component={component!r}) of {method} on {net.kind} {net.module}"
    inputs = net.inputs(2)
    with torch.no_grad():
        before = sb.draw(model, *inputs, noise="mean", **net.call)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        done, _ = attempt(lambda: sb.merge(model, component), what=what)
        if not done:
            same_tree(f"{what}, refused", sb.draw(model, *inputs, noise="mean", **net.call), before, 0.0)
            return Outcome(REFUSED, *who)
        k = component or 0
        if isinstance(component, str | float) or not 0 <= k < components:
            raise Wrong(f"{what}: accepted without a word")
        expected = pytree.tree_map(lambda y: y[k] if isinstance(y, Tensor) else y, before)
        same_tree(what, model(*inputs, **net.call), expected, 1e-8)
        if {type(m) for m in model.modules()} - {type(m) for m in net.module.modules()}:
            raise Wrong(f"{what}: classes are left that are not the network's own")
        sb.unmerge(model)
        after = model.state_dict()
        if after.keys() != state.keys() or not all(torch.equal(after[name], state[name]) for name in state):
            raise Wrong(f"{what}: unmerge left another state")
    return Outcome(EQUAL, *who)


def compressed(data: Any) -> Outcome:
    """A compressed model keeps its means; with a rank of the matrix's own it keeps its KL nearly, never gains means."""
    net = data.draw(
        networks.nets(("linear", "convolution", "bilinear", "network", "embedding"), statistics=True)
    )
    method = data.draw(methods.sampled("MeanField"))
    if data.draw(st.sampled_from([True, True, True, False])):
        method = dataclasses.replace(method, tied_mean=False, estimator="shared")
    done, model = converted(data, net, method)
    who = methods.label(method), net.kind
    if not done or not _runs(net):
        return Outcome(REFUSED, *who)
    rank = data.draw(st.sampled_from([*[1, 2, 3] * 6, 0, "a", 1.5, True]))
    what = f"compress(rank={rank!r}) of {method} on {net.kind}"
    done, made = attempt(lambda: sb.compress(model, rank), what=what)
    if not done:
        return Outcome(REFUSED, *who)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise Wrong(f"{what}: accepted without a word")
    inputs = net.inputs(2)
    with torch.no_grad():
        expected = sb.draw(model.eval(), *inputs, noise="mean", **net.call)
        same_tree(what, sb.draw(made.eval(), *inputs, noise="mean", **net.call), expected, 1e-10)
    for module in made.modules():
        log_u = getattr(module, "log_u", None)
        if log_u is not None and (log_u.shape[1] != rank or not torch.isfinite(log_u).all()):
            raise Wrong(f"{what}: factors of shape {list(log_u.shape)}, or not finite")
    return Outcome(EQUAL, *who)


def summary(data: Any) -> Outcome:
    """The summary counts every parameter once, before and after."""
    done, net, method, model, who = built(data)
    if not done:
        return Outcome(REFUSED, *who)
    found = sb.summary(model)
    after = sum(p.numel() for p in set(model.parameters()))
    before = sum(p.numel() for p in set(net.module.parameters()))
    trained = sum(p.numel() for p in set(model.parameters()) if p.requires_grad)
    if (found.parameters, found.base_parameters, found.trainable) != (after, before, trained):
        raise Wrong(f"summary of {method} on {net.kind}: {found}, counted {after}, {before} and {trained}")
    if "parameters" not in str(found):
        raise Wrong(f"summary of {method} on {net.kind} prints as {found}")
    keys = [name for name in net.module.state_dict() if name not in model.state_dict()]
    if keys:
        raise Wrong(f"{method} on {net.kind}: the state_dict lost {keys}")
    return Outcome(EQUAL, *who)


def unconverted(data: Any) -> Outcome:
    """Every verb says of a network that was never converted that it was not, and of no network that it is none."""
    thing: Any = data.draw(st.sampled_from([nn.Linear(2, 2), nn.Sequential(), 3, "model", None, sb.Rank1()]))
    x = torch.zeros(1, 2)
    verbs: dict[str, Any] = {
        "draw": lambda: sb.draw(thing, x), "predict": lambda: sb.predict(thing, x), "kl": lambda: sb.kl(thing),
        "elbo": lambda: sb.elbo(x[None], torch.zeros(1, dtype=torch.long), thing, 10),
        "freeze": lambda: sb.freeze(thing),
        "summary": lambda: sb.summary(thing), "merge": lambda: sb.merge(thing), "unmerge": lambda: sb.unmerge(thing),
        "compress": lambda: sb.compress(thing, 1), "save": lambda: sb.save(thing, "/nowhere/model"),
        "groups": lambda: sb.parameter_groups(thing, 0.1, 0.0), "evaluate": lambda: sb.evaluate(thing, [(x, x)]),
        "load": lambda: sb.load(thing, "/nowhere/model"), "diagnose": lambda: sb.diagnose(thing),
        "bayesianize": lambda: sb.bayesianize(thing, data.draw(st.sampled_from([3, sb.Rank1, None, "Rank1", [], [3]]))),
    }  # fmt: skip
    name = data.draw(st.sampled_from(sorted(verbs)))
    allowed = FileNotFoundError() if name == "load" and isinstance(thing, nn.Module) else None
    done, found = attempt(verbs[name], allowed, what=f"sb.{name} of {thing!r}")
    if done:
        raise Wrong(f"sb.{name} of {thing!r}: accepted without a word, {found!r}")
    return Outcome(REFUSED, name)
