"""Weight samples with the sums that their KL needs as a by-product, by one sweep over the weight.

k-tied: W = M + (U Vᵀ)∘ε; mean-field: W = M + σ∘ε, σ = softplus(ρ) + 1e-7. The noise is never stored: the backward
pass makes it again from the seed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slimbayes.accelerate.gpu import weight_operations as ops
from slimbayes.accelerate.gpu.launch import available

_LARGEST = 2**31 - 2**24  # offsets inside a weight are 32-bit
_RANKS = 4  # of a k-tied weight, each of which has its own registers


def _runs(mean: Tensor) -> bool:
    return available(mean.device) and mean.dtype != torch.float64 and 0 < mean.numel() < _LARGEST


def ktied_weight(
    mean: Tensor,
    log_u: Tensor,
    log_v: Tensor,
    seed: Tensor,
    dtype: torch.dtype | None = None,
    center: float = 0.0,
    stream: int = 0,
    form: str = "sample",
) -> tuple[Tensor, Tensor, Tensor]:
    """(M + (U Vᵀ)∘ε, nothing) in ``dtype``, and (Σ(M − center)², Σσ², Σ log σ) in float32.

    ``mean`` is [m, ...], seen as an m×n matrix; ``log_u`` [m, k] and ``log_v`` [n, k]. ``seed`` holds one int64
    on the device; streams of one seed are independent. In place of the sample a ``form`` makes (nothing, (U Vᵀ)∘ε)
    for "noise", (M, nothing) for "mean" and (M, (U Vᵀ)∘ε) for "both", where nothing is a tensor without elements.

    >>> low = torch.full((2, 1), -30.0)
    >>> w, _, sums = ktied_weight(torch.ones(2, 2), low, low, torch.tensor([5]))
    >>> w, [round(float(s)) for s in sums]
    (tensor([[1., 1.],
            [1., 1.]]), [4, 0, -240])
    """
    # A weight with channels last is a matrix in the order of its memory, and so V's rows are reordered, not M.
    moved = mean.dim() > 2 and not mean.is_contiguous() and mean.movedim(1, -1).is_contiguous()
    ordered = mean.movedim(1, -1) if moved else mean
    if moved:
        log_v = log_v.view(*mean.shape[1:], -1).movedim(0, -2).reshape(log_v.shape)
    # The kernel's results are laid out row by row, and the compiler has to know: what it is given is, too.
    matrix = ordered.reshape(mean.shape[0], -1).contiguous()
    log_u, log_v = log_u.contiguous(), log_v.contiguous()
    kernel = _runs(mean) and log_u.shape[1] <= _RANKS
    args = (matrix, log_u, log_v, seed, stream, center, dtype or mean.dtype, form, kernel)
    compiled = torch.compiler.is_compiling()
    w, noise, sums = torch.ops.slimbayes.ktied_weight(*args) if compiled else ops.KTied.apply(*args)
    if form != "noise":
        w = w.view(ordered.shape)
        w = w.movedim(-1, 1) if moved else w
    if form in ("noise", "both"):
        noise = noise.view(ordered.shape)
        noise = noise.movedim(-1, 1) if moved else noise
    return w, noise, sums


def meanfield_weight(
    mean: Tensor,
    rho: Tensor,
    seed: Tensor,
    dtype: torch.dtype | None = None,
    center: float = 0.0,
    maximum: float | None = None,
    stream: int = 0,
    form: str = "sample",
) -> tuple[Tensor, Tensor, Tensor]:
    """M + σ∘ε in ``dtype``, nothing, and (Σ(M − center)², Σσ², Σ log σ) in float32; forms as in ``ktied_weight``.

    σ is capped at ``maximum``. The gradient of σ vanishes only where it would push σ further over the cap.

    >>> w, _, sums = meanfield_weight(torch.ones(2, 2), torch.full((2, 2), -50.0), torch.tensor([5]))
    >>> w.shape, round(float(sums[0]))
    (torch.Size([2, 2]), 4)
    """
    kernel = _runs(mean)
    args = (mean, rho, seed, stream, center, maximum, dtype or mean.dtype, form, kernel)
    compiled = torch.compiler.is_compiling()
    w, noise, sums = torch.ops.slimbayes.meanfield_weight(*args) if compiled else ops.MeanField.apply(*args)
    return w, noise, sums
