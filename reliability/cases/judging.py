"""What becomes of a case: equal to its reference, refused in documented words, or wrong."""

from __future__ import annotations

import ast
import functools
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import slimbayes

SOURCE = Path(slimbayes.__file__).parent.resolve()
EQUAL, REFUSED = "equal", "refused"
# Relative to the largest element: what a sum of some hundred terms of the type may be off by.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-4, torch.float16: 3e-2, torch.bfloat16: 2e-1}


class Wrong(AssertionError):
    """A case whose result is neither its reference nor a documented refusal."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended, and what it was about."""

    verdict: str
    method: str = ""
    layer: str = ""


@functools.cache
def _raise_lines(path: Path) -> frozenset[int]:
    """The lines of a file that belong to ``raise`` statements."""
    tree = ast.parse(path.read_text())
    raises = [node for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    return frozenset(line for node in raises for line in range(node.lineno, (node.end_lineno or 0) + 1))


def written_here(error: BaseException) -> bool:
    """Whether a ``raise`` of slimbayes' own made the error; what an operation in its code raised is not."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return False
    last = Path(frames[-1].filename).resolve()
    return SOURCE in last.parents and frames[-1].lineno in _raise_lines(last)


def documented(error: BaseException, tokens: tuple[str, ...] = ()) -> bool:
    """A ValueError or TypeError of slimbayes' own, in a sentence that names one of ``tokens``, if there are any."""
    text = str(error)
    named = not tokens or any(token in text for token in tokens)
    return isinstance(error, ValueError | TypeError) and written_here(error) and named and len(text) > 20


def explained(error: BaseException) -> bool:
    """An error of the network's or of torch's beside which slimbayes says what the network was handed in the draw."""
    return any("This was a draw of" in note for note in (str(error), *getattr(error, "__notes__", ())))


def refusal_of(run: Callable[[], Any]) -> BaseException | None:
    """The error of a call, or None where there is none."""
    try:
        run()
    except Exception as error:
        return error
    return None


def attempt(
    run: Callable[[], Any],
    allowed: BaseException | None = None,
    tokens: tuple[str, ...] = (),
    what: str = "",
    misfit: bool = False,
) -> tuple[bool, Any]:
    """(True, result), or (False, error) of a documented refusal; any other error is ``Wrong``.

    ``allowed``: what torch's own network says to the same input; an error of that type will do, and one of another type
    that names the inputs. So will the latter with ``misfit``: for inputs that are no inputs of a draw to begin with.
    """
    try:
        return True, run()
    except Wrong:
        raise
    except Exception as error:
        if documented(error, tokens) or (allowed is not None and type(error) is type(allowed)):
            return False, error
        if (misfit or allowed is not None) and explained(error):
            return False, error
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise Wrong(
            f"{what}: a bare {type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {error}; torch's "
            f"own: {type(allowed).__name__ if allowed is not None else 'accepts'}"
        ) from error


def same_tensor(
    what: str, ours: Any, reference: Any, tolerance: float | None = None, least: float = 1e-30
) -> None:
    """Raise unless two tensors have one shape and, in float64, the same values up to rounding; NaN equals NaN.

    ``tolerance`` is relative to the largest element, and to ``least`` at least.
    """
    if not isinstance(ours, Tensor) or not isinstance(reference, Tensor):
        raise Wrong(f"{what}: {type(ours).__name__} against {type(reference).__name__}")
    if ours.shape != reference.shape:
        raise Wrong(f"{what}: shape {list(ours.shape)}, the reference has {list(reference.shape)}")
    if ours.device.type == "meta" or reference.device.type == "meta" or ours.numel() == 0:
        return
    near = TOLERANCE.get(ours.dtype, 0.0) if tolerance is None else tolerance
    a, b = ours.detach().double(), reference.detach().double()
    finite = b[torch.isfinite(b)]
    scale = max(float(finite.abs().max()) if finite.numel() else 1.0, least)
    if not torch.allclose(a, b, rtol=near, atol=near * scale, equal_nan=True):
        off = (a - b).abs().nan_to_num(nan=float("inf")).max()
        raise Wrong(
            f"{what}: off by {float(off):.3g} at a scale of {scale:.3g}, tolerance {near:g}, {ours.dtype}"
        )


def same_tree(
    what: str, ours: Any, reference: Any, tolerance: float | None = None, least: float = 1e-30
) -> None:
    """``same_tensor`` for every leaf of two outputs of one structure."""
    mine, spec = pytree.tree_flatten(ours)
    theirs, other = pytree.tree_flatten(reference)
    if spec != other:
        raise Wrong(f"{what}: structure {spec}, the reference has {other}")
    for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        if isinstance(b, Tensor):
            same_tensor(f"{what}, output {i}", a, b, tolerance, least)
        elif a is not b and a != b:
            raise Wrong(f"{what}, output {i}: {a!r}, the reference has {b!r}")


def same_number(what: str, ours: Any, reference: float, tolerance: float = 1e-9) -> None:
    """``same_tensor`` for two numbers."""
    mine = (
        ours.detach().double() if isinstance(ours, Tensor) else torch.tensor(float(ours), dtype=torch.float64)
    )
    same_tensor(what, mine, torch.tensor(float(reference), dtype=torch.float64), tolerance, 1e-4)
