"""A prediction cut into passes: which examples and samples each takes, and smaller ones where memory ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slimbayes.budget import exhausted, out_of_memory
from slimbayes.draws import FlatInputs
from slimbayes.likelihoods import Likelihood
from slimbayes.predictive import Moments, Predictive

_HELD = 1 << 20  # outputs at most whose moments are taken at once
Run = Callable[[FlatInputs, int, int, int], Tensor]  # (inputs, samples, first sample, first example)


@dataclass
class Pieces:
    """Passes over blocks of examples, and over the samples of each; joined to one predictive."""

    run: Run
    flat: FlatInputs
    samples: int
    components: int
    likelihood: Likelihood
    keep_draws: bool

    def all(self, examples: int, per_pass: int) -> Predictive:
        """Every example, ``examples`` at a time with ``per_pass`` samples; fewer from where memory ends."""
        parts: list[Predictive] = []
        start = 0
        while start < self.flat.batch:
            stop = min(start + examples, self.flat.batch)
            block, fitting = self._block(start, stop, per_pass)
            if block is None:
                examples = (stop - start) // 2
            else:
                parts.append(block)
                start, per_pass = stop, fitting
        return parts[0] if len(parts) == 1 else Predictive.cat(parts)

    def _block(self, start: int, stop: int, per_pass: int) -> tuple[Predictive | None, int]:
        """The examples start..stop, and the samples per pass that fitted; None if they are too many."""
        rows = slice(start, stop)
        part = self.flat.map_tiled(lambda leaf: leaf[rows], stop - start)
        pieces: list[Tensor] = []
        moments: Moments | None = None
        # Moments of small outputs, pass by pass, cost as much as some layers, and a look at values waits for a GPU:
        # both are for several passes together, whose outputs are fewer than the inputs.
        first, held, most, seen = 0, 0, min(part.numel() // 4, _HELD), 0
        while first < self.samples:
            count = min(per_pass, self.samples - first)
            smallest = count == 1 and stop - start == 1
            once = functools.partial(self.run, part, count, first, start)
            draws = attempt(once, self._last_words if smallest else None)
            if draws is None:
                if count == 1:
                    return None, 1
                per_pass = count // 2
                continue
            pieces.append(draws.unflatten(0, (self.components, count)))  # [K, s, b, ...]
            held += draws.numel()
            full = held >= most or first + count == self.samples
            if full:
                together = _joined(pieces[seen:])
                self.likelihood.check(together)
                held, seen = 0, len(pieces)
                if not self.keep_draws:
                    new = self.likelihood.moments(together)
                    moments = new if moments is None else moments.merge(new)
                    pieces, seen = [], 0
            elif first == 0:
                self.likelihood.check(draws)
            first += count
        return self.likelihood.predictive(_joined(pieces) if moments is None else moments), per_pass

    def _last_words(self, error: BaseException) -> str:
        tensors = [leaf for leaf in self.flat.leaves if isinstance(leaf, Tensor)]
        return exhausted(error, self.components, tensors[0].device)


def _joined(pieces: list[Tensor]) -> Tensor:
    """Draws [K·S, b, ...] of passes [K, s, b, ...]."""
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)).flatten(0, 1)


def attempt(
    run: Callable[[], Tensor], last_words: Callable[[BaseException], str] | None = None
) -> Tensor | None:
    """The result of a pass, or None if memory was too short for it; with ``last_words`` that is an error.

    >>> attempt(lambda: torch.zeros(2))
    tensor([0., 0.])
    """
    try:
        return run()
    except Exception as error:
        if not out_of_memory(error):
            raise
        if last_words is not None:
            raise type(error)(last_words(error)) from error
    # Only here, without the error and the frames it holds, is the memory of the failed pass free.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return None
