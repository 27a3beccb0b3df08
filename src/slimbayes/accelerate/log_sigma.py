"""Σ log σ of a k-tied matrix, and its gradient: by a pass over all elements, or by interpolation for rank 2.

With a = log u₂ − log u₁, b = log v₂ − log v₁ and h(t) = log(2 cosh(t/2)),

    log σ_ij = ½(log u_i1 + log u_i2) + ½(log v_j1 + log v_j2) + h(a_i + b_j),

a separable part and a function of a sum. Interpolation at N Chebyshev nodes α_p in the range of a makes the double
sum Σ_p (Σ_i ℓ_p(a_i)) (Σ_j h(α_p + b_j)), of (m + n)·N terms in place of m·n. The singularities of h are at
±πi, so the error falls as r^(−N) with r = π/w + √(π²/w² + 1), w half the range of a.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from slimbayes.accelerate import switches
from slimbayes.core.custom_operation import operation
from slimbayes.core.noise import transformed
from slimbayes.core.paths import FastPath

SMALLEST = 1 << 20  # elements of a matrix below which passes over them cost less than the calls
_MOST_NODES = 40
_FIXED_NODES = 64  # on a GPU: an error of 1e-6 where u₂/u₁ spreads over a factor of e³⁰
_TOLERANCE = {torch.float32: 1e-8, torch.float64: 1e-16}


class Interpolation(FastPath):
    """(m + n)·N terms in place of m·n."""

    def on(self) -> bool:
        """By ``log_sigma``."""
        return switches.paths.log_sigma

    def log_sigma(self, log_u: Tensor, log_v: Tensor) -> Tensor | None:
        """Σ log σ of a large matrix of rank 2."""
        return sum_log_sigma(log_u, log_v) if interpolates(log_u, log_v) else None


def sum_log_sigma(log_u: Tensor, log_v: Tensor) -> Tensor:
    """Σ_ij log Σ_a exp(log u_ia + log v_ja).

    >>> float(sum_log_sigma(torch.zeros(3, 2), torch.zeros(5, 2)) / math.log(2.0))
    15.0
    """
    if log_u.shape[1] == 1:
        return log_v.shape[0] * log_u.sum() + log_u.shape[0] * log_v.sum()
    if not interpolates(log_u, log_v):
        return exact(log_u, log_v)
    if torch.compiler.is_compiling():
        compiled: Tensor = interpolated(log_u, log_v)[0]
        return compiled
    value: Tensor = _Interpolated.apply(log_u, log_v)  # type: ignore[no-untyped-call]
    return value


def exact(log_u: Tensor, log_v: Tensor) -> Tensor:
    """The same by a pass over all elements, in the type of its factors even under autocast."""
    with torch.autocast(device_type=log_u.device.type, enabled=False):
        u, v, taken = _scaled(log_u, log_v)
        return (u @ v.t()).log().sum() + taken


def _scaled(log_u: Tensor, log_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of U and V over their largest elements, and the sum of those over log σ: σ itself may be too small."""
    u_most, v_most = log_u.detach().amax(1, keepdim=True), log_v.detach().amax(1, keepdim=True)
    taken = len(log_v) * u_most.sum() + len(log_u) * v_most.sum()
    return (log_u - u_most).exp(), (log_v - v_most).exp(), taken


def interpolates(log_u: Tensor, log_v: Tensor) -> bool:
    """Whether interpolation is used.

    On the CPU the number of nodes follows from the values. A GPU would have to be waited for: there it is fixed.
    """
    return (
        switches.paths.log_sigma
        and log_u.device.type in ("cpu", "cuda")
        and log_u.shape[1] == 2
        and log_u.shape[0] * log_v.shape[0] >= SMALLEST
        and log_u.dtype in _TOLERANCE
        and (torch.compiler.is_compiling() or not transformed())
    )


def nodes_needed(half_range: float, tolerance: float) -> int:
    """N such that r^(−N) is below the tolerance.

    >>> nodes_needed(0.5, 1e-9), nodes_needed(2.0, 1e-9)
    (11, 19)
    """
    if not half_range < 1e3:
        return _MOST_NODES + 1
    ratio = math.pi / max(half_range, 1e-6)
    return max(2, math.ceil(-math.log(tolerance) / math.log(ratio + math.hypot(ratio, 1.0)))) + 2


@torch.no_grad()
def value_and_gradients(log_u: Tensor, log_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ log σ and its gradients with respect to log u and log v."""
    if log_u.shape[1] == 1:
        du, dv = torch.full_like(log_u, len(log_v)), torch.full_like(log_v, len(log_u))
        return sum_log_sigma(log_u, log_v), du, dv
    if not interpolates(log_u, log_v):
        return _exact_with_gradients(log_u, log_v)
    a, b = log_u[:, 1] - log_u[:, 0], log_v[:, 1] - log_v[:, 0]
    if log_u.device.type != "cpu":
        low, high = a.double().aminmax()
        sums = _double_sum(a, b, 0.5 * (low + high), 0.5 * (high - low), _FIXED_NODES)
        return _with_separable(log_u, log_v, *sums)
    (a_low, a_high), (b_low, b_high) = (torch.stack(x.aminmax()).tolist() for x in (a, b))
    swapped = b_high - b_low < a_high - a_low  # the narrower side needs fewer nodes
    if swapped:
        a, b, a_low, a_high = b, a, b_low, b_high
    nodes = nodes_needed(0.5 * (a_high - a_low), _TOLERANCE[log_u.dtype])
    if nodes > _MOST_NODES:
        return _exact_with_gradients(log_u, log_v)
    h, da, db = _double_sum(a, b, 0.5 * (a_low + a_high), 0.5 * (a_high - a_low), nodes)
    if swapped:
        da, db = db, da
    return _with_separable(log_u, log_v, h, da, db)


def _with_separable(
    log_u: Tensor, log_v: Tensor, h: Tensor, da: Tensor, db: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Value and gradients of Σ log σ from those of Σ h(a + b)."""
    m, n = len(log_u), len(log_v)
    value = 0.5 * (n * log_u.sum(dtype=h.dtype) + m * log_v.sum(dtype=h.dtype)) + h
    gradient_u = torch.stack((0.5 * n - da, 0.5 * n + da), 1)
    gradient_v = torch.stack((0.5 * m - db, 0.5 * m + db), 1)
    return value.to(log_u.dtype), gradient_u.to(log_u.dtype), gradient_v.to(log_v.dtype)


@functools.lru_cache(maxsize=_MOST_NODES)
def _table(nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Orders k, nodes x_p = cos θ_p in [−1, 1], and the matrix that takes T_k(x) to ℓ_p(x).

    ℓ_p(x) = (2/N) Σ_k T_k(x_p) T_k(x), the term k = 0 halved, with T_k(cos θ) = cos kθ.
    """
    with torch.inference_mode(False):
        return _make_table(nodes, torch.device("cpu"))


def _make_table(nodes: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    order = torch.arange(nodes, dtype=torch.float64, device=device)
    angles = (order + 0.5) * (math.pi / nodes)
    to_lagrange = torch.outer(order, angles).cos() * (2.0 / nodes)  # [k, p]
    to_lagrange[0] *= 0.5
    return order, angles.cos(), to_lagrange


def _double_sum(
    a: Tensor, b: Tensor, middle: float | Tensor, half: float | Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Σ_ij h(a_i + b_j), Σ_j h′(a_i + b_j) and Σ_i h′(a_i + b_j)."""
    # Not kept on a GPU: what is first made inside a CUDA graph's run lives in the graph's own memory.
    order, points, to_lagrange = _table(nodes) if a.device.type == "cpu" else _make_table(nodes, a.device)
    width = half.clamp_min(1e-300) if isinstance(half, Tensor) else max(half, 1e-300)
    # In float64, for these weights of both signs stand for sums of thousands; the tables may be float32.
    theta = a.double().sub_(middle).div_(width).clamp_(-1.0, 1.0).acos_()
    lagrange = torch.outer(theta, order).cos_() @ to_lagrange  # [m, p]
    total = lagrange.sum(0)
    t = (points * half + middle).to(b.dtype)[:, None] + b  # [p, n]
    magnitude = t.abs()
    h = torch.exp(-magnitude).log1p_().add_(magnitude, alpha=0.5)
    slope = t.mul_(0.5).tanh_().mul_(0.5)
    weights = total.to(b.dtype)
    return total @ h.sum(1, dtype=total.dtype), lagrange @ slope.sum(1, dtype=total.dtype), weights @ slope


def _exact_with_gradients(log_u: Tensor, log_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    u, v, taken = _scaled(log_u, log_v)
    with torch.autocast(device_type=u.device.type, enabled=False):
        sigma = u @ v.t()
        inverse = sigma.reciprocal()
        return sigma.log_().sum() + taken, (inverse @ v).mul_(u), (u.t() @ inverse).t().mul(v)


class _Interpolated(torch.autograd.Function):
    """The value with its gradients computed beside it: both need the same few terms."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, log_u: Tensor, log_v: Tensor) -> Tensor:
        value, gradient_u, gradient_v = value_and_gradients(log_u, log_v)
        ctx.save_for_backward(log_u, log_v, gradient_u, gradient_v)
        return value

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        log_u, log_v, gradient_u, gradient_v = ctx.saved_tensors  # type: ignore[attr-defined]
        if torch.is_grad_enabled():  # a second derivative is asked for: the interpolation has none
            again = torch.autograd.grad(exact(log_u, log_v), (log_u, log_v), grad, create_graph=True)
            return again[0], again[1]
        return gradient_u * grad, gradient_v * grad


@operation("sum_log_sigma", "(Tensor log_u, Tensor log_v) -> (Tensor, Tensor, Tensor)")
def interpolated(log_u: Tensor, log_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``value_and_gradients`` as one operation of compiled code, where the number of nodes stays free."""
    return value_and_gradients(log_u, log_v)


@interpolated.register_fake
def _(log_u: Tensor, log_v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return log_u.new_empty(()), torch.empty_like(log_u), torch.empty_like(log_v)


def _keep(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]
) -> None:
    ctx.save_for_backward(output[1], output[2])


def _use(
    ctx: torch.autograd.function.FunctionCtx, grad: Tensor, *unused: Tensor | None
) -> tuple[Tensor, Tensor]:
    gradient_u, gradient_v = ctx.saved_tensors  # type: ignore[attr-defined]
    return gradient_u * grad, gradient_v * grad


interpolated.register_autograd(_use, setup_context=_keep)
