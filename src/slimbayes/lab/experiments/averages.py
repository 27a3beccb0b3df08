"""Probabilities averaged over ever more draws, in passes of a bounded size, and what is kept of each example."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from slimbayes.core.conversion import find_record
from slimbayes.core.draws import draw_flat
from slimbayes.core.paths import ASKED
from slimbayes.core.paths import first as first_of
from slimbayes.core.plan import Plan
from slimbayes.core.probes import evaluating
from slimbayes.core.rows import flatten_inputs


def passes(
    model: nn.Module,
    inputs: Tensor,
    stops: Sequence[int],
    chunk: int,
    seed: int | None = 0,
    prepare: Callable[[Tensor], Tensor] = lambda x: x,
    first: int = 0,
) -> Iterator[tuple[slice, int, Tensor]]:
    """Probabilities of draws, block by block of the examples: (examples, draws done, [components · draws, block, C]).

    No pass has more than ``chunk`` rows, and one ends at each of the ``stops``, the last of which is the number of
    draws. With a ``seed`` draw s is the same function for all blocks, whatever their size; None takes torch's
    generator. ``first`` is the place of the first row among the data.
    """
    record = find_record(model)
    size = max(1, min(len(inputs), chunk // record.components))
    for start in range(0, len(inputs), size):
        x = prepare(inputs[start : start + size])
        flat = flatten_inputs(model, (x,), {}, ())
        most, done = max(1, chunk // (record.components * len(x))), 0
        course = first_of(ASKED.course, model, stops[-1], flat.numel())
        with contextlib.nullcontext() if course is None else contextlib.closing(course):
            for stop in stops:
                while done < stop:
                    step = min(most, stop - done)
                    plan = Plan(step, "example", seed, first + start, done, evaluated=True)
                    with torch.no_grad(), evaluating(model):
                        logits = draw_flat(model, flat, plan, course)
                    done += step
                    yield slice(start, start + len(x)), done, logits.float().softmax(-1)


def running_means(
    model: nn.Module,
    inputs: Tensor,
    counts: Sequence[int],
    chunk: int,
    seed: int | None = 0,
    prepare: Callable[[Tensor], Tensor] = lambda x: x,
    first: int = 0,
) -> Iterator[tuple[slice, Tensor]]:
    """Probabilities averaged over the first S draws, for every S of ``counts``, from one run of the longest.

    p_S(y|x) = (1/S) Σ_{s ≤ S} p(y | f_s(x)), block by block: (examples, [counts, block, classes]). Nothing but the
    running sum stays from one of the ``passes`` to the next.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(3, 2), sb.EMP(patch="output"))
    >>> [(block.stop, means.shape) for block, means in running_means(net, torch.zeros(5, 3), (1, 4), chunk=4)]
    [(4, torch.Size([2, 4, 2])), (5, torch.Size([2, 1, 2]))]
    """
    components = find_record(model).components
    total: Tensor | None = None
    found: list[Tensor] = []
    for block, done, p in passes(model, inputs, counts, chunk, seed, prepare, first):
        total = p.sum(0) if total is None else total + p.sum(0)
        if done in counts:
            found.append(total / (components * done))
        if done == counts[-1]:
            yield block, torch.stack(found)
            total, found = None, []


def columns_of(p: Tensor, targets: Tensor) -> Tensor:
    """Per example [b, 4]: the largest probability, whether it and whether one of the five largest is right, the NLL.

    >>> columns_of(torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([1]))[0, :3]
    tensor([0.5000, 0.0000, 1.0000])
    """
    top = p.topk(min(5, p.shape[-1]))
    right = top.indices == targets[:, None]  # [b, 5]
    nll = -p.gather(1, targets[:, None]).squeeze(1).clamp_min(torch.finfo(p.dtype).tiny).log()
    return torch.stack([top.values[:, 0], right[:, 0].float(), right.any(1).float(), nll], 1)
