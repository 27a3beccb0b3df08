"""Component indices: one per draw (EMP), or one per draw and element (ECMP)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core import context
from slimbayes.core import distributions as d
from slimbayes.core.context import Frame
from slimbayes.core.priors import Prior
from slimbayes.core.rules.base import Inputs, KLTerm, Operation, Rule, per_draw
from slimbayes.core.rules.fixed import Fixed
from slimbayes.core.rules.kernel_map import Mapped
from slimbayes.core.sharded import have_company


class Mixing(nn.Module):
    """The categorical law of a component index: uniform, or learned through ``logits``."""

    def __init__(self, name: str, components: int, learn: bool, like: Tensor) -> None:
        super().__init__()
        self.name = name
        self.components = components
        self.logits: nn.Parameter | None
        if learn:
            self.logits = nn.Parameter(torch.zeros(components, dtype=like.dtype, device=like.device))
        else:
            self.register_parameter("logits", None)

    def log_probs(self, like: Tensor) -> Tensor:
        """log p_k, [K]."""
        logits = like.new_zeros(self.components) if self.logits is None else self.logits
        return logits.log_softmax(0)

    def draw(self, frame: Frame, source: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Indices [draws, *shape]; those of a learned law stay with the draw, for ``elbo``."""
        dtype = torch.promote_types(like.dtype, torch.float32)

        def make() -> Tensor:
            u = frame.noise_like("uniform", source, shape, dtype, like.device, False).flatten(0, 2)
            if self.logits is None:
                index = (u * self.components).long()
            else:
                edges = self.log_probs(like).detach().to(dtype).exp().cumsum(0)
                index = _place(edges, u)
            return index.clamp(max=self.components - 1)  # rounding: u can reach 1 and edges can end below it

        index: Tensor = frame.once(source, make)
        if self.logits is not None and frame.draw is not None:
            # Shared-out logits are whole only while the network runs; others are asked when it has run.
            value = self.log_prob(index) if have_company() and torch.is_grad_enabled() else None
            frame.draw.chosen[source] = self, index, value
        return index

    def log_prob(self, index: Tensor) -> Tensor:
        """Σ log p of the indices of every draw, [draws]."""
        assert self.logits is not None
        return self.log_probs(self.logits)[index].reshape(index.shape[0], -1).sum(1)


def _place(edges: Tensor, u: Tensor) -> Tensor:
    """How many edges are at most u; vmap has no searchsorted of its own, and goes through networks one by one."""
    if not torch.compiler.is_compiling() and torch._C._functorch.is_batchedtensor(edges):
        return (u.unsqueeze(-1) >= edges).sum(-1)
    return torch.searchsorted(edges, u.contiguous(), right=True)


class Normalizing(Operation, ABC):
    """A layer with running statistics, of which every component may have its own: buffers [K, channels]."""

    @abstractmethod
    def by_component(self, inputs: Inputs, weight: Tensor, bias: Tensor | None, index: Tensor) -> Tensor:
        """Run with one weight and bias per draw [draws, channels], and the statistics of component index[draw]."""

    @abstractmethod
    def averaged(self, inputs: Inputs, weight: Tensor, bias: Tensor | None, probs: Tensor) -> Tensor:
        """Run with one weight and bias, and in eval mode the mean of the components' statistics."""


class IndexedRule(Rule):
    """Weight and bias have K versions; an index per draw (or per draw and element) chooses among them.

    Layers with one tied weight share its ``mixing``, and so do the kernels of a layer that has several;
    ``weight_source`` and ``bias_source`` name the tensors, which may be tied or not.
    ``own_statistics``: the layer is ``Normalizing``, and its statistics have K versions too.
    """

    def __init__(
        self,
        name: str,
        mixing: Mixing,
        bias_source: str,
        per_element: bool,
        prior: Prior | None,
        own_statistics: bool = False,
        weight_source: str | None = None,
        joint: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.mixing = mixing
        self.weight_source = weight_source or f"{mixing.name}.weight"
        self.bias_source = bias_source
        self.per_element = per_element
        self.prior = prior
        self.own_statistics = own_statistics
        self.joint = joint  # whether weights of several sizes have the one index

    def mapped(self, op: Operation, frame: Frame) -> Mapped:
        """The versions that every draw takes."""
        if frame.noise == "mean":
            weight, bias = (None if t is None else self._patch(t).point() for t in (op.weight, op.bias))
            assert weight is not None
            return Mapped(weight.unsqueeze(0), None if bias is None else bias.unsqueeze(0))
        chosen = frame.once(
            f"{self.weight_source} taken", lambda: self._chosen(op.weight, self.weight_source, frame)
        )
        own = None if op.bias is None else self._chosen(op.bias, self.bias_source, frame)
        return Mapped(chosen, own)

    def fixed(self, op: Operation, frame: Frame) -> Fixed:
        """The versions that every draw takes, or their mean; so the statistics."""
        one = self.mapped(op, frame)
        if not (self.own_statistics and isinstance(op, Normalizing)):
            return Fixed(one.weight, one.bias)
        both: Any = (op.running_mean, op.running_var)  # [K, channels]
        if frame.noise == "mean":
            probs = self.mixing.log_probs(op.weight).exp()[:, None]
            mean, variance = ((probs * own).sum(0, keepdim=True) for own in both)
        else:
            mean, variance = (own.index_select(0, self._index(op.weight, frame)) for own in both)
        return Fixed(one.weight, one.bias, statistics=(mean, variance))

    def quick(self, op: Operation) -> Iterator[nn.Parameter]:
        """The versions, of which a step trains one."""
        for tensor in (op.weight, op.bias):
            if isinstance(tensor, nn.Parameter):
                yield tensor

    def mixing_law(self) -> Mixing:
        """That of the index."""
        return self.mixing

    def forward(self, op: Operation, inputs: Inputs) -> Tensor:
        """The layer's output for these inputs."""
        frame = context.frame(self.name, inputs[0].shape[0])
        if frame.noise == "mean":
            weight, bias = (
                self._patch(op.weight).point(),
                None if op.bias is None else self._patch(op.bias).point(),
            )
            if self.own_statistics and isinstance(op, Normalizing):
                return op.averaged(inputs, weight, bias, self.mixing.log_probs(op.weight).exp())
            return op.compute(inputs, weight, bias)
        known = self.per_element or frame.ahead(f"{self.weight_source} chosen") is not None
        index = None if known else self._index(op.weight, frame)
        weight = self._chosen(op.weight, self.weight_source, frame, index)
        bias = None if op.bias is None else self._chosen(op.bias, self.bias_source, frame, index)
        if self.own_statistics and isinstance(op, Normalizing):
            return op.by_component(inputs, weight, bias, self._index(op.weight, frame))
        return per_draw(op, inputs, weight, bias)

    def _chosen(self, points: Tensor, source: str, frame: Frame, index: Tensor | None = None) -> Tensor:
        """The versions [draws, *shape] that this draw takes: known beforehand, or now."""
        known = frame.ahead(f"{source} chosen")
        if known is not None:
            return known
        if self.per_element:
            return points.gather(0, self.mixing.draw(frame, source, tuple(points.shape[1:]), points))
        return points.index_select(0, self._index(points, frame) if index is None else index)

    def _index(self, points: Tensor, frame: Frame) -> Tensor:
        """The component of every draw, [draws]: one for weight, bias and statistics."""
        return self.mixing.draw(frame, f"{self.mixing.name}.index", (), points)

    def _patch(self, points: Tensor) -> d.Patch:
        probs = self.mixing.log_probs(points).exp()
        return d.Patch(points, probs, points[0].numel() if self.per_element else 0)

    def kl_terms(self, op: Operation) -> Iterator[KLTerm]:
        """The pairs whose KL this layer adds."""
        if self.prior is None:
            return
        for source, points in ((self.weight_source, op.weight), (self.bias_source, op.bias)):
            if points is not None:
                whole_weight = points is not op.weight or self.constant_row is None
                points = points if whole_weight else d.without_row(points, self.constant_row, 1)
                patch = self._patch(points)
                if not self.per_element and source == f"{self.mixing.name}.weight":
                    patch.indices = 1  # one index serves weight and bias together
                yield source, patch, self.prior.distribution(points), "sum"
