"""What the compiler is told about plain Python functions, without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable[..., object])


def constant(function: Function) -> Function:
    """Mark a function whose result the compiler takes as a constant: it is called while the compiler traces.

    torch.compiler.assume_constant_result sets the same mark, but imports the whole compiler to do so: two seconds.

    >>> @constant
    ... def three() -> int:
    ...     return 3
    >>> three()
    3
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
