"""The training loop of the estimators: a weighted ELBO over the rows of a table, in torch alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from slimbayes.core.conversion import find_record
from slimbayes.core.draws import draw
from slimbayes.core.likelihoods import Gaussian, Likelihood
from slimbayes.core.methods import MCDropout
from slimbayes.core.objective import LinearAnnealing, elbo, parameter_groups
from slimbayes.core.predict import predict, scored

BATCH = 64  # of batch_size="auto"


class Weighted(nn.Module):
    """A likelihood whose rows count w_b times: log p(y_b|x_b, d)^w_b, [D, B].

    >>> from slimbayes.core.likelihoods import Bernoulli
    >>> Weighted(Bernoulli(), torch.tensor([2.0])).log_prob(torch.zeros(1, 1), torch.ones(1))
    tensor([[-1.3863]])
    """

    def __init__(self, likelihood: Likelihood, weights: Tensor) -> None:
        super().__init__()
        self.likelihood = likelihood
        self.weights = weights

    def log_prob(self, draws: Tensor, targets: Tensor) -> Tensor:
        """w_b log p(y_b|x_b, d), [D, B]."""
        return self.weights * self.likelihood.log_prob(draws, targets)

    def follows(self, draws: Tensor) -> bool:
        """Whether the likelihood's noise is that of the residuals of these draws."""
        return isinstance(self.likelihood, Gaussian) and self.likelihood.follows(draws)

    def followed(self, draws: Tensor, targets: Tensor, mixture: bool) -> Tensor:
        """``log_prob`` at the noise of these residuals too, by the rows' weights."""
        assert isinstance(self.likelihood, Gaussian)
        return self.weights * self.likelihood.followed(draws, targets, mixture, self.weights)


@dataclass(frozen=True)
class Rows:
    """Inputs, targets and weights of a table; ``weights`` is None where every row counts as much.

    ``total`` is the sum of the weights: rows that count c times each have total = c · rows.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor | None
    total: float

    def __len__(self) -> int:
        return len(self.inputs)

    def batches(self, size: int, shuffle: bool = True) -> Iterator[Rows]:
        """All rows once, in random batches of nearly equal size; a table of one batch keeps its order."""
        count = math.ceil(len(self) / size)
        if count == 1:
            yield self
            return
        order = torch.randperm(len(self)) if shuffle else torch.arange(len(self))
        for index in torch.tensor_split(order.to(self.inputs.device), count):
            weights = None if self.weights is None else self.weights[index]
            yield Rows(self.inputs[index], self.targets[index], weights, self.total)


@dataclass(frozen=True)
class Plan:
    """What the loop needs of an estimator's parameters."""

    epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    kl_weight: float
    kl_annealing: float
    samples: int
    noise: str
    num_data: float  # the KL is divided by it
    patience: int | None = None
    decay_lr: bool = True
    say: Callable[[str], None] | None = None


@dataclass
class Outcome:
    """What happened: losses per epoch, and negative log-likelihoods of held-out rows if there were any."""

    losses: list[float] = field(default_factory=list)
    held_out: list[float] = field(default_factory=list)
    epochs: int = 0


def make_optimizer(model: nn.Module, likelihood: Likelihood, plan: Plan) -> torch.optim.Optimizer:
    """AdamW over ``sb.parameter_groups``, and without decay over what the likelihood learns."""
    groups = parameter_groups(model, plan.lr, plan.weight_decay)
    own = list(likelihood.parameters())
    if own:
        groups.append({"params": own, "weight_decay": 0.0})
    return torch.optim.AdamW(groups, lr=plan.lr, fused=_fuses(model))


def _fuses(model: nn.Module) -> bool:
    """Whether one operation can update all parameters: most of a small table's step is calls, not arithmetic."""
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda") for p in model.parameters())


def train_noise(noise: str, model: nn.Module) -> str:
    """The noise of training draws: "auto" is "shared" where that is as good as noise for every row.

    Then a row of weight 2 is the same as the row twice, exactly. Dropout and the estimators "flipout" and "local"
    lower the variance of gradients by noise for every row, and keep it.
    """
    if noise != "auto":
        return noise
    by_row = any(
        isinstance(method, MCDropout) or getattr(method, "estimator", "shared") != "shared"
        for method in find_record(model).methods
    )
    return "example" if by_row else "shared"


def train(
    model: nn.Module,
    likelihood: Likelihood,
    rows: Rows,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    held_out: Rows | None = None,
) -> Outcome:
    """Minimise −Σ_i (w_i/W) E_q[log p(y_i|x_i, θ)] + β KL(q‖p)/N, with W = Σ w_i and N = ``plan.num_data``.

    A batch B of n rows estimates the sum by (n/|B|) Σ_{i∈B}. With ``held_out`` rows the loop ends when their negative
    log-likelihood has not improved for ``plan.patience`` epochs, and puts the best weights back.
    """
    outcome = Outcome()
    likelihood.requires_grad_()
    steps = plan.epochs * math.ceil(len(rows) / plan.batch_size)
    annealing = LinearAnnealing(max(1, round(plan.kl_annealing * steps)))
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    # elbo divides the KL by the number of rows: together with this factor, by num_data.
    per_row = len(rows) / plan.num_data
    best, waited, step = math.inf, 0, 0
    kept: dict[str, dict[str, Tensor]] = {}
    for epoch in range(plan.epochs):
        model.train()
        total = torch.zeros((), device=rows.inputs.device)  # read once an epoch: a GPU does not wait for it
        for batch in rows.batches(plan.batch_size):
            if plan.decay_lr:
                share = 0.5 * (1 + math.cos(math.pi * step / steps))
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * share
            draws = scored(draw(model, batch.inputs, samples=plan.samples, noise=plan.noise))
            counted: Any = likelihood if batch.weights is None else Weighted(likelihood, batch.weights)
            weight = plan.kl_weight * annealing(step) * per_row
            result = elbo(draws, batch.targets, model, len(rows), counted, kl_weight=weight)
            optimizer.zero_grad()
            result.loss.backward()
            optimizer.step()
            total = total + result.loss.detach() * len(batch)
            step += 1
        outcome.losses.append(float(total) / len(rows))
        outcome.epochs = epoch + 1
        message = f"epoch {epoch + 1}: loss {outcome.losses[-1]:.4f}"
        if held_out is not None:
            score = negative_log_likelihood(model, likelihood, held_out, plan)
            outcome.held_out.append(score)
            message += f", held-out negative log-likelihood {score:.4f}"
            waited = 0 if score < best else waited + 1
            if score < best:
                best, kept = score, _state(model, likelihood)
        if plan.say is not None:
            plan.say(message)
        if plan.patience is not None and held_out is not None and waited >= plan.patience:
            break
    if kept:
        model.load_state_dict(kept["model"])
        likelihood.load_state_dict(kept["likelihood"])
    model.eval()
    likelihood.requires_grad_(False)  # what it says of predictions needs no graph
    return outcome


def _state(model: nn.Module, likelihood: Likelihood) -> dict[str, dict[str, Tensor]]:
    parts = {"model": model, "likelihood": likelihood}
    return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}


@torch.no_grad()
def negative_log_likelihood(model: nn.Module, likelihood: Likelihood, rows: Rows, plan: Plan) -> float:
    """−Σ w_i log p(y_i|x_i) / Σ w_i of the mixture of a few draws, the same ones each time."""
    noisy = any(method.traits.noisy for method in find_record(model).methods)
    found = predict(
        model, rows.inputs, samples=4 if noisy else 1, noise="shared", seed=0, likelihood=likelihood
    )
    log_prob = found.log_prob(rows.targets)
    return -float((log_prob if rows.weights is None else rows.weights * log_prob).mean())
