"""``compile``: torch.compile for draws, with BatchNorm, ReLU and the factors beside them as one operation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from slimbayes import fast
from slimbayes.apply.bulk import JOINS
from slimbayes.apply.chained import chain_noise
from slimbayes.apply.fused import SCOPE
from slimbayes.apply.rows import row_product
from slimbayes.kernels.norm import norm_rows

Compiled = TypeVar("Compiled", bound=Callable[..., Any])

_RELU = (F.relu, torch.relu, torch.relu_)
_PRODUCT = (row_product,)


def compile(
    function: Compiled,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Compiled:
    """torch.compile with one more step: relu(BatchNorm(r∘y))∘s becomes one operation on a GPU.

    Left to itself the compiler keeps a second copy of every activation for the factors' gradients and sweeps over
    it; the one operation gets them from sums that the backward pass of BatchNorm makes anyway. ``mode`` and
    ``options`` are torch.compile's. A function compiled by torch.compile itself gives the same results.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(torch.nn.Linear(3, 2), sb.Rank1())
    >>> step = sb.compile(lambda x: sb.draw(net, x).square().mean(), fullgraph=True)
    """
    torch.compiler.allow_in_graph(row_product)
    settings = {**_mode_options(mode), **_repairs(), **(options or {})}

    def backend(module: fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx

        if fast.paths.triton and fast.paths.rows:
            fuse_norms(module.graph)
            module.recompile()
        if fast.paths.triton and fast.paths.weights:
            chain_noise(module.graph)
            module.recompile()
        return compile_fx(module, inputs, config_patches=settings)

    whole = function if isinstance(function, nn.Module) else _scoped(function)
    return torch.compile(whole, fullgraph=fullgraph, dynamic=dynamic, backend=backend)  # type: ignore[return-value]


def _scoped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one scope: a KL in it may use what a draw in it has summed."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        SCOPE.open, SCOPE.made, JOINS.made, JOINS.rules = True, [], [], []
        try:
            return function(*args, **named)
        finally:
            SCOPE.open, SCOPE.made, JOINS.made, JOINS.rules = False, [], [], []

    return call


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


def fuse_norms(graph: fx.Graph, devices: tuple[str, ...] = ("cuda",)) -> int:
    """Replace training-mode BatchNorm between row factors by ``norm_rows``; return how many were replaced.

    The pattern is [r∘] → batch_norm → [relu] → [∘s], with at least one factor; whatever has other readers stays.
    """
    count = 0
    for norm in list(graph.nodes):
        if norm.op != "call_function" or norm.target is not F.batch_norm:
            continue
        arguments = _norm_arguments(norm)
        if arguments is None or not _suits(arguments["input"], devices):
            continue
        count += _replace(graph, norm, arguments)
    if count:
        graph.lint()
    return count


_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}


def _norm_arguments(norm: fx.Node) -> dict[str, Any] | None:
    """The arguments of F.batch_norm by name, or None if it is not the training mode with an affine map."""
    found = {**_DEFAULTS, **dict(zip(_NAMES, norm.args, strict=False)), **norm.kwargs}
    if found["training"] is not True or found["weight"] is None or found["bias"] is None:
        return None
    return found if isinstance(found["momentum"], float) else None


def _suits(value: Any, devices: tuple[str, ...]) -> bool:
    example = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    return (
        isinstance(example, Tensor)
        and example.dim() == 4
        and example.device.type in devices
        and example.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        and example.is_contiguous(memory_format=torch.channels_last)
    )


def _replace(graph: fx.Graph, norm: fx.Node, found: dict[str, Any]) -> int:
    given = found["input"]
    y, r = given, None
    if _is_product(given) and len(given.users) == 1:
        y, r = given.args
    last = norm
    only = _only_user(last)
    relu = only is not None and _is_relu(only)
    if relu:
        assert only is not None
        last = only
    after = _only_user(last)
    s = None
    if after is not None and _is_product(after) and after.args[0] is last:
        s = after.args[1]
        last = after
    if r is None and s is None:
        return 0
    with graph.inserting_before(last):
        made = graph.call_function(
            norm_rows,
            (
                y, r, found["running_mean"], found["running_var"], found["weight"], found["bias"], s,
                found["momentum"], found["eps"], relu,
            ),
        )  # fmt: skip
    made.meta = dict(last.meta)
    last.replace_all_uses_with(made)
    chain = [last]
    while chain[-1] is not norm:
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    if r is not None:
        chain.append(given)
    for node in chain:  # from the last to the first: each has lost its reader
        graph.erase_node(node)
    return 1


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _is_product(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in _PRODUCT


def _is_relu(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in ("relu", "relu_")
    return node.op == "call_function" and node.target in _RELU
