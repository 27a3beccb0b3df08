"""A step of many networks as one flat graph of torch's operations: no modules, no vmap, no autograd at every step.

The graph is what ``make_fx`` sees while the step runs once. It is called as it is, or handed to torch.compile, which
has nothing left to trace but plain operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize, grad_and_value

from slimbayes.training.many.noise import NoisePlan
from slimbayes.training.many.stack import Stack

Tensors = dict[str, Tensor]
_FACTORIES = (torch.ops.aten.ones.default, torch.ops.aten.zeros.default, torch.ops.aten.full.default)


class Traced:
    """Gradients, figures and new buffers of a step; ``used`` names the parameters that have gradients."""

    def __init__(self, stack: Stack, used: Sequence[str], args: tuple[Any, ...], compiled: bool) -> None:
        self.used = list(used)
        rest = {name: value.detach() for name, value in stack.trained.items() if name not in self.used}

        def step(
            trained: Tensors,
            buffers: Tensors,
            inputs: Tensor,
            targets: Tensor,
            noise: Tensors,
            weight: Tensor,
        ) -> tuple[Tensors, Tensor, Tensors]:
            def total(parameters: Tensors) -> tuple[Tensor, tuple[Tensor, Tensors]]:
                own = {name: value.clone() for name, value in buffers.items()}  # changed in place below
                losses, figures, after = stack.losses(
                    {**parameters, **rest}, own, inputs, targets, noise, weight
                )
                return losses.sum(), (figures, after)

            gradients, (_, (figures, after)) = grad_and_value(total, has_aux=True)(trained)
            return gradients, figures, after

        example = (self._own(stack), stack.buffers, *args)
        with _plain_norms(args[0].device):
            self.graph = _graph(step, example)
        self.run: Any = torch.compile(self.graph, fullgraph=True, dynamic=False) if compiled else self.graph

    def _own(self, stack: Stack) -> Tensors:
        return {name: stack.trained[name].detach() for name in self.used}

    def __call__(self, stack: Stack, *args: Any) -> tuple[Tensors, Tensor, Tensors]:
        """``args``: inputs, targets, noise by name, KL weight. Gradients by name, figures [N, 3], buffers."""
        with torch.no_grad():
            found: tuple[Tensors, Tensor, Tensors] = self.run(self._own(stack), stack.buffers, *args)
        return found

    def agrees(self, stack: Stack, buffers: Tensors, args: tuple[Any, ...], figures: Tensor) -> bool:
        """Whether the graph gives the figures [N, 3] that the step itself gave, from the same buffers."""
        with torch.no_grad():
            found = self.graph(self._own(stack), buffers, *args)[1]
        exact = 1e-9 if figures.dtype == torch.float64 else 1e-4
        # Losses that are not finite are another matter, told by their step.
        return torch.allclose(found, figures, rtol=exact, atol=exact, equal_nan=True)


def compiled_noise(plan: NoisePlan, steps: Tensor) -> Any:
    """``plan.make`` for as many steps as these, compiled: one kernel or two instead of a hundred."""

    def make(these: Tensor) -> Tensors:
        return plan.make(these)

    return torch.compile(_graph(make, (steps,)), fullgraph=True, dynamic=False)


def _graph(function: Any, example: tuple[Any, ...]) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(functionalize(function))(*example)
    for node in graph.graph.nodes:
        # The older operation does not tell that it changes the running statistics; it is the same otherwise.
        if node.target is torch.ops.aten.native_batch_norm.default and node.args[3] is not None:
            node.target = torch.ops.aten._native_batch_norm_legit.default
    graph.graph.eliminate_dead_code()
    _hoist_constants(graph)
    graph.recompile()
    return graph


def _hoist_constants(graph: Any) -> None:
    """Make tensors of zeros and ones once instead of at every step; nothing in the graph changes them."""
    number = 0
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in _FACTORIES and not node.all_input_nodes:
            name = f"constant_{number}"
            number += 1
            graph.register_buffer(name, node.target(*node.args, **node.kwargs))
            with graph.graph.inserting_before(node):
                node.replace_all_uses_with(graph.graph.get_attr(name))
            graph.graph.erase_node(node)


def _plain_norms(device: torch.device) -> AbstractContextManager[Any]:
    """On a GPU cuDNN has a norm of its own, which a compiler cannot take apart; convolutions are traced alike."""
    return torch.backends.cudnn.flags(enabled=False) if device.type == "cuda" else nullcontext()
