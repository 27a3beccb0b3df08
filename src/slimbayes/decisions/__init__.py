"""From predictions to decisions: calibration, sets and intervals with a promise, abstention, costs, stacking.

Everything is fitted on held-out data, after training, and takes what ``sb.predict`` gives or plain probabilities.

>>> import torch
>>> from slimbayes import decisions
>>> p = torch.tensor([[0.7, 0.2, 0.1]] * 19)
>>> sets = decisions.ConformalSets("lac", alpha=0.1).fit(p, torch.zeros(19, dtype=torch.long))
>>> sets(p[:1])
tensor([[ True, False, False]])
"""

from slimbayes.decisions.conformal import (
    ConformalSets,
    conformal_quantile,
    coverage_range,
    set_coverage,
    set_size,
)
from slimbayes.decisions.costs import Decisions, least_cost
from slimbayes.decisions.intervals import ConformalIntervals
from slimbayes.decisions.scores import Detector, uncertainty
from slimbayes.decisions.selective import ABSTAIN, Abstention
from slimbayes.decisions.stacked import Stacking, stack_components
from slimbayes.decisions.temperature import Temperature, VarianceScale

__all__ = [
    "ABSTAIN",
    "Abstention",
    "ConformalIntervals",
    "ConformalSets",
    "Decisions",
    "Detector",
    "Stacking",
    "Temperature",
    "VarianceScale",
    "conformal_quantile",
    "coverage_range",
    "least_cost",
    "set_coverage",
    "set_size",
    "stack_components",
    "uncertainty",
]
