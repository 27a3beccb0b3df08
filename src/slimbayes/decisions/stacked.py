"""Components weighted after training, by how well their mixture predicts held-out data (stacking)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slimbayes.core.conversion import find_record, unwrap
from slimbayes.core.likelihoods import Categorical, Likelihood
from slimbayes.core.predict import predict
from slimbayes.core.predictive import Predictive
from slimbayes.verbs.evaluation import arguments, as_pair
from slimbayes.verbs.stacking import stack


@dataclass(frozen=True, eq=False)
class Stacking:
    """Weights of a model's members, [M], and how its draws are made: p(y|x) = Σ_m w_m p_m(y|x).

    Members are the components (Rank1, BatchEnsemble, DeepEnsemble), whose samples share a weight; or single draws of
    one seed, each one function for all inputs (every other method: a draw of EMP is a choice of patches). Fitted by
    ``stack_components``, or from predictions by ``Stacking.of``. ``nll`` and ``uniform_nll`` are those of the mixture
    on the held-out data, with these weights and with equal ones.

    >>> from slimbayes.core.likelihoods import Gaussian
    >>> draws = torch.tensor([[0.0], [0.1], [5.0], [5.1]]).expand(4, 3)  # 2 components, 2 samples each
    >>> stacking = Stacking.of(Gaussian().predictive(draws), torch.zeros(3), members=2)
    >>> stacking.weights.round(decimals=3), stacking(Gaussian().predictive(draws)).mean[:1]
    (tensor([1., 0.]), tensor([0.0500]))
    """

    weights: Tensor
    nll: float = math.nan
    uniform_nll: float = math.nan
    samples: int = 1
    noise: str = "example"
    seed: int | None = None
    likelihood: Likelihood = field(default_factory=Categorical)

    @staticmethod
    def of(predictive: Predictive, targets: Tensor, members: int, tolerance: float = 1e-6) -> Stacking:
        """Weights of the ``members`` groups of draws (component-major) of a held-out predictive."""
        draws = predictive.draws
        _check_members(len(draws), members)
        log_p = _by_member(predictive.likelihood.log_prob(draws, targets), members)
        return _fitted(log_p, tolerance, likelihood=predictive.likelihood)

    def __call__(self, predictive: Predictive) -> Predictive:
        """The predictive with these weights: each member's shared equally by its draws."""
        draws = len(predictive.draws)
        _check_members(draws, len(self.weights))
        return predictive.reweighted(_per_draw(self.weights, draws))

    def predict(
        self, model: nn.Module, *inputs: Any, samples: int | None = None, **options: Any
    ) -> Predictive:
        """``sb.predict`` with these weights, with draws made as they were for the fit.

        ``samples`` per component may be another number; where members are single draws they are what was weighted.
        """
        count = self.samples if samples is None else samples
        components = find_record(model).components
        if len(self.weights) != (components if components > 1 else count):
            raise ValueError(
                f"{len(self.weights)} weights do not fit {components} components with {count} samples each: predict "
                "with the model and, where single draws were weighted, the samples of the fit"
            )
        named = {"noise": self.noise, "seed": self.seed, "likelihood": self.likelihood, **options}
        return self(predict(model, *inputs, samples=count, **named))


@torch.no_grad()
def stack_components(
    model: nn.Module,
    batches: Iterable[Any],
    samples: int = 1,
    seed: int = 0,
    likelihood: Likelihood | None = None,
    *,
    tolerance: float = 1e-6,
    select: Callable[[Any], Tensor] | None = None,
) -> Stacking:
    """Weights of a trained model's components, or of its draws where it has none, fitted on held-out data.

        w = argmax (1/N) Σ_n log Σ_m w_m (1/S) Σ_s p(y_n|x_n, m, s)

    ``batches``: an iterable of (inputs, targets) as in ``sb.evaluate``, of data that the model was not trained on.
    For models without components ``samples`` is the number of draws to be weighted, under the ``seed`` that makes
    them. Never worse than equal weights on these data; on others by as much as they are enough to tell.

    >>> import slimbayes as sb
    >>> net = sb.bayesianize(nn.Linear(3, 2), sb.BatchEnsemble(components=3))
    >>> x, y = torch.randn(50, 3), torch.randint(2, (50,))
    >>> stacking = stack_components(net, [(x, y)])
    >>> stacking.weights.shape, stacking.nll <= stacking.uniform_nll, stacking.predict(net, x).mean.shape
    (torch.Size([3]), True, torch.Size([50, 2]))
    """
    record = find_record(model)
    members = record.components if record.components > 1 else samples
    if members < 2:
        raise ValueError(
            "one component and one sample leave nothing to weigh: for a model without components give the number of "
            "draws to weigh, such as samples=16"
        )
    noise = (
        "example" if record.components > 1 else "shared"
    )  # a weighted draw must be one function for all inputs
    chosen = Categorical() if likelihood is None else likelihood
    device = next((p.device for p in unwrap(model).parameters()), None)
    parts, place = [], 0
    for number, batch in enumerate(batches):
        moved = pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch)
        inputs, targets = as_pair(moved, number)
        args, named = arguments(inputs)
        made = predict(
            model, *args, samples=samples, noise=noise, seed=seed, likelihood=chosen, select=select,
            first_example=place, **named,
        )  # fmt: skip
        parts.append(_by_member(made.likelihood.log_prob(made.draws, targets), members).cpu())
        place += len(made)
    if not parts:
        raise ValueError("there is nothing to fit weights on: batches gave no example")
    return _fitted(torch.cat(parts, 1), tolerance, samples, noise, seed, chosen)


def _fitted(
    log_p: Tensor,
    tolerance: float,
    samples: int = 1,
    noise: str = "example",
    seed: int | None = None,
    likelihood: Likelihood | None = None,
) -> Stacking:
    """The weights for log p_m(y_n), float64 [M, N]."""
    weights = stack(log_p, tolerance=tolerance)
    nll, uniform = (
        -float((log_p + w.double().log().unsqueeze(1)).logsumexp(0).mean())
        for w in (weights, torch.full_like(weights, 1 / len(weights)))
    )
    kind = Categorical() if likelihood is None else likelihood
    return Stacking(weights.float(), nll, uniform, samples, noise, seed, kind)


def _by_member(log_prob: Tensor, members: int) -> Tensor:
    """log (1/S) Σ_s p_ms of log-probabilities [M·S, N], float64 [M, N]."""
    apart = log_prob.double().unflatten(0, (members, -1))
    mean: Tensor = apart.logsumexp(1) - math.log(apart.shape[1])
    return mean


def _per_draw(weights: Tensor, draws: int) -> Tensor:
    each = draws // len(weights)
    return weights.repeat_interleave(each) / each


def _check_members(draws: int, members: int) -> None:
    if members < 1 or draws % members:
        raise ValueError(
            f"{draws} draws are no multiple of {members} members: give the number of components, whose samples come "
            "one after the other"
        )
