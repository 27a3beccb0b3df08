"""KL of random weights straight from their parameters, with a backward pass of few sweeps.

The closed forms of ``kl`` on distributions go over the weights a dozen times under autograd. Here a Normal prior is
two numbers, the sums are dot products, and the gradients are written out. A draw leaves a ``Byproduct`` for the KL
that follows it: σ of every weight, and a place where the KL's backward pass can leave its factor for the draw's,
which then adds both gradients in one sweep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes import fast, priors
from slimbayes.kl import closed
from slimbayes.logsigma import exact, sum_log_sigma, value_and_gradients
from slimbayes.noise import transformed
from slimbayes.posteriors import KTiedPosterior, NormalPosterior, Posterior, positive


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
class Pending:
    """Where a KL's backward pass leaves its factor for the backward pass of the sample of the same weights."""

    task: int = -1
    factor: Tensor | None = None
    prior: RawPrior | None = None
    done: int = -1

    def take(self) -> tuple[Tensor, RawPrior] | None:
        """What was left in this very backward pass; nothing can be left after it."""
        self.done = torch._C._current_graph_task_id()
        factor, prior = self.factor, self.prior
        self.factor = self.prior = None
        if self.task != self.done or factor is None or prior is None:
            return None
        return factor, prior


def _version(tensor: Tensor) -> tuple[int, int]:
    """What changes with a tensor's values, or with its memory (``p.data = ...``, ``model.to(...)``)."""
    return -1 if tensor.is_inference() else tensor._version, tensor.data_ptr()


@dataclass
class Byproduct:
    """Of one sample: σ where it is one per weight, and the parameters and their versions that it came from."""

    parameters: tuple[Tensor, ...]
    scale: Tensor | None = None
    node: Any = None
    pending: Pending = field(default_factory=Pending)
    versions: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        self.versions = tuple(_version(tensor) for tensor in self.parameters)

    def belongs_to(self, parameters: tuple[Tensor, ...]) -> bool:
        """Whether it came from these parameters, and they have not changed since."""
        return all(
            mine is other and _version(other) == version
            for mine, other, version in zip(self.parameters, parameters, self.versions, strict=True)
        )

    def leave(self, factor: Tensor, prior: RawPrior) -> bool:
        """Leave the KL's factor to the sample's backward pass, if that is still to come in this one."""
        task = torch._C._current_graph_task_id()
        if (
            self.node is None
            or self.pending.done == task
            or not torch._C._will_engine_execute_node(self.node)
        ):
            return False
        self.pending.task, self.pending.factor, self.pending.prior = task, factor, prior
        return True


@dataclass
class Raw:
    """A posterior around ``loc`` by its parameters: (ρ,) of a Normal, (log U, log V) of a k-tied one."""

    loc: Tensor
    spread: tuple[Tensor, ...]
    byproduct: Byproduct | None = None

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The mean and the parameters of the spread."""
        return (self.loc, *self.spread)


def raw_spread(posterior: Posterior | None, mean: Tensor) -> Raw | None:
    """The posterior's parameters where the fast paths know what to do with them, else None."""
    if posterior is None or not fast.paths.weights or torch.compiler.is_compiling() or transformed():
        return None
    if type(posterior) is NormalPosterior and posterior.maximum is None:
        raw = Raw(mean, (posterior.rho,))
    elif type(posterior) is KTiedPosterior:
        raw = Raw(mean, (posterior.log_u, posterior.log_v))
    else:
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


@closed(Raw, RawPrior)
def raw_kl(q: Raw, p: RawPrior) -> Tensor:
    """Σ log(σ_p/σ) + (σ² + (μ − μ_p)²)/(2σ_p²) − ½."""
    known = q.byproduct
    if known is not None and not known.belongs_to(q.parameters):
        known = None
    function = _NormalKL if len(q.spread) == 1 else _KTiedKL
    value: Tensor = function.apply(q.loc, *q.spread, known, p)  # type: ignore[no-untyped-call]
    return value


class _NormalKL(torch.autograd.Function):
    """With c = 1/σ_p²: dM = c(M − μ_p), dρ = (cσ − 1/σ)∘sigmoid(ρ)."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, rho: Tensor, known: Byproduct | None, prior: RawPrior) -> Tensor:
        scale = positive(rho) if known is None or known.scale is None else known.scale
        ctx.save_for_backward(mean, rho, scale)
        ctx.known, ctx.prior = known, prior
        squares = _squares(scale) + _distance(mean, prior)
        constant = mean.numel() * (math.log(prior.scale) - 0.5)
        return squares.mul_(0.5 * prior.precision).sub_(scale.log().sum()).add_(constant)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mean, rho, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is asked for: σ must be a function of ρ
            return *_again(_plain_normal, (mean, rho), ctx.prior, grad), None, None
        if ctx.known is not None and ctx.known.leave(grad, ctx.prior):
            return None, None, None, None
        slope = torch.reciprocal(scale).sub_(scale, alpha=ctx.prior.precision).mul_(-grad)
        return _pull(mean, ctx.prior, grad), slope.mul_(torch.sigmoid(rho)), None, None


class _KTiedKL(torch.autograd.Function):
    """The same with σ = U Vᵀ: from a draw's σ, or else with Σσ² = Σ_ab (UᵀU)_ab (VᵀV)_ab and log σ by ``logsigma``.

    Without σ the gradients of U and V are few numbers, made at once.
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, log_u: Tensor, log_v: Tensor, known: Byproduct | None, prior: RawPrior
    ) -> Tensor:
        ctx.known, ctx.prior = known, prior
        ctx.scaled = known is not None and known.scale is not None
        constant = mean.numel() * (math.log(prior.scale) - 0.5)
        if known is not None and known.scale is not None:
            ctx.save_for_backward(mean, log_u, log_v, known.scale)
            squares, logs = _squares(known.scale), known.scale.log().sum()
        else:
            u, v = log_u.exp(), log_v.exp()
            gram_u, gram_v = u.t() @ u, v.t() @ v
            logs, du, dv = value_and_gradients(log_u, log_v)
            du = torch.addcmul(-du, u @ gram_v, u, value=prior.precision)
            dv = torch.addcmul(-dv, v @ gram_u, v, value=prior.precision)
            ctx.save_for_backward(mean, log_u, log_v, du, dv)
            squares = (gram_u * gram_v).sum()
        squares = squares + _distance(mean, prior)
        return squares.mul_(0.5 * prior.precision).sub_(logs).add_(constant)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mean, log_u, log_v, *rest = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_again(_plain_ktied, (mean, log_u, log_v), ctx.prior, grad), None, None
        left = ctx.known is not None and ctx.known.leave(grad, ctx.prior)
        if left and ctx.scaled:
            return None, None, None, None, None
        if ctx.scaled:
            slope = torch.reciprocal(rest[0]).sub_(rest[0], alpha=ctx.prior.precision).mul_(-grad)
            du, dv = ktied_gradients(slope, log_u, log_v)
        else:
            du, dv = rest[0] * grad, rest[1] * grad
        return None if left else _pull(mean, ctx.prior, grad), du, dv, None, None


def ktied_gradients(slope: Tensor, log_u: Tensor, log_v: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of log U and log V from that of σ = U Vᵀ, G: (G V)∘U and (Gᵀ U)∘V."""
    u, v = log_u.exp(), log_v.exp()
    slope = slope.reshape(len(u), len(v))
    return (slope @ v).mul_(u), (u.t() @ slope).t() * v  # few rows on the left: several times faster


def _squares(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    return torch.dot(flat, flat)


def _distance(mean: Tensor, prior: RawPrior) -> Tensor:
    if prior.loc is None:
        return mean.new_zeros(())
    return _squares(mean if prior.loc == 0.0 else mean - prior.loc)


def _pull(mean: Tensor, prior: RawPrior, grad: Tensor) -> Tensor:
    """Gradient of ½c(M − μ_p)²: zeros where the prior's mean is M itself."""
    if prior.loc is None:
        return torch.zeros_like(mean)
    factor = grad * prior.precision
    return mean * factor if prior.loc == 0.0 else (mean - prior.loc).mul_(factor)


def _plain_normal(prior: RawPrior, mean: Tensor, rho: Tensor) -> Tensor:
    scale = positive(rho)
    return 0.5 * prior.precision * scale.square().sum() - scale.log().sum() + _plain_distance(prior, mean)


def _plain_ktied(prior: RawPrior, mean: Tensor, log_u: Tensor, log_v: Tensor) -> Tensor:
    u, v = log_u.exp(), log_v.exp()
    squares = ((u.t() @ u) * (v.t() @ v)).sum()
    logs = exact(log_u, log_v) if log_u.shape[1] > 1 else sum_log_sigma(log_u, log_v)
    return 0.5 * prior.precision * squares - logs + _plain_distance(prior, mean)


def _plain_distance(prior: RawPrior, mean: Tensor) -> Tensor:
    centre = mean if prior.loc is None else prior.loc
    return 0.5 * prior.precision * (mean - centre).square().sum()


def _again(
    function: Any, inputs: tuple[Tensor, ...], prior: RawPrior, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again, by autograd through the plain formula."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    found = iter(torch.autograd.grad(function(prior, *inputs), wanted, grad, create_graph=True))
    return tuple(next(found) if tensor.requires_grad else None for tensor in inputs)
