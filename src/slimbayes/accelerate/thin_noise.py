"""Local reparameterisation of a k-tied matrix product in few sweeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate.situation import further
from slimbayes.core.rules.local import spoil_infinite


def add_thin_noise(
    y: Tensor, x: Tensor, a: Tensor, b: Tensor, extra: Tensor | None, epsilon: Tensor
) -> Tensor:
    """y + ε∘√(x² A Bᵀ + extra), for rows y [R, out], x [R, in] and an extra variance [out] or None."""
    noisy: Tensor = _ThinNoise.apply(y, x, a, b, extra, epsilon)  # type: ignore[no-untyped-call]
    return noisy


class _ThinNoise(torch.autograd.Function):
    """With h = g∘ε/(2s), s the standard deviation: dA = (x²)ᵀ h B, dB = hᵀ x² A, dx = 2x ∘ (h B Aᵀ)."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, extra: Tensor | None, epsilon: Tensor
    ) -> Tensor:
        thin = x.square() @ a
        variance = thin @ b.t() if extra is None else torch.addmm(extra, thin, b.t())
        stddev = variance.clamp_min_(torch.finfo(variance.dtype).tiny).sqrt_()
        ctx.save_for_backward(x, a, b, extra, thin, stddev, epsilon)
        return spoil_infinite(torch.addcmul(y, stddev, epsilon), stddev)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, extra, thin, stddev, epsilon = ctx.saved_tensors
        if further(grad):
            return grad, *_again(x, a, b, extra, epsilon, grad), None
        h = (grad * epsilon).div_(stddev)
        # Where the variance was clamped (an input of zeros) its square root has no slope.
        edge = 1.001 * torch.finfo(stddev.dtype).tiny ** 0.5
        if stddev.device.type != "cpu" or float(stddev.min()) <= edge:
            h = torch.where(stddev > edge, h, 0.0)
        thin_grad = (h @ b).mul_(0.5)  # [R, q]
        dx = (thin_grad @ a.t()).mul_(x).mul_(2.0) if ctx.needs_input_grad[1] else None
        da = (thin_grad.t() @ x.square()).t()
        db = (thin.t() @ h).t() * 0.5
        rest = h.sum(0).mul_(0.5) if ctx.needs_input_grad[4] else None
        return grad, dx, da, db, rest, None


def _again(
    x: Tensor, a: Tensor, b: Tensor, extra: Tensor | None, epsilon: Tensor, grad: Tensor
) -> tuple[Tensor | None, ...]:
    """Gradients that can be differentiated again, by autograd through the plain formula."""
    variance = x.square() @ a @ b.t() if extra is None else torch.addmm(extra, x.square() @ a, b.t())
    noise = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt() * epsilon
    inputs = (x, a, b, extra)
    wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    found = iter(torch.autograd.grad(noise, wanted, grad, create_graph=True))
    return tuple(next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs)
