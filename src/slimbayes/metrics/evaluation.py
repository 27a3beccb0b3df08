"""``Evaluation``: a few numbers per example, gathered batch by batch, and the metrics that they give."""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimbayes.core.likelihoods import Bernoulli, Categorical, Gaussian
from slimbayes.core.predictive import Predictive, entropy
from slimbayes.metrics.calibration import Reliability, equal_mass_error
from slimbayes.metrics.classification import auc_pr, auroc, target_rank
from slimbayes.metrics.diversity import normalized, pairs_that_differ
from slimbayes.metrics.selective import area_under_risk

_LEVEL = 0.9
_CURVE = tuple(i / 20 for i in range(1, 20))  # levels of the regression calibration curve
_warned: set[str] = set()


class Evaluation:
    """Per-example results of a model, filled by ``update``, joined by ``merge``, summed up by ``compute``.

    Memory grows by about a hundred bytes per example, whatever the number of classes and draws.
    ``components`` is the number of components on the draws axis, for the disagreement. ``target_scaling`` (a
    ``slimbayes.containers.datasets.Scaling``) takes regression back from network units to the original ones.

    >>> evaluation = Evaluation()
    >>> draws = torch.tensor([[[2.0, 0.0], [0.0, 1.0]]])  # one draw, two examples, two classes
    >>> evaluation.update(Categorical().predictive(draws), torch.tensor([0, 0]))
    >>> round(evaluation.compute()["nll"], 4), evaluation.examples["prediction"]
    (0.7201, tensor([0, 1]))
    """

    def __init__(self, components: int = 1, target_scaling: Any = None) -> None:
        self.components = components
        self.target_scaling = target_scaling
        self.classes: int | None = None  # None: regression, or nothing seen yet
        self._parts: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def update(self, predictive: Predictive, targets: Tensor) -> None:
        """Add a batch: a predictive that kept its draws, and its targets."""
        likelihood, draws = predictive.likelihood, predictive.draws
        likelihood.check(draws, targets)
        if isinstance(likelihood, Gaussian):
            classes, columns = None, self._regression(predictive, draws, targets)
        else:
            log_p, labels = _class_rows(likelihood, draws, targets)
            if not len(labels):
                return  # every target ignored
            classes, columns = log_p.shape[-1], _classification(log_p, labels, self.components)
        if self._parts and (classes != self.classes or columns.keys() != self._parts.keys()):
            raise ValueError(
                f"this batch has {_kind(classes)}, those before had {_kind(self.classes)}: use one "
                "Evaluation for each"
            )
        self.classes = classes
        for name, column in columns.items():
            column = column.cpu()  # before float64, which not every device has
            # The confidence keeps its type, in which the edges of bins are rounded too.
            wide = column.is_floating_point() and name != "confidence"
            self._parts.setdefault(name, []).append(column.double() if wide else column)

    def merge(self, other: Evaluation) -> Evaluation:
        """The evaluation of this one's examples and then the other's, say of two processes."""
        mine, theirs = self._settings(), other._settings()
        if self._parts and other._parts and mine != theirs:
            raise ValueError(
                f"cannot merge evaluations of {mine} and {theirs}: they are of different models or tasks"
            )
        first = self if self._parts else other
        merged = Evaluation(first.components, first.target_scaling)
        merged.classes = first.classes
        names = first._parts
        merged._parts = {name: [*self._parts.get(name, ()), *other._parts.get(name, ())] for name in names}
        return merged

    def gather(self) -> Evaluation:
        """The evaluations of all processes of ``torch.distributed`` merged, in the order of their ranks."""
        if not (dist.is_available() and dist.is_initialized()):
            return self
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self)
        merged: Evaluation = functools.reduce(Evaluation.merge, parts)
        return merged

    def __len__(self) -> int:
        return sum(len(part) for part in next(iter(self._parts.values()), ()))

    def __repr__(self) -> str:
        return f"Evaluation({len(self)} examples, {_kind(self.classes) if self._parts else 'empty'})"

    @property
    def examples(self) -> dict[str, Tensor]:
        """Per-example values in the order of the data, on the CPU.

        Classes: target, prediction, confidence, rank, nll, gibbs_nll, brier, entropy, mutual_information,
        with two classes score (the probability of class 1), with several components disagreement; all [N].
        Regression, in original units: target, prediction, lower, upper, variance, epistemic, pit, all [N, T],
        and nll [N] per target.
        """
        if not self._parts:
            raise ValueError("nothing has been evaluated: update with at least one example first")
        self._parts = {name: [torch.cat(parts)] for name, parts in self._parts.items()}
        return {name: parts[0] for name, parts in self._parts.items()}

    def compute(self) -> dict[str, float]:
        """Every metric, as floats; those that are not defined for these data are left out."""
        columns = self.examples
        found = _regression_metrics(columns) if self.classes is None else self._class_metrics(columns)
        found = {name: value for name, value in found.items() if not math.isnan(value)}
        return {**found, "examples": float(len(self))}

    def reliability(self, bins: int = 15) -> dict[str, list[float]]:
        """What a calibration plot shows, as lists.

        Classes: edges, count, confidence and accuracy per bin. Regression: the share of targets inside the
        central interval of each level.
        """
        columns = self.examples
        if self.classes is not None:
            return Reliability.of(columns["confidence"], _correct(columns), bins).to_dict()
        return {"level": list(_CURVE), "coverage": [_covered(columns["pit"], level) for level in _CURVE]}

    def _settings(self) -> tuple[object, ...]:
        return _kind(self.classes), f"{self.components} components", self.target_scaling

    def _class_metrics(self, columns: dict[str, Tensor]) -> dict[str, float]:
        assert self.classes is not None
        confidence, correct = columns["confidence"], _correct(columns)
        bins = Reliability.of(confidence, correct)
        mean = {name: float(column.double().mean()) for name, column in columns.items()}
        accuracy = float(correct.double().mean())
        metrics = {"nll": mean["nll"], "gibbs_nll": mean["gibbs_nll"], "accuracy": accuracy}
        if self.classes >= 10:
            metrics["top_5_accuracy"] = float((columns["rank"] < 5).double().mean())
        metrics |= {
            "ece": bins.ece(),
            "ece_20": Reliability.of(confidence, correct, bins=20).ece(min_count=5),
            "mce": bins.mce(),
            "adaptive_ece": equal_mass_error(confidence, correct),
            "brier": mean["brier"],
            "aurc": area_under_risk(confidence, correct),
            "entropy": mean["entropy"],
            "mutual_information": mean["mutual_information"],
        }
        if "disagreement" in columns:
            metrics["disagreement"] = normalized(mean["disagreement"], accuracy)
        if self.classes == 2:
            metrics |= _binary_metrics(columns)
        return metrics

    def _regression(self, predictive: Predictive, draws: Tensor, targets: Tensor) -> dict[str, Tensor]:
        likelihood = predictive.likelihood
        assert isinstance(likelihood, Gaussian)

        def rows(tensor: Tensor) -> Tensor:
            return tensor.cpu().double().reshape(len(tensor), -1)  # [N, T]

        loc, log_precision = likelihood.components(draws)  # [D, N, ...]
        z = (targets.to(loc).view(loc.shape[1:]) - loc) * (0.5 * log_precision).exp()
        lower, upper = predictive.interval(_LEVEL)
        shift, scale = self._units(rows(predictive.mean).shape[1])
        return {
            **{
                name: rows(tensor) * scale + shift
                for name, tensor in zip(
                    ("target", "prediction", "lower", "upper"),
                    (targets, predictive.mean, lower, upper),
                    strict=True,
                )
            },
            "variance": rows(predictive.variance) * scale.square(),
            "epistemic": rows(predictive.epistemic) * scale.square(),
            "pit": rows(torch.special.ndtr(z).mean(0)),
            # A density per original unit is smaller by the scale: log p(y) = log p(z) − log |dy/dz|.
            "nll": -rows(predictive.log_prob(targets))[:, 0] / len(scale) + scale.log().mean(),
        }

    def _units(self, count: int) -> tuple[Tensor, Tensor]:
        """y = z · scale + shift, per target, float64 [T]."""
        scaling = self.target_scaling
        if scaling is None:
            return torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
        if len(scaling.std) != count:
            raise ValueError(
                f"target_scaling has {len(scaling.std)} columns, the model {count} targets: pass its own"
            )
        mean, std = (torch.tensor(each, dtype=torch.float64) for each in (scaling.mean, scaling.std))
        return mean / scaling.unit, std / scaling.unit


def _kind(classes: int | None) -> str:
    return "real targets" if classes is None else f"{classes} classes"


def _correct(columns: dict[str, Tensor]) -> Tensor:
    return columns["prediction"] == columns["target"]


def _class_rows(likelihood: object, draws: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [D, N, C] and labels [N]; pixels or tokens become examples, ignored ones go."""
    if isinstance(likelihood, Categorical):
        log_p = likelihood.log_probabilities(draws).movedim(likelihood.axis(draws.ndim - 1), -1)
        log_p, labels = log_p.flatten(1, -2), targets.long().flatten()  # [D, N, C], [N]
        ignored = labels == (-1 if likelihood.ignore_index is None else likelihood.ignore_index)
        return (log_p[:, ~ignored], labels[~ignored]) if ignored.any() else (log_p, labels)
    if isinstance(likelihood, Bernoulli):
        if math.prod(draws.shape[2:]) != 1:
            raise ValueError(
                f"Bernoulli draws {list(draws.shape)} have several outputs per example: evaluate one label "
                "at a time, with outputs [N] or [N, 1]; select=lambda output: output[..., 0] takes the first"
            )
        if targets.is_floating_point() and (targets % 1).any():
            raise ValueError("evaluation counts right and wrong: Bernoulli targets are 0 or 1, not fractions")
        return likelihood.log_probabilities(draws).flatten(1, -2), targets.long().flatten()  # [D, N, 2]
    raise TypeError(
        f"cannot evaluate {type(likelihood).__name__}: use sb.Categorical, sb.Bernoulli or sb.Gaussian"
    )


def _classification(log_p: Tensor, labels: Tensor, components: int) -> dict[str, Tensor]:
    """The columns of a batch of log-probabilities [D, N, C]."""
    draws, index = len(log_p), labels.unsqueeze(-1)  # [N, 1]
    log_mean = log_p.logsumexp(0) - math.log(draws)  # [N, C]
    mean = log_mean.exp()
    confidence, prediction = mean.max(-1)
    own = log_p.gather(-1, index.expand(draws, -1, -1)).squeeze(-1)  # [D, N]
    total = entropy(log_mean, -1)
    columns = {
        "target": labels,
        "prediction": prediction,
        "confidence": confidence.clamp_max(1.0),
        "rank": target_rank(mean, labels),
        "nll": -log_mean.gather(-1, index).squeeze(-1),
        "gibbs_nll": -own.mean(0),
        "brier": 1 + mean.square().sum(-1) - 2 * mean.gather(-1, index).squeeze(-1),
        "entropy": total,
        "mutual_information": (total - entropy(log_p, -1).mean(0)).clamp_min(0.0),
    }
    if log_p.shape[-1] == 2:
        columns["score"] = mean[:, 1]
    if components > 1:
        if draws % components:
            raise ValueError(
                f"{draws} draws are no multiple of {components} components: pass the model's number"
            )
        members = log_p.unflatten(0, (components, -1)).logsumexp(1)  # [K, N, C] up to a constant
        columns["disagreement"] = pairs_that_differ(members.argmax(-1).cpu(), log_p.shape[-1])
    return columns


def _binary_metrics(columns: dict[str, Tensor]) -> dict[str, float]:
    labels = columns["target"]
    if labels.min() == labels.max():
        return {}  # one class only: there is nothing to rank
    if importlib.util.find_spec("torchmetrics") is None:
        if "torchmetrics" not in _warned:
            _warned.add("torchmetrics")
            message = (
                "auroc and auc_pr are left out, torchmetrics is missing: pip install 'slimbayes[metrics]'"
            )
            warnings.warn(message, stacklevel=2)
        return {}
    return {"auroc": auroc(columns["score"], labels), "auc_pr": auc_pr(columns["score"], labels)}


def _covered(pit: Tensor, level: float) -> float:
    """The share of targets inside the central interval: those whose |2F(y) − 1| is at most the level."""
    return float(((2 * pit - 1).abs() <= level).double().mean())


def _regression_metrics(columns: dict[str, Tensor]) -> dict[str, float]:
    error = columns["prediction"] - columns["target"]
    density = -float(columns["nll"].mean())
    return {
        "nll": -density,
        "log_predictive_density": density,
        "rmse": float(error.square().mean().sqrt()),
        "mae": float(error.abs().mean()),
        "coverage_90": _covered(columns["pit"], _LEVEL),
        "width_90": float((columns["upper"] - columns["lower"]).mean()),
        "variance": float(columns["variance"].mean()),
        "epistemic": float(columns["epistemic"].mean()),
    }
