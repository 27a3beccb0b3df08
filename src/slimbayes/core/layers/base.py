"""The converted layer: torch's class with a rule in place of its forward pass."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.context import Draw, current_draw, repeat_rows
from slimbayes.core.fitness import SEVERAL
from slimbayes.core.rules.base import Operation, Rule
from slimbayes.core.sharded import is_sharded, run_whole


class Loading(nn.Module):
    """A layer that reads checkpoints from before its conversion.

    ``component_tensors`` names the tensors that now have a leading component axis: what was saved without it is
    expanded, so that every component starts from the same values.
    """

    component_tensors: tuple[str, ...]
    title: str
    # What the one draw of a pass takes, for compiled code, and whose it is (``context.Settled``).
    settled_token = ""
    settled_weight: Tensor | None = None
    settled_bias: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        own = getattr(super(), "__getstate__", None)  # torch's layer may leave something out, too
        state: dict[str, Any] = self.__dict__ if own is None else own()
        return {key: value for key, value in state.items() if not key.startswith("settled_")}

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        for name in self.component_tensors:
            expand_saved(state_dict, prefix + name, attrgetter(name)(self))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Converted(Loading, Operation, ABC):
    """Mixed into a torch layer class; the layer is retyped in place and keeps its state_dict keys."""

    bayes: Rule

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """torch's; but the styles of tensor parallel, which take every parameter for a Linear's own, come too late."""
        if is_sharded(param) and "bayes" in self._modules and not is_sharded(self._parameters.get(name)):
            raise ValueError(
                f"layer {self.bayes.name!r} is converted already, and parallelize_module would cut its {name!r} as if "
                f"it were torch's own layer. Parallelize first: sb.bayesianize(parallelize_module(model, mesh, plan), "
                f"method)"
            )
        super().register_parameter(name, param)

    def register_forward_pre_hook(self, hook: Any, *args: Any, **kwargs: Any) -> Any:
        """As torch's, but for the norm of several weights taken for one."""
        if type(hook).__name__ == "SpectralNorm" and self.component_tensors:
            raise ValueError(SEVERAL.format(self.bayes.name))
        return super().register_forward_pre_hook(hook, *args, **kwargs)

    def replace(self, which: str, new: nn.Parameter) -> None:
        """Put another parameter in the place of the "weight" or "bias"."""
        setattr(self, which, new)

    def _apply_rule(self, *inputs: Any) -> Tensor:
        output: Tensor
        if type(inputs[0]) is not Tensor and is_sharded(
            inputs[0]
        ):  # tensor parallel lays out what it hands to a layer
            output = run_whole(self, self._apply_rule, inputs)
            return output
        draw = current_draw()
        if draw is not None and draw.settled is not None:
            pair = draw.settled.pair(self)
            if pair is not None and draw.fits(inputs[0].shape[0]):
                return self.compute(inputs, *pair)
        if draw is None or draw.late is None:
            output = self.bayes(self, inputs)
            return output
        rows = inputs[0].shape[0]
        if not draw.late.untiled(self.bayes.name, rows):
            output = self.bayes(self, inputs)
        elif draw.noise in self.bayes.untiled_noise:
            output = self.bayes(self, inputs, untiled=True)
        else:
            output = self.bayes(self, tuple(_repeated(value, rows, draw) for value in inputs))
        output = draw.late.result(output)
        return output


def _repeated(value: Any, rows: int, draw: Draw) -> Any:
    if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows:
        return repeat_rows(value, draw.components * draw.samples)
    return value


def expand_saved(state_dict: Mapping[str, Any], key: str, target: Tensor | None) -> None:
    """Give a saved tensor of one component fewer axes the component axis that ``target`` has."""
    saved = state_dict.get(key)
    if isinstance(saved, Tensor) and target is not None and saved.shape == target.shape[1:]:
        state_dict[key] = saved.expand_as(target).clone()  # type: ignore[index]  # assign=True keeps it


def unbatched(run: Any, x: Tensor, batched_dims: int) -> Tensor:
    """Run on a single example that has no row axis, as torch's own layers allow."""
    if not isinstance(x, Tensor):
        raise TypeError(f"a layer takes a tensor, got {type(x).__name__} {x!r:.40}")
    if x.dim() >= batched_dims:
        output: Tensor = run(x)
        return output
    result: Tensor = run(x.unsqueeze(0))
    return result.squeeze(0)


def affine_per_group(y: Tensor, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """y·w_g + b_g for groups of rows; ``shape`` places one group's weight against one row."""
    groups = weight.shape[0]
    y = y.unflatten(0, (groups, -1))  # [G, R/G, ...]
    weight = weight.to(y.dtype).reshape(groups, 1, *shape)
    if bias is None:
        return (y * weight).flatten(0, 1)
    return torch.addcmul(bias.to(y.dtype).reshape(groups, 1, *shape), y, weight).flatten(0, 1)


def require_weight(module: nn.Module, name: str) -> None:
    """Raise for a layer without parameters to spread, or with features that a random table cannot have."""
    if getattr(module, "weight", module) is None:
        raise ValueError(
            f"layer {name!r} ({type(module).__name__}) has no affine parameters to make random; "
            f"leave it out with exclude={name!r}"
        )
    if getattr(module, "max_norm", None) is not None:
        raise ValueError(
            f"embedding {name!r} renormalises its rows in place (max_norm={module.max_norm}), "
            f"which a random table cannot do; build it with max_norm=None"
        )


def constant_row(layer: Converted) -> int | None:
    """The row of the weight that is never random: an embedding's padding."""
    row: int | None = getattr(layer, "padding_idx", None)
    return row
