"""The slow reference of a draw: every draw and every example by itself, in torch's own layers.

With a seed the noise of a layer is a function of (seed, name, component, sample, example). Here it is made again,
turned into the weight that this one example meets in this one draw by the formula of the method, and put into a plain
copy of the network, in float64. What is no weight (masks, factors that are added, noise on outputs) enters by hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from reliability.cases.values import CPU, NoReference, Place, chosen, deviation, factor_value, tensors
from slimbayes.core.conversion import converted_layers, find_record
from slimbayes.core.keyed_noise import keyed_noise, layer_key
from slimbayes.core.layers.dropout import _Active
from slimbayes.core.rules.dropout import DroppedRule
from slimbayes.core.rules.meanfield import SampledRule
from slimbayes.core.rules.patching import IndexedRule
from slimbayes.core.rules.rank1 import Rank1Rule

__all__ = ["NoReference", "Replay"]


class Replay:
    """A plain copy of a converted network that runs one example of one draw at a time."""

    def __init__(self, plain: nn.Module, model: nn.Module) -> None:
        self.model = model
        self.net = copy.deepcopy(plain).double().eval()
        for module in list(self.net.modules()):  # untie: a tied weight has factors of its own in either place
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
        self.place: Place | None = None
        self.modules = dict(self.net.named_modules())
        self.layers = [(name, layer) for name, layer in converted_layers(model)]
        for name, layer in self.layers:
            if not hasattr(layer, "store"):
                self._hook(self.modules[name], layer)
        for name, module in model.named_modules():
            if isinstance(module, _Active):
                self.modules[name].register_forward_pre_hook(self._dropout(module))

    def _hook(self, plain: nn.Module, layer: Any) -> None:
        rule = layer.bayes
        if isinstance(rule, Rank1Rule) and rule.additive:
            plain.register_forward_pre_hook(lambda m, x: self._added(layer, x))
            plain.register_forward_hook(lambda m, x, y: self._shifted(layer, y))
        if isinstance(rule, DroppedRule):
            plain.register_forward_pre_hook(lambda m, x: self._dropped(layer, x))
        if isinstance(rule, SampledRule) and rule.estimator == "local":
            plain.register_forward_hook(lambda m, x, y: self._local(layer, m, x, y), always_call=False)

    def _added(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        assert self.place is not None
        changed, start = list(inputs), 0
        if layer.bayes.s is not None:
            s = factor_value(layer.bayes.s, layer.bayes, "s", self.place)
            for slot in layer.input_slots:
                part = s[start : start + slot.size]
                changed[slot.position] = inputs[slot.position] + along(part, slot.axis, inputs[slot.position])
                start += slot.size
        return tuple(changed)

    def _shifted(self, layer: Any, y: Tensor) -> Tensor:
        assert self.place is not None
        if layer.bayes.r is None:
            return y
        return y + along(factor_value(layer.bayes.r, layer.bayes, "r", self.place), layer.output_axis, y)

    def _mask(self, x: Tensor, source: str, rate: float, axis: int | None) -> Tensor:
        place = self.place
        assert place is not None
        if place.noise == "mean" or rate == 0:
            return x
        shape = tuple(x.shape) if axis is None else (x.shape[axis],)
        u = place.of(
            "uniform", source, shape, torch.promote_types(self.dtype, torch.float32), place.noise == "example"
        )
        place.calls[source] = place.calls.get(source, 0) + 1
        mask = (u >= rate).double() / (1 - rate)
        return x * (mask if axis is None else along(mask, axis, x))

    def _dropped(self, layer: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        changed = list(inputs)
        for slot in layer.input_slots:
            axis = slot.axis if layer.bayes.per_channel else None
            source = f"{layer.bayes.name}.mask{slot.position}"
            changed[slot.position] = self._mask(inputs[slot.position], source, layer.bayes.rate, axis)
        return tuple(changed)

    def _dropout(self, active: Any) -> Callable[..., Any]:
        return lambda module, x: (self._mask(x[0], active.source, active.p, active.channel_axis),)

    def _local(self, layer: Any, plain: Any, inputs: tuple[Any, ...], y: Tensor) -> Tensor:
        place, rule = self.place, layer.bayes
        assert place is not None
        if place.noise != "example":
            return y
        sigma = deviation(rule.weight, layer.weight)
        squares = copy.deepcopy(plain)
        squares._forward_hooks.clear()
        with torch.no_grad():
            squares.weight.copy_(sigma.square())
            if squares.bias is not None:
                squares.bias.zero_()
        variance = squares(*(x.square() if isinstance(x, Tensor) else x for x in inputs))
        source = f"{rule.name}.local"
        noise = place.of("normal", source, tuple(y.shape), layer.weight.dtype, True)
        place.calls[source] = place.calls.get(source, 0) + 1
        y = y + variance.clamp_min(0.0).sqrt() * noise
        if layer.bias is None or rule.bias is None:
            return y
        source = f"{rule.bias_source}.example"
        epsilon = place.of("normal", source, tuple(layer.bias.shape), layer.bias.dtype, True)
        return y + along(deviation(rule.bias, layer.bias) * epsilon, layer.output_axis, y)

    def _set(self, place: Place) -> None:
        record = find_record(self.model)
        self.place = place
        with torch.no_grad():
            if record.components > 1 and not self.layers:
                self._set_member(place.component)
                return
            for name, layer in self.layers:
                weight, bias = tensors(layer, place)
                if hasattr(layer, "store"):
                    owner = self.modules[layer.layer if layer.layer in self.modules else ""]
                    owner = owner.get_submodule(layer.prefix.rstrip("."))
                    names = layer.names
                else:
                    owner, names = self.modules[name], {"weight": "weight", "bias": "bias"}
                for which, value in (("weight", weight), ("bias", bias)):
                    if value is not None and names[which] is not None:
                        self._copy(owner, names[which], value)
                self._statistics(owner, layer, place)

    def _copy(self, owner: Any, name: str, value: Tensor) -> None:
        old = getattr(owner, name)
        padding = getattr(owner, "padding_idx", None)
        kept = None if padding is None else old[padding].clone()
        old.copy_(value)
        if kept is not None and isinstance(owner, nn.Embedding):
            old[padding] = kept

    def _statistics(self, owner: Any, layer: Any, place: Place) -> None:
        rule = layer.bayes
        if isinstance(rule, IndexedRule) and rule.own_statistics:
            for name in ("running_mean", "running_var"):
                getattr(owner, name).copy_(chosen(rule, getattr(layer, name), "", place))

    def _set_member(self, k: int) -> None:
        state = self.model.state_dict()
        for name, tensor in self.net.state_dict(keep_vars=True).items():
            saved = state[name]
            tensor.data.copy_(saved[k] if saved.dim() > tensor.dim() else saved)

    def places(
        self, samples: int, batch: int, noise: str, seed: int, start: int, first: int, ids: list[int]
    ) -> Iterator[Place]:
        """Component-major, examples innermost."""
        for k in ids:
            for s in range(samples):
                for i in range(batch):
                    yield Place(seed, noise, k, first + s, start + i)

    def draw(
        self, inputs: tuple[Any, ...], call: dict[str, Any], *, samples: int = 1, noise: str = "example", seed: int = 0,
        first_example: int = 0, first_sample: int = 0, step: int | None = None, dtype: torch.dtype = torch.float64,
    ) -> Any:  # fmt: skip
        """What ``sb.draw`` is to return."""
        self.dtype = dtype
        batch = len(inputs[0])
        record = find_record(self.model)
        ids = list(range(record.components))
        if step is not None and step < record.components:
            key = layer_key(seed, "components")
            u = keyed_noise("uniform", key, 0, None, None, None, (record.components,), torch.float32, CPU)
            ids = u.flatten().argsort()[:step].tolist()
        found = []
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        for place in self.places(samples, batch, noise, seed, first_example, first_sample, ids):
            self._set(place)
            i = place.example - first_example
            found.append(self.net(*(x[i : i + 1] for x in wide), **call))
        leaves = [pytree.tree_flatten(one)[0] for one in found]
        spec = pytree.tree_flatten(found[0])[1]
        draws = len(ids) * samples
        joined = [
            torch.cat(column).unflatten(0, (draws, -1)) if isinstance(column[0], Tensor) else column[0]
            for column in zip(*leaves, strict=True)
        ]
        return pytree.tree_unflatten(joined, spec)


def along(vector: Tensor, axis: int, like: Tensor) -> Tensor:
    """A vector placed along one axis of a tensor."""
    shape = [1] * like.dim()
    shape[axis] = -1
    return vector.reshape(shape)
