"""The k-tied paper's tables and figures (Swiatkowski et al., 2020), and ours beside them."""

from __future__ import annotations

from slimbayes.experiments.entry import Experiment

_GRID = {
    "optimizer": "adam",
    "lr": (1e-4, 3e-4, 1e-3, 3e-3),
    "batch_size": 1024,
    "epochs": 300,
    "schedule": "constant",
    "prior scale": (0.2, 0.3),
}
_ANNEALED = {**_GRID, "kl_coefficient": (5e-5, 5e-6), "kl_every": 100}
_FAMILY = {
    "Mean-field": "MeanField(prior=Normal(0, 0.3), stddev_init=0.01)",
    "1-tied": "KTied(rank=1, prior=Normal(0, 0.3), stddev_init=0.01)",
    "2-tied": "KTied(rank=2, prior=Normal(0, 0.3), stddev_init=0.01)",
    "3-tied": "KTied(rank=3, prior=Normal(0, 0.3), stddev_init=0.01)",
}
_TRAINED = {"Mean-field": _FAMILY["Mean-field"]}
_MNIST = "Inputs in [−1, 1]; the last 10,000 training examples are the validation set."
_CIFAR = "Inputs in [0, 1]; the last 10,000 training examples are the validation set."
_ERROR = "standard error over test examples (the paper says: over 100 weight samples)"
ENTRIES: tuple[Experiment, ...] = ()
