"""What models of transformers give and are scored by: likelihoods by problem type, labels, logits of a mixture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from slimbayes.core.conversion import unwrap
from slimbayes.core.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from slimbayes.core.predictive import GaussianPredictive, Predictive

CAUSAL = ("ForCausalLM", "LMHeadModel")  # their labels are those of the next position


def likelihood_of(model: nn.Module) -> Likelihood:
    """The likelihood of a model's ``config.problem_type``; classes where there is none.

    >>> likelihood_of(nn.Linear(1, 1))
    Categorical(class_axis=-1, ignore_index=-100)
    """
    config = getattr(unwrap(model), "config", None)
    kind = getattr(config, "problem_type", None)
    if kind == "multi_label_classification":
        return Bernoulli()
    if kind == "regression" or (kind is None and getattr(config, "num_labels", 2) == 1):
        return Gaussian(learn="global")
    return Categorical()


def mean_logits(found: Predictive) -> Tensor:
    """Network outputs that mean what the mixture means: log p̄, log-odds of p̄, or the mean of real targets.

    >>> import torch
    >>> found = Categorical().predictive(torch.tensor([[[0.0, 0.0]], [[2.0, 0.0]]]))
    >>> mean_logits(found).softmax(-1), found.mean
    (tensor([[0.6904, 0.3096]]), tensor([[0.6904, 0.3096]]))
    """
    if isinstance(found, GaussianPredictive):
        return found.mean
    log_mean = found.moments.log_mean
    return log_mean if isinstance(found.likelihood, Categorical) else log_mean[..., 1] - log_mean[..., 0]


def whole(model: nn.Module, objective: Callable[[nn.Module], Any]) -> Any:
    """The objective; under DistributedDataParallel as its forward pass, which must see the KL to know what is used."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return objective(model)
    inner = model.module
    own = inner.__dict__.get("forward")  # accelerate puts one there

    def restore() -> None:
        inner.__dict__.pop("forward", None)
        if own is not None:
            inner.__dict__["forward"] = own

    def forward() -> Any:
        restore()
        return objective(inner)

    inner.__dict__["forward"] = forward
    try:
        return model()
    finally:
        restore()


def shaped(labels: Tensor, likelihood: Likelihood) -> Tensor:
    """Labels in the type that the likelihood takes: collators make integers of whole real targets.

    >>> import torch
    >>> shaped(torch.tensor([1, 2]), Gaussian()), shaped(torch.tensor([1, 2]), Categorical())
    (tensor([1., 2.]), tensor([1, 2]))
    """
    return labels.float() if isinstance(likelihood, Gaussian) and not labels.is_floating_point() else labels


def base_of(model: nn.Module) -> nn.Module:
    """The model of transformers inside of wrappers and of PEFT's own.

    >>> base_of(nn.Linear(1, 1))
    Linear(in_features=1, out_features=1, bias=True)
    """
    inner = unwrap(model)
    find: Any = getattr(inner, "get_base_model", None)
    base = find() if callable(find) else inner
    return base if isinstance(base, nn.Module) else inner


def aligned(model: nn.Module, draws: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Draws and labels of the same positions: a causal model's output is of the next one."""
    # Subclasses of your own have any name: those of the classes above them count, too.
    kinds = (*type(unwrap(model)).__mro__, *type(base_of(model)).__mro__)
    names = (kind.__name__ for kind in kinds)
    if labels.dim() == 2 and any(name.endswith(CAUSAL) for name in names):
        return draws[:, :, :-1], labels[:, 1:]
    return draws, labels
