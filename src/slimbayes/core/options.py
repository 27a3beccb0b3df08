"""What options are: counts, numbers, flags and choices; what is none of these is refused by its name.

Python's own numbers alone: an option is written into checkpoints and compared, which a tensor's is not made for.
"""

from __future__ import annotations

import math
from typing import Any


def is_count(value: Any, least: int = 1) -> bool:
    """Whether a value is an integer of at least ``least``; True and False are none.

    >>> is_count(3), is_count(True), is_count(2.0), is_count(0)
    (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> bool:
    """Whether a value is a finite real number of Python's own; True and False are none.

    >>> is_number(0.5), is_number("0.5"), is_number(math.nan), is_number(True)
    (True, False, False, False)
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise unless ``value`` is an integer of at least ``least``."""
    if not is_count(value, least):
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def check_rate(name: str, value: Any) -> None:
    """Raise unless ``value`` is a probability below one."""
    if not (is_number(value) and 0.0 <= value < 1.0):
        raise ValueError(f"{name} must be at least 0 and below 1, got {value!r}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise unless ``value`` is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"unknown {name} {value!r}; use one of {', '.join(map(repr, choices))}")


def check_positive(name: str, value: Any, optional: bool = True) -> None:
    """Raise unless ``value`` is a positive finite number, or None where it is ``optional``."""
    if not (optional and value is None) and not (is_number(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, got {value!r}")


def check_least(name: str, value: Any, least: float = 0.0) -> None:
    """Raise unless ``value`` is a finite number of at least ``least``."""
    if not (is_number(value) and value >= least):
        raise ValueError(f"{name} must be finite and at least {least:g}, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Raise unless ``value`` is True or False: "no" would count as true.

    >>> check_flag("biases", "no")
    Traceback (most recent call last):
        ...
    ValueError: biases must be True or False, got 'no'
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
