"""Local noise of a k-tied product: kernel and plain twins against the formula with the noise read back."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_kernels import DEVICE, needs_kernels

from slimbayes import fast_paths
from slimbayes.accelerate.gpu import local_launch as local
from slimbayes.accelerate.gpu.local import local_noise, thin_local, thin_squares
from slimbayes.accelerate.gpu.local_launch import Tile
from slimbayes.accelerate.thin_noise import add_thin_noise
from slimbayes.core.rules.local import thin_factors

KERNEL = [pytest.param(True, marks=needs_kernels, id="kernel"), pytest.param(False, id="plain")]
SEED = torch.tensor([-987654321987654321], device=DEVICE)
SHAPES = [(1, 1, 1), (9, 33, 130), (6, 128, 128), (13, 70, 7)]  # R, n, m


def parts(shape, p, extra=True, dtype=torch.float32):
    torch.manual_seed(0)
    rows, n, m = shape
    like = {"dtype": dtype, "device": DEVICE}
    made = [
        torch.randn(rows, m, **like), torch.randn(rows, n, **like), torch.rand(n, p, **like).add(0.1),
        torch.rand(m, p, **like).add(0.1), torch.rand(m, **like).add(0.1) if extra else None,
    ]  # fmt: skip
    return [part if part is None else part.requires_grad_() for part in made]


def noise_of(shape, dtype=torch.float32, stream=0):
    """What is added to 0 where the variance is 1."""
    rows, _, m = shape
    like = {"dtype": dtype, "device": DEVICE}
    zero, one = torch.zeros(rows, 1, **like), torch.zeros(1, 1, **like)
    b, unit = torch.zeros(m, 1, **like), torch.ones(m, **like)
    return thin_local(torch.zeros(rows, m, **like), zero, one, b, unit, SEED, stream)


def formula(y, x, a, b, extra, noise):
    variance = x.square() @ a @ b.t()
    if extra is not None:
        variance = variance + extra
    return y + variance.sqrt() * noise


def agree(shape, inputs, noise, stream=0, rtol=3e-5, atol=3e-6):
    """Value and gradients against autograd of the plain expression in float64."""
    given = [part for part in inputs if part is not None]
    out = thin_local(*inputs, SEED, stream)
    exact = [None if part is None else part.detach().double().requires_grad_() for part in inputs]
    expected = formula(*exact, noise.double())
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)
    g = torch.randn_like(out)
    found = torch.autograd.grad(out, given, g)
    targets = torch.autograd.grad(expected, [part for part in exact if part is not None], g.double())
    for part, grad, target in zip(given, found, targets, strict=True):
        assert grad.dtype == part.dtype and grad.shape == part.shape
        scale = 1.0 + float(target.abs().max())
        torch.testing.assert_close(grad.double(), target, rtol=rtol, atol=atol * scale)


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", [1, 3, 6])
@pytest.mark.parametrize("extra", [True, False])
def test_formula(kernel, shape, p, extra):
    with fast_paths(triton=kernel):
        agree(shape, parts(shape, p, extra), noise_of(shape, stream=5), stream=5)


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("p", [10, 11])
def test_many_ranks(kernel, p):
    """Ten columns have registers of their own; more take the plain way, and its noise."""
    shape = (5, 40, 36)
    with fast_paths(triton=kernel):
        inputs = parts(shape, p)
        with fast_paths(triton=kernel and p <= 10):
            noise = noise_of(shape)
        agree(shape, inputs, noise)


def test_double_precision():
    shape = (9, 12, 14)
    noise = noise_of(shape, torch.float64)
    agree(shape, parts(shape, 3, dtype=torch.float64), noise, rtol=1e-10, atol=1e-10)


def test_as_the_stored_noise():
    """The same as the operation that is given its noise."""
    shape = (9, 12, 14)
    torch.manual_seed(1)
    y, x, _, _, extra = parts(shape, 3, dtype=torch.float64)
    u, v = torch.rand(12, 2, dtype=torch.float64), torch.rand(14, 2, dtype=torch.float64)
    u, v = u.to(DEVICE).requires_grad_(), v.to(DEVICE).requires_grad_()
    inputs = [y, x, u, v, extra]
    noise = noise_of(shape, torch.float64)
    out = thin_local(y, x, *thin_factors(u, v), extra, SEED)
    expected = add_thin_noise(y, x, *thin_factors(u, v), extra, noise)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    g = torch.randn_like(out)
    exact = torch.autograd.grad(expected, inputs, g)
    for grad, target in zip(torch.autograd.grad(out, inputs, g), exact, strict=True):
        torch.testing.assert_close(grad, target, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types(kernel, dtype):
    """16-bit rows are the rounded float32 ones; A, B and extra keep float32 gradients."""
    shape = (12, 40, 50)
    y, x, a, b, extra = parts(shape, 3)
    rows = [part.detach().to(dtype) for part in (y, x)]
    small = [*(part.clone().requires_grad_() for part in rows), a, b, extra]
    wide = [*(part.float().requires_grad_() for part in rows), a, b, extra]
    with fast_paths(triton=kernel):
        out, expected = thin_local(*small, SEED), thin_local(*wide, SEED)
        assert out.dtype == dtype
        torch.testing.assert_close(out, expected.to(dtype))
        g = torch.randn_like(out)
        exact = torch.autograd.grad(expected, wide, g.float())
        for part, grad, target in zip(small, torch.autograd.grad(out, small, g), exact, strict=True):
            assert grad.dtype == part.dtype
            torch.testing.assert_close(grad, target.to(part.dtype))


@pytest.mark.parametrize("kernel", KERNEL)
def test_other_strides(kernel):
    shape = (9, 33, 40)
    inputs = [part.detach().t().contiguous().t().requires_grad_() for part in parts(shape, 3, False)[:4]]
    with fast_paths(triton=kernel):
        agree(shape, [*inputs, None], noise_of(shape))


@pytest.mark.parametrize("kernel", KERNEL)
def test_no_variance_has_no_slope(kernel):
    """A row of zeros has no noise, and its gradients are finite."""
    shape = (8, 20, 30)
    y, x, a, b, _ = parts(shape, 3, False)
    with torch.no_grad():
        x[2] = 0.0
    with fast_paths(triton=kernel):
        out = thin_local(y, x, a, b, None, SEED)
        torch.testing.assert_close(out[2], y[2])
        grads = torch.autograd.grad(out.square().sum(), [x, a, b])
        assert all(bool(grad.isfinite().all()) for grad in grads)
        assert not grads[0][2].any() and grads[0][3].any()
        x.data[4, 5] = float("nan")
        assert bool(thin_local(y.detach(), x, a, b, None, SEED)[4].isnan().all())


@pytest.mark.parametrize("kernel", KERNEL)
def test_only_what_is_asked_for(kernel):
    shape = (8, 20, 30)
    y, x, a, b, extra = parts(shape, 3)
    with fast_paths(triton=kernel):
        exact = torch.autograd.grad(thin_local(y, x, a, b, extra, SEED).square().sum(), [y, a])
        some = thin_local(y, x.detach(), a, b.detach(), extra.detach(), SEED)
        for grad, target in zip(torch.autograd.grad(some.square().sum(), [y, a]), exact, strict=True):
            torch.testing.assert_close(grad, target)
        alone = thin_local(y, *(part.detach() for part in (x, a, b, extra)), SEED)
        torch.testing.assert_close(torch.autograd.grad(alone.square().sum(), y)[0], exact[0])
        with torch.no_grad():
            torch.testing.assert_close(thin_local(y, x, a, b, extra, SEED), alone)


@pytest.mark.parametrize("kernel", KERNEL)
def test_moments_and_streams(kernel):
    shape = (60, 1, 200)
    with fast_paths(triton=kernel):
        first, again, other = noise_of(shape), noise_of(shape), noise_of(shape, stream=1)
    assert torch.equal(first, again)
    table = torch.stack([first.flatten(), other.flatten()]).double()
    count = table.shape[1]
    assert (table.mean(1).abs() < 5 / math.sqrt(count)).all()
    assert ((table.var(1) - 1).abs() < 5 * math.sqrt(2 / count)).all()
    assert (((table**4).mean(1) - 3).abs() < 5 * math.sqrt(96 / count)).all()
    assert abs(float(torch.corrcoef(table)[0, 1])) < 5 / math.sqrt(count)
    for shift in (1, 32, 64, 200, 800, count // 4):
        assert abs(float((table[0, :-shift] * table[0, shift:]).mean())) < 6 / math.sqrt(count - shift)


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("extra", [True, False])
def test_compiled(kernel, extra):
    inputs = parts((6, 10, 12), 3, extra)
    given = [part for part in inputs if part is not None]

    def loss(seed):
        return thin_local(*inputs, seed).square().sum()

    with fast_paths(triton=kernel):
        expected = loss(SEED)
        exact = torch.autograd.grad(expected, given)
        torch._dynamo.reset()
        value = torch.compile(loss, fullgraph=True, backend="aot_eager")(SEED)
        torch.testing.assert_close(value, expected)
        for grad, target in zip(torch.autograd.grad(value, given), exact, strict=True):
            torch.testing.assert_close(grad, target, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("chained", [True, False])
def test_operators(extra, chained):
    """Schemas, shapes without data and gradients agree with what the operators do."""
    with fast_paths(triton=False):
        y, x, a, b, more = parts((4, 5, 6), 2, extra, torch.float64)
        torch.library.opcheck(torch.ops.slimbayes.thin_squares, (x, a, False))
        t = thin_squares(x.detach(), a.detach()).requires_grad_()
        bias, next_a = (
            torch.rand(6, 3, dtype=torch.float64, device=DEVICE).requires_grad_() for _ in range(2)
        )
        rest = (bias[:, 0].detach().requires_grad_(), next_a) if chained else (None, None)
        torch.library.opcheck(
            torch.ops.slimbayes.local_noise, (y, t, b, more, *rest, SEED, 0, chained, False)
        )  # fmt: skip


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 33, 130), (13, 70, 7)], ids=str)
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("q", [0, 3])
@pytest.mark.parametrize("extra", [True, False])
def test_chain(kernel, shape, relu, q, extra):
    """Bias, noise, ReLU and the next product's T in one sweep, against autograd of the formula."""
    y, x, a, b, more = parts(shape, 3, extra)
    like = {"device": DEVICE}
    bias = torch.randn(shape[2], **like).requires_grad_() if extra else None
    next_a = torch.rand(shape[2], q, **like).requires_grad_() if q else None
    with fast_paths(triton=kernel):
        noise = noise_of(shape).double()
        z, t = local_noise(y, thin_squares(x, a), b, more, bias, SEED, 0, relu, next_a)
    given = [tensor for tensor in (y, x, a, b, more, bias, next_a) if tensor is not None]
    exact = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in
             (y, x, a, b, more, bias, next_a)]  # fmt: skip
    expected = formula(*exact[:5], noise)
    expected = expected if bias is None else expected + exact[5]
    expected = expected.relu() if relu else expected
    torch.testing.assert_close(z.double(), expected, rtol=3e-5, atol=3e-6)
    found, wanted = [z], [expected]
    if next_a is not None:
        following = expected.square() @ exact[6]
        torch.testing.assert_close(t.double(), following, rtol=1e-4, atol=1e-5)
        found, wanted = [z, t], [expected, following]
    weights = [torch.randn_like(value) for value in found]
    grads = torch.autograd.grad(found, given, weights)
    leaves = [tensor for tensor in exact if tensor is not None]
    targets = torch.autograd.grad(wanted, leaves, [w.double() for w in weights])
    for grad, target in zip(grads, targets, strict=True):
        scale = 1.0 + float(target.abs().max())
        torch.testing.assert_close(grad.double(), target, rtol=3e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("kernel", KERNEL)
def test_only_one_end_of_a_chain(kernel):
    """A gradient that comes through the rows alone, or through the next product's T alone."""
    shape = (9, 20, 30)
    y, x, a, b, _ = parts(shape, 3)
    next_a = torch.rand(30, 2, device=DEVICE).requires_grad_()
    with fast_paths(triton=kernel):
        z, t = local_noise(y, thin_squares(x, a), b, None, None, SEED, 0, True, next_a)
        alone = torch.autograd.grad(z.sum(), [y, b], retain_graph=True)
        other = torch.autograd.grad(t.sum(), [y, b], retain_graph=True)
        for both, one, two in zip(torch.autograd.grad(z.sum() + t.sum(), [y, b]), alone, other, strict=True):
            torch.testing.assert_close(both, one + two, rtol=1e-4, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize("tile", [Tile(32, 1, 2), Tile(128, 32)], ids=str)
def test_tiles_change_nothing_but_the_sums_order(tile, monkeypatch):
    inputs = parts((21, 150, 270), 3)
    expected = thin_local(*inputs, SEED)
    g = torch.randn_like(expected)
    exact = torch.autograd.grad(expected, inputs, g)
    for name in ("THIN", "THIN_GRAD", "NOISY", "NOISY_GRAD"):
        monkeypatch.setattr(local, name, (tile,) * 4)
    found = thin_local(*inputs, SEED)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for grad, target in zip(torch.autograd.grad(found, inputs, g), exact, strict=True):
        torch.testing.assert_close(grad, target, rtol=1e-4, atol=1e-5 * float(target.abs().max()))
