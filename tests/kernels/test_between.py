"""A convolution between factors as one node: against plain operations and autograd, and where it is not taken."""

from __future__ import annotations

import contextlib

import pytest
import torch
from helpers_kernels import DEVICE, needs_kernels
from torch import nn
from torch.utils.checkpoint import checkpoint

import slimbayes as sb
from slimbayes import fast_paths
from slimbayes.accelerate import factor_groups
from slimbayes.accelerate.gpu import factor_convolution
from slimbayes.accelerate.gpu.rows import scale_rows
from slimbayes.core.context import Frame

pytestmark = needs_kernels

CONVOLUTIONS = {
    "plain": (nn.Conv2d, 4, 6, {"kernel_size": 3, "padding": 1}),
    "strided": (nn.Conv2d, 4, 6, {"kernel_size": 3, "stride": 2}),
    "grouped": (nn.Conv2d, 4, 6, {"kernel_size": 3, "groups": 2, "dilation": 2}),
    "point": (nn.Conv2d, 4, 6, {"kernel_size": 1}),
    "line": (nn.Conv1d, 4, 6, {"kernel_size": 3, "padding": 2}),
    "volume": (nn.Conv3d, 4, 6, {"kernel_size": 2}),
}
NODE = "_BetweenBackward"


@pytest.fixture(autouse=True)
def without_cpu_kernels():
    with fast_paths(native=False):
        yield


def layer(name="plain", bias=False, method=None):
    torch.manual_seed(0)
    kind, inputs, outputs, settings = CONVOLUTIONS[name]
    net = sb.bayesianize(
        nn.Sequential(kind(inputs, outputs, bias=bias, **settings)), method or sb.BatchEnsemble(2)
    )
    return net[0].to(DEVICE)


def frame(batch=3, samples=1):
    return Frame(2, samples, batch, 1, "example", None)


def tensors(op, rows=6, lines=(2, 1, 3), size=5, channels_last=False, dtype=torch.float32):
    x = torch.randn(rows, 4, *[size] * len(op.kernel_size), device=DEVICE).to(dtype)
    if channels_last:
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    s, r = (torch.randn(*lines, width, device=DEVICE, requires_grad=True) for width in (4, 6))
    return x.requires_grad_(), s, r


def plain(op, x, s, r):
    for f, after in ((s, False), (r, True)):
        if after:
            x = op._conv_forward(x, op.weight, None)
        if f is not None:
            rows = f.flatten(0, 2).repeat_interleave(x.shape[0] // f[..., 0].numel(), 0)
            x = x * rows.reshape(*x.shape[:2], *[1] * (x.dim() - 2)).to(x.dtype)
    return x


def same(found, expected, **tolerance):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_twin(name, channels_last):
    op = layer(name)
    x, s, r = tensors(op, channels_last=channels_last)
    assert factor_convolution.usable(op, x, s, r, frame())
    y, expected = factor_convolution.convolved(op, x, s, r), plain(op, x, s, r)
    assert y.grad_fn.name() == NODE
    same([y], [expected])
    g = torch.randn_like(y)
    wanted = (x, op.weight, s, r)
    same(torch.autograd.grad(y, wanted, g), torch.autograd.grad(expected, wanted, g), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lines", [(2, 1, 1), (2, 2, 1), (2, 2, 3)], ids=str)
def test_lines_that_rows_share(lines):
    op = layer()
    x, s, r = tensors(op, rows=12, lines=lines)
    assert factor_convolution.usable(op, x, s, r, frame(samples=2))
    y, expected = factor_convolution.convolved(op, x, s, r), plain(op, x, s, r)
    g = torch.randn_like(y)
    same([y], [expected])
    same(torch.autograd.grad(y, (s, r), g), torch.autograd.grad(expected, (s, r), g), rtol=1e-4, atol=1e-4)


def test_lines_that_are_not_of_consecutive_rows():
    op = layer()
    x, s, r = tensors(op, rows=12, lines=(2, 1, 3))
    assert not factor_convolution.usable(op, x, s, r, frame(samples=2))


@pytest.mark.parametrize("missing", ["s", "r", "x", "weight", "s gradient", "r gradient"])
def test_parts(missing):
    op = layer()
    x, s, r = tensors(op)
    if missing == "weight":
        op.weight.requires_grad_(False)
    x = x.detach() if missing == "x" else x
    s = None if missing == "s" else s.detach() if missing == "s gradient" else s
    r = None if missing == "r" else r.detach() if missing == "r gradient" else r
    wanted = [t for t in (x, op.weight, s, r) if t is not None and t.requires_grad]
    assert factor_convolution.usable(op, x, s, r, frame())
    y, expected = factor_convolution.convolved(op, x, s, r), plain(op, x, s, r)
    g = torch.randn_like(y)
    same(torch.autograd.grad(y, wanted, g), torch.autograd.grad(expected, wanted, g), rtol=1e-4, atol=1e-4)


def test_a_gradient_that_is_no_dense_tensor():
    op = layer()
    x, s, r = tensors(op, channels_last=True)
    wanted = (x, op.weight, s, r)
    same(
        torch.autograd.grad(factor_convolution.convolved(op, x, s, r).sum(), wanted),
        torch.autograd.grad(plain(op, x, s, r).sum(), wanted),
        rtol=1e-4, atol=1e-4,
    )  # fmt: skip


def test_autocast():
    op = layer()
    x, s, r = tensors(op, dtype=torch.bfloat16, channels_last=True)
    s, r = (f.detach().bfloat16().requires_grad_() for f in (s, r))
    assert not factor_convolution.usable(op, x, s, r, frame())
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert factor_convolution.usable(op, x, s, r, frame()) and not factor_convolution.usable(
            op, x.float(), s, r, frame()
        )
        y = factor_convolution.convolved(op, x, s, r)
    with torch.autocast(DEVICE.type, torch.bfloat16):  # node by node, the same kernels
        expected = scale_rows(op._conv_forward(scale_rows(x, s), op.weight, None), r)
    assert y.dtype == torch.bfloat16
    g = torch.randn_like(y)
    wanted = (x, op.weight, s, r)
    same([y], [expected], rtol=0, atol=0)
    same(torch.autograd.grad(y, wanted, g), torch.autograd.grad(expected, wanted, g), rtol=0, atol=0)
    with torch.autocast(
        DEVICE.type, torch.bfloat16
    ):  # the cast weight is not left to others without its gradient
        factor_convolution.convolved(op, x, s, r)
        assert nn.functional.conv2d(x.detach(), op.weight).requires_grad


def test_the_gradient_of_the_gradient_and_a_vectorised_one():
    op = layer("strided")
    x, s, r = tensors(op, channels_last=True)
    wanted = (x, op.weight, s, r)
    found, exact = [
        torch.autograd.grad(
            sum(one.square().sum() for one in torch.autograd.grad(y.pow(3).sum(), wanted, create_graph=True)), wanted
        )
        for y in (factor_convolution.convolved(op, x, s, r), plain(op, x, s, r))
    ]  # fmt: skip
    same(found, exact, rtol=1e-3, atol=1e-1)
    g = torch.randn(3, *plain(op, x, s, r).shape, device=DEVICE)
    found, exact = [
        torch.autograd.grad(y, wanted, g, is_grads_batched=True)
        for y in (factor_convolution.convolved(op, x, s, r), plain(op, x, s, r))
    ]
    same(found, exact, rtol=1e-4, atol=1e-4)


def test_a_second_backward_pass():
    op = layer()
    x, s, r = tensors(op)
    wanted = (x, op.weight, s, r)
    y = factor_convolution.convolved(op, x, s, r)
    g = torch.randn_like(y)
    kept = g.clone()
    first = torch.autograd.grad(y, wanted, g, retain_graph=True)
    held = [one.clone() for one in first]
    same(torch.autograd.grad(y, wanted, g), first, rtol=0, atol=0)
    same([*first, g], [*held, kept], rtol=0, atol=0)


def test_a_weight_changed_in_between_is_told():
    op = layer()
    x, s, r = tensors(op)
    y = factor_convolution.convolved(op, x, s, r)
    with torch.no_grad():
        op.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_where_it_is_not_taken():
    op = layer()
    x, s, r = tensors(op)
    assert factor_convolution.usable(op, x, s, r, frame())
    with torch.no_grad():
        assert not factor_convolution.usable(op, x, s, r, frame())
    for switch in ("rows", "triton"):
        with fast_paths(**{switch: False}):
            assert not factor_convolution.usable(op, x, s, r, frame())
    assert not factor_convolution.usable(op, x.double(), s, r, frame())
    assert not factor_convolution.usable(op, x, s.double(), r, frame())
    assert not factor_convolution.usable(op, x[:0], s, r, frame())
    assert not factor_convolution.usable(op, x, None, None, frame())
    assert not factor_convolution.usable(op, nn.Parameter(x), s, r, frame())
    for settings in ({"padding": "same"}, {"padding": 1, "padding_mode": "reflect"}):
        net = sb.bayesianize(nn.Sequential(nn.Conv2d(4, 6, 3, **settings)), sb.BatchEnsemble(2)).to(DEVICE)
        assert not factor_convolution.usable(net[0], x, s, r, frame())
        assert sb.draw(net, x[:3]).shape[0] == 2
    up = sb.bayesianize(nn.Sequential(nn.ConvTranspose2d(4, 6, 3)), sb.BatchEnsemble(2)).to(DEVICE)
    assert not factor_convolution.usable(up[0], x, s, r, frame())


def network(method, bias):
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=bias),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, bias=bias),
    )
    return sb.bayesianize(net, method).to(DEVICE)


def gradients(net, x, call=None, seed=3):
    net.zero_grad()
    torch.manual_seed(seed)
    y = (call or sb.draw)(net, x)
    (y.square().mean() + 1e-3 * sb.kl(net)).backward()
    return [y.detach(), *[p.grad.clone() for p in net.parameters()]]


@pytest.mark.parametrize(
    "method",
    [sb.Rank1.paper(components=2), sb.Rank1.paper(components=2, random="output"), sb.BatchEnsemble(2)],
    ids=["rank1", "random output", "batchensemble"],
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_network(method, bias, monkeypatch):
    monkeypatch.setattr(factor_groups, "DEVICES", (DEVICE.type,))
    monkeypatch.setattr("slimbayes.accelerate.factor_groups.DEVICES", (DEVICE.type,))
    net = network(method, bias)
    x = torch.randn(3, 3, 6, 6, device=DEVICE)
    sb.draw(net, x)
    calls = []
    hook = net[3].register_forward_hook(lambda module, inputs, output: calls.append(output.shape))
    found = gradients(net, x)
    hook.remove()
    assert calls == [(6, 4, 2, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(factor_convolution, "usable", lambda *_: False)
        same(found, gradients(net, x), rtol=1e-4, atol=1e-5)
    with fast_paths(rows=False):
        same(found, gradients(net, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    net = network(sb.Rank1.paper(components=2), False)
    x = torch.randn(3, 3, 6, 6, device=DEVICE, requires_grad=True)

    class Whole(nn.Module):
        def __init__(self, inner, again):
            super().__init__()
            self.inner, self.again = inner, again

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=reentrant) if self.again else self.inner(x)

    found, exact = [
        gradients(Whole(net, again), x, lambda n, x: sb.draw(n, x, seed=5)) for again in (True, False)
    ]
    same(found, exact, rtol=1e-4, atol=1e-5)


def test_transforms_of_functions():
    net = network(sb.BatchEnsemble(2), False).eval()
    x = torch.randn(3, 3, 6, 6, device=DEVICE)
    parameters = dict(net.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(net, parameters, x.repeat(2, 1, 1, 1)).square().mean()

    found = torch.func.grad(loss)(parameters, x)
    value = loss(parameters, x)
    same(found.values(), torch.autograd.grad(value, parameters.values()), rtol=1e-4, atol=1e-5)
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x[:, None])
    same(
        [one[0] for one in each.values()],
        torch.func.grad(loss)(parameters, x[:1]).values(),
        rtol=1e-4,
        atol=1e-5,
    )


def test_second_derivatives_through_an_input_that_is_not_dense():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(4, 4, 3, bias=False)

        def forward(self, x):
            return self.b(self.a(x).chunk(2, 1)[0])

    torch.manual_seed(0)
    model = sb.bayesianize(Half(), sb.BatchEnsemble(2)).to(DEVICE)
    x, wanted = torch.randn(3, 3, 7, 7, device=DEVICE), list(model.parameters())
    along = [torch.randn_like(parameter) for parameter in wanted]

    def product():
        grads = torch.autograd.grad(sb.draw(model, x).square().mean(), wanted, create_graph=True)
        return torch.autograd.grad(grads, wanted, along)

    found = product()
    with fast_paths(rows=False):
        same(found, product(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("fused", [True, False])
def test_what_is_saved_may_come_back_with_other_strides(fused):
    op = layer()
    x, s, r = tensors(op, channels_last=True)

    def run(hooks):
        with hooks:
            y = factor_convolution.convolved(op, x, s, r) if fused else scale_rows(x, s)
        return torch.autograd.grad(y.square().sum(), (x, s))

    dropped = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.clone(memory_format=torch.contiguous_format), lambda tensor: tensor
    )
    same(run(dropped), run(contextlib.nullcontext()), rtol=1e-3, atol=1e-4)
