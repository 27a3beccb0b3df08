"""Signal-to-noise pruning (Blundell et al. 2015): weights that are more noise than signal can go."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from slimbayes.analysis.layers import posterior_of, root_of, spread_layers, stddev_of, tied_names
from slimbayes.analysis.spectra import set_stddev
from slimbayes.core.conversion import converted_layers, unwrap
from slimbayes.core.posteriors import EPSILON, KTiedPosterior, NormalPosterior
from slimbayes.core.selection import Selection
from slimbayes.verbs.evaluation import evaluate

Network = TypeVar("Network", bound=nn.Module)
SHARES = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98)


@torch.no_grad()
def signal_to_noise(model: nn.Module, include: Selection | None = None) -> dict[str, Tensor]:
    """|μ|/σ of every weight of the layers with a Normal posterior (MeanField, KTied), in the weight's shape.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(2, 1), sb.MeanField(stddev_init=0.1))
    >>> _ = nn.init.zeros_(net.weight)
    >>> sb.analysis.signal_to_noise(net)
    {'': tensor([[0., 0.]])}
    """
    layers = spread_layers(model, (NormalPosterior, KTiedPosterior), include)
    return {name: layer.weight.detach().abs() / stddev_of(layer) for name, layer in layers.items()}


@torch.no_grad()
def prune(
    model: Network,
    share: float | None = None,
    threshold: float | None = None,
    include: Selection | None = None,
    exclude: Selection | None = None,
) -> Network:
    """A copy of a mean-field model without its weights of lowest |μ|/σ: their μ is 0 and their σ 1e-7.

    ``share`` of all weights of the selected layers go, whichever layers they are in; or those with |μ|/σ below
    ``threshold``. Biases stay. A k-tied σ has no entries of its own and cannot be pruned. The KL of a pruned model
    means nothing (σ is next to 0), and training it further brings weights back.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(20, 10), sb.MeanField())
    >>> cut = sb.analysis.prune(net, share=0.75)
    >>> int((cut.weight == 0).sum()), int((net.weight == 0).sum())
    (150, 0)
    """
    _check(share, threshold)
    names = tied_names(model, (NormalPosterior,), include, exclude)
    copied: Any = copy.deepcopy(unwrap(model))
    layers = dict(converted_layers(root_of(copied)))
    once = {posterior_of(layers[name]): name for name in reversed(names)}  # the first name of tied weights
    chosen = [layers[name] for name in names if name in once.values()]
    ratios = [(layer.weight.abs() / stddev_of(layer)).flatten() for layer in chosen]
    if share is not None:
        gone = _lowest(torch.cat([ratio.cpu() for ratio in ratios]), share).split([len(r) for r in ratios])
    else:
        gone = [ratio < threshold for ratio in ratios]
    for layer, mask in zip(chosen, gone, strict=True):
        posterior = posterior_of(layer)
        assert isinstance(posterior, NormalPosterior)
        where, sigma = mask.to(layer.weight.device).view(layer.weight.shape), stddev_of(layer)
        set_stddev(posterior, sigma.masked_fill(where, EPSILON), sigma)
        layer.weight.masked_fill_(where, 0.0)
    return copied  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PruningCurve:
    """What is left of a model's metrics as its weights go; prints as a table."""

    share: list[float]
    left: list[int]  # weights that are not 0
    metrics: list[dict[str, float]]

    def __str__(self) -> str:
        """Render as a table."""
        names = [n for n in ("nll", "accuracy", "ece", "rmse", "coverage_90") if n in self.metrics[0]]
        lines = [
            "  ".join(["pruned".rjust(8), "weights left".rjust(14), *(name.rjust(12) for name in names)])
        ]
        for share, left, found in zip(self.share, self.left, self.metrics, strict=True):
            cells = [f"{100 * share:.4g} %".rjust(8), f"{left:,}".rjust(14)]
            lines.append("  ".join([*cells, *(f"{found[name]:.4f}".rjust(12) for name in names)]))
        return "\n".join(lines)


def pruning_curve(
    model: nn.Module,
    batches: Iterable[Any],
    shares: Sequence[float] = SHARES,
    include: Selection | None = None,
    exclude: Selection | None = None,
    **options: Any,
) -> PruningCurve:
    """``sb.evaluate`` of the model with these shares of its weights pruned; ``options`` are those of ``evaluate``.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(20, 2), sb.MeanField())
    >>> batches = [(torch.randn(30, 20), torch.randint(2, (30,)))]
    >>> sb.analysis.pruning_curve(net, batches, shares=(0.0, 0.5), samples=4, seed=0).left
    [40, 20]
    """
    held = list(batches)  # a generator can be used only once
    left, found = [], []
    for share in shares:
        cut = prune(model, share, None, include, exclude)
        seen = {posterior_of(layer): layer for layer in spread_layers(cut, (NormalPosterior,)).values()}
        left.append(sum(int(layer.weight.count_nonzero()) for layer in seen.values()))
        found.append(evaluate(cut, held, **options))
    return PruningCurve(list(shares), left, found)


def _lowest(ratios: Tensor, share: float) -> Tensor:
    """Which of all ratios are among the lowest ``share``: exactly so many, whatever the ties."""
    gone = torch.zeros(len(ratios), dtype=torch.bool)
    gone[ratios.argsort()[: math.floor(round(share * len(ratios), 6))]] = True
    return gone


def _check(share: float | None, threshold: float | None) -> None:
    if (share is None) == (threshold is None):
        raise ValueError(
            f"share={share!r} and threshold={threshold!r}: pass one of them, the share of weights that go or the |μ|/σ "
            "below which they do"
        )
    if share is not None and not 0.0 <= share < 1.0:
        raise ValueError(f"share={share!r}: pass a number from 0 to below 1, such as 0.75 for 75 %")
    if threshold is not None and not 0.0 <= threshold < math.inf:
        raise ValueError(f"threshold={threshold!r}: pass a finite number of at least 0")
