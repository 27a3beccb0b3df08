"""Our own operations, each one node for compilers: a function, its outputs' shapes, its gradients.

``torch.library.custom_op`` takes 2 ms for each, most of it for a dataclass and a Function that only the first
gradient needs and for finding its caller's source; every import would pay. This makes the same registrations,
and leaves the machinery of the gradients to the first call. Should a version of torch lack what that takes, it is
``custom_op`` after all.

>>> import torch
>>> @operation("doctest_twice", "(Tensor x) -> Tensor")
... def twice(x):
...     return 2 * x
>>> twice.register_fake(torch.empty_like)
>>> twice.register_autograd(lambda ctx, grad: 2 * grad)
>>> x = torch.ones(3, requires_grad=True)
>>> torch.autograd.grad(twice(x).sum(), x)
(tensor([2., 2., 2.]),)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "slimbayes"
try:  # what torch keeps for itself, and may change
    from torch._compile import _disable_dynamo
    from torch._library import autograd
    from torch._library.custom_ops import get_library_allowing_overwrite

    DIRECT = {"_backward_fn", "_setup_context_fn"} <= set(autograd.Info.__annotations__)
    DIRECT = DIRECT and callable(autograd.make_autograd_impl)
except (ImportError, AttributeError):
    DIRECT = False

# Compiled code hands over the strides that a kernel would see in eager code; newer versions do so unasked.
_TAGS = (
    torch.Tag.pt2_compliant_tag,
    getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order),
)

# Absent from older versions of torch, where opcheck in the tests has to find a shared output.
_shares_memory: Callable[..., bool] | None = getattr(
    torch._C, "_any_output_is_alias_to_input_or_output", None
)


class CustomOp:
    """A function registered as ``slimbayes::name``, called like the function; no output shares memory."""

    def __init__(self, name: str, schema: str, function: Callable[..., Any]) -> None:
        if "!" in schema:
            raise ValueError(
                f"slimbayes::{name}{schema} writes to an argument: use torch.library.custom_op for it"
            )
        self.name = name
        self._made: Any = None
        if not DIRECT:
            self._made = torch.library.custom_op(
                f"{NAMESPACE}::{name}", function, mutates_args=(), schema=schema
            )
            self.overload: Any = getattr(getattr(torch.ops, NAMESPACE), name).default
            return
        self.formula = autograd.Info(None, None)
        self._library = get_library_allowing_overwrite(NAMESPACE, name)
        self._library.define(name + schema, tags=_TAGS)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        self._library.impl(name, _kernel(name, function), "CompositeExplicitAutograd")
        gradients = _differentiated(self.overload, self.formula)
        self._library.impl(name, gradients, "Autograd", with_keyset=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.overload(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<slimbayes::{self.name}>"

    def register_fake(self, function: Callable[..., Any]) -> None:
        """The outputs' shapes, without their values."""
        if self._made is not None:
            self._made.register_fake(function)
            return
        # From this line for all of them: torch searches all modules for its caller's, and finds a known one at once.
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", function, lib=self._library)

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[..., Any] | None = None
    ) -> None:
        """The gradients, as ``torch.library.register_autograd`` takes them."""
        if self._made is not None:
            self._made.register_autograd(backward, setup_context=setup_context)
            return
        self.formula._backward_fn, self.formula._setup_context_fn = backward, setup_context


def operation(name: str, schema: str) -> Callable[[Callable[..., Any]], CustomOp]:
    """Decorator that makes a function the operation ``slimbayes::name``; the schema has no name in it."""
    return lambda function: CustomOp(name, schema, function)


def _kernel(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        outputs = result if isinstance(result, tuple) else (result,)
        if _shares_memory is not None and _shares_memory(args, kwargs, outputs):
            raise RuntimeError(
                f"an output of slimbayes::{name} shares memory with an input or another output"
            )
        return result

    return _disable_dynamo(run)  # or dynamo would trace it, called between two compiled pieces


def _differentiated(overload: Any, formula: Any) -> Any:
    @_disable_dynamo
    def first(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        # Without a backward too: whoever asks for the gradient then hears that there is none.
        made = autograd.make_autograd_impl(overload, formula)
        run.__setstate__((made, (), {}, {"first": first}))  # kept, for it is running
        return made(keyset, *args, **kwargs)

    # What a partial calls can be exchanged: later calls pay for no detour and show compilers no function of ours.
    run: Any = functools.partial(first)
    return run
