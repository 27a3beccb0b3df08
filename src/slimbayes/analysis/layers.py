"""Which layers have a spread to look at, and what it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slimbayes.core.conversion import ATTRIBUTE, converted_layers, find_record, unwrap
from slimbayes.core.layers.base import Converted
from slimbayes.core.posteriors import KTiedPosterior, NormalPosterior, Posterior
from slimbayes.core.selection import Selection, kept, listing, selected


def posterior_of(layer: Converted) -> Posterior:
    """The posterior of the weight of a layer that ``spread_layers`` has found."""
    posterior = layer.bayes.weight_posterior()
    assert posterior is not None
    return posterior


def stddev_of(layer: Converted) -> Tensor:
    """σ of a layer's weight, at its shape, caps included."""
    posterior = posterior_of(layer)
    assert isinstance(posterior, NormalPosterior | KTiedPosterior)
    sigma: Tensor = posterior(layer.weight).scale
    return sigma.detach()


def flat_stddev(name: str, layer: Converted) -> Tensor:
    """σ as KTied sees it, the first axis of the weight against all others, in float64."""
    return wide(stddev_of(layer).flatten(1), f"layer {name!r}")


def wide(matrix: Tensor, where: str) -> Tensor:
    """A matrix in float64, where its device has that.

    >>> wide(torch.ones(1, 1), "example").dtype
    torch.float64
    """
    if not isinstance(matrix, Tensor) or matrix.dim() != 2:
        got = f"shape {tuple(matrix.shape)}" if isinstance(matrix, Tensor) else type(matrix).__name__
        raise ValueError(f"{where}: a matrix [m, n] is needed, got {got}")
    if matrix.is_meta:
        raise ValueError(
            f"{where}: its numbers are on the meta device, which holds none: load the model first"
        )
    device = torch.device("cpu") if matrix.device.type == "mps" else matrix.device
    whole = matrix.detach().to(device, torch.float64)
    if not bool(torch.isfinite(whole).all()):
        raise ValueError(f"{where}: the matrix has entries that are not finite; did the training diverge?")
    return whole


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
        if layer.matrix_weight and isinstance(layer.bayes.weight_posterior(), kinds)
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
    posteriors = {posterior_of(layer): name for name, layer in chosen.items()}
    together: list[str] = []
    for name, layer in spread_layers(model, kinds).items():
        other = posteriors.get(posterior_of(layer))
        if other is None:
            continue
        if name not in chosen and exclude is not None and selected(exclude, name, layer):
            raise ValueError(
                f"layers {other!r} and {name!r} share one weight and its σ: exclude={exclude!r} cannot part them. "
                f"Exclude both, or neither"
            )
        together.append(name)
    return together
