"""The operations behind weights.py: for torch.compile as custom operators, in eager code as autograd Functions.

The custom operator's dispatch in Python costs as much as a small layer, and a network calls one per weight.

All return (value, noise, sums). A form says which of the first two are made, the other is empty: "sample" M + σ∘ε,
"noise" σ∘ε, "mean" M, "both" M and σ∘ε.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slimbayes.accelerate.gpu import plain_twins, weight_launch
from slimbayes.core.custom_operation import CustomOp

_Gradients = tuple[Tensor | None, ...]
FORMS = ("sample", "noise", "mean", "both")


def _ktied(
    mean: Tensor,
    log_u: Tensor,
    log_v: Tensor,
    seed: Tensor,
    stream: int,
    center: float,
    dtype: torch.dtype,
    form: str,
    kernel: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if kernel:
        return weight_launch.ktied(mean, log_u, log_v, seed, stream, center, dtype, form)
    wide = _wide(mean)
    sigma = log_u.to(wide).exp() @ log_v.to(wide).exp().t()
    sums = torch.stack([_squares(mean, center), sigma.square().sum(), sigma.log().sum()])
    if form != "mean":
        sigma = sigma.mul_(plain_twins.draw("normal", tuple(mean.shape), seed, stream, wide))
    return *_made(mean, sigma, dtype, form), sums


def _ktied_backward(
    grad: Tensor,
    noise_grad: Tensor | None,
    d_sums: Tensor | None,
    mean: Tensor,
    log_u: Tensor,
    log_v: Tensor,
    seed: Tensor,
    stream: int,
    center: float,
    dtype: torch.dtype,
    form: str,
    kernel: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if kernel:
        return weight_launch.ktied_backward(
            grad, noise_grad, d_sums, mean, log_u, log_v, seed, stream, center, form
        )  # fmt: skip
    wide = _wide(mean)
    u, v = log_u.to(wide).exp(), log_v.to(wide).exp()
    slope = _by_noise(grad, noise_grad, seed, stream, wide, form)
    if d_sums is not None:
        sigma = u @ v.t()
        slope.add_(d_sums[2] / sigma).addcmul_(sigma, 2.0 * d_sums[1])
    d_mean = _mean_gradient(grad, d_sums, mean, center, form)
    return d_mean, (u * (slope @ v)).to(log_u.dtype), (v * (slope.t() @ u)).to(log_v.dtype)


def _field(
    mean: Tensor,
    rho: Tensor,
    seed: Tensor,
    stream: int,
    center: float,
    maximum: float | None,
    dtype: torch.dtype,
    form: str,
    kernel: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if kernel:
        return weight_launch.field(mean, rho, seed, stream, center, maximum, dtype, form)
    wide = _wide(mean)
    sigma = F.softplus(rho.to(wide)).add_(1e-7)
    sigma = sigma if maximum is None else sigma.clamp_(max=maximum)
    sums = torch.stack([_squares(mean, center), sigma.square().sum(), sigma.log().sum()])
    if form != "mean":
        sigma = plain_twins.draw("normal", tuple(mean.shape), seed, stream, wide).mul_(sigma)
    return *_made(mean, sigma, dtype, form), sums


def _field_backward(
    grad: Tensor,
    noise_grad: Tensor | None,
    d_sums: Tensor | None,
    mean: Tensor,
    rho: Tensor,
    seed: Tensor,
    stream: int,
    center: float,
    maximum: float | None,
    dtype: torch.dtype,
    form: str,
    kernel: bool,
) -> tuple[Tensor, Tensor]:
    if kernel:
        return weight_launch.field_backward(
            grad, noise_grad, d_sums, mean, rho, seed, stream, center, maximum, form
        )  # fmt: skip
    wide = _wide(mean)
    free = F.softplus(rho.to(wide)) + 1e-7
    sigma = free if maximum is None else free.clamp(max=maximum)
    slope = _by_noise(grad, noise_grad, seed, stream, wide, form)
    if d_sums is not None:
        slope.add_(2.0 * d_sums[1] * sigma).add_(d_sums[2] / sigma)
    if maximum is not None:
        slope = slope * ((free < maximum) | (slope > 0))
    d_rho = torch.empty_like(rho).copy_(slope * torch.sigmoid(rho.to(wide)))
    return _mean_gradient(grad, d_sums, mean, center, form), d_rho


def _wide(mean: Tensor) -> torch.dtype:
    return mean.dtype if mean.dtype.itemsize >= 4 else torch.float32


def _squares(mean: Tensor, center: float) -> Tensor:
    shift = mean.to(_wide(mean)) - center
    return shift.square().sum()


def _made(mean: Tensor, noise: Tensor, dtype: torch.dtype, form: str) -> tuple[Tensor, Tensor]:
    """What a form makes, in the layout of M."""
    made = torch.empty_like(mean, dtype=dtype)
    none = mean.new_empty(0, dtype=dtype)
    if form == "noise":
        return none, made.copy_(noise)
    if form == "both":
        return made.copy_(mean), torch.empty_like(made).copy_(noise)
    return made.copy_(mean if form == "mean" else noise.add_(mean)), none


def _by_noise(
    grad: Tensor, noise_grad: Tensor | None, seed: Tensor, stream: int, wide: torch.dtype, form: str
) -> Tensor:
    """gW∘ε; nothing for the mean alone."""
    if form == "mean":
        return torch.zeros(grad.shape, dtype=wide, device=grad.device)
    noise = plain_twins.draw("normal", tuple(grad.shape), seed, stream, wide)
    return noise.mul_(grad if noise_grad is None else noise_grad)


def _mean_gradient(
    grad: Tensor, d_sums: Tensor | None, mean: Tensor, center: float, form: str
) -> Tensor:  # fmt: skip
    """gM = gW + 2·g₀·(M − center)."""
    total = torch.zeros_like(mean) if form == "noise" else torch.empty_like(mean).copy_(grad)
    if d_sums is not None:
        total = total + (mean - center) * (2.0 * d_sums[0])
    return total.to(mean.dtype)


_KTIED = "Tensor mean, Tensor log_u, Tensor log_v, Tensor seed, int stream, float center"
_FIELD = "Tensor mean, Tensor rho, Tensor seed, int stream, float center, float? maximum"
_ENDS = "ScalarType dtype, str form, bool kernel"


def _register(name: str, arguments: str, forward: Callable[..., Any], backward: Callable[..., Any], tensors: int,
              sums: int) -> type[torch.autograd.Function]:  # fmt: skip
    """Register forward and backward as custom operators; return the autograd Function of the same pair."""
    op = CustomOp(name, f"({arguments}, {_ENDS}) -> (Tensor, Tensor, Tensor)", forward)
    returns = ", ".join(["Tensor"] * (tensors - 1))
    op_backward = CustomOp(
        f"{name}_backward",
        f"(Tensor grad, Tensor? noise_grad, Tensor? d_sums, {arguments}, {_ENDS}) -> ({returns})",
        backward,
    )

    def fake(mean: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        dtype, form = rest[-3], rest[-2]
        made, none = torch.empty_like(mean, dtype=dtype), mean.new_empty(0, dtype=dtype)
        other = torch.empty_like(made) if form == "both" else none
        pair = (none, made) if form == "noise" else (made, other)
        return *pair, mean.new_empty(sums, dtype=_wide(mean))

    def fake_backward(
        grad: Tensor, noise_grad: Tensor | None, d_sums: Tensor | None, *rest: Any
    ) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in rest[: tensors - 1])

    op.register_fake(fake)
    op_backward.register_fake(fake_backward)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:tensors])
        ctx.settings = inputs[tensors:]
        ctx.set_materialize_grads(False)

    def through(run: Callable[..., Any]) -> Callable[..., _Gradients]:
        def gradients(
            ctx: Any, grad: Tensor | None, noise_grad: Tensor | None, d_sums: Tensor | None
        ) -> _Gradients:
            saved, form = ctx.saved_tensors, ctx.settings[-2]
            if form == "noise":
                grad = noise_grad
            if grad is None:  # not used
                grad = torch.zeros_like(saved[0])
            if form == "both" and noise_grad is None:
                noise_grad = torch.zeros_like(saved[0])
            found = run(grad, noise_grad if form == "both" else None, d_sums, *saved, *ctx.settings)
            return *found, *(None for _ in range(1 + len(ctx.settings)))

        return gradients

    op.register_autograd(through(getattr(torch.ops.slimbayes, f"{name}_backward")), setup_context=setup)

    def run_forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output: tuple[Tensor, ...] = forward(*inputs)
        setup(ctx, inputs, output)
        return output

    run_backward = torch.autograd.function.once_differentiable(through(backward))
    members = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
    return type(name, (torch.autograd.Function,), members)


KTied = _register("ktied_weight", _KTIED, _ktied, _ktied_backward, 4, 3)
MeanField = _register("meanfield_weight", _FIELD, _field, _field_backward, 3, 3)
