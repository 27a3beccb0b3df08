"""The loop of the README, for our methods and for what else a user would take."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import slimbayes as sb
from slimbayes.core.methods import Method
from slimbayes.core.predictive import Predictive
from slimbayes.lab.suite.data import Task
from slimbayes.lab.suite.pairs import Pair

Answer = Callable[[Tensor, int], Predictive]  # for inputs, the first of which has this index
Optimizer = torch.optim.Optimizer
DRAWS = 16  # of a prediction, whatever the method


def likelihood_of(task: Task) -> sb.Gaussian | sb.Categorical:
    """Classes, or a mean with noise of one learned precision."""
    return sb.Gaussian(learn="global").to(task.device) if task.regression else sb.Categorical()


def start(pair: Pair, task: Task, seed: int) -> nn.Module:
    """The network of this seed: made on the CPU, for the same numbers everywhere."""
    torch.manual_seed(seed)
    return pair.network(task).to(task.device)


def batches(pair: Pair, task: Task, seed: int) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Inputs, targets, and the part of the run that is done: the same for every contender of this seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    whole = len(task.train) // pair.batch
    for epoch in range(pair.epochs):
        order = torch.randperm(len(task.train), generator=generator)
        for step in range(whole):
            rows = task.train[order[step * pair.batch : (step + 1) * pair.batch]]
            yield rows.inputs, rows.targets, (epoch + step / whole) / pair.epochs


def make_optimizer(pair: Pair, groups: list[dict[str, object]]) -> Optimizer:
    """AdamW at a constant rate, or SGD with momentum, whose rate falls as a cosine."""
    if pair.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=pair.lr)
    return torch.optim.SGD(groups, lr=pair.lr, momentum=0.9, nesterov=True)


def decay(pair: Pair) -> float:
    """The usual weight decay of that optimizer."""
    return 0.01 if pair.optimizer == "adamw" else 5e-4


def set_rate(optimizer: Optimizer, pair: Pair, done: float) -> None:
    """The rate at this part of the run."""
    if pair.optimizer == "sgd":
        for group in optimizer.param_groups:
            group["lr"] = 0.5 * group.setdefault("initial_lr", group["lr"]) * (1 + math.cos(math.pi * done))


def train(pair: Pair, task: Task, method: Method, seed: int) -> Answer:
    """A network converted to ``method``, trained as the README does it; how it answers."""
    model = sb.bayesianize(start(pair, task, seed), method)
    likelihood = likelihood_of(task)
    groups = sb.parameter_groups(model, lr=pair.lr, weight_decay=decay(pair))
    optimizer = make_optimizer(pair, groups)
    model.train()
    for inputs, targets, done in batches(pair, task, seed):
        set_rate(optimizer, pair, done)
        draws = sb.draw(model, inputs)
        loss = sb.elbo(draws, targets, model, num_data=len(task.train), likelihood=likelihood).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return answer_of(model, likelihood, method, seed)


def answer_of(
    model: nn.Module, likelihood: sb.Gaussian | sb.Categorical, method: Method, seed: int
) -> Answer:
    """Predictions by ``DRAWS`` draws, of one each where nothing is random."""
    samples = max(1, DRAWS // method.traits.components) if method.traits.noisy else 1

    def answer(inputs: Tensor, first: int) -> Predictive:
        return sb.predict(
            model, inputs, samples=samples, seed=seed, likelihood=likelihood, first_example=first
        )

    return answer
