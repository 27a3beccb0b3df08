"""The modules of a converted network, walked through again only where something has changed."""

from __future__ import annotations

from torch import nn

from slimbayes.core.fitness import check_norm_of_several
from slimbayes.core.layers.base import Converted
from slimbayes.core.sharded import is_shared_out
from slimbayes.sequences.kernels import Several

Layers = list[tuple[str, Converted]]


class Survey:
    """What a walk through the modules found, and by what the next look sees that nothing has changed since.

    The network itself is not held, which holds its survey; what it had inside is, until the next look.

    >>> net = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh()))
    >>> survey = Survey(net)
    >>> len(survey.below), survey.holds(net)
    (3, True)
    >>> net[1][0] = nn.ReLU()
    >>> survey.holds(net)
    False
    """

    def __init__(self, model: nn.Module) -> None:
        self.below = modules(model)[1:]
        self.kinds = [type(module) for module in self.below]
        self.children = [dict(module._modules) for module in self.below]
        self.root = type(model), dict(model._modules)
        self.shared_out = is_shared_out(
            [model, *self.below]
        )  # fully_shard changes types, and so asks for another look
        self.layers = [(name, None if layer is model else layer) for name, layer in walk(model)]
        for name, layer in walk(model):
            check_norm_of_several(layer, name)

    def holds(self, model: nn.Module) -> bool:
        """Whether every module has its type and its children still."""
        return (
            self.root == (type(model), model._modules)
            and [type(module) for module in self.below] == self.kinds
            and [module._modules for module in self.below] == self.children
        )

    def converted(self, model: nn.Module) -> Layers:
        """The converted layers with their names."""
        return [(name, model if layer is None else layer) for name, layer in self.layers]  # type: ignore[misc]


def modules(model: nn.Module) -> list[nn.Module]:
    """Every module, each once: ``model.modules()`` without the names.

    >>> len(modules(nn.Sequential(nn.ReLU(), nn.ReLU())))
    3
    """
    found = {id(model): model}
    waiting = [model]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                waiting.append(child)
    return list(found.values())


def walk(model: nn.Module) -> Layers:
    """Every converted layer with its name, each once, in the order of ``named_modules``; of some its kernels instead.

    Without that generator: the compiler traces every instruction of the walk.

    >>> walk(nn.Sequential(nn.ReLU()))
    []
    """
    found: Layers = []
    seen: set[nn.Module] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        converted = isinstance(module, Converted)
        if converted:
            found.append((name, module))  # type: ignore[arg-type]
        elif isinstance(module, Several):
            converted = True
            found += [(f"{name}.{kernel.key}" if name else kernel.key, kernel) for kernel in module.kernels]
        children = [
            (f"{name}.{key}" if name else key, child)
            for key, child in module._modules.items()
            if child is not None and not (converted and key == "bayes")  # a rule holds no layers
        ]
        waiting.extend(children[::-1])
    return found
