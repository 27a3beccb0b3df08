"""Weight samples in few sweeps: W = M + σ∘ε with the gradients of sample and KL written out and added at once.

Another device's kernels plug in here: ``sample_weight`` is the one place that makes a sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimbayes.logsigma import interpolates
from slimbayes.posteriors import EPSILON, positive
from slimbayes.weightkl import Byproduct, Pending, Raw, RawPrior, ktied_gradients


def sample_weight(raw: Raw, epsilon: Tensor, centred: bool) -> tuple[Tensor, Byproduct]:
    """M + σ∘ε [draws, *shape] from ε of that shape, or σ∘ε when ``centred``, and what a KL can take over."""
    known = Byproduct(raw.parameters)
    function: Any = _NormalSample if len(raw.spread) == 1 else _KTiedSample
    sampled: Tensor
    sampled, known.scale = function.apply(raw.loc, *raw.spread, epsilon, centred, known.pending)
    known.node = sampled.grad_fn
    return sampled, known


class _NormalSample(torch.autograd.Function):
    """M + (softplus(ρ) + 1e-7)∘ε: dM = Σ_draws g, dρ = Σ_draws (g∘ε) ∘ sigmoid(ρ)."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, rho: Tensor, epsilon: Tensor, centred: bool, pending: Pending
    ) -> tuple[Tensor, Tensor]:
        scale = _scale(rho)
        sampled = scale * epsilon if centred else torch.addcmul(mean, scale, epsilon)
        ctx.save_for_backward(mean, rho, epsilon, scale)
        ctx.centred, ctx.pending = centred, pending
        ctx.mark_non_differentiable(scale)
        ctx.set_materialize_grads(False)
        return sampled, scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, unused: None) -> tuple[Tensor | None, ...]:
        mean, rho, epsilon, scale = ctx.saved_tensors
        left = ctx.pending.take()
        slope = None
        if grad is None:
            grad = torch.zeros_like(epsilon)
        if ctx.needs_input_grad[1]:
            slope = _slope(grad, epsilon, scale, left).mul_(torch.sigmoid(rho))
        return _mean_gradient(ctx, mean, grad, left), slope, None, None, None


class _KTiedSample(torch.autograd.Function):
    """M + (U Vᵀ)∘ε: with G = Σ_draws g∘ε, d log U = (G V)∘U and d log V = (Gᵀ U)∘V.

    σ stays for the KL of a small matrix; that of a large one has no use for it.
    """

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, log_u: Tensor, log_v: Tensor, epsilon: Tensor, centred: bool, pending: Pending
    ) -> tuple[Tensor, Tensor | None]:
        with _Full(log_u):
            # Vᵀ laid out as such: the product is twice as fast.
            scale = torch.mm(log_u.exp(), log_v.exp().t().contiguous()).reshape(epsilon.shape[1:])
        kept = None if interpolates(log_u, log_v) else scale
        ctx.save_for_backward(mean, log_u, log_v, epsilon, kept)
        ctx.centred, ctx.pending = centred, pending
        ctx.set_materialize_grads(False)
        if kept is not None:
            ctx.mark_non_differentiable(kept)
        # One sample of a large matrix takes the place of its σ.
        room = scale.unsqueeze(0) if kept is None and len(epsilon) == 1 else torch.empty_like(epsilon)
        if centred:
            return torch.mul(scale, epsilon, out=room), kept
        return torch.addcmul(mean, scale, epsilon, out=room), kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, unused: None) -> tuple[Tensor | None, ...]:
        mean, log_u, log_v, epsilon, scale = ctx.saved_tensors
        left = ctx.pending.take()
        du = dv = None
        if grad is None:
            grad = torch.zeros_like(epsilon)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            with _Full(log_u):
                du, dv = ktied_gradients(_slope(grad, epsilon, scale, left), log_u, log_v)
        return _mean_gradient(ctx, mean, grad, left), du, dv, None, None, None


def _slope(
    grad: Tensor, epsilon: Tensor, scale: Tensor | None, left: tuple[Tensor, RawPrior] | None
) -> Tensor:
    """dσ: Σ_draws g∘ε, and κ(σ/σ_p² − 1/σ) if the KL has left its factor κ."""
    slope = _total(grad * epsilon)
    if left is None or scale is None:
        return slope
    factor, prior = left
    return slope.addcmul_(scale, factor, value=prior.precision).addcdiv_(-factor, scale)


def _mean_gradient(
    ctx: Any, mean: Tensor, grad: Tensor, left: tuple[Tensor, RawPrior] | None
) -> Tensor | None:
    """Σ_draws g, and κ(M − μ_p)/σ_p² if the KL has left its factor κ."""
    if not ctx.needs_input_grad[0]:
        return None
    centre = None if left is None else left[1].loc
    if left is None or centre is None:
        return None if ctx.centred else _total(grad)
    factor, prior = left
    distance = mean if centre == 0.0 else mean - centre
    if ctx.centred:
        return distance * (factor * prior.precision)
    return torch.addcmul(_total(grad), distance, factor, value=prior.precision)


class _Full:
    """No autocast inside: σ is made in the type of its parameters."""

    def __init__(self, like: Tensor) -> None:
        kind = like.device.type
        on = torch.is_autocast_enabled(kind)
        self.context = torch.autocast(device_type=kind, enabled=False) if on else None

    def __enter__(self) -> None:
        if self.context is not None:
            self.context.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.context is not None:
            self.context.__exit__(*error)


def _total(samples: Tensor) -> Tensor:
    """The sum over draws [draws, *shape], and no pass at all for one."""
    return samples.squeeze(0) if len(samples) == 1 else samples.sum(0)


def _scale(rho: Tensor) -> Tensor:
    """softplus(ρ) + 1e-7, by two vectorised functions where torch's softplus is not one."""
    if rho.device.type != "cpu" or rho.numel() == 0 or not float(rho.amax()) < 20.0:
        return positive(rho)
    return rho.exp().log1p_().add_(EPSILON)
