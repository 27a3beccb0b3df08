"""The training loop and its settings."""

from slimbayes.training.loop import FitResult, Objective, TrainingError, fit, make_fabric
from slimbayes.training.settings import Training
from slimbayes.training.sources import Source, hold_out, make_source, mixed_seed

__all__ = [
    "FitResult",
    "Objective",
    "Source",
    "Training",
    "TrainingError",
    "fit",
    "hold_out",
    "make_fabric",
    "make_source",
    "mixed_seed",
]
