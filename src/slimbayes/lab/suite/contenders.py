"""What the suite compares: our methods with their defaults, and what a user would take instead, with its own."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import slimbayes as sb
from slimbayes.containers.datasets import Split
from slimbayes.core.methods import Method
from slimbayes.core.predictive import Predictive
from slimbayes.lab.suite import training
from slimbayes.lab.suite.data import Task, table
from slimbayes.lab.suite.estimators import ON_TABLES, settings
from slimbayes.lab.suite.pairs import Pair
from slimbayes.lab.suite.training import DRAWS, Answer
from slimbayes.verbs.method_text import parse_method

Contender = Callable[[Pair, Task, int], Answer]
PLAIN = "plain"
OURS: dict[str, Method] = {
    "Rank1": sb.Rank1(),
    "BatchEnsemble": sb.BatchEnsemble(),
    "KTied": sb.KTied(),
    "MeanField": sb.MeanField(),
    "EMP": sb.EMP(),
    "ECMP": sb.ECMP(),
    "MCDropout": sb.MCDropout(),
    "DropConnect": sb.DropConnect(),
}


@dataclass
class _Trained:
    """A plain network and its loss, for what starts from one."""

    network: nn.Module
    likelihood: sb.Gaussian | sb.Categorical


def _train(
    pair: Pair, task: Task, seed: int, after: Callable[[float, nn.Module], None] | None = None
) -> _Trained:
    network, likelihood = training.start(pair, task, seed), training.likelihood_of(task)
    groups: list[dict[str, Any]] = [{"params": network.parameters(), "weight_decay": training.decay(pair)}]
    optimizer = training.make_optimizer(pair, groups)
    network.train()
    for inputs, targets, done in training.batches(pair, task, seed):
        training.set_rate(optimizer, pair, done)
        loss = _loss(likelihood, network(inputs).unsqueeze(0), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if after is not None:
            after(done, network)
    return _Trained(network.eval(), likelihood)


def _loss(likelihood: sb.Gaussian | sb.Categorical, draws: Tensor, targets: Tensor) -> Tensor:
    """The nll; a noise that is learned follows the residuals, as in ``sb.elbo``."""
    if isinstance(likelihood, sb.Gaussian) and likelihood.follows(draws):
        return -likelihood.followed(draws, targets).mean()
    return -likelihood.log_prob(draws, targets).mean()


def _of_draws(draws: Callable[[Tensor], Tensor], likelihood: Any) -> Answer:
    def answer(inputs: Tensor, first: int) -> Predictive:
        with torch.no_grad():
            return likelihood.predictive(draws(inputs))  # type: ignore[no-any-return]

    return answer


def _held_out(task: Task) -> tuple[Task, Split]:
    """The task with the last tenth of its rows set apart."""
    cut = len(task.train) * 9 // 10
    return replace(task, train=task.train[:cut]), task.train[cut:]


def temperature_scaling(pair: Pair, task: Task, seed: int) -> Answer:
    """Nine tenths of the rows train a plain network, the rest its temperature or, of a regression, its noise."""
    less, held = _held_out(task)
    trained = _train(pair, less, seed)
    with torch.no_grad():
        outputs = trained.network(held.inputs).unsqueeze(0)
    if task.regression:
        precision = 1 / float((outputs[0] - held.targets).square().mean())
        fitted: Any = sb.Gaussian(precision=precision)
    else:
        fitted = _temperature(outputs, held.targets)
    return _of_draws(lambda x: trained.network(x).unsqueeze(0), fitted)


def _temperature(outputs: Tensor, targets: Tensor) -> sb.Categorical:
    """The likelihood with the temperature of least nll; with none where there is no least: all right, or all wrong."""
    right = outputs[0].argmax(-1) == targets
    if right.all() or not right.any():
        return sb.Categorical()
    return sb.decisions.Temperature().fit(outputs, targets).likelihood  # type: ignore[no-any-return]


def ensemble(pair: Pair, task: Task, seed: int) -> Answer:
    """Five plain networks, each trained by itself: the first is the plain network of this seed."""
    trained = [_train(pair, task, seed + 100 * member) for member in range(5)]

    def draws(x: Tensor) -> Tensor:
        return torch.stack([_with_noise(one, one.network(x)) for one in trained])

    return _of_draws(draws, sb.Gaussian(learn="per_example") if task.regression else trained[0].likelihood)


def _with_noise(trained: _Trained, mean: Tensor) -> Tensor:
    """Outputs of a regression beside the log precision of the network's own noise."""
    precision = getattr(trained.likelihood, "log_precision", None)
    return mean if precision is None else torch.cat([mean, precision.expand_as(mean)], -1)


_RANK = 20  # columns of SWAG's low-rank part: Maddox et al. 2019, section 4


def swag(pair: Pair, task: Task, seed: int) -> Answer:
    """Mean, diagonal and low-rank spread of the weights over the last quarter of the run (Maddox et al. 2019)."""
    kept: list[Tensor] = []
    steps = max(1, len(task.train) // pair.batch * pair.epochs // (4 * _RANK))
    count = [0]

    def after(done: float, network: nn.Module) -> None:
        if done >= 0.75:
            if count[0] % steps == 0:
                kept.append(parameters_to_vector(network.parameters()).detach().clone())
            count[0] += 1

    trained = _train(pair, task, seed, after)
    states = torch.stack(kept)
    mean, variance = states.mean(0), states.var(0, correction=0)
    apart = (states - mean)[-_RANK:]
    generator = torch.Generator().manual_seed(seed)
    networks = []
    for _ in range(DRAWS):
        # θ = mean + Σ_diag^½ z₁ / √2 + D z₂ / √(2 (K − 1))
        z1 = torch.randn(mean.shape, generator=generator).to(mean)
        z2 = torch.randn(len(apart), generator=generator).to(mean)
        low = apart.T @ z2 / (2 * max(1, len(apart) - 1)) ** 0.5
        network = copy.deepcopy(trained.network)
        vector_to_parameters(mean + variance.sqrt() * z1 / 2**0.5 + low, network.parameters())
        networks.append(_statistics(network, task.train.inputs))
    return _of_draws(lambda x: torch.stack([network(x) for network in networks]), trained.likelihood)


def _statistics(network: nn.Module, inputs: Tensor) -> nn.Module:
    """BatchNorm's statistics anew, as SWAG's samples need them."""
    norms = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain mean over batches
        network.train()
        with torch.no_grad():
            for first in range(0, min(len(inputs), 2000) - 1, 200):
                network(inputs[first : first + 200])
    return network.eval()


def laplace(pair: Pair, task: Task, seed: int) -> Answer:
    """Last-layer Laplace of laplace-torch with its defaults: Kronecker factors, marginal likelihood, probit."""
    Laplace = importlib.import_module("laplace").Laplace

    trained = _train(pair, task, seed)
    rows = torch.utils.data.TensorDataset(task.train.inputs, task.train.targets)
    loader = torch.utils.data.DataLoader(rows, batch_size=256)
    posterior = Laplace(trained.network, "regression" if task.regression else "classification")
    posterior.fit(loader)
    if not task.regression:
        posterior.optimize_prior_precision(method="marglik")
        return _of_draws(lambda x: posterior(x).clamp_min(1e-12).log().unsqueeze(0), sb.Categorical())
    precision: Any = getattr(trained.likelihood, "log_precision")  # noqa: B009 - of Gaussians alone
    noise = float(precision.detach().exp()) ** -0.5
    posterior.sigma_noise = torch.tensor(noise)
    posterior.optimize_prior_precision(method="marglik")

    def draws(x: Tensor) -> Tensor:
        mean, variance = posterior(x)
        total = variance.reshape(len(x), -1)[:, : mean.shape[-1]] + noise**2
        return torch.cat([mean, -total.log()], -1).unsqueeze(0)

    return _of_draws(draws, sb.Gaussian(learn="per_example"))


def ivon(pair: Pair, task: Task, seed: int) -> Answer:
    """IVON of ivon-opt as its page has it: lr = 0.1, ess = the rows, one sample a step; cosine to 0."""
    IVON = importlib.import_module("ivon").IVON

    network, likelihood = training.start(pair, task, seed), training.likelihood_of(task)
    optimizer = IVON(network.parameters(), lr=0.1, ess=len(task.train))
    network.train()
    for inputs, targets, done in training.batches(pair, task, seed):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 + math.cos(math.pi * done))
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            _loss(likelihood, network(inputs).unsqueeze(0), targets).backward()
        optimizer.step()
    network.eval()

    def draws(x: Tensor) -> Tensor:
        outputs = []
        for _ in range(DRAWS):
            with optimizer.sampled_params():
                outputs.append(network(x))
        return torch.stack(outputs)

    return _of_draws(draws, likelihood)


RIVALS: dict[str, Contender] = {
    "temperature scaling": temperature_scaling,
    "SWAG": swag,
    "last-layer Laplace": laplace,
    "IVON": ivon,
    "ensemble of 5": ensemble,
}


# Packages that this one does not ask for: they go into an environment of their own, beside it.
_PACKAGES = {"last-layer Laplace": ("laplace", "laplace-torch"), "IVON": ("ivon", "ivon-opt")}


def lacking(name: str, pair: Pair) -> str | None:
    """The package that this contender or pair needs and that is not there."""
    for module, package in filter(None, (_PACKAGES.get(name), pair.needs and (pair.needs, pair.needs))):
        if importlib.util.find_spec(module) is None:
            return package.replace("_", "-")
    return None


def suits(name: str, pair: Pair) -> bool:
    """Whether this contender can take part: estimators have rows of a table and a network of their own."""
    return name not in ON_TABLES or pair.data.kind is table


def contender(name: str) -> tuple[Contender, str]:
    """What goes by this name, and in full what it is; a name of none is a method as text."""
    if name in RIVALS:
        return RIVALS[name], name
    if name in ON_TABLES:
        return ON_TABLES[name], settings(name)
    method = sb.Deterministic() if name == PLAIN else OURS[name] if name in OURS else parse_method(name)
    return lambda pair, task, seed: training.train(pair, task, method, seed), repr(method)
