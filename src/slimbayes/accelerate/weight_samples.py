"""Weight samples in few sweeps: W = M + σ∘ε with the gradients of sample and KL written out and added at once.

One operation samples any number of tensors. Those of a small network are all sampled before it runs: there the calls
cost more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate.cpu import weights as kernel
from slimbayes.accelerate.log_sigma import interpolates
from slimbayes.accelerate.weight_kl import (
    Byproduct,
    Number,
    RawPrior,
    add_pull,
    again,
    closed,
    number,
    plain,
    pull,
    scale_of,
    spread_gradients,
    version,
)
from slimbayes.core.noise import transformed


def sample_weights(known: Byproduct, noises: Sequence[Tensor], centred: Sequence[bool]) -> list[Tensor]:
    """M + σ∘ε [draws, *shape] for every tensor, from ε of that shape, or σ∘ε where ``centred``.

    What a KL can take over is left in ``known``.
    """
    plan = _Plan(known, centred)
    made: tuple[Any, ...] = _Samples.apply(plan, *known.tensors, *noises)  # type: ignore[no-untyped-call]
    count = len(known.raws)
    known.scales = list(made[count:])
    known.node = made[0].grad_fn
    return list(made[:count])


def by_kernel(known: Byproduct) -> bool:
    """Whether the kernels in C sample these tensors, with noise of their own."""
    return kernel.usable([raw.parameters for raw in known.raws])


def make_weights(
    known: Byproduct,
    draws: int,
    centred: Sequence[bool],
    noise: tuple[int, int] | None = None,
    axis: bool = True,
) -> list[Tensor]:
    """The same by the kernels in C; ``noise`` is the seed and the first stream of ε, else the seed is new.

    One draw without its ``axis`` has the shape of its mean: nothing for the layer, and autograd, to take away.
    """
    known.draws, known.noise = draws, (kernel.new_seed(), 0) if noise is None else noise
    plan = _Plan(known, centred, axis)
    if not torch.is_grad_enabled():
        return plan.sample([raw.parameters for raw in known.raws], False)
    made: list[Tensor]
    *made, known.total = _Made.apply(plan, *known.tensors)  # type: ignore[no-untyped-call]
    return made


class _Plan:
    """What the operation knows of its tensors, which come in groups: mean, then the spread's parameters."""

    def __init__(self, known: Byproduct, centred: Sequence[bool], axis: bool = True) -> None:
        self.sizes = [len(raw.spread) + 1 for raw in known.raws]
        self.priors = known.priors
        self.terms = [
            (raw, prior) for raw, prior in zip(known.raws, known.priors, strict=True) if prior is not None
        ]
        self.centred = centred
        self.axis = axis  # whether samples have an axis of draws
        self.pending = known.pending
        self.draws, self.noise = known.draws, known.noise
        self.sums: list[kernel.Sums] = []

    def sample(self, groups: Sequence[Sequence[Tensor]], counted: bool) -> list[Tensor]:
        """Samples by the kernel, and where they are ``counted`` the sums of their KL."""
        centres = None
        if counted:
            centres = [0.0 if prior is None else prior.loc or 0.0 for prior in self.priors]
        seed, stream = self.noise
        made, self.sums = kernel.sample(groups, self.centred, self.draws, seed, centres, stream, self.axis)
        return made

    def divergence(self) -> Tensor:
        """The KL of the samples' tensors that have a prior here, from the sums made with them."""
        sums = [own for own, prior in zip(self.sums, self.priors, strict=True) if prior is not None]
        return torch.full((), closed(sums, self.terms), dtype=torch.float32, device="cpu")

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
        found = _gradients(plan, grads, tensors, noises, scales, ctx.needs_input_grad[1:])
        return None, *found, *[None] * count


class _Made(torch.autograd.Function):
    """The same, forwards and backwards one sweep each by the kernels in C, which make ε again; and the KL.

    The parameters are not saved but held, with their versions: the KL's backward pass may come after the samples'
    own, which frees what is saved.
    """

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        ctx.plan, ctx.tensors = plan, tensors
        ctx.versions = [version(tensor)[0] for tensor in tensors]
        ctx.set_materialize_grads(False)
        made = plan.sample(plan.groups(tensors), bool(plan.terms))
        return *made, plan.divergence() if plan.terms else None

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        plan, tensors = ctx.plan, ctx.tensors
        if [version(tensor)[0] for tensor in tensors] != ctx.versions:
            raise RuntimeError(
                "a mean or a spread has been modified by an inplace operation since its weight was sampled: step "
                "the optimizer after backward()"
            )
        *grads, pulled = given
        groups, (seed, stream), draws = plan.groups(tensors), plan.noise, plan.draws
        if torch.is_grad_enabled() or transformed() or not all([one is None or plain(one) for one in given]):
            streams = range(stream, stream + draws * len(groups), draws)
            noises = [
                kernel.noise_of(mean, draws, seed, own)
                for (mean, *_), own in zip(groups, streams, strict=True)
            ]
            scales = [None] * len(groups)
            found = _gradients(plan, grads, tensors, noises, scales, ctx.needs_input_grad[1:])
            return None, *(found if pulled is None else _with_kl(plan, found, tensors, pulled))
        factor = 0.0 if pulled is None else pulled.item()
        pulls = [_pulls(prior, factor) for prior in plan.priors]
        needs = plan.groups(ctx.needs_input_grad[1:])
        return None, *kernel.gradients(groups, plan.centred, draws, seed, grads, needs, pulls, stream)


def _with_kl(
    plan: _Plan, found: Sequence[Tensor | None], tensors: Sequence[Tensor], grad: Tensor
) -> list[Tensor | None]:
    """The gradients with those of the KL, which can be differentiated again."""
    positions = zip(plan.groups(range(len(tensors))), plan.priors, strict=True)
    places = [i for group, prior in positions if prior is not None for i in group]
    total = list(found)
    for i, own in zip(places, again(plan.terms, [tensors[i] for i in places], grad), strict=True):
        mine = total[i]
        total[i] = own if mine is None else mine if own is None else mine + own
    return total


def _pulls(prior: RawPrior | None, factor: float) -> kernel.Pull:
    """What a KL with this factor adds, as the kernels take it."""
    if prior is None or factor == 0.0:
        return kernel.NO_PULL
    own = factor * prior.precision
    return (0.0, 0.0, own, factor) if prior.loc is None else (prior.loc, own, own, factor)


def _gradients(
    plan: _Plan,
    grads: Sequence[Tensor | None],
    tensors: Sequence[Tensor],
    noises: Sequence[Tensor],
    scales: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of all parameters by torch's operations."""
    left = plan.pending.take()
    factor = None if left is None else number(left)
    needs = plan.groups(needed)
    if not plan.axis:
        grads = [None if grad is None else grad.unsqueeze(0) for grad in grads]
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
    return found


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
    # Itself where it is written over: a view beside its base is refused where other strides mix in.
    own = scale if kept or len(noise) > 1 else room
    if centred:
        return torch.mul(own, noise, out=room), scale if kept else None
    return torch.addcmul(mean, own, noise, out=room), scale if kept else None


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
