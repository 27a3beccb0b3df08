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

from slimbayes import aliases
from slimbayes.core.context import RowError
from slimbayes.core.convert import bayesianize
from slimbayes.core.draws import draw
from slimbayes.core.likelihoods import Bernoulli, Categorical, Gaussian, NotFiniteError
from slimbayes.core.methods import (
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
from slimbayes.core.objective import ELBO, LinearAnnealing, StepAnnealing, elbo, kl, parameter_groups
from slimbayes.core.paths import attach_later
from slimbayes.core.predictive import Predictive
from slimbayes.core.priors import (
    Cauchy,
    EmpiricalNormal,
    HalfCauchy,
    HeNormal,
    LogNormal,
    Neutral,
    Normal,
    RelativeNormal,
)

if TYPE_CHECKING:
    from slimbayes import analysis, decisions, metrics
    from slimbayes.accelerate.compile.entry import compile
    from slimbayes.accelerate.switches import fast_paths
    from slimbayes.core.predict import predict
    from slimbayes.lab import data, models
    from slimbayes.training import FitResult, ManyResult, Training, TrainingError, fit, fit_many
    from slimbayes.verbs import exporting as export
    from slimbayes.verbs.adapters import adapt
    from slimbayes.verbs.checkpoint import CheckpointError, load, save
    from slimbayes.verbs.compression import compress
    from slimbayes.verbs.diagnosis import Diagnosis, diagnose
    from slimbayes.verbs.evaluation import evaluate
    from slimbayes.verbs.finiteness import check_finite
    from slimbayes.verbs.freezing import Frozen, freeze
    from slimbayes.verbs.merging import merge, unmerge
    from slimbayes.verbs.stacking import stack
    from slimbayes.verbs.summary import Summary, summary

__version__ = "0.1.0"

# What not everybody needs, imported when one of these is first asked for: the room itself under its own name or the
# names in it.
_LATE = {
    "accelerate.compile.entry": ("compile",),
    "accelerate.switches": ("fast_paths",),
    "analysis": (),
    "core.predict": ("predict",),
    "data": (),
    "decisions": (),
    "experiments": (),
    "export": (),
    "metrics": (),
    "models": (),
    "training": ("FitResult", "ManyResult", "Training", "TrainingError", "fit", "fit_many"),
    "verbs.adapters": ("adapt",),
    "verbs.checkpoint": ("CheckpointError", "load", "save"),
    "verbs.compression": ("compress",),
    "verbs.diagnosis": ("Diagnosis", "diagnose"),
    "verbs.evaluation": ("evaluate",),
    "verbs.finiteness": ("check_finite",),
    "verbs.freezing": ("Frozen", "freeze"),
    "verbs.merging": ("merge", "unmerge"),
    "verbs.stacking": ("stack",),
    "verbs.summary": ("Summary", "summary"),
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
    "EmpiricalNormal",
    "RelativeNormal",
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
    "Neutral",
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


aliases.install()


def _attach() -> None:
    """Attach the fast paths; without the folder that has them, core goes its own way."""
    try:
        import_module("slimbayes.accelerate.registry")
    except ModuleNotFoundError as problem:
        if problem.name not in ("slimbayes.accelerate", "slimbayes.accelerate.registry"):
            raise


attach_later(_attach)

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
