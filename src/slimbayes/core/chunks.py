"""A prediction cut into passes: which examples and samples each takes, and smaller ones where memory ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slimbayes.core.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood, not_finite, unseen
from slimbayes.core.memory import exhausted, out_of_memory
from slimbayes.core.predictive import Moments, Predictive
from slimbayes.core.rows import FlatInputs

_HELD = 1 << 21  # outputs at most whose moments are taken at once
_LATE = {"cuda"}  # devices whose values are looked at when all passes are done
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
    whole: bool = False  # examples belong together: a batch is not cut

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
        looks: list[Tensor] = []
        # Moments of small outputs, pass by pass, cost as much as some layers: they are for several passes together,
        # whose outputs are no more than the inputs.
        first, held, most = 0, 0, min(part.numel(), _HELD)
        while first < self.samples:
            count = min(per_pass, self.samples - first)
            smallest = count == 1 and (self.whole or stop - start == 1)
            once = functools.partial(self.run, part, count, first, start)
            draws = attempt(once, self._last_words if smallest else None)
            if draws is None:
                if count == 1:
                    return None, 1
                per_pass = count // 2
                continue
            if first == 0:
                self.likelihood.check(draws)
            pieces.append(draws)  # [K·s, b, ...]
            first, held = first + count, held + draws.numel()
            if not self.keep_draws and (held >= most or first == self.samples):
                new = self._moments(pieces, looks)
                moments = new if moments is None else moments.merge(new)
                pieces, held = [], 0
        if moments is None:
            together = self._joined(pieces)
            self.likelihood.check(together)
            return self.likelihood.predictive(together), per_pass
        self._look(looks)
        return self.likelihood.predictive(moments), per_pass

    def _moments(self, pieces: list[Tensor], looks: list[Tensor]) -> Moments:
        """The moments of some passes. Whether all is finite is asked later: to look at a value waits for a GPU."""
        together = self._joined(pieces)
        if together.device.type not in _LATE or type(self.likelihood) not in (
            Categorical,
            Bernoulli,
            Gaussian,
        ):
            self.likelihood.check(together)
            return self.likelihood.moments(together)
        looks.append(together.isfinite().logical_not_().sum())
        with unseen():
            return self.likelihood.moments(together)

    def _look(self, looks: list[Tensor]) -> None:
        bad = int(torch.stack(looks).sum()) if looks else 0
        if bad:
            raise not_finite(bad, f"elements of {self.components * self.samples} draws")

    def _joined(self, pieces: list[Tensor]) -> Tensor:
        """Draws [K·S, b, ...] of passes [K·s, b, ...]."""
        if len(pieces) == 1:
            return pieces[0]
        if self.components == 1:
            return torch.cat(pieces)
        return torch.cat([each.unflatten(0, (self.components, -1)) for each in pieces], 1).flatten(0, 1)

    def _last_words(self, error: BaseException) -> str:
        tensors = [leaf for leaf in self.flat.leaves if isinstance(leaf, Tensor)]
        return exhausted(error, self.components, tensors[0].device)


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
