"""Random weights as one operation of compiled code, with their KL beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate.cpu import weights as kernel
from slimbayes.core.custom_operation import operation

_ARGUMENTS = "Tensor[] tensors, int[] sizes, float[] centres, float[] precisions, float[] pulls, Tensor seed, int draws"


@operation("sampled_weights", f"({_ARGUMENTS}) -> (Tensor[], Tensor)")
def sampled_weights(
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    centres: Sequence[float],
    precisions: Sequence[float],
    pulls: Sequence[float],
    seed: Tensor,
    draws: int,
) -> tuple[list[Tensor], Tensor]:
    """M + σ∘ε [draws, *shape] of every tensor, and Σ ½(cσ² + c′(M − μ)²) − log σ over those with c > 0.

    ``tensors`` are the parameters of one random tensor after the other, ``sizes`` how many each has; μ, c and c′ are
    the ``centres``, ``precisions`` and ``pulls``, where c′ is c, or 0 for a prior around M itself.
    """
    counted = any([precision > 0.0 for precision in precisions])
    groups = _groups([tensor.detach().contiguous() for tensor in tensors], sizes)
    alone = [False] * len(groups)
    made, sums = kernel.sample(groups, alone, draws, int(seed), centres if counted else None)
    total = 0.0
    for (distance, squares, logs), precision, own in zip(sums, precisions, pulls, strict=False):
        if precision > 0.0:
            total += 0.5 * (precision * squares + own * distance) - logs
    return made, torch.full((), total, dtype=tensors[0].dtype)


@sampled_weights.register_fake
def _(
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    centres: Sequence[float],
    precisions: Sequence[float],
    pulls: Sequence[float],
    seed: Tensor,
    draws: int,
) -> tuple[list[Tensor], Tensor]:
    made = [group[0].new_empty((draws, *group[0].shape)) for group in _groups(tensors, sizes)]
    return made, tensors[0].new_empty(())


@operation("sampled_weights_backward", f"(Tensor[] grads, Tensor factor, {_ARGUMENTS}) -> Tensor[]")
def _backward(
    grads: Sequence[Tensor],
    factor: Tensor,
    tensors: Sequence[Tensor],
    sizes: Sequence[int],
    centres: Sequence[float],
    precisions: Sequence[float],
    pulls: Sequence[float],
    seed: Tensor,
    draws: int,
) -> list[Tensor]:
    groups = _groups([tensor.detach().contiguous() for tensor in tensors], sizes)
    own = factor.item()
    pull = [
        (centre, own * pull, own * precision, own) if precision > 0.0 else kernel.NO_PULL
        for centre, precision, pull in zip(centres, precisions, pulls, strict=True)
    ]
    needs = [[True] * len(group) for group in groups]
    alone = [False] * len(groups)
    found = kernel.gradients(groups, alone, draws, int(seed), grads, needs, pull)
    return [grad for grad in found if grad is not None]


@_backward.register_fake
def _(grads: Sequence[Tensor], factor: Tensor, tensors: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[0], inputs[5])
    ctx.settings = inputs[1:5], inputs[6]


def _use(ctx: Any, grads: Sequence[Tensor], factor: Tensor) -> tuple[Any, ...]:
    (*tensors, seed), (facts, draws) = ctx.saved_tensors, ctx.settings
    found = _backward(list(grads), factor, tensors, *facts, seed, draws)
    return list(found), None, None, None, None, None, None


sampled_weights.register_autograd(_use, setup_context=_keep)


def _groups(tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Sequence[Tensor]]:
    found, start = [], 0
    for size in sizes:
        found.append(tensors[start : start + size])
        start += size
    return found
