"""What posteriors look like: matrices, spectra and the clipped SVD (Swiatkowski et al. 2020), components apart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slimbayes.apply.rank1 import Factor, Rank1Rule
from slimbayes.apply.sampled import SampledRule
from slimbayes.layers.base import Converted
from slimbayes.layers.several import Kernel
from slimbayes.methods.base import check_count, check_positive
from slimbayes.posteriors import EPSILON, KTiedPosterior, NormalPosterior, Posterior
from slimbayes.record import ATTRIBUTE, converted_layers, find_record, unwrap
from slimbayes.selection import Selection, kept, listing, selected

__all__ = [
    "Moments",
    "component_spread",
    "explained_variance",
    "factor_scale",
    "low_rank",
    "matrices",
    "spectrum",
    "stddevs",
    "truncate",
]

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
    values: Tensor = torch.linalg.svdvals(_wide(matrix, "explained_variance")).square()
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
    >>> net = sb.bayesianize(nn.Linear(200, 100), sb.MeanField(stddev_init=0.02))
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
    wide = _wide(matrix, "low_rank")
    if rank >= min(wide.shape):
        return wide
    a, gamma, b = torch.linalg.svd(wide, full_matrices=False)
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
        posterior = rule_of(layer).weight
        assert isinstance(posterior, NormalPosterior)
        if posterior not in done:
            done.add(posterior)
            sigma = flat_stddev(name, layer)
            _set_stddev(posterior, low_rank(sigma, rank).clamp_min(floor), sigma)
    return copied  # type: ignore[no-any-return]


def _set_stddev(posterior: NormalPosterior, sigma: Tensor, before: Tensor) -> None:
    """Change ρ where σ changes, and nowhere else: what stays is the same bit for bit."""
    rho = posterior.rho
    changed = (sigma != before).reshape(rho.shape)
    new = stored(sigma).reshape(rho.shape).to(rho.dtype)
    rho.copy_(torch.where(changed.to(rho.device), new.to(rho.device), rho))


def stored(sigma: Tensor) -> Tensor:
    """ρ with softplus(ρ) + 1e-7 = σ: exact in float64 for large σ too, and the least σ where it is smaller.

    >>> import slimbayes.posteriors as posteriors
    >>> posteriors.positive(stored(torch.tensor([0.5, 1e-8], dtype=torch.float64))).tolist()
    [0.5, 1.00001e-07]
    """
    excess = (sigma - EPSILON).clamp_min(_SMALLEST)
    return excess + torch.log(-torch.expm1(-excess))


def rule_of(layer: Converted) -> SampledRule:
    """The rule of a layer that ``spread_layers`` has found."""
    assert isinstance(layer.bayes, SampledRule)
    return layer.bayes


def stddev_of(layer: Converted) -> Tensor:
    """σ of a layer's weight, at its shape, caps included."""
    posterior = rule_of(layer).weight
    assert isinstance(posterior, NormalPosterior | KTiedPosterior)
    sigma: Tensor = posterior(layer.weight).scale
    return sigma.detach()


def flat_stddev(name: str, layer: Converted) -> Tensor:
    """σ as KTied sees it, the first axis of the weight against all others, in float64."""
    return _wide(stddev_of(layer).flatten(1), f"layer {name!r}")


def _wide(matrix: Tensor, where: str) -> Tensor:
    """A matrix in float64, where its device has that."""
    if not isinstance(matrix, Tensor) or matrix.dim() != 2:
        got = f"shape {tuple(matrix.shape)}" if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ValueError(f"{where}: a matrix [m, n] is needed, got {got}")
    if matrix.is_meta:
        raise ValueError(
            f"{where}: its numbers are on the meta device, which holds none: load the model first"
        )
    device = torch.device("cpu") if matrix.device.type == "mps" else matrix.device
    wide = matrix.detach().to(device, torch.float64)
    if not bool(torch.isfinite(wide).all()):
        raise ValueError(f"{where}: the matrix has entries that are not finite; did the training diverge?")
    return wide


@torch.no_grad()
def component_spread(model: nn.Module) -> dict[str, dict[str, float]]:
    """How far the components of rank-1 factors are apart, by layer and factor ("r" of outputs, "s" of inputs).

    (1/d) Σ_i sd_k(μ_ki), the standard deviation over components of a factor's locations [K, d], on average over its
    elements. It begins near ``random_sign_init``; at 0 the K components are copies of one network, and the mixture is
    no better than a member. Layers without rank-1 factors, and factors of one component, are left out.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(2, 3), sb.BatchEnsemble(components=2, random_sign_init=0.0))
    >>> component_spread(net)
    {'': {'r': 0.0, 's': 0.0}}
    """
    return _of_factors(
        model, lambda factor: factor.loc.float().std(0).mean() if len(factor.loc) > 1 else None
    )


@torch.no_grad()
def factor_scale(model: nn.Module) -> dict[str, dict[str, float]]:
    """How wide the posteriors of rank-1 factors are, by layer and factor ("r" of outputs, "s" of inputs).

    (1/Kd) Σ_ki σ_ki: the mean of σ (Normal; log-normal, in log-space) or γ (Cauchy, half-Cauchy) over components and
    elements. It begins at sqrt(p/(1 − p)) for ``dropout_rate`` p, and the KL draws it slowly to the prior's scale;
    beside ``component_spread`` it says whether components overlap. Points have none, and are left out.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(2, 3), sb.Rank1(posterior="cauchy", dropout_rate=0.01))
    >>> factor_scale(net)
    {'': {'r': 0.1005, 's': 0.1005}}
    """

    def scale(factor: Factor) -> Tensor | None:
        found = getattr(factor(), "scale", None)
        return found.float().mean() if isinstance(found, Tensor) else None

    return _of_factors(model, scale)


def rank1_factors(model: nn.Module) -> Iterator[tuple[str, str, Factor, Rank1Rule]]:
    """Every rank-1 factor: its layer's name, "r" or "s", the factor, and the rule that it belongs to."""
    for name, layer in converted_layers(root_of(model)):
        if isinstance(layer.bayes, Rank1Rule):
            for which, factor in (("r", layer.bayes.r), ("s", layer.bayes.s)):
                if factor is not None:
                    yield name, which, factor, layer.bayes


def _of_factors(model: nn.Module, measure: Callable[[Factor], Tensor | None]) -> dict[str, dict[str, float]]:
    """A number of every rank-1 factor, by layer; factors and layers that have none are left out."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, which, factor, _ in rank1_factors(model):
        value = measure(factor)
        if value is not None:
            found.setdefault(name, {})[which] = value
    every = [value for layer in found.values() for value in layer.values()]
    numbers = iter(torch.stack(every).tolist() if every else ())  # a GPU is waited for once
    return {name: {which: next(numbers) for which in layer} for name, layer in found.items()}


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


def root_of(model: nn.Module) -> nn.Module:
    """The module that was converted: the model, or the network inside it."""
    record = find_record(model)
    return next(m for m in unwrap(model).modules() if m.__dict__.get(ATTRIBUTE) is record)


def spread_layers(
    model: nn.Module,
    kinds: tuple[type[Posterior], ...],
    include: Selection | None = None,
    exclude: Selection | None = None,
) -> dict[str, Converted]:
    """The selected layers whose weight is a matrix or a kernel with a posterior of these kinds."""
    known = {
        name: layer
        for name, layer in converted_layers(root_of(model))
        if layer.matrix_weight
        and isinstance(layer.bayes, SampledRule)
        and isinstance(layer.bayes.weight, kinds)
    }
    if not known:
        methods = "sb.MeanField" + (" or sb.KTied" if KTiedPosterior in kinds else "")
        raise ValueError(
            f"this {type(unwrap(model)).__name__} has no weight matrix with the Normal posterior of {methods}; "
            f"give a model converted by {methods}"
        )
    chosen = known
    for name, selection, keep in (("include", include, True), ("exclude", exclude, False)):
        if selection is None:
            continue
        selection = kept(selection)
        assert selection is not None
        hit = {layer for layer, module in known.items() if selected(selection, layer, module)}
        if not hit:
            raise ValueError(f"{name}={selection!r} matches no layer; the layers are: {listing(known)}")
        chosen = {layer: module for layer, module in chosen.items() if (layer in hit) is keep}
    if not chosen:
        raise ValueError(f"exclude={exclude!r} leaves no layer of: {listing(known)}")
    return chosen


def tied_names(
    model: nn.Module,
    kinds: tuple[type[Posterior], ...],
    include: Selection | None = None,
    exclude: Selection | None = None,
) -> list[str]:
    """The names of the selected layers and of those that share a posterior with one, in the model's order."""
    exclude = kept(exclude)
    chosen = spread_layers(model, kinds, include, exclude)
    posteriors = {rule_of(layer).weight: name for name, layer in chosen.items()}
    together: list[str] = []
    for name, layer in spread_layers(model, kinds).items():
        other = posteriors.get(rule_of(layer).weight)
        if other is None:
            continue
        if name not in chosen and exclude is not None and selected(exclude, name, layer):
            raise ValueError(
                f"layers {other!r} and {name!r} share one weight and its σ: exclude={exclude!r} cannot part them. "
                f"Exclude both, or neither"
            )
        together.append(name)
    return together
