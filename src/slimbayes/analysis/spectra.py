"""Weights and their standard deviations as matrices, spectra, and the clipped SVD (Swiatkowski et al. 2020)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slimbayes.analysis.layers import (
    flat_stddev,
    posterior_of,
    root_of,
    spread_layers,
    stddev_of,
    tied_names,
    wide,
)
from slimbayes.core.conversion import converted_layers, unwrap
from slimbayes.core.layers.base import Converted
from slimbayes.core.methods.base import check_count, check_positive
from slimbayes.core.posteriors import EPSILON, KTiedPosterior, NormalPosterior, Posterior
from slimbayes.core.selection import Selection
from slimbayes.sequences.kernels import Kernel

Network = TypeVar("Network", bound=nn.Module)

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SMALLEST = 1e-12  # softplus(ρ) where σ is to be 1e-7 or less: nothing beside the 1e-7


@dataclass(frozen=True)
class Moments:
    """Means and standard deviations of a weight as matrices [m, n]: m inputs (times kernel taps), n outputs."""

    mean: Tensor
    stddev: Tensor


@torch.no_grad()
def matrices(model: nn.Module, include: Selection | None = None) -> dict[str, Moments]:
    """The weights of every layer with a Normal posterior (MeanField, KTied) as matrices, by the layer's name.

    A convolution's kernel is [taps·inputs, outputs], as in the k-tied paper; that of a transposed convolution is
    [inputs, taps·outputs], which is how KTied ties it. The tensors are copies. ``include`` selects layers as in
    ``sb.bayesianize``.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Sequential(nn.Conv2d(3, 8, 5), nn.Flatten(), nn.Linear(8, 2)), sb.MeanField())
    >>> {name: tuple(w.stddev.shape) for name, w in sb.analysis.matrices(net).items()}
    {'0': (75, 8), '2': (8, 2)}
    """
    layers = spread_layers(model, (NormalPosterior, KTiedPosterior), include)
    return {
        name: Moments(_oriented(layer, layer.weight), _oriented(layer, stddev_of(layer)))
        for name, layer in layers.items()
    }


def explained_variance(matrix: Tensor) -> Tensor:
    """γ_r²/Σγ² of the singular values γ_1 ≥ γ_2 ≥ ... of a matrix, in float64; zeros for a matrix of zeros.

    >>> explained_variance(torch.diag(torch.tensor([1.0, 3.0]))).tolist()
    [0.9, 0.1]
    """
    values: Tensor = torch.linalg.svdvals(wide(matrix, "explained_variance")).square()
    total = values.sum()
    return values / total if total > 0 else values


def spectrum(model: nn.Module, include: Selection | None = None) -> dict[str, dict[str, Tensor]]:
    """Explained variance of means and standard deviations, per layer: ``{layer: {"mean": ..., "stddev": ...}}``.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(20, 10), sb.KTied(rank=1))
    >>> [round(float(share), 6) for share in sb.analysis.spectrum(net)[""]["stddev"][:2]]
    [1.0, 0.0]
    """
    return {
        name: {"mean": explained_variance(w.mean), "stddev": explained_variance(w.stddev)}
        for name, w in matrices(model, include).items()
    }


@torch.no_grad()
def stddevs(model: nn.Module, include: Selection | None = None) -> dict[str, float]:
    """The mean σ of every layer's weight: one point of its curve over training.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(200, 100), sb.MeanField.paper(stddev_init=0.02))
    >>> {name: round(value, 3) for name, value in sb.analysis.stddevs(net).items()}
    {'': 0.02}
    """
    layers = spread_layers(model, (NormalPosterior, KTiedPosterior), include)
    return {name: float(stddev_of(layer).double().mean()) for name, layer in layers.items()}


def low_rank(matrix: Tensor, rank: int) -> Tensor:
    """Σ_{r ≤ rank} γ_r a_r b_rᵀ, the nearest matrix of this rank, in float64; the matrix itself if it has no more.

    >>> low_rank(torch.diag(torch.tensor([1.0, 3.0])), 1).tolist()
    [[0.0, 0.0], [0.0, 3.0]]
    """
    check_count("rank", rank)
    whole = wide(matrix, "low_rank")
    if rank >= min(whole.shape):
        return whole
    a, gamma, b = torch.linalg.svd(whole, full_matrices=False)
    nearest: Tensor = (a[:, :rank] * gamma[:rank]) @ b[:rank]
    return nearest


@torch.no_grad()
def truncate(
    model: Network,
    rank: int,
    floor: float = 1e-8,
    include: Selection | None = None,
    exclude: Selection | None = None,
) -> Network:
    """A copy of a mean-field model with σ = max(low_rank(σ, rank), floor): the k-tied paper's study after training.

    The copy is a mean-field model still, with all else as it was; the given model does not change. σ is stored as
    softplus(ρ) + 1e-7, so that no entry falls below 1e-7 whatever the floor, and ``stddev_max`` caps what the
    truncation raises above it. A rank of min(m, n) or more leaves σ as it is. ``include`` and ``exclude`` select
    layers as in ``sb.bayesianize``; tied weights are truncated once.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(20, 10), sb.MeanField())
    >>> share = sb.analysis.spectrum(sb.analysis.truncate(net, rank=1))[""]["stddev"]
    >>> round(float(share[0]), 6)
    1.0
    """
    check_count("rank", rank)
    check_positive("floor", floor)
    names = tied_names(model, (NormalPosterior,), include, exclude)
    copied: Any = copy.deepcopy(unwrap(model))
    layers = dict(converted_layers(root_of(copied)))
    done: set[Posterior] = set()
    for name in names:
        layer = layers[name]
        posterior = posterior_of(layer)
        assert isinstance(posterior, NormalPosterior)
        if posterior not in done:
            done.add(posterior)
            sigma = flat_stddev(name, layer)
            set_stddev(posterior, low_rank(sigma, rank).clamp_min(floor), sigma)
    return copied  # type: ignore[no-any-return]


def set_stddev(posterior: NormalPosterior, sigma: Tensor, before: Tensor) -> None:
    """Change ρ where σ changes, and nowhere else: what stays is the same bit for bit.

    >>> posterior = NormalPosterior(torch.tensor([[0.5, 0.25]]))
    >>> with torch.no_grad():
    ...     set_stddev(posterior, torch.tensor([[0.5, 0.125]]), torch.tensor([[0.5, 0.25]]))
    >>> posterior(torch.zeros(1, 2)).scale.detach()
    tensor([[0.5000, 0.1250]])
    """
    rho = posterior.rho
    changed = (sigma != before).reshape(rho.shape)
    new = stored(sigma).reshape(rho.shape).to(rho.dtype)
    rho.copy_(torch.where(changed.to(rho.device), new.to(rho.device), rho))


def stored(sigma: Tensor) -> Tensor:
    """ρ with softplus(ρ) + 1e-7 = σ: exact in float64 for large σ too, and the least σ where it is smaller.

    >>> import slimbayes.core.posteriors as posteriors
    >>> posteriors.positive(stored(torch.tensor([0.5, 1e-8], dtype=torch.float64))).tolist()
    [0.5, 1.00001e-07]
    """
    excess = (sigma - EPSILON).clamp_min(_SMALLEST)
    return excess + torch.log(-torch.expm1(-excess))


def _oriented(layer: Converted, tensor: Tensor) -> Tensor:
    """A copy as [inputs, outputs]."""
    tensor = tensor.detach()
    if isinstance(layer, _TRANSPOSED):
        matrix = tensor.movedim(1, -1).flatten(1)  # [i, o, h, w] -> [i, h·w·o]
    elif tensor.dim() > 3 or isinstance(layer, nn.Conv1d):
        matrix = tensor.movedim((0, 1), (-1, -2)).flatten(0, -2)  # [o, i, h, w] -> [h·w·i, o]
    elif isinstance(layer, nn.Linear | nn.Bilinear | Kernel):
        matrix = tensor.movedim(0, -1).flatten(0, -2)  # [o, i] -> [i, o]
    else:
        matrix = tensor  # transformers' Conv1D and tables of embeddings: [i, o]
    return matrix.clone(memory_format=torch.contiguous_format)
