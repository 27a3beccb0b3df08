"""slimbayes: make any PyTorch network Bayesian for about one percent more parameters.

>>> import torch, slimbayes as sb
>>> net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
>>> model = sb.bayesianize(net, sb.Rank1(components=4))
>>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
>>> loss = sb.elbo(sb.draw(model, x), y, model, num_data=1000).loss
>>> sb.predict(model, x, samples=8).mean.shape
torch.Size([8, 3])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slimbayes.context import RowError
from slimbayes.convert import bayesianize
from slimbayes.draws import draw
from slimbayes.evaluate import evaluate
from slimbayes.fast import fast_paths
from slimbayes.likelihoods import Bernoulli, Categorical, Gaussian, NotFiniteError
from slimbayes.methods import (
    ECMP,
    EMP,
    BatchEnsemble,
    DeepEnsemble,
    Deterministic,
    DropConnect,
    KTied,
    MCDropout,
    MeanField,
    Rank1,
)
from slimbayes.objective import ELBO, LinearAnnealing, StepAnnealing, elbo, kl, parameter_groups
from slimbayes.predict import predict
from slimbayes.predictive import Predictive
from slimbayes.priors import Cauchy, HalfCauchy, HeNormal, LogNormal, Normal
from slimbayes.summary import Summary, summary

if TYPE_CHECKING:
    from slimbayes import analysis, data, decisions, export, metrics, models
    from slimbayes.adapting import adapt
    from slimbayes.checkpoint import CheckpointError, load, save
    from slimbayes.compiling import compile
    from slimbayes.compressing import compress
    from slimbayes.diagnosis import Diagnosis, diagnose
    from slimbayes.frozen import Frozen, freeze
    from slimbayes.health import check_finite
    from slimbayes.merging import merge, unmerge
    from slimbayes.stacking import stack
    from slimbayes.training import FitResult, ManyResult, Training, TrainingError, fit, fit_many

__version__ = "0.1.0"

# Rooms that not everybody needs, imported when one of these is first asked for. None of their names may be that of
# a room itself: importing the room would put the module in the place of what it holds.
_LATE = {
    "adapting": ("adapt",),
    "analysis": (),
    "checkpoint": ("CheckpointError", "load", "save"),
    "compiling": ("compile",),
    "compressing": ("compress",),
    "data": (),
    "decisions": (),
    "diagnosis": ("Diagnosis", "diagnose"),
    "export": (),
    "frozen": ("Frozen", "freeze"),
    "health": ("check_finite",),
    "merging": ("merge", "unmerge"),
    "metrics": (),
    "models": (),
    "stacking": ("stack",),
    "training": ("FitResult", "ManyResult", "Training", "TrainingError", "fit", "fit_many"),
}

__all__ = [
    "ECMP",
    "ELBO",
    "EMP",
    "BatchEnsemble",
    "Bernoulli",
    "Categorical",
    "Cauchy",
    "CheckpointError",
    "DeepEnsemble",
    "Deterministic",
    "Diagnosis",
    "DropConnect",
    "FitResult",
    "Frozen",
    "Gaussian",
    "HalfCauchy",
    "HeNormal",
    "KTied",
    "LinearAnnealing",
    "LogNormal",
    "MCDropout",
    "ManyResult",
    "MeanField",
    "Normal",
    "NotFiniteError",
    "Predictive",
    "Rank1",
    "RowError",
    "StepAnnealing",
    "Summary",
    "Training",
    "TrainingError",
    "adapt",
    "analysis",
    "bayesianize",
    "check_finite",
    "compile",
    "compress",
    "data",
    "decisions",
    "diagnose",
    "draw",
    "elbo",
    "evaluate",
    "export",
    "fast_paths",
    "fit",
    "fit_many",
    "freeze",
    "kl",
    "load",
    "merge",
    "metrics",
    "models",
    "parameter_groups",
    "predict",
    "save",
    "stack",
    "summary",
    "unmerge",
]


if not TYPE_CHECKING:  # or no misspelt name would be an error to a type checker

    def __getattr__(name: str) -> Any:
        for room, names in _LATE.items():
            if name == room or name in names:
                module = import_module(f"slimbayes.{room}")
                value = globals()[name] = module if name == room else getattr(module, name)
                return value
        raise AttributeError(f"module 'slimbayes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
