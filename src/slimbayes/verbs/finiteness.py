"""What is not finite in a model, by name: for the training loop, and for loops of one's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slimbayes.core.conversion import converted_layers, find_record, unwrap
from slimbayes.core.kl import total_kl
from slimbayes.core.layers.base import Converted
from slimbayes.core.likelihoods import NotFiniteError
from slimbayes.core.objective import ELBO

_NAMED = 4  # culprits of a kind that a message names; the others are counted


@dataclass(frozen=True)
class Culprit:
    """A tensor with elements that are NaN or infinite: what it is, whose, how many of how many.

    >>> str(Culprit("gradient", "0.weight", 3, 12))
    "the gradient of '0.weight' (3 of 12)"
    """

    what: str  # "parameter", "buffer", "gradient", "output", "input", "KL"
    name: str
    bad: int
    of: int

    def __str__(self) -> str:
        return f"the {self.what} of {self.name!r} ({self.bad} of {self.of})"


def check_finite(model: nn.Module, loss: Tensor | ELBO | None = None) -> None:
    """Raise ``sb.NotFiniteError`` unless loss, parameters, buffers and gradients are finite, and name what is not.

    For a training loop of one's own, between ``backward`` and the optimizer's step, where nothing is lost yet.
    ``loss``: a tensor, or what ``sb.elbo`` returns, of which nll and KL are looked at too. It takes one pass over the
    gradients and parameters; on a GPU it waits for it.

    >>> import slimbayes as sb
    >>> model = sb.bayesianize(nn.Linear(2, 1), sb.MeanField())
    >>> check_finite(model, sb.kl(model))
    >>> model.weight.grad = torch.full((1, 2), float("nan"))
    >>> check_finite(model)
    Traceback (most recent call last):
        ...
    slimbayes.core.likelihoods.NotFiniteError: not finite: the gradient of 'weight' (2 of 2): do not step ...
    """
    figures = _figures(loss)
    inner = unwrap(model)
    tensors = [t for t in (*inner.parameters(), *inner.buffers()) if t.is_floating_point()]
    gradients = [p.grad for p in inner.parameters() if p.grad is not None]
    if all(map(math.isfinite, figures.values())) and finite([*tensors, *gradients]):
        return
    wrong = [f"{name} {value}" for name, value in figures.items() if not math.isfinite(value)]
    found = culprits(inner)
    if "KL" in figures and not math.isfinite(figures["KL"]):
        found += kl_culprits(inner)
    parts = [*wrong, *([listed(found)] if found else [])]
    raise NotFiniteError(
        f"not finite: {'; '.join(parts)}: do not step the optimizer, zero its gradients; lower the learning rate, clip "
        f"gradients, or look for extreme inputs in this batch"
    )


def _figures(loss: Tensor | ELBO | None) -> dict[str, float]:
    if loss is None:
        return {}
    if isinstance(loss, Tensor):
        return {"loss": float(loss.detach())}
    return {"loss": float(loss.loss.detach()), "nll": float(loss.nll.detach()), "KL": float(loss.kl.detach())}


def finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all elements are: reads the device.

    A finite norm has finite terms; where it is not, a square may only have been too large.

    >>> finite([torch.tensor([1e30, -1e30])]), finite([torch.tensor([1.0, float("inf")])])
    (True, False)
    """
    dense = [_values(tensor.detach()) for tensor in tensors]
    return not dense or math.isfinite(norm_sum(dense)) or all(bool(torch.isfinite(t).all()) for t in dense)


def norm_sum(tensors: Sequence[Tensor]) -> float:
    """Σ ‖t‖ in one pass: finite only if all elements are. Reads the device."""
    norms = torch._foreach_norm(list(tensors))
    if len({(norm.dtype, norm.device) for norm in norms}) > 1:
        norms = tuple(norm.to("cpu", torch.float64) for norm in norms)
    return float(torch.stack(norms).sum())


def _values(tensor: Tensor) -> Tensor:
    return tensor._values() if tensor.is_sparse else tensor


def culprit(what: str, name: str, tensor: Tensor) -> Iterator[Culprit]:
    """The tensor, if it is one."""
    values = _values(tensor.detach())
    if values.is_floating_point() or values.is_complex():
        bad = values.numel() - int(torch.isfinite(values).sum())
        if bad:
            yield Culprit(what, name, bad, values.numel())


def culprits(model: nn.Module) -> list[Culprit]:
    """Parameters, buffers and gradients that are not finite, in the order of the modules."""
    found: list[Culprit] = []
    for name, parameter in model.named_parameters():
        found += culprit("parameter", name, parameter)
    for name, buffer in model.named_buffers():
        found += culprit("buffer", name, buffer)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found += culprit("gradient", name, parameter.grad)
    return found


def kl_culprits(model: nn.Module) -> list[Culprit]:
    """Tensors whose own KL is not finite."""
    find_record(model)
    found: list[Culprit] = []
    with torch.no_grad():
        for _, layer in converted_layers(model):
            for source, q, p, _ in layer.bayes.kl_terms(layer):
                if not math.isfinite(float(total_kl(q, p))):
                    found.append(Culprit("KL", source, 1, 1))
    return found


def listed(found: Iterable[Culprit]) -> str:
    """Culprits in words: the first few of every kind, and how many others there are.

    >>> listed([Culprit("gradient", str(i), 1, 2) for i in range(6)])
    "the gradients of '0' (1 of 2), '1' (1 of 2), '2' (1 of 2), '3' (1 of 2) and 2 others"
    """
    kinds: dict[str, list[Culprit]] = {}
    for each in found:
        kinds.setdefault(each.what, []).append(each)
    parts = []
    for what, own in kinds.items():
        if len(own) == 1:
            parts.append(str(own[0]))
            continue
        names = ", ".join(f"{each.name!r} ({each.bad} of {each.of})" for each in own[:_NAMED])
        more = len(own) - _NAMED
        rest = f" and {more} other{'s' * (more > 1)}" if more > 0 else ""
        parts.append(f"the {what}s of {names}{rest}")
    return ", ".join(parts)


@contextmanager
def first_output(model: nn.Module, found: list[Culprit]) -> Iterator[None]:
    """Inside, the first module whose output is not finite though its inputs are is put into ``found``.

    The network's own inputs are looked at first.
    """
    handles = []

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not found and not list(_wrong("input", name, (args, kwargs))):
                found.extend(_wrong("output", name, output))

        return hook

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not found:
            found.extend(list(_wrong("input", "the network", (args, kwargs)))[:1])

    try:
        handles.append(model.register_forward_pre_hook(enter, with_kwargs=True))
        for name, module in _leaves(model):
            handles.append(module.register_forward_hook(watch(name), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leaves(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules that compute something themselves: converted layers, and those without parts."""
    if isinstance(model, Converted) or not any(True for _ in model.children()):
        yield prefix or "the network", model
        return
    for name, part in model.named_children():
        yield from _leaves(part, f"{prefix}.{name}" if prefix else name)


def _wrong(what: str, name: str, tree: Any) -> Iterator[Culprit]:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield from culprit(what, name, leaf)
