"""Peers on the same networks: each converted as its documentation says, its own KL in the loss.

None of them is a dependency: the packages are imported when a worker of the peers' environment builds them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Objective = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Family:
    """How a peer makes a network Bayesian, its KL (None: it has none), and how many members it has.

    ``channels_last``: whether its weights may have that layout; inputs have it in any case.
    """

    convert: Callable[[nn.Module], nn.Module]
    penalty: Callable[[nn.Module], Callable[[], Tensor]] | None = None
    components: int = 1
    channels_last: bool = True

    def objective(self, model: nn.Module, num_data: int) -> Objective:
        """Cross-entropy plus KL / num_data; a batch ensemble's targets are repeated for its members."""
        members = self.components
        if self.penalty is None:

            def plain(x: Tensor, y: Tensor) -> Tensor:
                return nn.functional.cross_entropy(model(x), y.repeat(members))

            return plain
        kl = self.penalty(model)

        def objective(x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            return (loss + kl() / num_data).sum()  # some return a vector of one

        return objective

    def prediction(self, model: nn.Module, samples: int) -> Callable[[Tensor], Tensor]:
        """The mean of the probabilities of so many passes, or of one pass over all members."""
        members = self.components

        def function(x: Tensor) -> Tensor:
            if members > 1:
                logits: Tensor = model(x)
                probabilities: Tensor = logits.softmax(-1).unflatten(0, (members, -1)).mean(0)
                return probabilities
            return torch.stack([model(x).softmax(-1) for _ in range(samples)]).mean(0)

        return function


def replace_layers(network: nn.Module, change: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """The network with every layer that ``change`` has an answer for replaced, at any depth.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    >>> replace_layers(net, lambda m: nn.Identity() if isinstance(m, nn.Linear) else None)[0]
    Identity()
    """
    for name, child in list(network.named_children()):
        other = change(child)
        if other is None:
            replace_layers(child, change)
        else:
            setattr(network, name, other)
    return network


def convolution(layer: nn.Conv2d) -> dict[str, Any]:
    """A convolution's arguments; padding "same" as a number, which some peers need.

    >>> convolution(nn.Conv2d(3, 8, 5, padding="same"))["padding"]
    (2, 2)
    """
    padding: Any = layer.padding
    if padding == "same":
        padding = tuple(size // 2 for size in layer.kernel_size)
    return {
        "in_channels": layer.in_channels,
        "out_channels": layer.out_channels,
        "kernel_size": layer.kernel_size,
        "stride": layer.stride,
        "padding": padding,
        "dilation": layer.dilation,
        "groups": layer.groups,
        "bias": layer.bias is not None,
    }


def _each(network: nn.Module, linear: Callable[..., nn.Module], conv: Callable[..., nn.Module]) -> nn.Module:
    """Every dense layer and every convolution as a peer's own layer of the same size."""

    def change(layer: nn.Module) -> nn.Module | None:
        if isinstance(layer, nn.Linear):
            return linear(
                in_features=layer.in_features, out_features=layer.out_features, bias=layer.bias is not None
            )
        return conv(**convolution(layer)) if isinstance(layer, nn.Conv2d) else None

    return replace_layers(network, change)


def _bayesian_torch(kind: str) -> Callable[[nn.Module], nn.Module]:
    def convert(network: nn.Module) -> nn.Module:
        for layer in network.modules():
            if isinstance(layer, nn.Conv2d):
                layer.padding = convolution(layer)["padding"]
        prior = {
            "prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0,
            "type": kind, "moped_enable": True, "moped_delta": 0.1,
        }  # fmt: skip
        importlib.import_module("bayesian_torch.models.dnn_to_bnn").dnn_to_bnn(network, prior)
        return network

    return convert


def _bayesian_torch_kl(model: nn.Module) -> Callable[[], Tensor]:
    get_kl_loss = importlib.import_module("bayesian_torch.models.dnn_to_bnn").get_kl_loss
    return lambda: get_kl_loss(model)


def _torchbnn(network: nn.Module) -> nn.Module:
    bnn = importlib.import_module("torchbnn")

    def linear(**options: Any) -> nn.Module:
        layer: nn.Module = bnn.BayesLinear(prior_mu=0, prior_sigma=0.1, **options)
        return layer

    def conv(**options: Any) -> nn.Module:
        layer: nn.Module = bnn.BayesConv2d(prior_mu=0, prior_sigma=0.1, **options)
        return layer

    return _each(network, linear, conv)


def _torchbnn_kl(model: nn.Module) -> Callable[[], Tensor]:
    loss = importlib.import_module("torchbnn.functional").bayesian_kl_loss
    return lambda: loss(model, reduction="sum")


def _blitz(network: nn.Module) -> nn.Module:
    modules = importlib.import_module("blitz.modules")
    return _each(network, modules.BayesianLinear, modules.BayesianConv2d)


def _blitz_kl(model: nn.Module) -> Callable[[], Tensor]:
    divergence = importlib.import_module("blitz.losses").kl_divergence_from_nn
    return lambda: divergence(model)


def _bare(*packages: str) -> None:
    """Let packages' files be imported without their __init__, which imports torchvision and Lightning."""
    for name in packages:
        if name not in sys.modules:
            parent, _, child = name.rpartition(".")
            if parent:
                places = [f"{place}/{child}" for place in sys.modules[parent].__path__]
            else:
                spec = importlib.util.find_spec(name)
                if spec is None:
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
                places = list(spec.submodule_search_locations or ())
            module = types.ModuleType(name)
            module.__path__ = places
            sys.modules[name] = module


def _torch_uncertainty(part: str) -> Any:
    _bare("torch_uncertainty", *(f"torch_uncertainty.{name}" for name in ("utils", "losses", "methods")))
    return importlib.import_module(f"torch_uncertainty.{part}")


def _uncertain(network: nn.Module) -> nn.Module:
    layers = _torch_uncertainty("layers")
    return _each(network, layers.BayesLinear, layers.BayesConv2d)


def _uncertain_kl(model: nn.Module) -> Callable[[], Tensor]:
    divergence: Callable[[], Tensor] = _torch_uncertainty("losses.bayesian").KLDiv(model)
    return divergence


def _uncertain_ensemble(network: nn.Module) -> nn.Module:
    layers = _torch_uncertainty("layers")
    # Its own conversion fails on nested networks, so that its layers are put in place here.
    converted = _each(
        network,
        lambda **options: layers.BatchLinear(num_estimators=4, **options),
        lambda **options: layers.BatchConv2d(num_estimators=4, **options),
    )
    ensemble = _torch_uncertainty("methods.batch_ensemble").BatchEnsemble
    wrapped: nn.Module = ensemble(converted, 4, repeat_training_inputs=True)
    return wrapped


FAMILIES = {
    "bayesian-torch": Family(_bayesian_torch("Reparameterization"), _bayesian_torch_kl),
    "bayesian-torch-flipout": Family(_bayesian_torch("Flipout"), _bayesian_torch_kl),
    "torchbnn": Family(_torchbnn, _torchbnn_kl, channels_last=False),  # its KL views weights as vectors
    "blitz": Family(_blitz, _blitz_kl),
    "torch-uncertainty": Family(_uncertain, _uncertain_kl),
    "torch-uncertainty-batchensemble": Family(_uncertain_ensemble, None, 4),
}
