"""A layer with several weight matrices, each a kernel with a rule of its own: recurrent layers, cells, attention.

A kernel looks like a layer to methods, the KL, checkpoints and analyses: it has a weight, a bias and a rule. The
layer itself holds the parameters, under the names that torch gave them, and runs the kernels together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from slimbayes.core import context
from slimbayes.core.context import Frame, RowError, row_message
from slimbayes.core.layers.base import Converted, Loading
from slimbayes.core.layers.linear import batched_product
from slimbayes.core.rules.base import Inputs, Rule, Slot
from slimbayes.core.rules.kernel_map import Mapped


class KernelNames(NamedTuple):
    """How a kernel is called, and under which names its layer holds the tensors."""

    key: str
    weight: str
    bias: str | None
    recurrent: bool = False
    child: str = ""  # the child of the layer that holds them, where it is not the layer itself


class Kernel(Converted):
    """One weight matrix [out, in] of a layer that has several, and the bias that goes with it.

    It holds the layer's store of parameters and not the layer, so that neither keeps the other alive.
    """

    title = "kernel"
    output_axis = -1
    linear = True
    float_input = True
    matrix_weight = True
    is_matrix = True
    partial = True

    def __init__(self, owner: nn.Module, layer: str, names: KernelNames) -> None:
        super().__init__()
        self.layer = layer
        self.key = names.key
        self.kind = type(owner)
        self.store = owner.get_submodule(names.child)._parameters
        self.prefix = f"{names.child}." if names.child else ""
        self.names = {"weight": names.weight, "bias": names.bias}
        self.recurrent = names.recurrent
        self.component_tensors = ()
        self._forward_pre_hooks = owner._forward_pre_hooks

    @property
    def weight(self) -> Any:
        """The layer's parameter [out, in], or [K, out, in] where it has versions."""
        return self.store[self.names["weight"]]  # type: ignore[index]

    @property
    def bias(self) -> Any:
        """The layer's parameter [out], or [K, out], or None."""
        name = self.names["bias"]
        return None if name is None else self.store[name]

    def replace(self, which: str, new: nn.Parameter) -> None:
        """Put another parameter in the place of the "weight" or "bias"."""
        name = self.names[which]
        assert name is not None
        self.store[name] = new

    @property
    def input_slots(self) -> tuple[Slot, ...]:
        """The one input, channels last."""
        return (Slot(0, -1, self.fan_in),)

    @property
    def output_size(self) -> int:
        """Rows of the matrix: those of all gates or projections."""
        return int(self.weight.shape[-2])

    @property
    def fan_in(self) -> int:
        """Columns of the matrix."""
        return int(self.weight.shape[-1])

    def matrix_sides(self, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The weight is [out, in]."""
        return v, u

    def compute(self, inputs: Inputs, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """A matrix product; its layer does the rest."""
        assert weight is not None
        return F.linear(inputs[0], weight, bias)

    def grouped(self, inputs: Inputs, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One batched product."""
        return batched_product(inputs[0], weight.transpose(1, 2), bias)


class Several(Loading, ABC):
    """Mixed into the class of a torch layer with several weights; retyped in place, state_dict keys kept."""

    linear: ClassVar[bool] = True
    float_input: ClassVar[bool] = True
    matrix_weight: ClassVar[bool] = True
    recurrent: ClassVar[bool]
    bayes: nn.ModuleDict  # the rule of every kernel, by its key
    kernels: tuple[Kernel, ...]
    source: str

    @abstractmethod
    def kernel_names(self) -> Iterator[KernelNames]:
        """The kernels of this layer, in the order of its parameters."""

    def attach(self, source: str, make: Callable[[Kernel, str], Rule]) -> None:
        """Give every kernel the rule that ``make`` returns for it and its name."""
        names = list(self.kernel_names())
        self._check_plain(source, names)
        self.source = source
        self.kernels = tuple([Kernel(self, source, own) for own in names])
        self.component_tensors = ()
        rules: dict[str, Rule] = {}
        for kernel in self.kernels:
            rules[kernel.key] = kernel.bayes = make(kernel, f"{source}.{kernel.key}")
            grown = [kernel.names[which] for which in kernel.component_tensors]
            self.component_tensors += tuple([kernel.prefix + name for name in grown if name is not None])
        self.bayes = nn.ModuleDict(rules)

    def _check_plain(self, source: str, names: list[KernelNames]) -> None:
        for own in names:
            held = self.get_submodule(own.child)._parameters
            for name in (own.weight, own.bias):
                if name is not None and held.get(name) is None:
                    raise ValueError(
                        f"layer {source!r} computes its {name!r} from other parameters (weight_norm, pruning or the "
                        f"like); remove that before the conversion, or leave the layer out with exclude={source!r}"
                    )

    def _components(self) -> int:
        return max([kernel.bayes.components for kernel in self.kernels])

    def _frame(self, rows: int) -> Frame:
        """The rows of this call; ``tiled`` is False where they still stand for all draws."""
        draw = context.late_draw()
        late = None if draw is None else draw.late
        untiled = late is not None and late.untiled(self.source, rows)
        now = context.current_draw()
        if (
            now is not None and now.whole and not now.fits(rows)
        ):  # the batch may be another axis of this layer's
            raise RowError(row_message(self.source, rows, now))
        return context.frame(self.source, rows, self._components(), untiled)

    def _mapped(self, frame: Frame) -> dict[str, Mapped]:
        """What every kernel does in this call."""
        return {kernel.key: kernel.bayes.mapped(kernel, frame) for kernel in self.kernels}


def on_its_way(output: Any) -> Any:
    """The output of a random layer, changed where a draw is being probed."""
    draw = context.late_draw()
    return output if draw is None or draw.late is None else draw.late.result(output)


def repeat_axis(tree: Any, axis: int, draws: int) -> Any:
    """Every tensor of the tree with its rows at ``axis`` repeated for all draws, draws outermost."""

    def repeated(x: Tensor) -> Tensor:
        return torch.cat([x] * draws, axis)

    return pytree.tree_map_only(Tensor, repeated, tree)
