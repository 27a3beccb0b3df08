"""``kl``, ``elbo`` and KL schedules: one visible expression, loss = nll + kl_weight · kl / num_data."""

from __future__ import annotations

import math
import numbers
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core import distributions as d
from slimbayes.core.conversion import (
    Record,
    converted_layers,
    every_module,
    find_record,
    ruled_layers,
    shared_out,
    unwrap,
)
from slimbayes.core.facts import Facts, facts_of, sums_of_trace
from slimbayes.core.fitness import check_not_meta, explain_network
from slimbayes.core.kl import mixture_kl, total_kl
from slimbayes.core.layers.base import Converted
from slimbayes.core.likelihoods import Categorical, Likelihood, check_likelihood
from slimbayes.core.options import check_least, is_count, is_number
from slimbayes.core.paths import ASKED
from slimbayes.core.priors import Prior
from slimbayes.core.rules.base import KLTerm, Rule, stored
from slimbayes.core.sampling import RandomTensor, kl_parts
from slimbayes.core.sharded import on_whole, same_noise

_NORM = re.compile(r"Norm(\dd)?$")  # torch's, and as other libraries name theirs: LlamaRMSNorm, LayerNorm2d

_STANDARD = Categorical()
REDUCTIONS = ("average", "mixture", "logits")


def kl(model: nn.Module) -> Tensor:
    """KL(q‖p) of the whole model: a sum over elements and layers, tied tensors once, in at least float32.

    No temperature is in it: ``elbo`` has Σ over layers of temperature · KL.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(3, 2), sb.MeanField())
    >>> bool(sb.kl(net) > 0)
    True
    """
    record = find_record(model)
    return _whole_kl(model, record, sums_of_trace(record) if torch.compiler.is_compiling() else [], False)


def tempered_kl(model: nn.Module, facts: Iterable[Facts] = ()) -> Tensor:
    """Σ over layers of temperature · KL, which ``elbo`` adds; ``facts`` of draws may know parts of it."""
    record = find_record(model)
    if torch.compiler.is_compiling():
        return _whole_kl(model, record, sums_of_trace(record), True)
    return _whole_kl(model, record, [one for known in facts for one in known.take_byproducts()], True)


def _whole_kl(model: nn.Module, record: Record, byproducts: list[Any], tempered: bool) -> Tensor:
    like = _any_parameter(model)
    if like.is_meta:
        check_not_meta(unwrap(model))
    try:
        if not torch.is_autocast_enabled(like.device.type):
            return _kl(model, record, like, byproducts, tempered)
        with torch.autocast(device_type=like.device.type, enabled=False):
            return _kl(model, record, like, byproducts, tempered)
    except NotImplementedError as error:
        explain_network(unwrap(model), error)
        raise


Pairs = list[tuple[Rule, Converted]]


def _kl(model: nn.Module, record: Record, like: Tensor, byproducts: list[Any], tempered: bool) -> Tensor:
    parts: list[Tensor] = []
    seen: set[str] = set()
    pairs = ruled_layers(model)
    layers = [layer for _, layer in pairs]
    zero = torch.zeros((), device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
    groups = _by_temperature(pairs) if tempered else [(1.0, pairs)]
    if shared_out(model):
        with same_noise(every_module(unwrap(model))):
            return _by_layer(model, layers, record, zero, groups)
    for temperature, group in groups:
        own = byproducts if len(groups) == 1 else _of_group(byproducts, group)
        found = _group_parts(group, own, seen)
        parts += found if temperature == 1.0 or not found else [temperature * _sum(found, zero)]
    parts += _term_parts((_shared_term(*shared) for shared in _shared_priors(model, layers, record)), seen)
    return _sum(parts, zero)


def _by_temperature(pairs: Pairs) -> list[tuple[float, Pairs]]:
    """The layers of each temperature, in the order in which it is met first; none of temperature 0."""
    temperatures = [rule.kl_temperature for rule, _ in pairs]
    different: list[float] = []
    for temperature in temperatures:
        if temperature not in different:
            different.append(temperature)
    if len(different) == 1 and different[0] != 0.0:
        return [(different[0], pairs)]
    return [
        (own, [pair for pair, temperature in zip(pairs, temperatures, strict=True) if temperature == own])
        for own in different
        if own != 0.0
    ]


def _of_group(byproducts: list[Any], group: Pairs) -> list[Any]:
    """What is known of the KL of tensors of these layers alone."""
    names = {one.name for rule, layer in group for one in rule.random(layer)}
    return [known for known in byproducts if names.issuperset(known.names)]


def _sum(parts: list[Tensor], zero: Tensor) -> Tensor:
    if len(parts) == 1 and parts[0].dtype == zero.dtype:
        return parts[0]
    total = zero
    for part in parts:
        total = total + part
    return total


def _group_parts(pairs: Pairs, byproducts: list[Any], seen: set[str]) -> list[Tensor]:
    """The KL of these layers but for the tensors ``seen``, as far as it is one operation."""
    parts: list[Tensor] = []
    layers = [layer for _, layer in pairs]
    for known in byproducts:  # what draws have of the KL of what they sampled
        if seen.isdisjoint(known.names) and known.valid(layers):
            parts.append(known.kl())
            seen.update(known.names)
    for ask in ASKED.kl:
        for value, names in ask(pairs, seen):
            parts.append(value)
            seen.update(names)
    terms: list[KLTerm] = []
    tensors: dict[str, RandomTensor] = {}
    for rule, layer in pairs:
        if rule.covered(seen):
            continue
        if type(rule).kl_terms is not Rule.kl_terms:
            terms += rule.kl_terms(layer)
            continue
        for one in rule.random(layer):
            if one.reduction == "monte_carlo":  # couples all layers
                terms.append((one.name, *one.pair, one.reduction))
            elif one.prior is not None and one.name not in seen and one.name not in tensors:
                tensors[one.name] = one
    if tensors:
        parts += kl_parts(tensors.values())
        seen.update(tensors)
    return parts + _term_parts(terms, seen)


def _term_parts(terms: Iterable[KLTerm], seen: set[str]) -> list[Tensor]:
    """The KL of these terms but for those ``seen``, as far as it is one operation."""
    parts: list[Tensor] = []
    joint: dict[int, list[tuple[d.Spread, d.Spread]]] = defaultdict(list)
    for name, q, p, reduction in terms:
        if name in seen:
            continue
        seen.add(name)
        if reduction == "monte_carlo":
            joint[q.loc.shape[0]].append((q, p))
        elif reduction == "mean":
            parts.append(total_kl(q, p) / q.loc.shape[0])
        else:
            parts.append(total_kl(q, p))
    parts += [mixture_kl(pairs) for pairs in joint.values()]
    return parts


def _by_layer(
    model: nn.Module,
    layers: list[Converted],
    record: Record,
    total: Tensor,
    groups: list[tuple[float, Pairs]],
) -> Tensor:
    """The same where processes share out the parameters: one layer's are gathered after the other's."""
    seen: set[str] = set()

    def term_sum(terms: Iterable[KLTerm]) -> Tensor:
        return torch.stack([torch.zeros_like(total), *[p.to(total) for p in _term_parts(terms, seen)]]).sum()

    for temperature, together in _gathered_together(groups):
        stores = [stored(layer, "weight")[0] for layer in together]
        stores += [module._parameters for layer in together for module in layer.bayes.modules()]

        def of_layers(together: list[Converted] = together) -> Tensor:
            return term_sum(term for layer in together for term in layer.bayes.kl_terms(layer))

        total = total + temperature * on_whole(stores, of_layers)
    for name, parameter, prior in _shared_priors(model, layers, record):

        def of_parameter(own: dict[str, Tensor], name: str = name, prior: Prior = prior) -> Tensor:
            return term_sum([_shared_term(name, own["parameter"], prior)])

        own = {"parameter": parameter}
        total = total + on_whole([own], partial(of_parameter, own))
    return total


def _gathered_together(groups: list[tuple[float, Pairs]]) -> Iterator[tuple[float, list[Converted]]]:
    """Layer by layer, but that a joint mixture couples the factors of all its layers."""
    for temperature, pairs in groups:
        coupled = [layer for rule, layer in pairs if getattr(rule, "reduction", "") == "monte_carlo"]
        if coupled:
            yield temperature, coupled
        for _, layer in pairs:
            if layer not in coupled:
                yield temperature, [layer]


def _any_parameter(model: nn.Module) -> Tensor:
    """The first parameter: ``next(model.parameters())`` without its names."""
    waiting = [unwrap(model)]
    while waiting:
        module = waiting.pop()
        for parameter in module._parameters.values():
            if parameter is not None:
                return parameter
        waiting.extend([child for child in module._modules.values() if child is not None][::-1])
    return torch.zeros(())


def _shared_term(name: str, parameter: Tensor, prior: Prior) -> KLTerm:
    return f"shared.{name}", d.Delta(parameter), prior.distribution(parameter), "sum"


def _shared_priors(
    model: nn.Module, layers: list[Converted], record: Record
) -> Iterator[tuple[str, Tensor, Prior]]:
    """The parameters that no rule converted and that have a prior all the same."""
    if not record.shared_priors:
        return
    converted = {id(p) for layer in layers for p in (*layer.parameters(), layer.weight, layer.bias)}
    rest = [(n, p) for n, p in unwrap(model).named_parameters() if id(p) not in converted and _trains(p)]
    tables = [
        module for module in unwrap(model).modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    ]
    padding = {id(table.weight): table.padding_idx for table in tables}
    for prior in record.shared_priors:
        for name, parameter in rest:
            yield name, d.without_row(parameter, padding.get(id(parameter))), prior


def _trains(parameter: Tensor) -> bool:
    """Whether a parameter has a gradient; under vmap what it stands for says so."""
    if torch.compiler.is_compiling():
        return parameter.requires_grad
    while torch._C._functorch.is_batchedtensor(parameter):
        parameter = torch._C._functorch.get_unwrapped(parameter)
    return parameter.requires_grad


@dataclass
class ELBO:
    """The negative evidence lower bound per datum and its parts."""

    loss: Tensor
    nll: Tensor
    kl: Tensor


def elbo(
    draws: Tensor,
    targets: Tensor,
    model: nn.Module,
    num_data: int | None = None,
    likelihood: Likelihood | None = None,
    reduction: str = "average",
    kl_weight: float = 1.0,
    *,
    of: Any = None,
) -> ELBO:
    """loss = nll + kl_weight · kl / num_data, per datum, where kl is Σ over layers of temperature · KL(q‖p).

    ``num_data`` is the size of the training set. ``reduction`` says how draws enter the nll: "average" of the
    draws' own (Gibbs), "mixture" (minus log of the mean likelihood) or "logits" (of the mean output). ``of`` names the
    outputs of ``sb.draw`` where ``draws`` are so far from them that no graph leads back: learned mixing needs to know
    which components the draw has taken.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(3, 2), sb.Rank1())
    >>> x, y = torch.zeros(5, 3), torch.zeros(5, dtype=torch.long)
    >>> result = sb.elbo(sb.draw(net, x), y, net, num_data=100)
    >>> bool(torch.isclose(result.loss, result.nll + result.kl / 100))
    True
    """
    likelihood = _STANDARD if likelihood is None else likelihood
    check_likelihood(likelihood, ("log_prob",))
    _check_elbo(draws, targets, num_data, reduction, kl_weight)
    record = find_record(model)
    facts = facts_of(draws if of is None else of, record)
    log_prob = _log_prob(model, record, facts, of is not None)
    nll, per_draw = _nll(likelihood, draws, targets, reduction, log_prob is not None)
    divergence = tempered_kl(model, facts)
    # Compiled, the weight of a schedule would become a constant of the code.
    if type(kl_weight) in (float, int) and type(num_data) is int and not torch.compiler.is_compiling():
        loss = torch.add(nll, divergence, alpha=kl_weight / num_data)
    else:
        loss = nll + kl_weight * divergence / num_data  # type: ignore[operator]
    if log_prob is not None:
        loss = loss + _mixing_score(record, log_prob, nll, per_draw)
    return ELBO(loss, nll, divergence)


def _check_elbo(draws: Any, targets: Tensor, num_data: int | None, reduction: str, kl_weight: float) -> None:
    if not isinstance(draws, Tensor):
        raise TypeError(
            f"elbo needs the draws as a tensor [draws, batch, ...], got {type(draws).__name__}; for a model "
            f"that returns several outputs pass the one to score, for example draws.logits"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"unknown reduction {reduction!r}; use one of {', '.join(map(repr, REDUCTIONS))}")
    if num_data is None:
        raise ValueError("num_data is missing: pass the number of training examples, which scales the KL")
    if draws.dim() > 1 and draws.shape[1] == 0:
        raise ValueError(
            f"the batch is empty: draws have shape {list(draws.shape)}, and a mean over none is NaN"
        )
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets are a tensor, got {type(targets).__name__}: pass torch.as_tensor(targets)")
    if type(num_data) is not int and (isinstance(num_data, bool) or not _is_scalar(num_data)):
        raise ValueError(f"num_data must be the number of training examples, got {num_data!r}")
    batch = targets.shape[0] if targets.dim() else 1
    if num_data < batch:
        raise ValueError(
            f"num_data={num_data} is smaller than the batch of {batch}: it is the size of the training set"
        )
    if type(kl_weight) is not float and not _is_scalar(kl_weight):
        raise ValueError(f"kl_weight must be a number, got {kl_weight!r}")
    if not 0 <= kl_weight < math.inf:  # nor NaN; as a comparison it compiles for weights that change
        raise ValueError(f"kl_weight must be finite and at least 0, got {kl_weight!r}")


def _is_scalar(value: Any) -> bool:
    """Whether a value is one finite number: Python's, numpy's, or a tensor of one."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, numbers.Real) and math.isfinite(value)


def _nll(
    likelihood: Likelihood, draws: Tensor, targets: Tensor, reduction: str, apart: bool
) -> tuple[Tensor, Tensor | None]:
    """The nll, and for the average, where draws are wanted ``apart``, every draw's own loss [draws]."""
    if reduction == "logits":
        draws, reduction, apart = likelihood.average_logits(draws), "average", False
    learner: Any = likelihood if hasattr(likelihood, "follows") else None
    if learner is not None and learner.follows(draws):  # its noise is that of these residuals
        log_prob = learner.followed(draws, targets, reduction == "mixture")
    elif reduction == "average" and not apart:
        mean = getattr(likelihood, "mean_nll", None)  # what has a log_prob alone will do
        return -likelihood.log_prob(draws, targets).mean() if mean is None else mean(draws, targets), None
    else:
        log_prob = likelihood.log_prob(draws, targets)  # [D, B]
    if reduction == "mixture":
        return -(log_prob.logsumexp(0) - math.log(log_prob.shape[0])).mean(), None
    return -log_prob.mean(), -log_prob.mean(1) if apart else None


def _log_prob(model: nn.Module, record: Record, facts: list[Facts], named: bool) -> Tensor | None:
    """log p of the components that the scored draws have taken, [D]; None where none are learned."""
    if not facts and torch.is_grad_enabled() and _learns_mixing(model, record):
        raise ValueError(
            "elbo cannot tell which draw these outputs are of, and learn_mixing scores the components that the draw "
            "has taken: "
            + (
                "pass in of= what sb.draw(model, ...) returned for this model, made with gradients"
                if named
                else "name it, sb.elbo(..., of=outputs) with the outputs of sb.draw, made with gradients (in compiled "
                "code: the very tensors, of the latest draw, or of any in a function compiled by sb.compile); where "
                "nothing is trained, call elbo under torch.no_grad()"
            )
        )
    learned = [torch.stack(known.log_probs).sum(0) for known in facts if known.log_probs]
    if len(learned) > 1 and not named:
        raise ValueError(
            f"these outputs are of {len(learned)} draws, and learn_mixing scores each draw's own components: name them "
            f"in the order in which they follow each other, sb.elbo(..., of=[first, second])"
        )
    return torch.cat(learned) if learned else None


def _learns_mixing(model: nn.Module, record: Record) -> bool:
    if not any([getattr(method, "learn_mixing", False) for method in record.methods]):
        return False
    laws = [layer.bayes.mixing_law() for _, layer in converted_layers(model)]
    return any([law is not None and law.logits is not None and _trains(law.logits) for law in laws])


def _mixing_score(record: Record, log_prob: Tensor, nll: Tensor, per_draw: Tensor | None) -> Tensor:
    """Zero, with the score-function gradient of E_z[nll] with respect to learned mixing probabilities.

    The average of D draws has ∇E[L] = E[(1/D) Σ_d (L_d − b_d) ∇log p(z_d)], b_d the mean of the other draws'
    losses; a joint loss (or one draw) has E[(L − b) Σ_d ∇log p(z_d)], b a running mean of earlier losses.
    """
    draws = log_prob.shape[0]
    if per_draw is not None and per_draw.shape[0] != draws:
        raise ValueError(
            f"learn_mixing scores the {draws} draws that were made together, but elbo got {per_draw.shape[0]}; "
            f"call elbo on all of them"
        )
    if per_draw is not None and draws > 1:
        losses = per_draw.detach()
        score = ((losses - (losses.sum() - losses) / (draws - 1)) * log_prob).mean()
    else:
        loss = nll.detach()
        score = (loss - record.baseline) * log_prob.sum()
        record.baseline = record.baseline + 0.1 * (loss - record.baseline)
    return score - score.detach()


@dataclass(frozen=True)
class LinearAnnealing:
    """β_t = min(1, (t + 1)/steps): the rank-1 paper's KL weight at step t = 0, 1, ...

    With a ``start`` it is 0 for so many steps, and grows from there: β_t = (t + 1 − start)/(steps − start).

    >>> [LinearAnnealing(4)(t) for t in (0, 1, 3, 9)]
    [0.25, 0.5, 1.0, 1.0]
    >>> [LinearAnnealing(4, start=2)(t) for t in (0, 1, 2, 9)]
    [0.0, 0.0, 0.5, 1.0]
    """

    steps: int
    start: int = 0

    def __post_init__(self) -> None:
        if not (is_number(self.steps) and self.steps >= 1):
            raise ValueError(f"LinearAnnealing needs at least 1 step, got {self.steps!r}")
        if (
            isinstance(self.start, bool)
            or not isinstance(self.start, int)
            or not 0 <= self.start < self.steps
        ):
            raise ValueError(
                f"LinearAnnealing starts before its weight is whole: start={self.start!r} must be a whole number of at "
                f"least 0 and below steps={self.steps}"
            )

    def __call__(self, step: int) -> float:
        """KL weight at this step."""
        return min(1.0, max(0, step + 1 - self.start) / (self.steps - self.start))


@dataclass(frozen=True)
class StepAnnealing:
    """β_t = min(1, coefficient · t), with t rounded down to a multiple of ``every``: the k-tied paper's.

    >>> [StepAnnealing(5e-3, 100)(t) for t in (0, 99, 100, 10_000)]
    [0.0, 0.0, 0.5, 1.0]
    """

    coefficient: float
    every: int = 100

    def __post_init__(self) -> None:
        if not (is_number(self.coefficient) and self.coefficient > 0 and is_count(self.every)):
            raise ValueError(
                f"StepAnnealing needs a positive coefficient and every ≥ 1, got {self.coefficient!r} and "
                f"{self.every!r}"
            )

    def __call__(self, step: int) -> float:
        """KL weight at this step."""
        return min(1.0, self.coefficient * (step // self.every * self.every))


def _is_norm(module: nn.Module) -> bool:
    return any(_NORM.search(kind.__name__) for kind in type(module).__mro__)


def parameter_groups(
    model: nn.Module,
    lr: float,
    weight_decay: float,
    factor_lr_multiplier: float = 1.0,
    decay_norms: bool = True,
) -> list[dict[str, Any]]:
    """Optimizer groups: decay where a weight has no prior of its own, none on factors and spreads.

    Decayed: shared weights, biases, norm parameters and EMP/ECMP components. Not decayed: rank-1 factors
    (their learning rate times ``factor_lr_multiplier``), spreads, mixing logits, MeanField and KTied means. With
    ``decay_norms=False`` norms are not decayed either, patched or not: torch's, and modules of any class named ...Norm.
    What a method learns faster (``Rank1.spread_rate``, ``EMP.component_rate``) is a group of its own, whose decay per
    step is that of the others.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(spread_rate=10.0))
    >>> [(g["name"], g["lr"], g["weight_decay"]) for g in sb.parameter_groups(net, lr=0.1, weight_decay=1e-4)]
    [('decayed', 0.1, 0.0001), ('factors', 0.1, 0.0), ('factors, 10 times as fast', 1.0, 0.0)]
    """
    for name, value in (
        ("lr", lr),
        ("weight_decay", weight_decay),
        ("factor_lr_multiplier", factor_lr_multiplier),
    ):
        check_least(name, value)
    find_record(model)
    if not isinstance(decay_norms, bool):
        raise ValueError(f"decay_norms must be True or False, got {decay_norms!r}")
    factors: set[int] = set()
    plain: set[int] = set()
    quick: dict[int, float] = {}
    for _, layer in converted_layers(model):
        factors.update(id(p) for _, factor in layer.bayes.rank1_factors() for p in factor.parameters())
        plain.update(id(p) for p in (*layer.bayes.parameters(), *layer.bayes.means(layer)))
    for rule, layer in ruled_layers(model):
        if rule.lr_multiplier != 1.0:
            quick.update((id(parameter), rule.lr_multiplier) for parameter in rule.quick(layer))
    if not decay_norms:
        norms = [m for m in unwrap(model).modules() if _is_norm(m)]
        plain.update(id(p) for norm in norms for p in norm.parameters(recurse=False))
    groups: dict[tuple[str, float], list[nn.Parameter]] = {
        (kind, 1.0): [] for kind in ("decayed", "undecayed", "factors")
    }
    for parameter in unwrap(model).parameters():
        if parameter.requires_grad:
            own = id(parameter)
            kind = "factors" if own in factors else "undecayed" if own in plain else "decayed"
            groups.setdefault((kind, quick.get(own, 1.0)), []).append(parameter)
    rates = {"decayed": lr, "undecayed": lr, "factors": lr * factor_lr_multiplier}
    return [
        {
            "name": kind if rate == 1.0 else f"{kind}, {rate:.3g} times as fast",
            "params": params,
            "lr": rates[kind] * rate,
            "weight_decay": weight_decay / rate if kind == "decayed" else 0.0,
        }
        for (kind, rate), params in groups.items()
        if params
    ]
