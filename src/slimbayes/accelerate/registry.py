"""The fast paths that are attached: each has a plain twin in core, and is hidden by taking its line away."""

from __future__ import annotations

from slimbayes.accelerate.compile import factor_operations  # noqa: F401 - registers its operators
