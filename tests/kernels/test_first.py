"""The first convolution with a factor on its input: the kernel, its plain twin, and torch's own convolution."""

from __future__ import annotations

import pytest
import torch
from helpers_kernels import DEVICE, needs_kernels
from torch.nn import functional as F

import slimbayes as sb
from slimbayes.accelerate.compile.first_fusion import fuse_first
from slimbayes.accelerate.gpu.first_convolution import scaled_conv
from slimbayes.accelerate.row_factors import row_product

CASES = [  # rows, channels, size, outputs, kernel, stride, padding
    (3, 3, (14, 18), 20, (7, 7), (2, 2), (3, 3)),
    (2, 3, (8, 8), 16, (3, 3), (1, 1), (1, 1)),
    (2, 1, (9, 5), 70, (3, 2), (2, 1), (0, 1)),
]


def data(case: tuple, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, channels, size, outputs, kernel, _, _ = case
    torch.manual_seed(0)
    x = torch.randn(rows, channels, *size).to(memory_format=torch.channels_last)
    s, weight = 1 + 0.5 * torch.randn(rows, channels), torch.randn(outputs, channels, *kernel) / 5
    return tuple(value.to(DEVICE, dtype) for value in (x, s, weight))


def run(function, x, s, weight, stride, padding):
    s, weight = (value.detach().clone().requires_grad_() for value in (s, weight))
    y = function(x, s, weight, stride, padding)
    g = torch.sin(torch.arange(y.numel())).bfloat16().view_as(y).to(DEVICE, y.dtype)
    return y, *torch.autograd.grad(y, (s, weight), g)


def by_torch(x, s, weight, stride, padding):
    return F.conv2d(x * s[:, :, None, None], weight, None, stride, padding)


@pytest.mark.parametrize("case", CASES)
def test_plain_twin_equals_torch_in_double_precision(case: tuple) -> None:
    x, s, weight = data(case, torch.float64)
    found, expected = (run(function, x, s, weight, *case[5:]) for function in (scaled_conv, by_torch))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@needs_kernels
@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_torch(case: tuple) -> None:
    x, s, weight = data(case, torch.float32)
    found = run(scaled_conv, x, s, weight, *case[5:])
    expected = run(by_torch, x.double(), s.double(), weight.double(), *case[5:])
    for value, wanted in zip(found, expected, strict=True):
        scale = float(wanted.abs().max())
        # On a GPU torch's own float32 convolutions round to 10 bits.
        bound = 2e-3 if DEVICE.type == "cuda" else 1e-5
        torch.testing.assert_close(value.double() / scale, wanted / scale, rtol=bound, atol=bound)


@needs_kernels
def test_bfloat16_weights_and_float32_images() -> None:
    x, s, weight = data(CASES[0], torch.float32)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
        y, gs, gw = run(scaled_conv, x, s.bfloat16(), weight, *CASES[0][5:])
    assert gs.dtype == torch.bfloat16 and gw.dtype == torch.float32
    expected = run(by_torch, x.double(), s.double(), weight.double(), *CASES[0][5:])
    for value, wanted in zip((y, gs, gw), expected, strict=True):
        assert float((value.double() - wanted).norm() / wanted.norm()) < 2e-2


def test_the_graph_takes_it_for_inputs_without_a_gradient_only() -> None:
    torch.compiler.allow_in_graph(row_product)
    counts = []

    def backend(module: torch.fx.GraphModule, inputs: list) -> object:
        counts.append(fuse_first(module.graph, ("cpu",)))
        module.recompile()
        return module.forward

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.Conv2d(4, 4, 3, bias=False))
    model = sb.bayesianize(net.to(memory_format=torch.channels_last), sb.BatchEnsemble(components=2))
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    grads = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model.zero_grad()
        function = lambda x: sb.draw(model, x).square().mean()  # noqa: E731
        function = torch.compile(function, backend=backend, fullgraph=True) if compiled else function
        function(x).backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)
    function(x.requires_grad_()).backward()
    assert counts == [1, 0]
