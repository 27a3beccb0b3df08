"""``diagnose``: what looks wrong with a model, in words, with the number that says so and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.conversion import find_record
from slimbayes.core.likelihoods import Likelihood
from slimbayes.verbs.diagnosis import behaviour, members, spreads
from slimbayes.verbs.diagnosis.findings import SEVERITIES, Diagnosis, Finding

__all__ = ["Diagnosis", "Finding", "diagnose"]


@torch.no_grad()
def diagnose(
    model: nn.Module,
    inputs: Any = None,
    targets: Tensor | None = None,
    *,
    validation: Any = None,
    num_data: int | None = None,
    likelihood: Likelihood | None = None,
    history: Any = None,
    annealing: Callable[[int], float] | None = None,
    step: int | None = None,
    samples: int = 4,
    seed: int = 0,
) -> Diagnosis:
    """Say what looks wrong with a converted model: collapsed components, σ at its cap, exploded factors, and so on.

    The model alone is enough, and each argument lets it see more:

    - ``inputs`` (a tensor, a tuple of arguments or a dict of named ones): draws that are all the same, outputs that
      are not finite.
    - ``targets`` of these inputs: noise that drowns the signal; with ``num_data`` a KL that outweighs the data.
    - ``validation``, a pair (inputs, targets) or batches of them, not trained on: intervals that cover too much or too
      little, probabilities that are too sure or not sure enough.
    - ``history`` (what ``sb.fit`` returned, or its rows), or ``annealing`` and ``step``: a KL still being annealed, or
      that never counted.

    The result has ``.findings``, ``.ok`` (neither errors nor warnings) and prints as text. Nothing is changed. Where
    numbers begin to look wrong stands in ``slimbayes.verbs.diagnosis.limits``, with the reasons.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(3, 2), sb.BatchEnsemble(components=4, random_sign_init=0.0))
    >>> found = sb.diagnose(net)
    >>> found.ok, found.kinds
    (False, {'components-collapsed'})
    >>> print(found.findings[0].what)
    the components of factor r are 0 apart on average
    """
    find_record(model)
    found = list(spreads.not_finite(model))
    looked = ["parameters"]
    if not found:  # nothing else means anything where there are NaN
        for check in (
            spreads.spreads, spreads.factors, spreads.dead, members.components, members.patches, members.unconverted,
            members.norms,
        ):  # fmt: skip
            found += check(model)
        looked += ["spreads", "components", "layers left alone", "norms"]
    weight, of_history = behaviour.annealed(model, history, annealing, step)
    found += of_history
    if history is not None or annealing is not None:
        looked.append("annealing")
    if inputs is not None:
        draws = behaviour.outputs(model, inputs, samples, seed)
        new = list(behaviour.drawn(model, draws))
        looked.append("draws")
        if targets is not None and not any(f.severity == "error" for f in new):
            new += behaviour.drowned(model, inputs, draws, targets, likelihood)
            looked.append("noise against signal")
            if num_data is not None:
                started = any(finding.kind == "sigma-at-start" for finding in found)
                new += behaviour.balance(model, draws, targets, num_data, weight, likelihood, started)
                looked.append("KL against nll")
        found += new
    if validation is not None and not any(f.severity == "error" for f in found):
        from slimbayes.verbs.diagnosis.calibration import believable  # and with it all metrics

        found += believable(model, validation, samples, seed, likelihood)
        looked.append("calibration")
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return Diagnosis(tuple(found), tuple(looked))
