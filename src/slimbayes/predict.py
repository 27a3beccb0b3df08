"""``predict``: draws turned into a predictive distribution, in as little memory as asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.draws import FlatInputs, check_options, draw_flat, evaluating, flatten_inputs
from slimbayes.likelihoods import Categorical, Likelihood
from slimbayes.predictive import Moments, Predictive
from slimbayes.record import find_record, unwrap


def predict(
    model: nn.Module,
    *inputs: Any,
    samples: int = 1,
    noise: str = "example",
    seed: int | None = None,
    likelihood: Likelihood | None = None,
    chunk: int | None = None,
    keep_draws: bool = True,
    shared_inputs: Sequence[str | int] = (),
    select: Callable[[Any], Tensor] | None = None,
    first_example: int = 0,
    **named_inputs: Any,
) -> Predictive:
    """Predictive distribution p(y | x) ≈ (1/D) Σ_d p(y | f_d(x)) over D = components × samples draws.

    Runs in eval mode without gradients and restores the model's mode. ``chunk`` bounds the rows (draws ×
    examples) of one pass, at least one example of every component; the result is the same as in one pass with
    the same seed. ``keep_draws=False`` keeps running moments instead of all outputs, so that memory does not
    grow with the number of draws. ``select`` picks the tensor to score from a structured output (default: the
    tensor itself, or ``.logits``). ``first_example`` is the index of the first example, as in ``draw``.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(3, 2), sb.Rank1())
    >>> p = sb.predict(net, torch.zeros(5, 3), samples=8)
    >>> p.mean.shape, p.mutual_information.shape
    (torch.Size([5, 2]), torch.Size([5]))
    """
    likelihood = Categorical() if likelihood is None else likelihood
    find_record(model)
    flat = flatten_inputs(model, inputs, named_inputs, shared_inputs)
    return predict_flat(
        model, flat, samples, noise, seed, likelihood, chunk, keep_draws, select, first_example
    )


def predict_flat(
    model: nn.Module,
    flat: FlatInputs,
    samples: int,
    noise: str,
    seed: int | None,
    likelihood: Likelihood,
    chunk: int | None = None,
    keep_draws: bool = True,
    select: Callable[[Any], Tensor] | None = None,
    first_example: int = 0,
) -> Predictive:
    """``predict`` on flattened inputs."""
    check_options(samples, noise, seed)
    check_chunk(chunk)
    record = find_record(model)
    if chunk is not None and seed is None:
        # One function per draw must stay one function in every chunk: chunks are keyed by a random seed.
        seed = int(torch.randint(2**62, ()))

    def run(part: FlatInputs, count: int, first_sample: int, start: int) -> Tensor:
        output = draw_flat(model, part, count, noise, seed, first_example + start, first_sample)
        return scored(output, select)

    with torch.no_grad(), evaluating(unwrap(model)):
        if chunk is None:
            draws = run(flat, samples, 0, 0)
            likelihood.check(draws)
            return likelihood.predictive(draws if keep_draws else likelihood.moments(draws))
        return _chunked(run, flat, samples, record.components, chunk, likelihood, keep_draws)


def check_chunk(chunk: int | None) -> None:
    """Raise on a bound of rows that means nothing."""
    if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk must be a positive number of rows or None, got {chunk!r}")


def scored(output: Any, select: Callable[[Any], Tensor] | None = None) -> Tensor:
    """The tensor of a structured output that is scored: the selected one, the output itself or its logits."""
    scored = select(output) if select is not None else getattr(output, "logits", output)
    if not isinstance(scored, Tensor):
        raise TypeError(
            f"the model returned {type(output).__name__}; tell predict which tensor to score, for example "
            f"select=lambda output: output[0]"
        )
    return scored


def _chunked(
    run: Callable[[FlatInputs, int, int, int], Tensor],
    flat: FlatInputs,
    samples: int,
    components: int,
    chunk: int,
    likelihood: Likelihood,
    keep_draws: bool,
) -> Predictive:
    examples = max(1, min(flat.batch, chunk // components))
    per_pass = max(1, chunk // (components * examples))
    parts: list[Predictive] = []
    for start in range(0, flat.batch, examples):
        stop = min(start + examples, flat.batch)
        part = flat.map_tiled(lambda leaf, rows=slice(start, stop): leaf[rows], stop - start)  # type: ignore[misc]
        pieces: list[Tensor] = []
        moments: Moments | None = None
        for first in range(0, samples, per_pass):
            count = min(per_pass, samples - first)
            draws = run(part, count, first, start)
            likelihood.check(draws)
            if keep_draws:
                pieces.append(draws.unflatten(0, (components, count)))  # [K, s, b, ...]
            else:
                new = likelihood.moments(draws)
                moments = new if moments is None else moments.merge(new)
        whole = torch.cat(pieces, 1).flatten(0, 1) if keep_draws else moments
        assert whole is not None
        parts.append(likelihood.predictive(whole))
    return Predictive.cat(parts)
