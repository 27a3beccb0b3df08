"""Abstention: predict where the model is sure enough, and leave the rest to somebody else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slimbayes.core.likelihoods import Gaussian
from slimbayes.core.options import is_number
from slimbayes.decisions.binomial import at_most, upper_bound
from slimbayes.decisions.inputs import ceiling, check_share, class_probabilities
from slimbayes.decisions.scores import Score, uncertainty
from slimbayes.metrics.checks import as_tensor, targets_of

ABSTAIN = -1
LEVELS = 20  # coverages that are tried for a wanted risk: 5 %, 10 %, ..., 100 %


@dataclass(frozen=True)
class Abstention:
    """Predict where the uncertainty is below ``threshold``, abstain elsewhere.

    Made by ``for_coverage`` or ``for_risk``, with what held-out data said: the share of examples that are predicted
    (``coverage``), the error rate among them (``risk``) and what it is at most (``bound``).

    >>> import torch
    >>> p = torch.tensor([[0.95, 0.05], [0.4, 0.6], [0.1, 0.9], [0.7, 0.3]], dtype=torch.float64)
    >>> rule = Abstention.for_coverage(p, 0.5)
    >>> rule(p)
    tensor([ 0, -1,  1, -1])
    """

    threshold: float
    score: Score = "max_probability"
    coverage: float = math.nan
    risk: float = math.nan
    bound: float = math.nan

    @staticmethod
    def for_coverage(predictions: Any, coverage: float, score: Score = "max_probability") -> Abstention:
        """Predict at least this share of examples like the given ones; no targets are needed.

        Examples that are as uncertain as the last one kept are kept, too.
        """
        if not (is_number(coverage) and 0.0 < coverage <= 1.0):
            raise ValueError(f"coverage={coverage!r}: pass a share of the examples above 0 and up to 1")
        found = uncertainty(predictions, score)
        rank = max(1, ceiling(coverage * len(found)))
        last = found.kthvalue(rank).values
        above = found[found > last]
        limit = float(above.min()) if len(above) else math.inf
        return Abstention(limit, score, float((found < limit).double().mean()))

    @staticmethod
    def for_risk(
        predictions: Any,
        targets: Any,
        risk: float,
        confidence: float = 0.95,
        score: Score = "max_probability",
        wrong: Any = None,
    ) -> Abstention:
        """Predict as many examples as possible with an error rate that is at most ``risk``, for sure.

        With probability ``confidence`` over the held-out data, the error rate among new examples that the rule predicts
        is at most ``risk``. Coverages of 5 %, 10 %, ..., 100 % are tried, each with the Clopper–Pearson bound on its
        error rate at (1 − confidence)/20; the largest that holds is taken. ``wrong`` [N] says which predictions are
        errors, where that is not "the most probable class is not the target" (real targets, say: off by too much;
        ``targets`` are then None).

        >>> import torch
        >>> p = torch.tensor([[0.9, 0.1]] * 190 + [[0.6, 0.4]] * 10, dtype=torch.float64)
        >>> y = torch.tensor([0] * 190 + [1] * 10)
        >>> rule = Abstention.for_risk(p, y, risk=0.04)
        >>> rule.coverage, rule.risk, round(rule.bound, 4)
        (0.95, 0.0, 0.031)
        """
        check_share("risk", risk)
        delta = (1 - check_share("confidence", confidence)) / LEVELS
        found = uncertainty(predictions, score)
        errors = _errors(predictions, targets, wrong).to(found.device)
        if errors.shape != found.shape:
            raise ValueError(
                f"{len(found)} predictions, and errors of shape {list(errors.shape)}: give one each"
            )
        ordered, order = found.sort()
        total = errors[order].cumsum(0)
        tried: list[tuple[float, int, int]] = []
        best = None
        for level in range(1, LEVELS + 1):
            keep = ceiling(level / LEVELS * len(found))
            # The threshold is the next example's: given it, those below are a sample of all that the rule predicts.
            limit = float(ordered[keep]) if keep < len(found) else math.inf
            kept = int((ordered < limit).sum())
            if kept:
                tried.append((limit, int(total[kept - 1]), kept))
                if at_most(*tried[-1][1:], risk) <= delta:  # the bound is at most the risk
                    best = tried[-1]
        if best is None:
            least = min(upper_bound(*each[1:], delta) for each in tried)
            raise ValueError(
                f"no threshold keeps the error rate at risk={risk:g} for sure: of {len(found)} held-out examples the "
                f"best bound is {least:.3g}. Give more of them, ask for more risk or less confidence={confidence:g}, "
                f"or improve the model (errors without abstention: {float(errors.double().mean()):.3g})"
            )
        limit, missed, kept = best
        return Abstention(limit, score, kept / len(found), missed / kept, upper_bound(missed, kept, delta))

    def abstains(self, predictions: Any) -> Tensor:
        """For which examples no prediction is made, bool [N]."""
        return ~(uncertainty(predictions, self.score) < self.threshold)

    def __call__(self, predictions: Any) -> Tensor:
        """The most probable class of every example, −1 where the rule abstains, int64 [N].

        Real targets have no class: there ``abstains`` says where not to answer.
        """
        if isinstance(getattr(predictions, "likelihood", None), Gaussian):
            raise TypeError("predictions of real targets have no classes: call abstains(predictions), a mask")
        classes = class_probabilities(predictions).argmax(-1)
        return classes.masked_fill(self.abstains(predictions), ABSTAIN)


def _errors(predictions: Any, targets: Any, wrong: Any) -> Tensor:
    if wrong is None:
        p = class_probabilities(predictions)
        return p.argmax(-1) != targets_of(targets, p)
    if targets is not None:
        raise TypeError("pass targets or wrong, not both: wrong says by itself which predictions are errors")
    errors = as_tensor(wrong)
    if not ((errors == 0) | (errors == 1)).all():
        raise ValueError("wrong holds 0 (right) or 1 (wrong) for every example")
    return errors.bool()
