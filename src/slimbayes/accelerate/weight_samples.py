"""Weight samples by the kernels in C: W = M + σ∘ε, the gradients of sample and KL written out and added at once.

One operation samples any number of tensors. Those of a small network are all sampled before it runs: there the calls
cost more than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate.cpu import weights as kernel
from slimbayes.accelerate.weight_kl import Byproduct, Cost, RawPrior, version
from slimbayes.core import distributions as d
from slimbayes.core.kl import total_kl
from slimbayes.core.noise import transformed
from slimbayes.core.posteriors import positive


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
    """M + σ∘ε [draws, *shape] for every tensor, or σ∘ε where ``centred``; a KL of theirs is left in ``known``.

    ``noise`` is the seed and the first stream of ε, else the seed is new.
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
        self.counts = [raw.loc.numel() for raw in known.raws]
        self.priors = known.priors
        self.counted = any([prior is not None for prior in known.priors])
        self.centred = centred
        self.axis = axis  # whether samples have an axis of draws
        self.draws, self.noise = known.draws, known.noise
        self.costs: list[Cost | None] = [None] * len(known.priors)

    def sample(self, groups: Sequence[Sequence[Tensor]], counted: bool) -> list[Tensor]:
        """Samples by the kernel, and where they are ``counted`` what each tensor costs."""
        centres = None
        if counted:
            centres = [0.0 if prior is None else prior.loc or 0.0 for prior in self.priors]
        seed, stream = self.noise
        made, sums = kernel.sample(groups, self.centred, self.draws, seed, centres, stream, self.axis)
        if counted:
            known = zip(self.priors, sums, self.counts, strict=True)
            self.costs = [None if prior is None else prior.cost(own, n) for prior, own, n in known]
        return made

    def divergence(self) -> Tensor:
        """The KL of the samples' tensors that have a prior here, from the sums made with them."""
        total = sum([cost.kl for cost in self.costs if cost is not None])
        return torch.full((), total, dtype=torch.float32, device="cpu")

    def groups(self, tensors: Sequence[Any]) -> list[Sequence[Any]]:
        """One slice of ``tensors`` for each random tensor."""
        found, start = [], 0
        for size in self.sizes:
            found.append(tensors[start : start + size])
            start += size
        return found


class _Made(torch.autograd.Function):
    """M + σ∘ε of every tensor, forwards and backwards one sweep each, which make ε again; and the KL.

    dM = Σ_draws g, and with G = Σ_draws g∘ε: dρ = G∘sigmoid(ρ), or d log U = (G V)∘U and d log V = (Gᵀ U)∘V.

    The parameters are not saved but held, with their versions: the KL's backward pass may come after the samples'
    own, which frees what is saved.
    """

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        ctx.plan, ctx.tensors = plan, tensors
        ctx.versions = [version(tensor)[0] for tensor in tensors]
        ctx.set_materialize_grads(False)
        made = plan.sample(plan.groups(tensors), plan.counted)
        return *made, plan.divergence() if plan.counted else None

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
        if torch.is_grad_enabled() or transformed() or not all([one is None or _plain(one) for one in given]):
            return None, *_again(plan, tensors, given)
        factor = 0.0 if pulled is None else pulled.item()
        pulls = [_pulls(*known, factor) for known in zip(plan.priors, plan.costs, strict=True)]
        needs = plan.groups(ctx.needs_input_grad[1:])
        return None, *kernel.gradients(groups, plan.centred, draws, seed, grads, needs, pulls, stream)


def _plain(x: Tensor) -> bool:
    """Whether a gradient is a tensor with memory of its own, not one that stands for many (a vectorised Jacobian)."""
    return type(x) is Tensor and torch._C._has_storage(x)


def _again(plan: _Plan, tensors: Sequence[Tensor], given: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients that can be differentiated again, by autograd through the plain formulas."""
    further = torch.is_grad_enabled()
    with torch.enable_grad():
        made = _plain_samples(plan, tensors)
    outputs, grads = zip(*[(y, g) for y, g in zip(made, given, strict=True) if g is not None], strict=True)
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=further, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in tensors]


def _plain_samples(plan: _Plan, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The samples and the KL, by operations that autograd knows."""
    seed, stream = plan.noise
    total = tensors[0].new_zeros(())
    made = []
    for (mean, *spread), centred, prior in zip(plan.groups(tensors), plan.centred, plan.priors, strict=True):
        sigma = positive(spread[0]) if len(spread) == 1 else spread[0].exp() @ spread[1].exp().t()
        sigma = sigma.view(mean.shape)
        noise = sigma * kernel.noise_of(mean, plan.draws, seed, stream)
        sample = noise if centred else mean + noise
        made.append(sample if plan.axis else sample.squeeze(0))
        stream += plan.draws
        if prior is not None:
            total = total + total_kl(d.Normal(mean, sigma), prior.distribution(mean))
    return [*made, total]


def _pulls(prior: RawPrior | None, cost: Cost | None, factor: float) -> kernel.Pull:
    """What a KL with this factor adds, as the kernels take it."""
    if prior is None or cost is None or factor == 0.0:
        return kernel.NO_PULL
    return prior.loc or 0.0, factor * cost.mean, factor * cost.spread, factor
