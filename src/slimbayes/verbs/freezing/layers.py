"""Frozen layers: small modules of plain tensor operations. Rows are ``[draws, batch, ...]``, draws outermost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from slimbayes.core.context import Request
from slimbayes.core.keyed_noise import keyed_noise, layer_key
from slimbayes.core.rules.groups import run_members
from slimbayes.verbs.freezing.network import CALL, fixed, repeat_rows


class FrozenLayer(nn.Module):
    """What all frozen layers share: ``repeats`` says that the input has the rows of one draw and stands for all."""

    repeats: int = 1

    def __getattr__(self, name: str) -> Any:
        """What others read of a torch layer (``in_features``, ``batch_first``) is that of the layer inside."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            inside = self.__dict__["_modules"].get("layer")
            if inside is None:
                members = self.__dict__["_modules"].get("members")
                inside = None if members is None else members[0]
            if inside is None:
                raise
            return getattr(inside, name)

    def repeated(self, *values: Any) -> tuple[Any, ...]:
        """The inputs with their rows for all draws."""
        if self.repeats == 1:
            return values
        rows = values[0].shape[0]
        return tuple(
            repeat_rows(value, self.repeats)
            if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows
            else value
            for value in values
        )


class Factored(FrozenLayer):
    """y = r_d ∘ op(s_d ∘ x, W) + b_d, or op(x + s_d, W) + b_d: one weight for all draws, and vectors for each.

    ``slots`` says which inputs s scales, and along which axis.
    """

    def __init__(
        self,
        layer: nn.Module,
        s: Tensor | None,
        r: Tensor | None,
        b: Tensor | None,
        additive: bool,
        slots: Sequence[tuple[int, int, int]],
        output_axis: int,
    ) -> None:
        super().__init__()
        self.register_buffer("s", s)  # [draws, Σ inputs]
        self.register_buffer("r", r)  # [draws, outputs]
        self.register_buffer("b", b)
        self.layer = layer
        self.additive = additive
        self.slots = tuple(slots)
        self.output_axis = output_axis

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """The layer's output for the rows of all draws."""
        inputs = self.repeated(*inputs)
        if self.s is not None:
            changed, start = list(inputs), 0
            for position, axis, size in self.slots:
                x, part = inputs[position], self.s[:, start : start + size]
                changed[position] = by_draw(
                    x, part, along(x, axis), torch.add if self.additive else torch.mul
                )
                start += size
            inputs = tuple(changed)
        y: Tensor = self.layer(*inputs, **named)
        if self.r is not None:
            shape = along(y, self.output_axis)
            if self.b is not None:
                return by_draw(y, self.r, shape, _affine, self.b)
            return by_draw(y, self.r, shape, torch.mul)
        return y if self.b is None else by_draw(y, self.b, along(y, self.output_axis), torch.add)


class Matrices(FrozenLayer):
    """y = x W_dᵀ + b_d: one batched product with a matrix for every draw."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)  # [draws, out, in]
        self.register_buffer("bias", bias)  # [draws, out]
        self.out_features, self.in_features = weight.shape[1:]

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output for the rows of all draws."""
        (x,) = self.repeated(input)
        return product(x, self.weight, self.bias)


class Scaled(FrozenLayer):
    """γ_d ∘ norm(x) + β_d: one normalisation of all rows, and an affine map for every draw.

    A BatchNorm whose components have statistics of their own is an affine map alone: ``layer`` is the identity.
    """

    def __init__(self, layer: nn.Module, weight: Tensor, bias: Tensor | None, trailing: int) -> None:
        super().__init__()
        self.register_buffer("weight", weight)  # [draws, *shape]; before the layer, which has such names too
        self.register_buffer("bias", bias)
        self.layer = layer
        self.trailing = trailing  # axes that the weight has; 0: one axis, of channels after the rows

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output for the rows of all draws."""
        (x,) = self.repeated(input)
        y = self.layer(x)
        own = self.weight.shape[1:]
        before, after = (y.dim() - 1 - self.trailing, 0) if self.trailing else (0, y.dim() - 2)
        shape = (*[1] * before, *own, *[1] * after)
        if self.bias is None:
            return by_draw(y, self.weight, shape, torch.mul)
        return by_draw(y, self.weight, shape, _affine, self.bias)


class Tables(FrozenLayer):
    """Rows of a table for every draw, laid end to end."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.draws, self.num_embeddings, self.embedding_dim = weight.shape
        self.register_buffer("weight", weight.flatten(0, 1))  # [draws·entries, size]
        self.register_buffer("start", torch.arange(self.draws, device=weight.device) * self.num_embeddings)

    def forward(self, input: Tensor) -> Tensor:
        """The looked-up rows for all draws."""
        (index,) = self.repeated(input)
        split = index.unflatten(0, (self.draws, -1))
        shifted = split + self.start.reshape(self.draws, *[1] * (split.dim() - 1))
        return F.embedding(shifted.flatten(0, 1), self.weight)


class Members(FrozenLayer):
    """Plain torch modules, each for its own share of the rows: a draw's convolution, or a member's whole network."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Their outputs, joined leaf by leaf."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        rows = next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0)
        if self.repeats > 1:
            leaves = [
                repeat_rows(leaf, self.repeats) if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows
                else leaf
                for leaf in leaves
            ]  # fmt: skip
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            rows = rows * self.repeats

        def call(k: int, own: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return self.members[k](*own, **named)

        return run_members(call, len(self.members), rows, args, kwargs)


class Mask(nn.Module):
    """x ∘ b_d/(1 − rate): the Bernoulli mask of every draw, the same for all examples.

    Its size is that of an example, so it is made when the first example comes, and kept.
    """

    def __init__(
        self, source: str, rate: float, axis: int | None, seed: int, components: int, samples: int
    ) -> None:
        super().__init__()
        self.source = source
        self.rate = rate
        self.axis = axis  # of whole channels; None: element by element
        self.seed = seed
        self.components = components
        self.samples = samples

    def forward(self, x: Tensor) -> Tensor:
        """The rows [R, ...] with their masks."""
        if self.rate == 0:
            return x
        if self.rate >= 1:
            return torch.zeros_like(x)
        draws = self.components * self.samples
        call = CALL.get()
        number = 0 if call is None else call.number(self.source)
        if self.axis is not None:
            mask = self._mask(number, (fixed(x.shape[self.axis]),), x)
            return by_draw(x, mask, along(x, self.axis), torch.mul)
        batch = x.shape[0] // draws if call is None else call.batch
        extra = fixed(x.shape[0] // (draws * batch))
        mask = self._mask(number, (extra, *[fixed(size) for size in x.shape[1:]]), x)
        if extra == 1:
            return by_draw(x, mask, x.shape[1:], torch.mul)
        if torch.compiler.is_compiling():
            return x * mask.flatten(1).repeat(1, batch).view(x.shape)
        rows: Tensor = x.unflatten(0, (draws, -1, extra)) * mask
        return rows.flatten(0, 2)

    def _mask(self, number: int, shape: tuple[int, ...], x: Tensor) -> Tensor:
        """[draws, 1, *shape]."""
        dtype = torch.promote_types(x.dtype, torch.float32)  # as draws make it
        request = Request("uniform", self.source, number, (self.components, self.samples, 1, *shape), dtype)

        def dropped(uniform: Tensor) -> Tensor:
            return ((uniform >= self.rate).to(x.dtype) / (1.0 - self.rate)).flatten(0, 1)

        return kept_noise(self, request, x.device, dropped).to(x)


def kept_noise(
    owner: Any,
    request: Request,
    device: torch.device,
    change: Callable[[Tensor], Tensor] = lambda noise: noise,
) -> Tensor:
    """Noise of every draw, changed, as ``sb.draw`` makes it from the owner's seed: at its first use, then a buffer.

    It may be as large as an example. A traced program holds the noise of the size that it was traced with.
    """
    components, samples, _, *shape = request.size
    name = f"{request.name} {'x'.join(map(str, shape))}".replace(".", "_").replace(" ", "_")
    if name not in owner._buffers:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"the noise {request.source!r} for examples of shape {shape} is not made yet: call the frozen model "
                f"once on such inputs before it is traced, or freeze it with example=..."
            )
        key, cpu = layer_key(owner.seed, request.source), torch.device("cpu")
        with torch.no_grad():
            noise = keyed_noise(
                request.kind, key, request.stream, torch.arange(components), torch.arange(samples), None,
                tuple(shape), request.dtype, cpu,
            )  # fmt: skip
            owner.register_buffer(name, change(noise).to(device))
    return owner._buffers[name]  # type: ignore[no-any-return]


class Masked(FrozenLayer):
    """op(x ∘ mask_d, W): MCDropout's layer, torch's own with masks on its inputs."""

    def __init__(self, layer: nn.Module, masks: dict[int, Mask]) -> None:
        super().__init__()
        self.layer = layer
        self.masks = nn.ModuleDict({str(position): mask for position, mask in masks.items()})

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The layer's output for the rows of all draws."""
        changed = list(self.repeated(*inputs))
        for position, mask in self.masks.items():
            changed[int(position)] = mask(changed[int(position)])
        return self.layer(*changed, **named)


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return torch.addcmul(shift, x, scale)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b for rows x [R, ..., in] in groups, with weight [G, out, in] and bias [G, out]."""
    groups, outputs, inputs = weight.shape
    if groups == 1:
        return F.linear(x, weight.squeeze(0), None if bias is None else bias.squeeze(0))
    flat = x.reshape(groups, -1, inputs)  # [G, R/G·..., in]
    matrices = weight.transpose(1, 2)
    y = torch.bmm(flat, matrices) if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, matrices)
    # A traced program puts the groups together again, for it cannot answer how [G, R/G, ...] lies in memory.
    return (torch.cat(y.unbind(0)) if torch.compiler.is_compiling() else y).reshape(*x.shape[:-1], outputs)


def by_draw(
    x: Tensor, values: Tensor, shape: Sequence[int], combine: Callable[..., Tensor], *more: Tensor
) -> Tensor:
    """Combine rows x [D·b, ...] with ``values`` [D, n] of every draw, of this ``shape`` against one row; so ``more``.

    A traced program repeats the values instead of splitting the rows: how an unknown batch lies in memory after a
    split is a question that it cannot answer.
    """
    if torch.compiler.is_compiling():
        count = x.shape[0] // values.shape[0]
        every = [
            value.flatten(1).repeat(1, count).view(x.shape[0], *shape).to(x.dtype)
            for value in (values, *more)
        ]
        return combine(x, *every)
    every = [value.to(x.dtype).reshape(value.shape[0], 1, *shape) for value in (values, *more)]
    return combine(x.unflatten(0, (values.shape[0], -1)), *every).flatten(0, 1)


def along(x: Tensor, axis: int) -> list[int]:
    """The shape of a vector along an axis of x, against one row."""
    shape = [1] * x.dim()
    shape[axis] = -1
    return shape[1:]
