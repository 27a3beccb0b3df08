"""``stack``: weights of several predictions, fitted on held-out data."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

_LEAST = 1e-15  # a weight of 0 could never grow again
_MOST = 20_000  # steps


@torch.no_grad()
def stack(log_probs: Tensor, targets: Tensor | None = None, tolerance: float = 1e-6) -> Tensor:
    """Weights w [M] of M predictions with the highest log score of their mixture on held-out data (stacking).

        w = argmax (1/N) Σ_n log Σ_m w_m p_m(y_n),    w ≥ 0, Σ_m w_m = 1

    ``log_probs`` are log p_m(y_n) [M, N], or those of all classes [M, N, C] with ``targets`` [N]. A prediction may be
    a component, a member, or a draw: with a seed draw s is one function for all data, so that weights fitted on some
    serve on others. The problem is concave: w grows by multiplication with g_m = (1/N) Σ_n p_m(y_n) / Σ_j w_j p_j(y_n)
    (the EM step, in longer strides as long as they help), until max_m g_m − 1, which bounds how far the score is from
    the highest, is at most ``tolerance``. ``sb.decisions.stack_components`` does all of it for a model.

    >>> right = torch.tensor([[0.9, 0.9, 0.9, 0.1], [0.1, 0.1, 0.1, 0.9]]).log()  # p of the target, two predictions
    >>> stack(right).round(decimals=3)
    tensor([0.8120, 0.1880])
    """
    log_p = _of_targets(log_probs, targets)
    best = log_p.amax(0)  # [N]
    if not bool(torch.isfinite(best).all()):
        raise ValueError(
            "log_probs give a target probability 0 in every prediction, or are not finite: no weights can repair that; "
            "leave such examples out"
        )
    p = (log_p - best).exp()  # [M, N], in units of the best prediction: the weights are the same
    w = p.new_full((len(p),), 1 / len(p))
    stride, score = 1.0, _score(w, p)
    for _ in range(_MOST):
        g = (p / (w @ p)).mean(1)  # [M]; Σ w g = 1
        if float(g.max()) - 1 <= tolerance:
            break
        trial = _normalised(w * g**stride)
        found = _score(trial, p)
        if found < score:  # too long: the EM step itself never lowers the score
            stride, trial = 1.0, _normalised(w * g)
            found = _score(trial, p)
        else:
            stride *= 1.5
        w, score = trial, found
    else:
        warnings.warn(
            f"stack stopped after {_MOST:,} steps, {float(g.max()) - 1:.1e} nats or less from the highest score: raise "
            f"tolerance={tolerance:g}, or give it more examples",
            stacklevel=2,
        )
    return w.to(torch.promote_types(log_probs.dtype, torch.float32))


def _of_targets(log_probs: Tensor, targets: Tensor | None) -> Tensor:
    """log p_m(y_n), float64 [M, N]."""
    if log_probs.ndim != (2 if targets is None else 3) or 0 in log_probs.shape:
        wanted = "[M, N]" if targets is None else "[M, N, C], with targets"
        raise ValueError(f"log_probs have shape {list(log_probs.shape)}: give {wanted}, none of them 0")
    if targets is None:
        return log_probs.double()
    members, examples, classes = log_probs.shape
    if targets.shape != (examples,) or targets.is_floating_point():
        raise ValueError(
            f"targets are {targets.dtype} {list(targets.shape)}: give {examples} classes as integers"
        )
    if int(targets.min()) < 0 or int(targets.max()) >= classes:
        raise ValueError(f"targets must lie in 0..{classes - 1}, as log_probs have {classes} classes")
    index = targets.long().to(log_probs.device)[None, :, None].expand(members, -1, 1)
    return log_probs.gather(2, index).squeeze(2).double()


def _normalised(w: Tensor) -> Tensor:
    w = w.clamp_min(_LEAST)
    return w / w.sum()


def _score(w: Tensor, p: Tensor) -> float:
    return float((w @ p).log().mean())
