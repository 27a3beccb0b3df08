# mypy: ignore-errors
"""Triton's names for the programs; without Triton they still import, so that tools can read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton.language as tl
    from triton import jit
    from triton.language.extra import libdevice
except ImportError:
    tl = libdevice = None

    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Stand in for triton.jit: the function comes back as it is and can only be read."""
        return function if function is not None else jit


__all__ = ["jit", "libdevice", "tl"]
