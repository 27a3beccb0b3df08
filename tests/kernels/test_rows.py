"""Row factors: the kernel against x∘f and autograd, in every layout and type."""

from __future__ import annotations

import pytest
import torch
from helpers_kernels import DEVICE, needs_kernels

from slimbayes import fast_paths
from slimbayes.accelerate.gpu import rows

pytestmark = needs_kernels

SHAPES = [
    (3, 5, 7),
    (2, 160, 4, 4),
    (3, 33, 5, 7),
    (2, 640, 2, 2),
    (2, 4, 3, 5, 2),
    (1, 8, 40, 40),
    (4, 1, 6, 6),
]


def last(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def plain(x: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    return x * f.reshape(f.shape + (1,) * (x.dim() - 2))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("grad_last", [False, True])
def test_twin(shape, channels_last, grad_last):
    torch.manual_seed(0)
    x = torch.randn(shape, device=DEVICE)
    x = (last(x) if channels_last else x).requires_grad_()
    f = torch.randn(shape[:2], device=DEVICE, requires_grad=True)
    g = torch.randn(shape, device=DEVICE)
    g = last(g) if grad_last else g
    y = rows.scale_rows(x, f)
    expected = plain(x, f)
    torch.testing.assert_close(y, expected)
    assert y.stride() == x.stride()
    gx, gf = torch.autograd.grad(y, (x, f), g)
    ex, ef = torch.autograd.grad(expected, (x, f), g)
    torch.testing.assert_close(gx, ex)
    torch.testing.assert_close(gf, ef, rtol=1e-5, atol=1e-5)
    again = torch.autograd.grad(rows.scale_rows(x, f), f, g)[0]
    assert torch.equal(gf, again)


@pytest.mark.parametrize("x_type", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("f_type", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("channels_last", [False, True])
def test_types(x_type, f_type, channels_last):
    torch.manual_seed(0)
    x = torch.randn(3, 20, 6, 6, device=DEVICE).to(x_type)
    x = (last(x) if channels_last else x).requires_grad_()
    f = torch.randn(3, 20, device=DEVICE).to(f_type).requires_grad_()
    g = torch.randn(3, 20, 6, 6, device=DEVICE).to(x_type)
    y = rows.scale_rows(x, f)
    assert y.dtype == x_type
    gx, gf = torch.autograd.grad(y, (x, f), g)
    assert gx.dtype == x_type and gf.dtype == f_type
    x64, f64 = x.detach().double().requires_grad_(), f.detach().double().requires_grad_()
    exact = plain(x64, f64)
    ex, ef = torch.autograd.grad(exact, (x64, f64), g.double())
    torch.testing.assert_close(y, exact.to(x_type))
    torch.testing.assert_close(gx, ex.to(x_type))
    torch.testing.assert_close(gf, ef.to(f_type))


def test_strided_factors_and_partial_gradients():
    torch.manual_seed(0)
    x = torch.randn(4, 6, 5, 5, device=DEVICE, requires_grad=True)
    f = torch.randn(6, 4, device=DEVICE).t().requires_grad_()  # column-major
    one = torch.randn(1, 6, device=DEVICE, requires_grad=True)
    for factor in (f, one.expand(4, 6)):
        torch.testing.assert_close(rows.scale_rows(x, factor), plain(x, factor))
    gone = torch.autograd.grad(rows.scale_rows(x, one.expand(4, 6)).square().sum(), one)[0]
    torch.testing.assert_close(gone, torch.autograd.grad(plain(x, one.expand(4, 6)).square().sum(), one)[0])
    gx = torch.autograd.grad(rows.scale_rows(x, f.detach()).sum(), x)[0]  # an expanded gradient
    torch.testing.assert_close(gx, f.detach()[..., None, None].expand_as(x).contiguous())
    gf = torch.autograd.grad(rows.scale_rows(x.detach(), f).sum(), f)[0]
    torch.testing.assert_close(gf, x.detach().sum((2, 3)))


def test_a_sliced_input_and_a_matrix():
    x = torch.randn(4, 6, 10, device=DEVICE)[:, :, ::2]
    f = torch.randn(4, 6, device=DEVICE)
    torch.testing.assert_close(rows.scale_rows(x, f), plain(x, f))
    torch.testing.assert_close(rows.scale_rows(x[..., 0], f), x[..., 0] * f)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("lines", [(2,), (3, 1, 1), (1, 2, 3)], ids=str)
def test_lines_that_rows_share(lines, channels_last):
    torch.manual_seed(0)
    x = torch.randn(6, 5, 4, 3, device=DEVICE)
    x = (last(x) if channels_last else x).requires_grad_()
    f = torch.randn(*lines, 5, device=DEVICE, requires_grad=True)
    wide = f.reshape(-1, 5).repeat_interleave(6 // f[..., 0].numel(), 0)
    y, expected = rows.scale_rows(x, f), plain(x, wide)
    assert "ScaleRows" in type(y.grad_fn).__name__
    g = torch.randn_like(y)
    torch.testing.assert_close(y, expected)
    for create in (False, True):
        found = torch.autograd.grad(y, (x, f), g, create_graph=create, retain_graph=True)
        exact = torch.autograd.grad(expected, (x, f), g, retain_graph=True)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    with fast_paths(triton=False):
        torch.testing.assert_close(rows.scale_rows(x, f), expected)


def test_lines_that_do_not_divide_the_rows_are_refused():
    x, f = torch.randn(4, 3, 2, device=DEVICE), torch.randn(3, 3, device=DEVICE)
    assert not rows.fits(x, f) and not rows.fits(x, f[:0]) and not rows.fits(x[:0], f)
    with pytest.raises(RuntimeError):
        rows.scale_rows(x, f)


def test_a_vectorised_jacobian():
    x = torch.randn(2, 3, 4, device=DEVICE, requires_grad=True)
    f = torch.randn(2, 3, device=DEVICE, requires_grad=True)
    g = torch.randn(5, 2, 3, 4, device=DEVICE)
    found = torch.autograd.grad(rows.scale_rows(x, f), (x, f), g, is_grads_batched=True)
    torch.testing.assert_close(found, torch.autograd.grad(plain(x, f), (x, f), g, is_grads_batched=True))


def test_the_gradient_may_be_written_over():
    x, f, g = (
        torch.randn(3, 20, 6, 6, device=DEVICE),
        torch.randn(3, 20, device=DEVICE),
        torch.randn(3, 20, 6, 6, device=DEVICE),
    )
    for is_last in (False, True):
        one, other = (last(x), last(g.clone())) if is_last else (x, g.clone())
        exact = rows.gradients(other.clone(), one, f, is_last, torch.empty_like(one))
        found = rows.gradients(other, one, f, is_last, other)
        assert found[0] is other and torch.equal(found[0], exact[0]) and torch.equal(found[1], exact[1])


def test_the_switch():
    x, f = torch.randn(2, 3, 4, device=DEVICE, requires_grad=True), torch.randn(2, 3, device=DEVICE)
    with fast_paths(triton=False):
        assert type(rows.scale_rows(x, f).grad_fn).__name__ == "MulBackward0"
    assert "ScaleRows" in type(rows.scale_rows(x, f).grad_fn).__name__


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_gradient_of_the_gradient(channels_last):
    x = torch.randn(2, 3, 4, 4, device=DEVICE)
    x = (last(x) if channels_last else x).requires_grad_()
    f = torch.randn(2, 3, device=DEVICE, requires_grad=True)
    found, exact = [
        torch.autograd.grad(
            sum(one.square().sum() for one in torch.autograd.grad(y.pow(3).sum(), (x, f), create_graph=True)), (x, f)
        )
        for y in (rows.scale_rows(x, f), plain(x, f))
    ]  # fmt: skip
    for value, target in zip(found, exact, strict=True):
        torch.testing.assert_close(value, target, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(2, 64, 40, 40), (1, 32, 70, 70), (4000, 32, 4, 4)])
def test_parts_cover_all_positions(shape):
    for is_last in (False, True):
        count, parts, steps = rows._backward_plan(shape[0], shape[1], torch.Size(shape).numel(), 2, is_last)
        positions, blocks, _ = rows._plan(shape[0], shape[1], torch.Size(shape).numel(), 2, is_last)
        assert (
            count % parts == 0
            and (parts - 1) * steps * blocks["BP"] < positions <= parts * steps * blocks["BP"]
        )
        assert parts == 1 or count // parts < rows._ENOUGH
