"""What ``fit_many`` is given: networks, their data, likelihoods and seeds, checked, and what is alike put together."""

from __future__ import annotations

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from slimbayes.containers.datasets import Dataset, Split
from slimbayes.core.conversion import ATTRIBUTE, find_record, unwrap
from slimbayes.core.layers.ensemble import Ensembled
from slimbayes.core.likelihoods import Categorical, Gaussian, Likelihood
from slimbayes.training.settings import Training
from slimbayes.training.sources import as_split

DTYPES = {"32-true": torch.float32, "64-true": torch.float64}
_OWN = {*vars(nn.Module()), ATTRIBUTE, "_batched", "_in_use"}  # what torch and conversion keep of any module


@dataclass(frozen=True, eq=False)
class Table:
    """The training examples of one data set in the network's units and type, on the device."""

    inputs: Tensor
    targets: Tensor
    split: Split  # as it was given

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass
class Member:
    """One network of many."""

    index: int
    model: nn.Module
    likelihood: Likelihood
    table: Table
    seed: int


def make_members(
    models: Sequence[nn.Module],
    data: Any,
    likelihood: Likelihood | Sequence[Likelihood] | None,
    seeds: Sequence[int] | None,
    settings: Training,
    device: torch.device,
) -> list[Member]:
    """One Member for every model; data and likelihood are one for all, or one each."""
    models = list(models)
    for i, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise TypeError(f"models[{i}] is a {type(model).__name__}: give a sequence of networks")
        if any(model is other for other in models[:i]):
            raise ValueError(f"models[{i}] is the same object as an earlier one: give copy.deepcopy(model)")
    if not models:
        raise ValueError("fit_many got no models: give a sequence of networks")
    count = len(models)
    sets = _each("data", [data] * count if _is_one(data) else data, count)
    likelihoods = _likelihoods(likelihood, sets, count)
    numbers = [settings.seed] * count if seeds is None else [int(s) for s in _each("seeds", seeds, count)]
    tables: dict[int, Table] = {}  # a data set that several networks share is prepared once
    for i, one in enumerate(sets):
        if id(one) not in tables:
            tables[id(one)] = _table(one, i, settings, device)
    return [
        Member(i, unwrap(model), likelihoods[i], tables[id(sets[i])], numbers[i])
        for i, model in enumerate(models)
    ]


def in_precision(member: Member, precision: str) -> None:
    """Put a network into float64 for "64-true", as ``sb.fit`` does; raise on one that is in another type."""
    if precision == "64-true":
        member.model.double()
        member.likelihood.double()
    parameters = [p for p in member.model.parameters() if p.is_floating_point()]
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError(f"models[{member.index}] has no parameter to train")
    wrong = [parameter.dtype for parameter in parameters if parameter.dtype != DTYPES[precision]]
    if wrong:
        raise ValueError(
            f"models[{member.index}] has parameters of {wrong[0]}, and precision={precision!r}: convert it, or pass "
            f"precision='64-true' for float64"
        )


def _is_one(data: Any) -> bool:
    return isinstance(data, Dataset) or as_split(data) is not None


def _each(name: str, values: Any, count: int) -> list[Any]:
    if isinstance(values, (str, bytes, dict)) or not (
        hasattr(values, "__len__") and hasattr(values, "__getitem__")
    ):
        kinds = "tensors (inputs, targets), a Split or a Dataset" if name == "data" else "values"
        raise TypeError(
            f"{name} is a {type(values).__name__}: fit_many takes {kinds}, or a sequence with one for each model; "
            f"loaders and streams are for sb.fit"
        )
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} models: give one for each")
    return list(values)


def _likelihoods(
    given: Likelihood | Sequence[Likelihood] | None, sets: list[Any], count: int
) -> list[Likelihood]:
    if given is None:
        return [
            Gaussian() if isinstance(one, Dataset) and one.task == "regression" else Categorical()
            for one in sets
        ]
    if not isinstance(given, Likelihood):
        return _each("likelihood", given, count)
    if count > 1 and any(True for _ in given.parameters()):
        raise ValueError(
            f"{given} learns parameters, and {count} networks cannot share them: give a list with one for each model"
        )
    return [given] * count


def _table(data: Any, index: int, settings: Training, device: torch.device) -> Table:
    """The rows as ``sb.fit`` would hand them to the network, all at once."""
    split = data.train if isinstance(data, Dataset) else as_split(data)
    if split is None:
        raise TypeError(
            f"data[{index}] is a {type(data).__name__}: fit_many takes tensors (inputs, targets), a Split or a "
            f"Dataset; loaders and streams are for sb.fit"
        )
    if len(split) == 0:
        raise ValueError(f"data[{index}] holds no examples")
    inputs, targets = split.inputs.to(device), split.targets.to(device)
    if isinstance(data, Dataset):
        if data.augment and settings.augment:
            raise ValueError(
                f"{data.name!r} is augmented ({', '.join(data.augment)}), which fit_many does not do: pass "
                f"augment=False"
            )
        inputs = data.scaling(inputs)
        targets = targets if data.target_scaling is None else data.target_scaling(targets)
    elif inputs.dtype is torch.uint8:
        inputs = inputs.float()
    dtype = DTYPES[settings.precision]
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    targets = targets.to(dtype) if targets.is_floating_point() else targets
    if targets.is_floating_point() and not bool(torch.isfinite(targets).all()):
        raise ValueError(f"the targets of data[{index}] hold NaN or infinity: drop those rows")
    return Table(inputs.contiguous(), targets.contiguous(), split)


def alike(members: Sequence[Member]) -> list[list[Member]]:
    """The members by structure: modules, methods, shapes, likelihoods and numbers of rows; in order of appearance."""
    found: dict[Any, list[Member]] = {}
    for member in members:
        table = member.table
        key = (
            structure(member.model), _likelihood_kind(member.likelihood), len(table),
            tuple(table.inputs.shape[1:]), str(table.inputs.dtype), tuple(table.targets.shape[1:]),
            str(table.targets.dtype),
        )  # fmt: skip
        found.setdefault(key, []).append(member)
    return list(found.values())


def _likelihood_kind(likelihood: Likelihood) -> Any:
    # The precision of a Gaussian is a number that may differ from network to network.
    return structure(likelihood, skip=("precision",) if type(likelihood) is Gaussian else ())


def structure(model: nn.Module, skip: Sequence[str] = ()) -> Any:
    """All of a network but the values of its tensors, to be compared: what one of two runs, the other would.

    >>> structure(nn.Linear(2, 3)) == structure(nn.Linear(2, 3)), structure(nn.ReLU()) == structure(nn.Tanh())
    (True, False)
    >>> structure(nn.Dropout(0.1)) == structure(nn.Dropout(0.2))
    False
    """
    modules = [(name, _kind(module), _facts(module, skip)) for name, module in model.named_modules()]
    first: dict[int, str] = {}
    tensors = []
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    for kind, group in enumerate(named):
        for name, tensor in group:
            same = first.setdefault(id(tensor), name)  # tied to an earlier one, or itself
            tensors.append((kind, name, same, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad))
    record = None
    if any(ATTRIBUTE in module.__dict__ for module in model.modules()):
        known = find_record(model)
        record = repr((known.methods, known.layers, known.components, known.step_components, known.dropouts))
    return tuple(modules), tuple(tensors), record


def _kind(module: nn.Module) -> Any:
    # Every ensembled module has a type of its own.
    return type(module).__mro__[1:] if isinstance(module, Ensembled) else type(module)


def _facts(module: nn.Module, skip: Sequence[str]) -> Any:
    """Its plain attributes; hooks by identity."""
    own = {name: value for name, value in vars(module).items() if name not in _OWN and name not in skip}
    hooks = [
        tuple(id(hook) for hook in store.values())
        for store in (module._forward_hooks, module._forward_pre_hooks)
        if store
    ]
    return tuple((name, _fact(value)) for name, value in sorted(own.items())), tuple(hooks)


def _fact(value: Any) -> Any:
    """A value as something that equals another's if, and only if, the two are interchangeable; else its identity."""
    if isinstance(value, (Tensor, np.ndarray, types.FunctionType)):
        return id(value)
    if isinstance(value, nn.Module):
        return structure(value)
    if isinstance(value, (tuple, list)):
        return tuple(_fact(part) for part in value)
    if isinstance(value, dict):
        return tuple((repr(key), _fact(part)) for key, part in value.items())
    return (type(value), repr(value))
