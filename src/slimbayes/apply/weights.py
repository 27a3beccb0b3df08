"""Weight samples in few sweeps: W = M + σ∘ε with the gradients of sample and KL written out and added at once.

One operation samples any number of tensors. Those of a small network are all sampled before it runs: there the calls
cost more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimbayes.logsigma import interpolates
from slimbayes.weightkl import (
    Byproduct,
    Number,
    Pending,
    Raw,
    RawPrior,
    add_pull,
    number,
    pull,
    scale_of,
    spread_gradients,
)


def sample_weights(known: Byproduct, noises: Sequence[Tensor], centred: Sequence[bool]) -> list[Tensor]:
    """M + σ∘ε [draws, *shape] for every tensor, from ε of that shape, or σ∘ε where ``centred``.

    What a KL can take over is left in ``known``.
    """
    plan = _Plan(known.raws, known.priors, centred, known.pending)
    tensors = [tensor for raw in known.raws for tensor in raw.parameters]
    made: tuple[Any, ...] = _Samples.apply(plan, *tensors, *noises)  # type: ignore[no-untyped-call]
    count = len(known.raws)
    known.scales = list(made[count:])
    known.node = made[0].grad_fn
    return list(made[:count])


class _Plan:
    """What the operation knows of its tensors, which come in groups: mean, then the spread's parameters."""

    def __init__(
        self,
        raws: Sequence[Raw],
        priors: Sequence[RawPrior | None],
        centred: Sequence[bool],
        pending: Pending,
    ) -> None:
        self.sizes = [len(raw.parameters) for raw in raws]
        self.priors = priors
        self.centred = centred
        self.pending = pending

    def groups(self, tensors: Sequence[Any]) -> list[Sequence[Any]]:
        """One slice of ``tensors`` for each random tensor."""
        found, start = [], 0
        for size in self.sizes:
            found.append(tensors[start : start + size])
            start += size
        return found


class _Samples(torch.autograd.Function):
    """M + σ∘ε of every tensor.

    dM = Σ_draws g, and with G = Σ_draws g∘ε: dρ = G∘sigmoid(ρ), or d log U = (G V)∘U and d log V = (Gᵀ U)∘V.
    σ goes out too, for the KL, but not that of a large k-tied matrix, which has no use for it.
    """

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        count = len(plan.sizes)
        noises = tensors[-count:]
        samples: list[Tensor] = []
        scales: list[Tensor | None] = []
        with _Full(tensors[0]):
            for (mean, *spread), noise, centred in zip(
                plan.groups(tensors), noises, plan.centred, strict=True
            ):
                made, scale = _sample(mean, spread, noise, centred)
                samples.append(made)
                scales.append(scale)
        ctx.plan = plan
        ctx.save_for_backward(*tensors, *scales)
        ctx.mark_non_differentiable(*[scale for scale in scales if scale is not None])
        ctx.set_materialize_grads(False)
        return *samples, *scales

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan = ctx.plan
        count = len(plan.sizes)
        saved = ctx.saved_tensors
        tensors, noises, scales = saved[: -2 * count], saved[-2 * count : -count], saved[-count:]
        left = plan.pending.take()
        factor = None if left is None else number(left)
        needs = plan.groups(ctx.needs_input_grad[1:])
        found: list[Tensor | None] = []
        with _Full(tensors[0]):
            for i, (mean, *spread) in enumerate(plan.groups(tensors)):
                prior = None if factor is None else plan.priors[i]
                grad, scale = grads[i], scales[i]
                own = None if plan.centred[i] else grad
                found.append(_mean_gradient(own, mean, prior, factor) if needs[i][0] else None)
                slope = None if grad is None else _total(grad * noises[i])
                if prior is not None and scale is not None:
                    slope = add_pull(slope, scale, prior, factor)  # type: ignore[arg-type]
                if slope is None or not any(needs[i][1:]):
                    found += [None] * len(spread)
                else:
                    found += spread_gradients(slope, spread)
        return None, *found, *[None] * count


def _sample(
    mean: Tensor, spread: Sequence[Tensor], noise: Tensor, centred: bool
) -> tuple[Tensor, Tensor | None]:
    """The sample [draws, *shape], and σ if a KL will want it."""
    if len(spread) == 1:
        scale = scale_of(spread[0])
        return scale * noise if centred else torch.addcmul(mean, scale, noise), scale
    log_u, log_v = spread
    # Vᵀ laid out as such: the product is twice as fast.
    scale = torch.mm(log_u.exp(), log_v.exp().t().contiguous()).view(noise.shape[1:])
    kept = not interpolates(log_u, log_v)
    # One sample of a large matrix takes the place of its σ.
    room = torch.empty_like(noise) if kept or len(noise) > 1 else scale.unsqueeze(0)
    if centred:
        return torch.mul(scale, noise, out=room), scale if kept else None
    return torch.addcmul(mean, scale, noise, out=room), scale if kept else None


def _mean_gradient(
    grad: Tensor | None, mean: Tensor, prior: RawPrior | None, factor: Number | None
) -> Tensor | None:
    """Σ_draws g, and κ(M − μ_p)/σ_p² if the KL has left its factor κ."""
    if prior is None or prior.loc is None or factor is None:
        return None if grad is None else _total(grad)
    if grad is None:
        return pull(mean, prior, factor)
    distance = mean if prior.loc == 0.0 else mean - prior.loc
    if isinstance(factor, float):
        return torch.add(_total(grad), distance, alpha=factor * prior.precision)
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
