"""The training loop and its settings."""

from slimbayes.training.faults import Terminated
from slimbayes.training.loop import FitResult, fit
from slimbayes.training.many.fit import ManyResult, fit_many
from slimbayes.training.pull import predicted_spread
from slimbayes.training.settings import Training
from slimbayes.training.sources import Source, hold_out, make_source, mixed_seed
from slimbayes.training.step import Objective, StopTraining, TrainingError, make_fabric

__all__ = [
    "FitResult",
    "ManyResult",
    "Objective",
    "Source",
    "StopTraining",
    "Terminated",
    "Training",
    "TrainingError",
    "fit",
    "fit_many",
    "hold_out",
    "make_fabric",
    "make_source",
    "mixed_seed",
    "predicted_spread",
]
