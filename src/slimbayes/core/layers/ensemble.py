"""A whole module, of any type, with K versions of all its tensors: the deep ensemble."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils import _pytree as pytree

from slimbayes.core import context
from slimbayes.core.fitness import computed
from slimbayes.core.layers.base import expand_saved
from slimbayes.core.layers.tensor_versions import InUse, watch
from slimbayes.core.paths import ASKED, MemberInputs, first
from slimbayes.core.rules.groups import join_members, run_members
from slimbayes.core.sharded import have_company, wraps

_ALONE = threading.RLock()
_STORES = torch.__version__ >= "2.7"  # older compilers do not look into a dict of one's own


class _Member(nn.Module):
    """A module as it was before it was retyped, for ``functional_call``."""

    def __init__(self, module: nn.Module, original: type[nn.Module]) -> None:
        super().__init__()
        self.module, self.original = module, original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.forward(self.module, *args, **kwargs)


def _run_sharded(root: Ensembled, k: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Member k, whose tensors FSDP2 gathers for the modules it wraps, each when it runs: there they are taken apart."""
    wrapped = [module for module in root.modules() if module is not root and wraps(module)]

    def run(
        module: nn.Module, original: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        own: dict[str, Tensor] = {}
        waiting = [("module", module)]
        while waiting:
            prefix, owner = waiting.pop()
            for key, tensor in (*owner._parameters.items(), *owner._buffers.items()):
                if tensor is not None:
                    own[f"{prefix}.{key}"] = tensor[k]
            below = [(key, child) for key, child in owner._modules.items() if child is not None]
            waiting += [(f"{prefix}.{key}", child) for key, child in below if not wraps(child)]
        return functional_call(_Member(module, original), own, args, kwargs, tie_weights=False)

    try:
        for module in wrapped:
            kind = type(module)
            vars(module)["forward"] = lambda *a, module=module, kind=kind, **named: run(
                module, kind, a, named
            )
        return run(root, root.plain_type, args, kwargs)
    finally:
        for module in wrapped:
            vars(module).pop("forward", None)


class Ensembled(nn.Module):
    """Mixed into the type of the module: splits the rows among the members and joins their outputs."""

    members: int
    ensemble_name: str
    _tensor_names: tuple[str, ...]
    _tied: tuple[tuple[str, str], ...] = ()  # further places of these tensors, in other modules
    _batched: dict[str, bool]  # whether all run at once, by kind of call: ``ASKED.members``
    _in_use: InUse | None  # None: this torch's compiler knows no such stores
    plain_type: type[nn.Module]  # as the module was before it was retyped

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run every member on its own rows, component-major."""
        rows = self._rows(args, kwargs)
        draw = context.late_draw()
        late = None if draw is None else draw.late
        untiled = late is not None and late.untiled(self.ensemble_name, rows)
        repeats = draw.components * draw.samples if untiled and draw is not None else 1
        frame = context.frame(self.ensemble_name, rows * repeats, self.members)
        if have_company() and any([wraps(module) for module in self.modules() if module is not self]):
            return run_members(partial(_run_sharded, self), frame.components, rows, args, kwargs)
        places = {
            **dict(self.named_parameters(remove_duplicate=False)),
            **dict(self.named_buffers(remove_duplicate=False)),
        }
        gone = [name for name in self._tensor_names if name not in places]
        if gone:
            raise ValueError(
                f"tensor {gone[0]!r} of the ensemble {self.ensemble_name!r} has been replaced since the conversion "
                f"(weight_norm, spectral_norm, prune or a parametrization make it from others): change the network "
                f"first, and convert it then, DeepEnsemble(reinitialize=False) or with a function of your own"
            )
        stacked = {name: places[name] for name in self._tensor_names}

        def use(
            tensors: dict[str, Tensor], member_args: tuple[Any, ...], member_kwargs: dict[str, Any]
        ) -> Any:
            own = {id(places[name]): value for name, value in tensors.items()}
            for place, name in self._tied:
                own[id(places[place])] = tensors[name]
            if self._in_use is not None:
                with self._in_use.using(own), self._alone():
                    return self.plain_type.forward(self, *member_args, **member_kwargs)
            named = {f"module.{name}": own[id(value)] for name, value in places.items() if id(value) in own}
            with contextlib.nullcontext() if torch.compiler.is_compiling() else _ALONE:
                member = _Member(self, self.plain_type)
                return functional_call(member, named, member_args, member_kwargs, tie_weights=False)

        offset = 0 if frame.draw is None else frame.draw.first_component

        def call(k: int, member_args: tuple[Any, ...], member_kwargs: dict[str, Any]) -> Any:
            k += offset
            return use({name: value[k] for name, value in stacked.items()}, member_args, member_kwargs)

        whole = frame.components == self.members and (frame.samples == 1 or not untiled)
        inputs = MemberInputs(rows, args, kwargs, split=not untiled)
        found = first(ASKED.members, self, use, stacked, inputs) if whole else None
        if found is not None:
            output = found[0]
        elif untiled:  # every member on all rows; its samples are copies
            outputs = [call(k, args, kwargs) for k in range(frame.components)]
            output = join_members(outputs, frame.samples)
        else:
            output = run_members(call, frame.components, rows, args, kwargs)
        return output if late is None else late.result(output)

    def _alone(self) -> contextlib.AbstractContextManager[Any]:
        """torch's recurrent layers and computed weights leave tensors of a call in a module: one thread at a time."""
        leaves = any([isinstance(m, nn.RNNBase) or bool(m._forward_pre_hooks) for m in self.modules()])
        return _ALONE if leaves and not torch.compiler.is_compiling() else contextlib.nullcontext()

    def _rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.dim() > 0:
                return leaf.shape[0]
        raise ValueError(f"ensembled module {self.ensemble_name!r} got no tensor with a row axis")

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty_ensemble, (self.plain_type,), self.__dict__

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        # Called for this module before its children: one place expands a plain checkpoint for all of them.
        for name, target in self.state_dict(keep_vars=True).items():
            expand_saved(state_dict, prefix + name, target)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@functools.cache
def _ensembled_type(original: Any) -> type[Ensembled]:
    """The type of ensembled modules of this type, one for all of them."""
    return type(f"Ensembled{original.__name__}", (Ensembled, original), {"plain_type": original})


def _empty_ensemble(original: Any) -> Ensembled:
    """What pickle and copy fill: no module holds the type itself, so that they could not find it."""
    kind = _ensembled_type(original)
    return kind.__new__(kind)


def _ties(module: nn.Module, names: list[str]) -> Iterator[tuple[str, str]]:
    """(place, name) for every place of a tensor but the one that its name is of, each module once."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    known = {id(tensors[name]): name for name in names}
    for prefix, owner in module.named_modules():
        for store in (owner._parameters, owner._buffers):
            for key, value in store.items():
                place = f"{prefix}.{key}" if prefix else key
                if value is not None and known[id(value)] != place:
                    yield place, known[id(value)]


def ensemble(name: str, module: nn.Module, members: int, reset: Callable[[nn.Module], None] | None) -> None:
    """Retype ``module`` in place: member 0 keeps its tensors, ``reset`` re-draws the others."""
    for part in module.modules():
        for key in computed(part):
            if key in vars(part):  # of the last call, and made anew in the next
                vars(part)[key] = vars(part)[key].detach()
    copies = [module, *(copy.deepcopy(module) for _ in range(members - 1))]
    if reset is not None:
        for member in copies[1:]:
            reset(member)
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    values = [{**dict(c.named_parameters()), **dict(c.named_buffers())} for c in copies]
    replaced: dict[int, Tensor] = {}
    for key in names:
        first = values[0][key]
        stacked = torch.stack([value[key].detach() for value in values])
        replaced[id(first)] = (
            nn.Parameter(stacked, requires_grad=first.requires_grad)
            if isinstance(first, nn.Parameter)
            else stacked
        )
    for owner in module.modules():
        for store in (owner._parameters, owner._buffers):
            for key, value in store.items():
                if value is not None:
                    store[key] = replaced[id(value)]  # type: ignore[assignment]
    original: Any = type(module)
    module.__class__ = _ensembled_type(original)
    module.members = members  # type: ignore[assignment]
    module.ensemble_name = name  # type: ignore[assignment]
    module._tensor_names = tuple(names)  # type: ignore[assignment]
    module._tied = tuple(_ties(module, names))  # type: ignore[assignment]
    module._batched = {}  # type: ignore[assignment]
    module._in_use = watch(module) if _STORES else None  # type: ignore[assignment]
