"""Compile the kernels that a traced graph will start while torch's compiler is at work on the rest of it.

Triton compiles a kernel when it is first started, one after the other: for a deep network as long as a quarter of the
first step. Which ones will be started is known as soon as the graph is traced.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, fx

from slimbayes.accelerate.gpu import factors, first_convolution, norm, norm_sum, sum_norm
from slimbayes.accelerate.gpu.launch import INTERPRETED, RECORDER, available

_Rehearsal = Callable[..., None]
_WORKERS = 8


@contextlib.contextmanager
def warmed(graph: fx.Graph) -> Iterator[None]:
    """Compile the kernels of our operations in the graph in threads of their own, until the with block ends.

    What goes wrong here goes wrong when the kernel is started, or not at all: it is not reported.
    """
    device = _device(graph)
    if device is None or INTERPRETED or not available(device):
        yield
        return
    pool = ThreadPoolExecutor(
        min(_WORKERS, os.cpu_count() or 1), initializer=_enter, initargs=(device.index or 0,)
    )
    futures: list[Future[None]] = []
    with contextlib.suppress(Exception):
        futures = [pool.submit(_compile, *call) for call in kernel_calls(graph)]
    try:
        yield
    finally:
        for future in futures:
            future.exception()
        pool.shutdown()


def kernel_calls(graph: fx.Graph) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Every kernel that the operations in the graph and in its backward pass start, with the kinds of its arguments.

    (kernel, arguments, constants), with types in place of tensors; calls for which Triton would compile the same
    program come once.
    """
    calls: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
    for node in graph.nodes:
        rehearse = REHEARSALS.get(node.target) if node.op == "call_function" else None
        if rehearse is None:
            continue
        RECORDER.calls = []
        try:
            arguments = [_stand_in(argument) for argument in node.args]
            rehearse(node.meta.get("example_value"), *arguments)
            for kernel, args, meta in RECORDER.calls:
                key = (id(kernel), *(_kind(arg) for arg in args), *meta.items())
                calls.setdefault(key, (kernel, args, meta))
        except Exception:
            continue  # it will be compiled when it is started
        finally:
            RECORDER.calls = None
    return list(calls.values())


def _stand_in(argument: Any) -> Any:
    """The argument of a node as an operation takes it, tensors without memory."""
    if not isinstance(argument, fx.Node):
        return argument
    example = argument.meta["example_value"]
    if not isinstance(example, Tensor):
        return _hint(example)
    sizes, strides = ([_hint(number) for number in numbers] for numbers in (example.shape, example.stride()))
    return torch.empty_strided(sizes, strides, dtype=example.dtype, device="meta")


def _hint(number: Any) -> Any:
    """A number as it is now; to ask for it would make the compiler take it for a constant."""
    return number.node.hint if isinstance(number, torch.SymInt) else number


def _kind(arg: Any) -> Any:
    """What Triton makes a difference of: 1, multiples of 16 and the width of a number; the type of anything else."""
    if type(arg) is int:
        return arg if arg == 1 else (arg % 16 == 0, -(2**31) <= arg < 2**31)
    return arg if isinstance(arg, torch.dtype) else type(arg)


def _device(graph: fx.Graph) -> torch.device | None:
    for node in graph.nodes:
        example = node.meta.get("example_value")
        if isinstance(example, Tensor) and example.device.type == "cuda":
            return example.device
    return None


def _enter(index: int) -> None:
    torch.cuda.set_device(index)


def _compile(kernel: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    kernel.warmup(*args, grid=(1,), **meta)


# Each starts what an operation and its gradient start; the first argument is the value of its node.


def _norm_rows(_: Any, y: Tensor, r: Any, weight: Tensor, bias: Tensor, s: Any, *settings: Any) -> None:
    outputs: Any = norm.run(y, r, weight, bias, s, *settings)
    u, *made = outputs
    norm.run_backward(u, y, r, weight, bias, s, *made, *settings)


def _sum_norm_rows(
    _: Any, y: Tensor, r: Tensor, x: Tensor, q: Any, weight: Tensor, bias: Tensor, s: Any, eps: float, relu: bool,
    keep: bool,
) -> None:  # fmt: skip
    outputs: Any = sum_norm.run(y, r, x, q, weight, bias, s, eps, relu, keep)
    v, u, *made = outputs
    backward: Any = sum_norm.run_backward
    backward(u, v if keep else None, y, r, x, q, weight, bias, s, v, *made, eps, relu)


def _norm_sum_rows(
    _: Any, y: Tensor, r: Any, x: Tensor, weight: Tensor, bias: Tensor, s: Any, t: Any, eps: float, relu: bool,
    keep: bool,
) -> None:  # fmt: skip
    outputs: Any = norm_sum.run(y, r, x, weight, bias, s, t, eps, relu, keep)
    z, u, w, *made = outputs
    grads = (z if keep else None, None if s is None else u, None if t is None else w)
    backward: Any = norm_sum.run_backward
    backward(*grads, y, r, weight, bias, s, t, z, *made, eps, relu)


def _scaled_conv(
    result: Tensor, x: Tensor, s: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]
) -> None:
    taps = weight.to(result.dtype)
    y = torch.ops.slimbayes.scaled_conv(x, x, s, taps, list(stride), list(padding))
    first_convolution.stem_gradients(y, x, s, taps, stride, padding)


def _factors(
    _: Any, loc: Tensor, rho: Tensor, seed: Tensor, widths: str, samples: int, examples: int, family: str, clip: Any,
    dtype: torch.dtype, kernel: bool,
) -> None:  # fmt: skip
    if kernel:
        n = samples * examples
        flat = factors.launch_sample(loc, rho, seed, widths, n, family, clip, dtype)
        factors.launch_grad(flat, loc, rho, seed, widths, n, family, clip)


REHEARSALS: dict[Any, _Rehearsal] = {
    torch.ops.slimbayes.norm_rows.default: _norm_rows,
    torch.ops.slimbayes.sum_norm_rows.default: _sum_norm_rows,
    torch.ops.slimbayes.norm_sum_rows.default: _norm_sum_rows,
    first_convolution.scaled_conv: _scaled_conv,
    torch.ops.slimbayes.factors: _factors,
}
