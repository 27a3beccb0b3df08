"""``compile``: torch.compile for draws, with BatchNorm, ReLU and the factors beside them as one operation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import fx, nn

from slimbayes.accelerate import switches
from slimbayes.accelerate.compile.local_chain import chain_noise
from slimbayes.accelerate.factor_groups import JOINS
from slimbayes.accelerate.gpu.weight_samples import SCOPE
from slimbayes.accelerate.row_factors import row_product
from slimbayes.core.facts import TRACE

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


def compile(
    function: Compiled,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Compiled:
    """torch.compile with one more step: relu(BatchNorm(r∘y))∘s becomes one operation on a GPU, residual sums included.

    Left to itself the compiler keeps a second copy of every activation for the factors' gradients and sweeps over
    it; the one operation gets them from sums that the backward pass of BatchNorm makes anyway. ``mode`` and
    ``options`` are torch.compile's. A function compiled by torch.compile itself gives the same results.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(torch.nn.Linear(3, 2), sb.Rank1())
    >>> step = sb.compile(lambda x: sb.draw(net, x).square().mean(), fullgraph=True)
    """
    from slimbayes.accelerate.compile.first_fusion import fuse_first
    from slimbayes.accelerate.compile.norm_fusion import (
        fuse_norms,  # these define operations, which takes a while
    )
    from slimbayes.accelerate.gpu.warm_up import warmed

    torch.compiler.allow_in_graph(row_product)
    settings = {**_mode_options(mode), **_repairs(), **(options or {})}

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        if switches.paths.triton and switches.paths.rows:
            fuse_norms(module.graph)
            fuse_first(module.graph)
            module.recompile()
        if switches.paths.triton and switches.paths.weights:
            chain_noise(module.graph)
            module.recompile()
        _shorten_messages()
        with warmed(module.graph):
            return compile_fx(module, inputs, config_patches=settings)

    whole = function if isinstance(function, nn.Module) else _scoped(function)
    return torch.compile(whole, fullgraph=fullgraph, dynamic=dynamic, backend=backend)  # type: ignore[return-value]


def _scoped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one scope: a KL in it may use what a draw in it has summed."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        SCOPE.open, SCOPE.made, JOINS.made, JOINS.rules = True, [], [], []
        TRACE.draws, TRACE.whole = [], True
        try:
            return function(*args, **named)
        finally:
            SCOPE.open, SCOPE.made, JOINS.made, JOINS.rules = False, [], [], []
            TRACE.draws, TRACE.whole = [], False

    return call


def _shorten_messages() -> None:
    """Keep the compiler from writing out the inputs of an operation, and theirs, for a message that nobody reads.

    Before 2.12 torch does so for every operation that it meets for the first time, also when a backward pass is
    compiled, long after this function has returned: down a chain of residual sums of ours the text doubles with every
    block, and the compiler does not come to an end.
    """
    from torch._inductor import exc

    old = [int(part) for part in str(torch.__version__).split(".")[:2]] < [2, 12]
    if old and hasattr(exc, "OperatorIssue"):
        exc.OperatorIssue.operator_str = staticmethod(_name_of)  # type: ignore[method-assign]


def _name_of(target: Any, args: Any, kwargs: Any) -> str:
    return f"target: {target}"


def _mode_options(mode: str | None) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    known = list_mode_options()
    if mode not in known:
        raise ValueError(f"unknown mode {mode!r}; use one of {', '.join(map(repr, known))}")
    return dict(known[mode])


def _repairs() -> dict[str, Any]:
    """Settings that keep the compiler from failing: torch 2.11's fusion of reductions in mixed order asserts."""
    from torch._inductor import config

    known = hasattr(config.triton, "mix_order_reduction")
    return {"triton.mix_order_reduction": False} if known else {}
