"""What is asked of a draw: how many samples, which noise, which place in a larger whole."""

from __future__ import annotations

from dataclasses import dataclass

from slimbayes.core.context import NOISE_MODES, Supply
from slimbayes.core.options import check_count, is_count

LAYOUTS = ("auto", "rows", "passes")
_PLACES = 2**32  # of examples and of samples, as keyed noise counts them


@dataclass
class Plan:
    """The options of ``sb.draw``; ``evaluated`` says that no module is in training mode.

    >>> Plan(samples=3).noise
    'example'
    """

    samples: int = 1
    noise: str = "example"
    seed: int | Supply | None = None
    first_example: int = 0
    first_sample: int = 0
    layout: str = "auto"
    evaluated: bool = False

    def check(self) -> None:
        """Raise on options that mean nothing."""
        check_count("samples", self.samples)
        for name, place in (("first_example", self.first_example), ("first_sample", self.first_sample)):
            if not is_count(place, 0) or place >= _PLACES:
                raise ValueError(f"{name} must be an integer from 0 to {_PLACES - 1}, got {place!r}")
        if not isinstance(self.noise, str) or self.noise not in NOISE_MODES:
            raise ValueError(f"unknown noise {self.noise!r}; use 'example', 'shared' or 'mean'")
        if self.seed is not None and not isinstance(self.seed, (int, Supply)):
            raise ValueError(f"seed must be an integer or None, got {self.seed!r}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"unknown layout {self.layout!r}; use 'auto', 'rows' or 'passes'")
