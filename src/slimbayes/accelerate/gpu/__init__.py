"""Hand-written GPU kernels (Triton), each with a plain twin; Triton itself is imported when one first runs."""

from __future__ import annotations

from slimbayes.accelerate.gpu.launch import available

__all__ = ["available"]
