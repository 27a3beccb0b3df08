"""Parameters that processes share out among themselves: DTensors of FSDP2 and of tensor parallel.

FSDP2 hands every module whole tensors while it runs, so that rules see nothing of it; between the passes each process
has a part. Tensor parallel hands parts and laid-out inputs to the layers themselves: a converted layer gathers them,
applies its rule as ever, and lays its output out again. The KL gathers one layer after the other, and keeps of the
gradients the part that the process has. So all arithmetic is on plain whole tensors; what is saved is memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def is_sharded(value: Any) -> bool:
    """Whether a value is a DTensor, by its name: the module that has it is slow to import.

    >>> is_sharded(torch.ones(2))
    False
    """
    return type(value).__name__ == "DTensor"


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, on every process; its gradient, alike on all of them, goes back to the part that each has.

    >>> whole(torch.ones(2))
    tensor([1., 1.])
    """
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process has, without a gradient."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shared_as(value: Tensor, like: Any) -> Tensor:
    """A whole tensor that every process has, shared out as ``like``."""
    if not is_sharded(like) or is_sharded(value):
        return value
    return _as(_part(value.to(like.device), like), like)  # type: ignore[no-any-return]


@contextlib.contextmanager
def one_writes(shared: bool) -> Iterator[bool]:
    """Whether this process is to write what all of them have; the others wait until it is written."""
    try:
        yield not shared or torch.distributed.get_rank() == 0
    finally:
        if shared:
            torch.distributed.barrier()


def wraps(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on this module: it gathers the module's tensors when that runs."""
    return any([kind.__name__ == "FSDPModule" for kind in type(module).__mro__])


def have_company() -> bool:
    """Whether torch knows of other processes, so that there may be something to share out.

    >>> have_company()
    False
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def is_shared_out(modules: Iterable[nn.Module]) -> bool:
    """Whether processes share out the parameters of any of these modules.

    >>> is_shared_out([nn.Linear(1, 1)])
    False
    """
    if not have_company():
        return False
    return any([wraps(m) or any([is_sharded(p) for p in m._parameters.values()]) for m in modules])


def agreed(value: Tensor, modules: Iterable[nn.Module]) -> Tensor:
    """What the first of the processes that share out these modules' parameters has for this value."""
    for module in modules:
        for parameter in module._parameters.values():
            if is_sharded(parameter):
                return alike(value, parameter)  # type: ignore[arg-type]
    return value


def alike(value: Tensor, parameter: Tensor) -> Tensor:
    """What the first of the processes that share out this parameter has for this value.

    >>> alike(torch.ones(2), torch.zeros(2))
    tensor([1., 1.])
    """
    if not is_sharded(parameter):
        return value
    same: Tensor = _replicated(value, parameter.device_mesh).to_local()  # type: ignore[attr-defined]
    return same


def _replicated(value: Tensor, mesh: Any) -> Any:
    from torch.distributed.tensor import Replicate, distribute_tensor

    return distribute_tensor(value, mesh, [Replicate()] * mesh.ndim)


@contextlib.contextmanager
def same_noise(modules: Iterable[nn.Module], by_data: bool = False) -> Iterator[None]:
    """torch's generators alike in the processes that share out these modules' parameters.

    ``by_data``: only in those that see the same data. Under FSDP2 every process has data, and noise, of its own; with
    tensor parallel inside it the last axis of the mesh sees the same.
    """
    modules = list(modules)
    parts: list[Any] = [p for m in modules for p in m._parameters.values() if is_sharded(p)]
    widest = max(parts, key=lambda part: part.device_mesh.ndim, default=None)
    place = 0
    if widest is not None and by_data and any([wraps(module) for module in modules]):
        mesh = widest.device_mesh
        if mesh.ndim == 1 or all([part.placements[0].is_replicate() for part in parts]):
            widest = None
        else:
            for axis, at in enumerate(mesh.get_coordinate()[:-1]):
                place = place * mesh.size(axis) + at
    if widest is None:
        yield
        return
    device = widest.device
    seed = int(alike(torch.randint(1 << 62, (1,), device=device), widest)) + place
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class _Whole(nn.Module):
    """A layer's own work, as a module, so that its tensors can be exchanged for one call without its hooks running."""

    def __init__(self, layer: nn.Module, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.run = layer, run

    def forward(self, *inputs: Any) -> Tensor:
        return self.run(*inputs)


def run_whole(layer: nn.Module, run: Callable[..., Tensor], inputs: tuple[Any, ...]) -> Any:
    """``run`` on whole inputs, the layer's tensors whole: a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = inputs[0].device_mesh, inputs[0].placements
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    parts = {f"layer.{name}": whole(tensor) for name, tensor in tensors if is_sharded(tensor)}
    values = tuple([whole(value) for value in inputs])
    output = torch.func.functional_call(_Whole(layer, run), parts, values, tie_weights=False)
    laid_out = DTensor.from_local(output, mesh, [Replicate()] * mesh.ndim, run_check=False)
    # A layer without a matrix (a norm under SequenceParallel) is asked for rows as they came.
    same = not getattr(layer, "matrix_weight", True) and output.shape == inputs[0].shape
    return laid_out.redistribute(placements=placements) if same else laid_out


Stores = Iterable[dict[str, Any]]


def on_whole(stores: Stores, compute: Callable[[], Tensor]) -> Tensor:
    """A number computed from the parameters in these dictionaries, gathered for as long as that takes.

    It is one for all processes, and so is what each parameter adds to its gradient: no one is to add it up.
    """
    given = list({id(p): p for store in stores for p in store.values() if isinstance(p, Tensor)}.values())
    value: Tensor = _OnWhole.apply(list(stores), compute, *given)  # type: ignore[no-untyped-call]
    return value


class _OnWhole(torch.autograd.Function):
    """The gradients are taken at once and kept in parts: else the graph would hold every whole tensor till backward."""

    @staticmethod
    def forward(ctx: Any, stores: list[dict[str, Any]], compute: Callable[[], Tensor], *given: Any) -> Tensor:
        ctx.given = given
        needs = ctx.needs_input_grad[2:]
        values = [whole(p.detach()).requires_grad_(need) for p, need in zip(given, needs, strict=True)]
        with torch.set_grad_enabled(any(needs)), _exchanged(stores, given, values):
            value = compute()
        wanted = [v for v in values if v.requires_grad]
        found = iter(torch.autograd.grad(value, wanted, allow_unused=True) if value.requires_grad else ())
        whole_grads = [next(found, None) if v.requires_grad else None for v in values]
        ctx.parts = [None if g is None else _part(g, p) for g, p in zip(whole_grads, given, strict=True)]
        return value.detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        pairs = zip(ctx.parts, ctx.given, strict=True)
        return (
            None,
            None,
            *[None if part is None else _as(part * grad.to(part.dtype), p) for part, p in pairs],
        )


def _part(value: Tensor, like: Any) -> Tensor:
    """What this process has of a whole tensor that is shared out as ``like``."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    same = DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    part: Tensor = same.redistribute(placements=like.placements).to_local()
    return part.clone()  # not a view that keeps the whole


def _as(part: Tensor, like: Any) -> Any:
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    layout = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return DTensor.from_local(part, like.device_mesh, like.placements, **layout)


@contextlib.contextmanager
def _exchanged(stores: Stores, given: Iterable[Any], values: Iterable[Tensor]) -> Iterator[None]:
    """The dictionaries with other tensors in the place of those given."""
    others = {id(old): new for old, new in zip(given, values, strict=True)}
    before = [(store, dict(store)) for store in stores]
    try:
        for store, own in before:
            store.update({key: others[id(old)] for key, old in own.items() if id(old) in others})
        yield
    finally:
        for store, own in before:
            store.update(own)


@contextlib.contextmanager
def gathered(module: nn.Module, known: dict[Tensor, nn.Parameter]) -> Iterator[None]:
    """The module with whole parameters; what it has afterwards is laid out as they were, alike on all processes.

    ``known`` keeps what was gathered, so that two modules with one parameter still have one.
    """
    owners: list[tuple[nn.Module, dict[str, Any]]] = [
        (m, dict(m._parameters)) for m in module.modules() if any(map(is_sharded, m._parameters.values()))
    ]
    for owner, own in owners:
        for key, part in own.items():
            if is_sharded(part) and part not in known:
                known[part] = nn.Parameter(whole(part.detach()), requires_grad=part.requires_grad)
            owner._parameters[key] = known.get(part, part)
    yield
    before: dict[int, Any] = {id(new): part for part, new in known.items()}
    for owner, own in owners:
        parts = [part for part in own.values() if is_sharded(part)]
        for inside in owner.modules():
            for key, tensor in inside._parameters.items():
                if id(tensor) in before:
                    inside._parameters[key] = before[id(tensor)]
                elif tensor is not None and not is_sharded(tensor):
                    inside._parameters[key] = _laid_out(tensor, parts)


def _laid_out(tensor: nn.Parameter, examples: list[Any]) -> nn.Parameter:
    """A new parameter placed as the one of its shape, but for an axis of components in front; any other is whole."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = examples[0].device_mesh
    placements: list[Any] = [Replicate()] * mesh.ndim
    for part in examples:
        if part.shape in (tensor.shape, tensor.shape[1:]):
            shift = tensor.dim() - part.dim()
            placements = [Shard(p.dim + shift) if p.is_shard() else Replicate() for p in part.placements]
            break
    return nn.Parameter(
        distribute_tensor(tensor.detach(), mesh, placements), requires_grad=tensor.requires_grad
    )
