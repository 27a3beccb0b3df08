"""Networks, data and comparisons for the tests of ``fit_many``."""

import copy

import torch
from torch import nn

import slimbayes as sb

METHODS = {
    "Deterministic": sb.Deterministic(),
    "MCDropout": sb.MCDropout(rate=0.2),
    "DropConnect": sb.DropConnect(rate=0.2),
    "EMP": sb.EMP.paper(components=3, patch=("norm",)),
    "ECMP": sb.ECMP.paper(components=3, patch=("norm", "output")),
    "EMP learned": sb.EMP.paper(components=3, patch=("norm",), learn_mixing=True, prior_precision=1.0),
    "ECMP learned": sb.ECMP.paper(components=2, patch=("norm",), learn_mixing=True),
    "Rank1": sb.Rank1.paper(components=2),
    "Rank1 Cauchy": sb.Rank1.paper(components=2, posterior="cauchy"),
    "Rank1 log-normal": sb.Rank1.paper(components=2, posterior="lognormal"),
    "Rank1 additive": sb.Rank1.paper(components=2, perturbation="additive"),
    "Rank1 random input": sb.Rank1.paper(components=2, random="input"),
    "Rank1 by steps": sb.Rank1.paper(components=3, components_per_step=2),
    "BatchEnsemble": sb.BatchEnsemble(components=2),
    "MeanField": sb.MeanField.paper(),
    "MeanField flipout": sb.MeanField.paper(estimator="flipout"),
    "MeanField local": sb.MeanField.paper(estimator="local"),
    "KTied": sb.KTied.paper(rank=2),
    "KTied flipout": sb.KTied.paper(rank=1, estimator="flipout"),
    "KTied local": sb.KTied.paper(rank=2, estimator="local"),
    "DeepEnsemble": sb.DeepEnsemble(members=3),
}
SETTINGS = {"steps": 11, "batch_size": 6, "lr": 0.003, "log_every": 4, "progress": False, "accelerator": "cpu",
            "precision": "64-true", "optimizer": "sgd"}  # fmt: skip


def network(width=5):
    layers = [nn.BatchNorm1d(3), nn.Linear(3, width), nn.ReLU(), nn.BatchNorm1d(width), nn.Linear(width, 1)]
    return nn.Sequential(*layers).double()


def networks(method, count=3, make=network):
    torch.manual_seed(0)
    return [sb.bayesianize(make(), method) for _ in range(count)]


def table(seed, rows=23):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=source, dtype=torch.float64)
    return x, x[:, :1].sin() + 0.1 * torch.randn(rows, 1, generator=source, dtype=torch.float64)


def distance(one, other):
    """The largest difference between two lists of models, over all tensors."""
    found = 0.0
    for a, b in zip(one, other, strict=True):
        first, second = a.state_dict(), b.state_dict()
        assert list(first) == list(second)
        for name in first:
            found = max(found, (first[name].double() - second[name].double()).abs().max().item())
    return found


def by_fit(models, data, seeds, likelihood=None, **settings):
    """Copies of the models, trained one by one."""
    trained = copy.deepcopy(models)
    for model, own, seed in zip(trained, data, seeds, strict=True):
        given = copy.deepcopy(likelihood) if likelihood is not None else sb.Gaussian()
        sb.fit(model, own, seed=seed, likelihood=given, **{**SETTINGS, **settings})
    return trained


def by_many(models, data, seeds, likelihood=None, **settings):
    """Copies of the models, trained at once, and the result."""
    trained = copy.deepcopy(models)
    given = likelihood if likelihood is not None else sb.Gaussian()
    result = sb.fit_many(trained, data, seeds=seeds, likelihood=given, **{**SETTINGS, **settings})
    return trained, result
