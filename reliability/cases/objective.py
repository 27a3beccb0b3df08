"""Cases of the objective: KL, ELBO and groups of parameters, against sums written out."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import slimbayes as sb
from reliability.cases import methods, networks
from reliability.cases.divergences import reference_kl
from reliability.cases.draws import converted
from reliability.cases.judging import EQUAL, REFUSED, Outcome, Wrong, attempt, same_number
from slimbayes.core.conversion import converted_layers
from slimbayes.core.rules.meanfield import SampledRule
from slimbayes.core.rules.patching import IndexedRule
from slimbayes.core.rules.rank1 import Rank1Rule

SPREADS = ("rho", "log_u", "log_v")  # what scales are learned as


def kl(data: Any) -> Outcome:
    """The KL of any method on any layer is the sum of torch's own, element by element."""
    net, method = data.draw(networks.nets()), data.draw(methods.valid())
    if getattr(method, "kl_reduction", "") == "monte_carlo":
        method = dataclasses.replace(method, kl_reduction="sum")
    done, model = converted(data, net, method)
    who = methods.label(method), net.kind
    if not done:
        return Outcome(REFUSED, *who)
    what = f"KL of {method} on {net.kind}"
    if data.draw(st.booleans()):
        sb.draw(
            model, *net.inputs(2), samples=2, **net.call
        ) if not net.norms else None  # leaves a part of the KL
    found = sb.kl(model)
    if found.shape != ():
        raise Wrong(f"{what} has shape {list(found.shape)}")
    same_number(what, found, reference_kl(model, method), 1e-8)
    return Outcome(EQUAL, *who)


def _log_prob(kind: str, f: np.ndarray, y: Any, likelihood: Any) -> float:
    """log p(y|f) of one example in one draw."""
    if kind == "Categorical":
        if y == likelihood.ignore_index:
            return 0.0
        z = f / likelihood.temperature
        return float(z[int(y)] - (z.max() + np.log(np.exp(z - z.max()).sum())))
    if kind == "Bernoulli":
        z = f / likelihood.temperature
        return float(np.sum(-(np.logaddexp(0, -z) * y + np.logaddexp(0, z) * (1 - y))))
    if likelihood.learn == "per_example":
        m = f.shape[-1] // 2
        f, log_tau = f[..., :m], np.clip(f[..., m:], -20, 20)
    else:
        log_tau = math.log(likelihood.precision) * np.ones_like(f)
    return float(np.sum(0.5 * (log_tau - math.log(2 * math.pi) - np.exp(log_tau) * (y - f) ** 2)))


def likelihoods(data: Any) -> tuple[str, Any, Tensor, Tensor]:
    """A likelihood, draws [D, B, ...] and targets that fit."""
    kind = data.draw(st.sampled_from(["Categorical", "Bernoulli", "Gaussian"]))
    d, b, c = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    scale = data.draw(st.sampled_from([1.0, 1e-3, 30.0]))
    if kind == "Categorical":
        likelihood: Any = sb.Categorical(temperature=data.draw(st.sampled_from([1.0, 0.3, 4.0])))
        draws, targets = torch.randn(d, b, c).double() * scale, torch.randint(c, (b,))
        if data.draw(st.booleans()):
            targets[0] = -100
        return kind, likelihood, draws, targets
    shape = data.draw(st.sampled_from([(), (1,), (c,), (2, c)]))
    if kind == "Bernoulli":
        likelihood = sb.Bernoulli(temperature=data.draw(st.sampled_from([1.0, 2.0])))
        return (
            kind,
            likelihood,
            torch.randn(d, b, *shape).double() * scale,
            torch.rand(b, *shape).double().round(),
        )
    learn = data.draw(st.sampled_from(["fixed", "global", "per_example"]))
    if learn == "per_example":
        shape = shape or (1,)
        outputs = torch.randn(d, b, *shape[:-1], 2 * shape[-1]).double()
        return kind, sb.Gaussian(learn=learn), outputs, torch.randn(b, *shape).double()
    likelihood = sb.Gaussian(data.draw(st.sampled_from([0.5, 1.0, 9.0])), learn=learn)
    if learn == "global":
        likelihood.double()
        likelihood.log_precision.data.fill_(math.log(likelihood.precision))
    return kind, likelihood, torch.randn(d, b, *shape).double() * scale, torch.randn(b, *shape).double()


_BAD_TARGETS = [
    "out of range",
    "negative",
    "float",
    "shape",
    "extra",
    "fewer",
    "nan",
    "bool",
    "list",
    "complex",
    "none",
    "empty",
]


def _spoiled(form: str, y: Tensor, classes: int) -> Any:
    changes = {
        "out of range": lambda: y + classes if not y.is_floating_point() else y + 2, "negative": lambda: y - 7,
        "float": lambda: y.float() if not y.is_floating_point() else y.to(torch.complex64), "shape": lambda: y[None],
        "extra": lambda: torch.cat([y, y]), "fewer": lambda: y[:-1], "nan": lambda: y * float("nan"),
        "bool": lambda: y > 0, "list": lambda: y.tolist(), "complex": lambda: y.to(torch.complex64),
        "none": lambda: None, "empty": lambda: y[:0],
    }  # fmt: skip
    return changes[form]()


def elbo(data: Any) -> Outcome:
    """loss = nll + kl_weight · temperature · KL / num_data, the nll written out; bad targets are refused."""
    kind, likelihood, draws, targets = likelihoods(data)
    method = data.draw(methods.valid().filter(lambda m: not getattr(m, "learn_mixing", False)))
    if getattr(method, "kl_reduction", "") == "monte_carlo":
        method = dataclasses.replace(method, kl_reduction="mean")
    model = sb.bayesianize(nn.Linear(2, 2).double(), method)
    reduction = data.draw(st.sampled_from(["average", "mixture", "logits"]))
    weight = data.draw(st.sampled_from([1.0, 0.0, 0.25, 1, 7.5]))
    spoiled = data.draw(st.sampled_from([*[""] * 24, *_BAD_TARGETS]))
    given: Any = _spoiled(spoiled, targets, draws.shape[-1]) if spoiled else targets
    num_data = data.draw(st.sampled_from([100, 4, 10**9]))
    shape = getattr(given, "shape", given)
    what = f"elbo({likelihood}, draws {list(draws.shape)}, targets {spoiled} {shape}, {reduction})"
    who = methods.label(method), kind
    done, found = attempt(
        lambda: sb.elbo(draws, given, model, num_data, likelihood, reduction, weight),
        tokens=("target", "num_data"),
        what=what,
    )
    if not done:
        return Outcome(REFUSED, *who)
    if spoiled and not _harmless(spoiled, kind, given, targets, draws):
        raise Wrong(f"{what}: accepted without a word")
    f = draws.numpy()
    y = given.to(targets.dtype).reshape(_target_shape(kind, likelihood, draws)).numpy()
    d, b = f.shape[:2]
    table = np.array([[_log_prob(kind, f[i, j], y[j], likelihood) for j in range(b)] for i in range(d)])
    if reduction == "logits":
        mean = f.mean(0)
        nll = -np.mean([_log_prob(kind, mean[j], y[j], likelihood) for j in range(b)])
    elif reduction == "mixture":
        nll = -np.mean(np.log(np.mean(np.exp(table - table.max(0)), 0)) + table.max(0))
    else:
        nll = -table.mean()
    same_number(f"{what}: nll", found.nll, nll, 1e-8)
    divergence = getattr(method, "temperature", 1.0) * reference_kl(model, method)
    same_number(f"{what}: loss", found.loss, nll + weight * divergence / num_data, 1e-8)
    return Outcome(EQUAL, *who)


def _target_shape(kind: str, likelihood: Any, draws: Tensor) -> tuple[int, ...]:
    if kind == "Categorical":
        return tuple(draws.shape[1:-1])
    if kind == "Gaussian" and likelihood.learn == "per_example":
        return (*draws.shape[1:-1], draws.shape[-1] // 2)
    return tuple(draws.shape[1:])


def _harmless(form: str, kind: str, given: Any, targets: Tensor, draws: Tensor) -> bool:
    """A change that leaves targets which mean something: other numbers, or zeros and ones by another name."""
    if not isinstance(given, Tensor) or given.shape != targets.shape:
        return False
    if kind == "Gaussian":
        return form in ("out of range", "negative", "float") and not given.is_complex()
    if kind == "Categorical":  # what is ignored may be shifted into the range by no change here
        return given.dtype is torch.long and bool(
            ((given >= 0) & (given < draws.shape[-1]) | (given == -100)).all()
        )
    return form in ("bool",)


def groups(data: Any) -> Outcome:
    """Every trained parameter is in one group, with the rate and the decay that its kind has."""
    net, method = data.draw(networks.nets()), data.draw(methods.valid())
    done, model = converted(data, net, method)
    who = methods.label(method), net.kind
    if not done:
        return Outcome(REFUSED, *who)
    values = [data.draw(st.sampled_from([0.1, 0.0, 1])) for _ in range(3)]
    norms = data.draw(st.sampled_from([True, False, True, False, "yes"]))
    if data.draw(st.sampled_from([False, False, True])):
        values[data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from([-1.0, float("nan"), "a", None, True])
        )
    what = f"parameter_groups({values}, decay_norms={norms!r}) of {method} on {net.kind}"
    tokens = ("lr", "weight_decay", "factor_lr_multiplier", "decay_norms")
    done, found = attempt(
        lambda: sb.parameter_groups(model, *values, decay_norms=norms), tokens=tokens, what=what
    )
    bad = norms == "yes" or any(isinstance(v, str | bool) or v is None or not v >= 0 for v in values)
    if not done:
        if not bad:
            raise Wrong(f"{what}: refused, and all is as it should be")
        return Outcome(REFUSED, *who)
    if bad:
        raise Wrong(f"{what}: accepted without a word")
    lr, decay, times = values
    factors, plain, quick = set(), set(), set()
    for _, layer in converted_layers(model):
        rule = layer.bayes
        (factors if isinstance(rule, Rank1Rule) else plain).update(id(p) for p in rule.parameters())
        if isinstance(rule, IndexedRule):  # the versions learn at a rate of their own, else the spreads
            quick |= {id(t) for t in (layer.weight, layer.bias) if t is not None}
        elif isinstance(rule, Rank1Rule | SampledRule):
            quick |= {id(p) for name, p in rule.named_parameters() if name.split(".")[-1] in SPREADS}
        if isinstance(rule, SampledRule) and rule.prior is not None:
            plain |= {
                id(t)
                for q, t in ((rule.weight, layer.weight), (rule.bias, layer.bias))
                if q is not None and t is not None
            }
    if not norms:
        plain |= {
            id(p)
            for m in model.modules()
            if "Norm" in type(m).__name__
            for p in m._parameters.values()
            if p is not None
        }
    own_rate = getattr(method, "spread_rate", getattr(method, "component_rate", 1.0))
    seen = {}
    for group in found:
        for p in group["params"]:
            if id(p) in seen:
                raise Wrong(f"{what}: a parameter is in two groups")
            seen[id(p)] = (group["lr"], group["weight_decay"])
    for name, p in model.named_parameters():
        rate = own_rate if id(p) in quick else 1.0
        if id(p) in factors:
            expected = lr * times * rate, 0.0
        else:  # a step decays what is quick as much as the rest
            expected = lr * rate, 0.0 if id(p) in plain else decay / rate
        if p.requires_grad != (id(p) in seen) or (p.requires_grad and seen[id(p)] != expected):
            raise Wrong(f"{what}: {name} has {seen.get(id(p))}, not {expected}, trained: {p.requires_grad}")
    return Outcome(EQUAL, *who)
