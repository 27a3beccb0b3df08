"""KL of random weights straight from their parameters, with a backward pass of few sweeps.

The closed forms of ``kl`` on distributions go over the weights a dozen times under autograd. Here a Normal prior is
two numbers, the sums are dot products, and the gradients are written out, for many tensors in one operation. A draw
leaves a ``Byproduct`` for the KL that follows it: σ of every weight, and a place where the KL's backward pass can
leave its factor for the draw's, which then adds both gradients in one sweep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slimbayes.accelerate import switches
from slimbayes.accelerate.log_sigma import exact, sum_log_sigma, value_and_gradients
from slimbayes.core import priors
from slimbayes.core.distributions import without_row
from slimbayes.core.noise import transformed
from slimbayes.core.paths import FastPath, Layers
from slimbayes.core.posteriors import EPSILON, KTiedPosterior, NormalPosterior, Posterior, positive
from slimbayes.core.rules.meanfield import SampledRule

Number = Tensor | float  # of one element: read on the CPU, left on a GPU, which would have to be waited for


@dataclass
class RawPrior:
    """N(loc, scale²) for all elements; loc is None where it is the posterior's own mean."""

    loc: float | None
    scale: float

    @property
    def precision(self) -> float:
        """1/scale²."""
        return 1.0 / (self.scale * self.scale)


@dataclass
class Raw:
    """A posterior around ``loc`` by its parameters: (ρ,) of a Normal, (log U, log V) of a k-tied one."""

    loc: Tensor
    spread: tuple[Tensor, ...]

    def without_row(self, row: int | None) -> Raw:
        """The same but for one row of the tensor."""
        if row is None:
            return self
        first, *others = self.spread
        return Raw(without_row(self.loc, row), (without_row(first, row), *others))

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The mean and the parameters of the spread."""
        return (self.loc, *self.spread)


@dataclass
class Pending:
    """Where a KL's backward pass leaves its factor for the backward pass of the sample of the same weights."""

    task: int = -1
    factor: Tensor | None = None
    done: int = -1

    def take(self) -> Tensor | None:
        """What was left in this very backward pass; nothing can be left after it."""
        self.done = torch._C._current_graph_task_id()
        factor, self.factor = self.factor, None
        return factor if self.task == self.done else None


def version(tensor: Tensor) -> tuple[int, int, bool]:
    """What changes with a tensor's values, its memory (``p.data = ...``, ``model.to(...)``), or with its freezing.

    >>> x = torch.zeros(1)
    >>> before = version(x)
    >>> x.add_(1.0) is x and version(x) != before
    True
    """
    return -1 if tensor.is_inference() else tensor._version, tensor.data_ptr(), tensor.requires_grad


class Facts(Protocol):
    """What a by-product follows from."""

    def hold(self, layers: Sequence[Any]) -> bool:
        """Whether it is still so for these layers."""


Owner = Callable[[], tuple[object, Raw | None, RawPrior | None]]


@dataclass
class Byproduct:
    """Of one operation that sampled random tensors: their parameters as they were, priors, and σ where it was kept."""

    sources: list[str]
    raws: list[Raw]
    priors: list[RawPrior | None]  # None: another layer's, or none that is Normal
    owners: list[Owner]  # the layer of each tensor, and its parameters and prior as they are now
    scales: list[Tensor | None] = field(default_factory=list)
    total: Tensor | None = None  # the KL, where the operation that sampled them made it too
    noise: tuple[int, int] = (-1, 0)  # the seed and the first stream of noise that can be made again
    draws: int = 0
    node: Any = None
    pending: Pending = field(default_factory=Pending)
    versions: list[tuple[int, int, bool]] = field(default_factory=list)
    facts: Facts | None = None  # by which the tensors are known to be the layers' own, instead of owners

    def __post_init__(self) -> None:
        self.versions = [version(tensor) for tensor in self.tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """All parameters, tensor by tensor."""
        return [tensor for raw in self.raws for tensor in raw.parameters]

    def noise_of(self, source: str) -> tuple[int, int]:
        """The seed and the first stream of the noise of one of its tensors."""
        seed, stream = self.noise
        return seed, stream + self.draws * self.sources.index(source)

    def add(self, source: str, raw: Raw, prior: RawPrior | None, owner: Owner) -> None:
        """One more tensor that is sampled with the others."""
        self.sources.append(source)
        self.raws.append(raw)
        self.priors.append(prior)
        self.owners.append(owner)
        self.versions += [version(tensor) for tensor in raw.parameters]

    @property
    def with_kl(self) -> list[int]:
        """Positions of the tensors whose KL follows from this."""
        return [i for i, prior in enumerate(self.priors) if prior is not None]

    @property
    def names(self) -> list[str]:
        """The sources of those tensors."""
        return [self.sources[i] for i in self.with_kl]

    def valid(self, layers: Sequence[object]) -> bool:
        """Whether there is a KL to take over: the tensors still belong to these layers, and have not changed."""
        if torch.compiler.is_compiling() or not self.with_kl or (self.total is None and not self.scales):
            return False  # compiled code has no part in a graph made outside of it
        if self.facts is not None:
            usable = switches.paths.weights and not transformed()
            changed = [version(tensor) for tensor in self.tensors] != self.versions
            return usable and not changed and self.facts.hold(layers)
        present = {id(layer) for layer in layers}
        now: list[Tensor] = []
        for prior, owner in zip(self.priors, self.owners, strict=True):
            layer, raw, its_prior = owner()
            if id(layer) not in present or raw is None or its_prior != prior:
                return False
            now += raw.parameters
        before = self.tensors
        return (
            len(now) == len(before)
            and all(mine is other for mine, other in zip(before, now, strict=True))
            and [version(tensor) for tensor in now] == self.versions
        )

    def kl(self) -> Tensor:
        """KL of all its tensors that have a prior here."""
        if self.total is not None:
            return self.total if torch.is_grad_enabled() else self.total.detach()
        kept = self.with_kl
        terms = [(self.raws[i], self.priors[i]) for i in kept]
        return divergence(terms, self)  # type: ignore[arg-type]

    def leave(self, factor: Tensor) -> bool:
        """Leave the KL's factor to the sample's backward pass, if that is still to come in this one."""
        task = torch._C._current_graph_task_id()
        if (
            self.node is None
            or self.pending.done == task
            or not torch._C._will_engine_execute_node(self.node)
        ):
            return False
        self.pending.task, self.pending.factor = task, factor
        return True


class WeightKL(FastPath):
    """The KL of all MeanField and KTied tensors with Normal priors, as one operation."""

    def on(self) -> bool:
        """By ``weights``."""
        return switches.paths.weights

    def kl(self, layers: Layers, seen: set[str]) -> Iterator[tuple[Tensor, Sequence[str]]]:
        """One part for all of them."""
        terms: dict[str, tuple[Raw, RawPrior]] = {}
        for rule, op in layers:
            if not isinstance(rule, SampledRule) or rule.prior is None:
                continue
            for which in ("weight", "bias"):
                posterior, mean, source, fan_in = rule.tensor(op, which)
                if posterior is None or mean is None or source in seen or source in terms:
                    continue
                raw, prior = raw_spread(posterior, mean), raw_prior(rule.prior, fan_in, rule.tied_mean)
                if raw is not None and prior is not None:
                    terms[source] = raw.without_row(rule.constant_row if which == "weight" else None), prior
        if terms:
            yield divergence(list(terms.values())), list(terms)


def spread_of(posterior: Posterior | None) -> tuple[Tensor, ...]:
    """The parameters of a spread that the fast paths know, else none."""
    if type(posterior) is NormalPosterior and posterior.maximum is None:
        return (posterior.rho,)
    if type(posterior) is KTiedPosterior:
        return posterior.log_u, posterior.log_v
    return ()


def raw_spread(posterior: Posterior | None, mean: Tensor) -> Raw | None:
    """The posterior's parameters where the fast paths know what to do with them, else None."""
    if posterior is None or not switches.paths.weights or torch.compiler.is_compiling() or transformed():
        return None
    raw = Raw(mean, spread_of(posterior))
    if not raw.spread:
        return None
    if mean.dtype not in (torch.float32, torch.float64):
        return None
    for tensor in raw.parameters:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.dtype != mean.dtype:
            return None
    return raw


def raw_prior(prior: priors.Prior, fan_in: int | None, tied: bool) -> RawPrior | None:
    """The numbers of a Normal prior, None for any other."""
    if type(prior) is priors.Normal:
        return RawPrior(None if tied else prior.loc, prior.scale)
    if type(prior) is priors.HeNormal:
        return RawPrior(None if tied else 0.0, 1.0 if fan_in is None else math.sqrt(2.0 / fan_in))
    return None


def scale_of(rho: Tensor) -> Tensor:
    """softplus(ρ) + 1e-7, by two vectorised functions where torch's softplus is not one.

    >>> bool(torch.isclose(scale_of(torch.tensor([900.0])), torch.tensor(900.0)))
    True
    """
    if rho.device.type != "cpu":
        return positive(rho)
    scale = rho.exp().log1p_().add_(EPSILON)
    # exp overflows from 88 on (float64: 709); one sum of squares costs less than a search for the largest.
    return scale if math.isfinite(squares(scale)) else positive(rho)


def divergence(terms: Sequence[tuple[Raw, RawPrior]], known: Byproduct | None = None) -> Tensor:
    """Σ log(σ_p/σ) + (σ² + (μ − μ_p)²)/(2σ_p²) − ½ over all elements of all terms, as one operation.

    >>> raw = Raw(torch.zeros(3), (torch.full((3,), math.log(math.e - 1.0)),))  # σ = 1
    >>> abs(float(divergence([(raw, RawPrior(0.0, 1.0))]))) < 1e-5
    True
    """
    tensors = [tensor for raw, _ in terms for tensor in raw.parameters]
    value: Tensor = _Divergence.apply(terms, known, *tensors)  # type: ignore[no-untyped-call]
    return value


class _Divergence(torch.autograd.Function):
    """With c = 1/σ_p²: dM = c(M − μ_p), dσ = cσ − 1/σ, dρ = dσ∘sigmoid(ρ), d log U = (dσ V)∘U.

    For σ = U Vᵀ not kept by a draw: Σσ² = Σ_ab (UᵀU)_ab (VᵀV)_ab and log σ by ``logsigma``, and the gradients of
    U and V are few numbers, made at once.
    """

    @staticmethod
    def forward(
        ctx: Any, terms: Sequence[tuple[Raw, RawPrior]], known: Byproduct | None, *tensors: Tensor
    ) -> Tensor:
        total: Number
        kept: list[Tensor | None] = []
        if known is not None:
            total, kept = _open(terms, [known.scales[i] for i in known.with_kl])
        else:
            total, kept = _open(terms, [None] * len(terms))
        total = total + _constant(terms)
        ctx.save_for_backward(*tensors, *kept)
        ctx.terms, ctx.known = terms, known
        dtype = tensors[0].dtype
        return (
            total.to(dtype)
            if isinstance(total, Tensor)
            else torch.full((), total, dtype=dtype, device=tensors[0].device)
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count = sum([len(raw.spread) + 1 for raw, _ in ctx.terms])
        tensors, kept = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        # A second derivative is asked for, and σ must be a function of its parameters; or many gradients at once.
        if torch.is_grad_enabled() or not plain(grad):
            return None, None, *again(ctx.terms, tensors, grad)
        left = ctx.known is not None and ctx.known.leave(grad)
        if left and not kept:
            return None, None, *[None] * count
        if not kept:
            kept = _open(ctx.terms, [None] * len(ctx.terms))[1]
        factor = number(grad)
        found: list[Tensor | None] = []
        start = 0
        for i, (raw, prior) in enumerate(ctx.terms):
            mean, *spread = tensors[start : start + len(raw.parameters)]
            start += len(raw.parameters)
            scale, slope_v = kept[2 * i : 2 * i + 2]
            found.append(None if left else pull(mean, prior, factor))
            if slope_v is not None:  # these are the gradients themselves
                found += [scale * factor, slope_v * factor]
            elif left:
                found += [None] * len(spread)
            else:
                found += spread_gradients(add_pull(None, scale, prior, factor), spread)
        return None, None, *found


def closed(sums: Sequence[tuple[float, float, float]], terms: Sequence[tuple[Raw, RawPrior]]) -> float:
    """The same number from Σ(M − μ_p)², Σσ² and Σ log σ of every term.

    >>> raw = Raw(torch.zeros(2), ())
    >>> closed([(0.0, 2.0, 0.0)], [(raw, RawPrior(0.0, 1.0))])
    0.0
    """
    total = _constant(terms)
    for (distance, squares, logs), (_, prior) in zip(sums, terms, strict=True):
        total += 0.5 * prior.precision * (squares + (0.0 if prior.loc is None else distance)) - logs
    return total


def _constant(terms: Sequence[tuple[Raw, RawPrior]]) -> float:
    return sum([raw.loc.numel() * (math.log(prior.scale) - 0.5) for raw, prior in terms])


def _open(
    terms: Sequence[tuple[Raw, RawPrior]], scales: Sequence[Tensor | None]
) -> tuple[Number, list[Tensor | None]]:
    """The same of all terms from their parameters, with σ of each, or the gradients of log U and log V."""
    total: Number = 0.0
    kept: list[Tensor | None] = []
    for (raw, prior), scale in zip(terms, scales, strict=True):
        if scale is None and len(raw.spread) == 1:
            scale = scale_of(raw.spread[0])
        if scale is not None:
            total = total + 0.5 * prior.precision * squares(scale) - number(scale.log().sum())
            kept += [scale, None]
        else:
            value, *gradients = _ktied_terms(raw, prior)
            total = total + value
            kept += gradients
        total = total + 0.5 * prior.precision * _distance(raw.loc, prior)
    return total, kept


def _ktied_terms(raw: Raw, prior: RawPrior) -> tuple[Number, Tensor, Tensor]:
    """½cΣσ² − Σ log σ of a k-tied matrix, and its gradients with respect to log U and log V."""
    log_u, log_v = raw.spread
    u, v = log_u.exp(), log_v.exp()
    gram_u, gram_v = u.t() @ u, v.t() @ v
    logs, du, dv = value_and_gradients(log_u, log_v)
    du = torch.addcmul(-du, u @ gram_v, u, value=prior.precision)
    dv = torch.addcmul(-dv, v @ gram_u, v, value=prior.precision)
    return 0.5 * prior.precision * number((gram_u * gram_v).sum()) - number(logs), du, dv


def spread_gradients(slope: Tensor, spread: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients of a spread's parameters from that of σ, whose memory may be used."""
    if len(spread) == 1:
        return [slope.mul_(torch.sigmoid(spread[0]))]
    log_u, log_v = spread
    u, v = log_u.exp(), log_v.exp()
    slope = slope.reshape(len(u), len(v))
    # Few rows on the left of both products: several times faster.
    return [(v.t() @ slope.t()).t() * u, (u.t() @ slope).t() * v]


def add_pull(slope: Tensor | None, scale: Tensor, prior: RawPrior, factor: Number) -> Tensor:
    """``slope`` + κ(σ/σ_p² − 1/σ), in the slope's own memory."""
    if slope is None:
        return torch.reciprocal(scale).sub_(scale, alpha=prior.precision).mul_(-factor)
    if isinstance(factor, float):
        slope.add_(scale, alpha=factor * prior.precision)
        return slope.addcdiv_(scale.new_ones(()), scale, value=-factor)
    return slope.addcmul_(scale, factor, value=prior.precision).addcdiv_(-factor, scale)


def pull(mean: Tensor, prior: RawPrior, factor: Number) -> Tensor:
    """κ(M − μ_p)/σ_p²: zeros where the prior's mean is M itself."""
    if prior.loc is None:
        return torch.zeros_like(mean)
    factor = factor * prior.precision
    return mean * factor if prior.loc == 0.0 else (mean - prior.loc).mul_(factor)


def plain(x: Tensor) -> bool:
    """Whether a gradient is a tensor with memory of its own, not one that stands for many (a vectorised Jacobian)."""
    return type(x) is Tensor and torch._C._has_storage(x)


def number(x: Tensor) -> Number:
    """The number in a tensor of one element, where it can be had without waiting."""
    return x.item() if x.device.type == "cpu" else x


def squares(x: Tensor) -> Number:
    """Σx²."""
    flat = x.reshape(-1)
    return number(torch.dot(flat, flat))


def _distance(mean: Tensor, prior: RawPrior) -> Number:
    if prior.loc is None:
        return 0.0
    return squares(mean if prior.loc == 0.0 else mean - prior.loc)


def _plain(terms: Sequence[tuple[Raw, RawPrior]], tensors: Sequence[Tensor]) -> Tensor:
    """The sum but for its constant, by operations that autograd knows."""
    total = tensors[0].new_zeros(())
    start = 0
    for raw, prior in terms:
        mean, *spread = tensors[start : start + len(raw.parameters)]
        start += len(raw.parameters)
        if len(spread) == 1:
            scale = positive(spread[0])
            sizes, logs = scale.square().sum(), scale.log().sum()
        else:
            u, v = spread[0].exp(), spread[1].exp()
            sizes = ((u.t() @ u) * (v.t() @ v)).sum()
            logs = sum_log_sigma(*spread) if u.shape[1] == 1 else exact(*spread)
        centre = mean if prior.loc is None else prior.loc
        total = total + 0.5 * prior.precision * (sizes + (mean - centre).square().sum()) - logs
    return total


def again(
    terms: Sequence[tuple[Raw, RawPrior]], tensors: Sequence[Tensor], grad: Tensor
) -> list[Tensor | None]:
    """Gradients that can be differentiated again, by autograd through the plain formula."""
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        value = _plain(terms, tensors)
    found = iter(torch.autograd.grad(value, wanted, grad, create_graph=again, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in tensors]
