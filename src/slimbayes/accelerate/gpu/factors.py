"""All rank-1 factors of a network by one operation: their samples, and their gradients from the same noise."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slimbayes.accelerate.gpu import plain_twins
from slimbayes.accelerate.gpu.joint_parameters import join, part
from slimbayes.accelerate.gpu.launch import INTERPRETED, available, ceil_div, launch, power_of_two
from slimbayes.accelerate.gpu.rows import batched
from slimbayes.core.compiler import constant
from slimbayes.core.custom_operation import operation
from slimbayes.core.distributions import bounded_exp

_NOISE = {
    "normal": "normal", "lognormal": "normal", "cauchy": "cauchy", "halfcauchy": "cauchy", "delta": "none",
}  # fmt: skip
_COLUMNS, _ROWS = 64, 16  # tile of one program: columns, and counters of four rows each


def sample_factors(
    locs: Sequence[Tensor],
    rhos: Sequence[Tensor],
    seed: Tensor,
    samples: int,
    examples: int,
    family: str = "normal",
    clip: float | None = None,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """f = loc + σ∘ε for every layer, σ = softplus(ρ) + 1e-7, clamped to ±clip: [K, samples, examples, C] each.

    Log-normal: exp(loc + σ∘ε); half-Cauchy: loc + σ∘|ε|; delta: loc. ``seed`` holds one int64 on the device. The
    factors are disjoint parts of one tensor; in the backward pass the noise is made again from the seed.

    >>> loc, rho = torch.ones(2, 3), torch.full((2, 3), -20.0)
    >>> [f.shape for f in sample_factors([loc, loc], [rho, rho], torch.tensor([7]), 1, 4)]
    [torch.Size([2, 1, 4, 3]), torch.Size([2, 1, 4, 3])]
    """
    widths = [loc.shape[1] for loc in locs]
    return sample_flat(join(locs), join(rhos), widths, seed, samples, examples, family, clip, dtype)


def sample_flat(
    loc: Tensor,
    rho: Tensor,
    widths: Sequence[int],
    seed: Tensor,
    samples: int,
    examples: int,
    family: str = "normal",
    clip: float | None = None,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """``sample_factors`` of parameters that ``join`` has put together, for layers of these widths."""
    check_family(family)
    kernel, names = _by_kernel(loc), prepared(loc, widths)
    flat = torch.ops.slimbayes.factors(
        loc, rho, seed, names, samples, examples, family, clip, dtype or loc.dtype, kernel
    )
    components = loc.numel() // sum(widths)
    return part(flat, [(components, samples, examples, width) for width in widths])


def check_family(family: str) -> None:
    """Raise for a family without samples."""
    if family not in _NOISE:
        raise ValueError(f"no family of factors is called {family!r}; there are {', '.join(_NOISE)}")


def _by_kernel(loc: Tensor) -> bool:
    return available(loc.device) and loc.dtype != torch.float64


def prepared(loc: Tensor, widths: Sequence[int]) -> str:
    """The widths as the operations take them, the kernel's tables made."""
    names = ",".join([str(width) for width in widths])
    if _by_kernel(loc):
        _prepare(names, loc.device)
    return names


def factors_value(
    loc: Tensor,
    rho: Tensor,
    seed: Tensor,
    widths: str,
    samples: int,
    examples: int,
    family: str,
    clip: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """The flat samples of ``sample_flat``, for eager code that records gradients itself."""
    if _by_kernel(loc):
        return launch_sample(loc, rho, seed, widths, samples * examples, family, clip, dtype)
    settings = (widths, samples, examples, family, clip, dtype, False)
    flat: Tensor = torch.ops.slimbayes.factors(loc, rho, seed, *settings)
    return flat


def factors_gradient(
    grads: Tensor,
    loc: Tensor,
    rho: Tensor,
    seed: Tensor,
    widths: str,
    samples: int,
    examples: int,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    """The flat gradients of loc and ρ; by the operation where somebody wants to differentiate them, who hears of it."""
    kernel = _by_kernel(loc)
    if kernel and not (torch.is_grad_enabled() or batched(grads)):
        return launch_grad(grads, loc, rho, seed, widths, samples * examples, *rest[:2])
    settings = (widths, samples, examples, *rest, kernel)
    d_loc, d_rho = torch.ops.slimbayes.factors_backward(grads, loc, rho, seed, *settings)
    return d_loc, d_rho


@functools.lru_cache(maxsize=64)
def _widths(names: str) -> tuple[int, ...]:
    return tuple(int(name) for name in names.split(","))


@constant
def _prepare(names: str, device: torch.device) -> bool:
    """Make the tables while the compiler traces.

    A table first made inside a CUDA graph's run would live in memory that the graph takes for its own.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        _tables(names, device)
    return True


@functools.cache  # for good: CUDA graphs read them where they are
def _tables(names: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """For every column the first column of its layer, and the layer's width."""
    counts = torch.tensor(_widths(names))
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    wide = counts.repeat_interleave(counts)
    return starts.to(device, torch.int32), wide.to(device, torch.int32)


# The widths are one string: the dispatcher walks a list element by element, in Python.
_SETTINGS = (
    "Tensor loc, Tensor rho, Tensor seed, str widths, SymInt samples, SymInt examples, str family, "
    "float? clip, ScalarType dtype, bool kernel"
)


@operation("factors", f"({_SETTINGS}) -> Tensor")
def _factors(
    loc: Tensor,
    rho: Tensor,
    seed: Tensor,
    widths: str,
    samples: int,
    examples: int,
    family: str,
    clip: float | None,
    dtype: torch.dtype,
    kernel: bool,
) -> Tensor:
    n = samples * examples
    if kernel:
        return launch_sample(loc, rho, seed, widths, n, family, clip, dtype)
    parts = []
    for layer, (mean, raw) in enumerate(_layers(loc, rho, widths)):
        value, _, _ = _plain_sample(mean, raw, seed, layer, n, family)
        parts.append((value if clip is None else value.clamp(-clip, clip)).reshape(-1).to(dtype))
    return torch.cat(parts)


@_factors.register_fake
def _(
    loc: Tensor,
    rho: Tensor,
    seed: Tensor,
    widths: str,
    samples: int,
    examples: int,
    family: str,
    clip: float | None,
    dtype: torch.dtype,
    kernel: bool,
) -> Tensor:
    return loc.new_empty(loc.numel() * samples * examples, dtype=dtype)


@operation("factors_backward", f"(Tensor grads, {_SETTINGS}) -> (Tensor, Tensor)")
def _factors_backward(
    grads: Tensor,
    loc: Tensor,
    rho: Tensor,
    seed: Tensor,
    widths: str,
    samples: int,
    examples: int,
    family: str,
    clip: float | None,
    dtype: torch.dtype,
    kernel: bool,
) -> tuple[Tensor, Tensor]:
    n = samples * examples
    if kernel:
        return launch_grad(grads, loc, rho, seed, widths, n, family, clip)
    d_locs, d_rhos, begin = [], [], 0
    for layer, (mean, raw) in enumerate(_layers(loc, rho, widths)):
        value, noise, slope = _plain_sample(mean, raw, seed, layer, n, family)
        grad = grads[begin : begin + value.numel()].view_as(value).to(value.dtype)
        begin += value.numel()
        if clip is not None:
            grad = grad * (value.abs() <= clip)
        grad = grad if slope is None else grad * slope
        d_locs.append(grad.sum(1).reshape(-1).to(loc.dtype))
        d_rhos.append(((grad * noise).sum(1) * torch.sigmoid(raw)).reshape(-1).to(rho.dtype))
    return torch.cat(d_locs), torch.cat(d_rhos)


@_factors_backward.register_fake
def _(grads: Tensor, loc: Tensor, rho: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(loc), torch.empty_like(rho)


def _layers(loc: Tensor, rho: Tensor, widths: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The [K, C] parameters of each layer."""
    columns = _widths(widths)
    components = loc.numel() // sum(columns)
    sizes = [components * width for width in columns]
    for mean, raw in zip(loc.split(sizes), rho.split(sizes), strict=True):
        yield mean.view(components, -1), raw.view(components, -1)


def _plain_sample(
    loc: Tensor, rho: Tensor, seed: Tensor, layer: int, n: int, family: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The sample [K, n, C] before clipping, its noise, and the slope of the sample in loc (None for 1)."""
    wide = loc.dtype if loc.dtype.itemsize >= 4 else torch.float32
    if family == "delta":
        noise = torch.zeros(loc.shape[0], n, loc.shape[1], dtype=wide, device=loc.device)
    else:
        noise = plain_twins.draw(_NOISE[family], (loc.shape[0], n, loc.shape[1]), seed, layer, wide)
    noise = noise.abs() if family == "halfcauchy" else noise
    sigma = F.softplus(rho.to(wide)) + 1e-7
    value = torch.addcmul(loc.to(wide)[:, None], sigma[:, None], noise)
    if family == "lognormal":
        value = bounded_exp(value)
        return value, noise, value
    return value, noise, None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    loc, rho, seed, *ctx.settings = inputs
    ctx.save_for_backward(loc, rho, seed)


def _backward(ctx: Any, grads: Tensor) -> tuple[Any, ...]:
    d_loc, d_rho = torch.ops.slimbayes.factors_backward(grads.contiguous(), *ctx.saved_tensors, *ctx.settings)
    return d_loc, d_rho, None, *(None for _ in ctx.settings)


_factors.register_autograd(_backward, setup_context=_setup)


def launch_sample(
    loc: Tensor,
    rho: Tensor,
    seed: Tensor,
    widths: str,
    n: int,
    family: str,
    clip: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """The samples of all layers, flat, by the kernel."""
    from slimbayes.accelerate.gpu.programs import factors as programs

    starts, wide = _tables(widths, loc.device)
    columns = starts.numel()
    components = loc.numel() // columns
    out = torch.empty(loc.numel() * n, dtype=dtype, device=loc.device)
    quarter = ceil_div(n, 4)
    rows = min(_ROWS, power_of_two(quarter))
    count = components * ceil_div(quarter, rows) * ceil_div(columns, _COLUMNS)
    launch(
        programs.sample, count, out,
        out, loc, rho, starts, wide, seed, columns, components, n, quarter, 0, clip or 0.0,
        KIND=_NOISE[family], FAMILY=family, CLIP=clip is not None, BQ=rows, BC=_COLUMNS, FAST=not INTERPRETED,
    )  # fmt: skip
    return out


def launch_grad(
    grads: Tensor,
    loc: Tensor,
    rho: Tensor,
    seed: Tensor,
    widths: str,
    n: int,
    family: str,
    clip: float | None,
) -> tuple[Tensor, Tensor]:
    """The gradients of loc and ρ, flat, by the kernel."""
    from slimbayes.accelerate.gpu.programs import factors as programs

    starts, wide = _tables(widths, loc.device)
    columns = starts.numel()
    components = loc.numel() // columns
    d_loc, d_rho = torch.empty_like(loc), torch.empty_like(rho)
    quarter = ceil_div(n, 4)
    rows = min(_ROWS, power_of_two(quarter))
    width = _COLUMNS // 2  # half the forward's: more programs, each with all rows of its columns
    launch(
        programs.grad, components * ceil_div(columns, width), loc,
        grads, loc, rho, d_loc, d_rho, starts, wide, seed, columns, components, n, quarter, 0, clip or 0.0,
        KIND=_NOISE[family], FAMILY=family, CLIP=clip is not None, BQ=rows, BC=width, FAST=not INTERPRETED,
    )  # fmt: skip
    return d_loc, d_rho
