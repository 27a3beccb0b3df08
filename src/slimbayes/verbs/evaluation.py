"""``evaluate``: a model's metrics over batches of data, in bounded memory."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slimbayes.core.context import Draw
from slimbayes.core.conversion import find_record, unwrap
from slimbayes.core.likelihoods import Categorical, Likelihood
from slimbayes.core.plan import Plan
from slimbayes.core.predict import Scoring, check_chunk, predict_flat
from slimbayes.core.row_mixing import in_passes
from slimbayes.core.rows import flatten_inputs

if TYPE_CHECKING:
    from slimbayes.metrics import Evaluation

__all__ = ["assess", "evaluate"]

_HELD = 1 << 25  # output elements of all draws held at a time where the rows of a pass are bounded


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    samples: int = 1,
    seed: int | None = None,
    likelihood: Likelihood | None = None,
    *,
    noise: str = "example",
    chunk: int | None = None,
    device: torch.device | str | None = None,
    target_scaling: Any = None,
    prepare: Callable[[Any], Any] | None = None,
    select: Callable[[Any], Tensor] | None = None,
    shared_inputs: Sequence[str | int] = (),
    first_example: int = 0,
    layout: str = "auto",
) -> dict[str, float]:
    """Metrics of a model over an iterable of (inputs, targets), as a dict of floats.

    Classes (``sb.Categorical``, ``sb.Bernoulli``): nll = −(1/N) Σ log (1/D) Σ_d p_d(y), gibbs_nll, accuracy,
    ece, ece_20, mce, adaptive_ece, brier, aurc, entropy, mutual_information; top_5_accuracy from 10 classes
    on, disagreement with several components, auroc and auc_pr with two classes. Real targets
    (``sb.Gaussian``): nll, log_predictive_density, rmse, mae, coverage_90, width_90, variance, epistemic.

    - ``inputs``: a tensor, a tuple of arguments or a dict of named ones; they are moved to ``device``, by
      default the model's, and then put through ``prepare``.
    - ``seed``: noise is keyed by the example's place in the data, so that the batch size does not matter;
      ``first_example`` is the place of the first (for a process that holds a part of the data).
    - ``chunk`` bounds the rows (draws × examples) of one pass.
    - ``target_scaling``: targets and outputs are in its scaled units, the metrics in its original ones.
    - ``select``, ``shared_inputs`` and ``layout`` as in ``sb.predict``; batches that run in passes are not cut.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(3, 2), sb.Rank1(components=4))
    >>> batches = [(torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))] * 2
    >>> metrics = sb.evaluate(net, batches, samples=8, seed=0)
    >>> metrics["examples"], metrics["nll"] <= metrics["gibbs_nll"]
    (10.0, True)
    """
    return assess(
        model,
        batches,
        samples,
        seed,
        likelihood,
        noise=noise,
        chunk=chunk,
        device=device,
        target_scaling=target_scaling,
        prepare=prepare,
        select=select,
        shared_inputs=shared_inputs,
        first_example=first_example,
        layout=layout,
    ).compute()


def assess(
    model: nn.Module,
    batches: Iterable[Any],
    samples: int = 1,
    seed: int | None = None,
    likelihood: Likelihood | None = None,
    *,
    noise: str = "example",
    chunk: int | None = None,
    device: torch.device | str | None = None,
    target_scaling: Any = None,
    prepare: Callable[[Any], Any] | None = None,
    select: Callable[[Any], Tensor] | None = None,
    shared_inputs: Sequence[str | int] = (),
    first_example: int = 0,
    layout: str = "auto",
) -> Evaluation:
    """``evaluate`` with the values of every example: ``.compute()`` the metrics, ``.examples``, ``.merge``.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(3, 2), sb.Rank1())
    >>> assess(net, [(torch.zeros(5, 3), torch.zeros(5, dtype=torch.long))], seed=0).examples["entropy"].shape
    torch.Size([5])
    """
    from slimbayes.metrics import Evaluation  # not everybody who imports slimbayes wants all metrics

    record = find_record(model)
    components = record.components
    plan = Plan(samples, noise, seed, layout=layout, evaluated=True)
    plan.check()
    check_chunk(chunk)
    device = _device(model) if device is None else torch.device(device)
    likelihood = Categorical() if likelihood is None else copy.deepcopy(likelihood).to(device)
    if seed is None and (noise == "shared" or chunk is not None):
        # A draw stays one function in every batch and pass.
        plan = replace(plan, seed=int(torch.randint(2**62, ())))
    scoring = Scoring(likelihood, select, chunk)
    evaluation = Evaluation(components, target_scaling)
    # Examples whose draws are held at a time; more than this once the size of an output is known.
    size = None if chunk is None else max(1, chunk // (components * samples))
    for number, batch in enumerate(batches):
        inputs, targets = _moved(as_pair(batch, number), device)
        args, named = arguments(inputs if prepare is None else prepare(inputs))
        flat = flatten_inputs(model, args, named, shared_inputs)
        now = Draw(components, samples, flat.batch, noise)
        together = in_passes(
            model, record, flat, now, layout
        )  # and targets may be fewer: of graphs, not of nodes
        if len(targets) % flat.batch and not together:
            raise ValueError(
                f"batch {number} has {flat.batch} inputs but {len(targets)} targets: give one target each"
            )
        each = len(targets) // flat.batch  # above 1 where the network turns tokens or pixels into rows
        start = 0
        while start < flat.batch:
            rows = slice(start, flat.batch if size is None or together else min(start + size, flat.batch))
            part = flat.map_tiled(lambda leaf, rows=rows: leaf[rows], rows.stop - start)  # type: ignore[misc]
            place = first_example + start
            own = replace(plan, first_example=place, layout="passes" if together else "rows")
            predictive = predict_flat(model, part, own, scoring)
            evaluation.update(predictive, targets if together else targets[start * each : rows.stop * each])
            if chunk is not None:
                held = predictive.draws.numel() // (rows.stop - start)  # outputs per example, of all draws
                size = max(1, min(chunk // components, _HELD // held))
            start = rows.stop
        first_example += flat.batch
    if not len(evaluation):
        raise ValueError(
            "there is nothing to evaluate: batches gave no example; a generator can be used only once"
        )
    return evaluation


def as_pair(batch: Any, number: int) -> tuple[Any, Tensor]:
    """(inputs, targets) of the batch with this number, or an error that says what was found instead."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        what = (
            f"{type(batch).__name__} of {len(batch)}"
            if isinstance(batch, (tuple, list))
            else type(batch).__name__
        )
        raise TypeError(
            f"batch {number} is a {what}: batches are pairs (inputs, targets), several inputs in a tuple or "
            "dict; a single batch is [(inputs, targets)]"
        )
    inputs, targets = batch
    if not isinstance(targets, Tensor) or targets.ndim == 0:
        raise TypeError(
            f"the targets of batch {number} are {type(targets).__name__}, not a tensor with a batch axis: "
            "pass (inputs, torch.as_tensor(targets))"
        )
    return inputs, targets


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a network is called with: a tensor, a tuple of arguments or a dict of named ones."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


def _device(model: nn.Module) -> torch.device | None:
    """Where the model is; None for one without parameters, whose inputs stay where they are."""
    tensors = itertools.chain(unwrap(model).parameters(), unwrap(model).buffers())
    return next((tensor.device for tensor in tensors), None)


def _moved(batch: Any, device: torch.device | None) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
