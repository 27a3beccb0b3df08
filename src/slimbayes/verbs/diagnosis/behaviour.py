"""What a pass over data and the history of a run say: equal draws, a KL that outweighs the data, annealing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.conversion import find_record, unwrap
from slimbayes.core.draws import draw
from slimbayes.core.likelihoods import Categorical, Likelihood
from slimbayes.core.objective import tempered_kl
from slimbayes.core.predict import scored
from slimbayes.core.probes import evaluating
from slimbayes.verbs.diagnosis import limits
from slimbayes.verbs.diagnosis.findings import Finding
from slimbayes.verbs.evaluation import arguments

_LATER = 10**9  # a step by which every schedule has ended


def outputs(model: nn.Module, inputs: Any, samples: int, seed: int) -> Tensor:
    """The draws [D, B, ...] of the inputs in eval mode, without a gradient."""
    args, named = arguments(inputs)
    with torch.no_grad(), evaluating(unwrap(model)):
        return scored(draw(model, *args, samples=samples, seed=seed, **named)).detach()


def drawn(model: nn.Module, draws: Tensor) -> Iterator[Finding]:
    """Outputs that are not finite, or the same in every draw."""
    finite = torch.isfinite(draws)
    if not bool(finite.all()):
        bad = draws.numel() - int(finite.sum())
        yield Finding(
            "outputs-not-finite", "error", "", f"{bad} of {draws.numel()} outputs are NaN or infinite",
            "Nothing can be predicted from them",
            "Look at the inputs, then at factors and σ that are too large", bad, 0,
        )  # fmt: skip
        return
    record = find_record(model)
    if len(draws) < 2 or (record.components == 1 and not any(m.traits.noisy for m in record.methods)):
        return  # one network, on purpose
    wide = draws.double()
    size = float(wide.square().mean().sqrt())
    spread = float(wide.std(0).square().mean().sqrt())
    if spread <= limits.SAME_DRAWS * max(size, 1e-30):
        yield Finding(
            "draws-identical", "error", "",
            f"{len(draws)} draws differ by {spread:.1g}, the outputs are {size:.2g} large",
            "There is no uncertainty in the predictions: σ has vanished, or the random layers do not reach the output",
            "Look at σ (sb.analysis.stddevs, factor_scale) and at what was converted (print(sb.summary(model)))",
            spread / max(size, 1e-30), limits.SAME_DRAWS,
        )  # fmt: skip


def balance(
    model: nn.Module,
    draws: Tensor,
    targets: Tensor,
    num_data: int,
    weight: float,
    likelihood: Likelihood | None,
) -> Iterator[Finding]:
    """A KL per datum that is many times the nll per datum."""
    if isinstance(num_data, bool) or num_data < 1:
        raise ValueError(f"num_data={num_data!r}: pass the number of training examples")
    chosen = Categorical() if likelihood is None else likelihood
    with torch.no_grad():
        nll = float(chosen.mean_nll(draws, targets))
        share = weight * float(tempered_kl(model)) / num_data
    ratio = share / max(abs(nll), 1e-12)
    if ratio > limits.KL_RATIO:
        yield Finding(
            "kl-dominates", "warning", "",
            f"the KL is {share:.3g} nats per datum, the nll {nll:.3g}: {ratio:.3g} times as much",
            "The objective is made of the prior, and the fit to the data hardly counts",
            f"Check that num_data={num_data} is the size of the training set and not of a batch; choose a prior nearer "
            "to the weights (sb.HeNormal, a smaller scale), a larger stddev_init, a method with fewer random numbers "
            "(KTied, Rank1), or a kl_weight below 1",
            ratio, limits.KL_RATIO,
        )  # fmt: skip


def annealed(
    history: Any, annealing: Callable[[int], float] | None, step: int | None
) -> tuple[float, list[Finding]]:
    """The KL's weight at the end of the run, and what is to be said of it."""
    if annealing is not None:
        if step is None:
            raise ValueError("annealing without step: pass the number of steps that were taken, too")
        now, end = float(annealing(max(0, step - 1))), float(annealing(_LATER))
        return now, [_annealing(now, end)] if now < end else []
    weights = _weights(history)
    if not weights:
        return 1.0, []
    now = weights[-1]
    if now >= 1.0:
        return now, []
    if len(weights) == 1 or now > weights[-2]:
        return now, [_annealing(now, 1.0)]
    found = Finding(
        "kl-tempered", "notice", "", f"the KL had the weight {now:.3g} to the end",
        "This is a cold posterior: narrower "
        "than Bayes' rule says, which often predicts better and is less sure of being unsure",
        "Keep it if it was meant so; kl_weight=1 is the plain posterior", now, 1.0,
    )  # fmt: skip
    return now, [found]


def _annealing(now: float, end: float) -> Finding:
    return Finding(
        "kl-annealing", "warning", "", f"the KL's weight was {now:.3g} when training ended, on its way to {end:.3g}",
        "The posterior has not settled under the objective that it is meant for, and σ is too small by as much",
        "Train longer, or let annealing end earlier (kl_annealing=0.5, LinearAnnealing with fewer steps)", now, end,
    )  # fmt: skip


def _weights(history: Any) -> list[float]:
    rows: Sequence[Any] = getattr(history, "history", history) or ()
    if not isinstance(rows, Sequence) or not all(isinstance(row, dict) for row in rows):
        raise TypeError(
            f"history is {type(history).__name__}: pass what sb.fit returned, or its rows (dicts with 'kl_weight')"
        )
    return [float(row["kl_weight"]) for row in rows if "kl_weight" in row]
