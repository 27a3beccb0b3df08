"""Posteriors beside their priors: where the data have said something, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.analysis.layers import root_of
from slimbayes.core import distributions as d
from slimbayes.core.conversion import converted_layers, find_record
from slimbayes.core.kl import fitted, total_kl
from slimbayes.core.objective import kl

OTHERS = "(other parameters)"


@dataclass(frozen=True)
class Compared:
    """One random tensor beside its prior."""

    layer: str
    tensor: str  # "weight", "bias", "r", "s", or "all" of a patched layer
    elements: int
    kl: float  # of all elements, as sb.kl counts it
    shift: float  # root mean square of (μ − μ_p)/σ_p
    ratio: float  # geometric mean of σ/σ_p; NaN without a σ

    @property
    def kl_per_element(self) -> float:
        """KL in nats per element."""
        return self.kl / max(1, self.elements)


@dataclass(frozen=True)
class Comparison:
    """Every random tensor of a model beside its prior; prints as a table."""

    rows: tuple[Compared, ...]

    @property
    def kl(self) -> float:
        """The sum of all KL."""
        return sum(row.kl for row in self.rows)

    def by_layer(self) -> dict[str, float]:
        """The KL of every layer."""
        found: dict[str, float] = {}
        for row in self.rows:
            found[row.layer] = found.get(row.layer, 0.0) + row.kl
        return found

    def __str__(self) -> str:
        """Render as a table."""
        width = max([5, *(len(row.layer) or 6 for row in self.rows)])
        lines = [
            f"{'layer':{width}}  tensor  {'elements':>10}  {'KL':>10}  KL/element  shift/σp    σ/σp",
        ]
        for row in self.rows:
            ratio = "      -" if math.isnan(row.ratio) else f"{row.ratio:7.3g}"
            lines.append(
                f"{row.layer or '(root)':{width}}  {row.tensor:6}  {row.elements:10,}  {row.kl:10.4g}  "
                f"{row.kl_per_element:10.3g}  {row.shift:8.3g}  {ratio}"
            )
        return "\n".join(lines)


@torch.no_grad()
def compare_with_prior(model: nn.Module) -> Comparison:
    """KL, shift of the mean and σ/σ_p of every random tensor beside its prior.

    shift = rms((μ − μ_p)/σ_p) and ratio = exp(mean log(σ/σ_p)): 0 and 1 where the posterior is the prior, which means
    that the data have said nothing about the tensor. Locations and scales of Cauchy and log-normal factors are compared
    in the same way, of log-normals in log-space. The KL of all rows is ``sb.kl``, but for the reduction "monte_carlo",
    whose joint KL has no parts: there a row has the mean over components, which is an upper bound. Tied tensors have
    one row.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(3, 2), sb.MeanField.paper(prior=sb.Normal(0.0, 0.5)))
    >>> _ = nn.init.ones_(net.weight)
    >>> for row in sb.analysis.compare_with_prior(net).rows:
    ...     print(row.tensor, row.elements, row.tensor == "bias" or row.shift)
    weight 6 2.0
    bias 2 True
    """
    rows: list[Compared] = []
    for name, tensor, q, p, reduction in prior_pairs(model):
        divergence = float(total_kl(q, p))
        if reduction != "sum":
            divergence /= len(q.loc)
        if isinstance(q, d.Patch):
            loc, elements, ratio = q.points, q.points.numel(), math.nan
        else:
            loc, elements, p = q.loc, q.loc.numel(), fitted(q, p)
            ratio = math.exp(float((q.scale.double() / p.scale.double()).log().mean()))
        shift = float(((loc.double() - p.loc.double()) / p.scale.double()).square().mean().sqrt())
        rows.append(Compared(name, tensor, elements, divergence, shift, ratio))
    if any(method.traits.shared_prior is not None for method in find_record(model).methods):
        others = _others(model, rows)
        if others is not None:
            rows.append(others)
    return Comparison(tuple(rows))


def prior_pairs(model: nn.Module) -> Iterator[tuple[str, str, Any, Any, str]]:
    """Every random tensor with a prior: its layer, its name, q, p and how the KL counts components."""
    seen: set[str] = set()
    for name, layer in converted_layers(root_of(model)):
        for source, q, p, reduction in layer.bayes.kl_terms(layer):
            if source not in seen:
                seen.add(source)
                yield name, source.rsplit(".", 1)[-1], q, p, reduction


def _others(model: nn.Module, rows: list[Compared]) -> Compared | None:
    """What a method's prior on all other parameters adds to the KL (EMP and ECMP with ``prior_precision``)."""
    rest = float(kl(model)) - sum(row.kl for row in rows)
    layers = converted_layers(root_of(model))
    random = {id(p) for _, layer in layers for p in (*layer.parameters(), layer.weight, layer.bias)}
    others: list[Tensor] = [p for p in model.parameters() if id(p) not in random and p.requires_grad]
    count = sum(p.numel() for p in others)
    if not count:
        return None
    return Compared(OTHERS, "all", count, rest, math.sqrt(2 * max(0.0, rest) / count), math.nan)
