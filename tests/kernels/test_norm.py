"""relu(BatchNorm(r∘y))∘s: the kernels, their plain twin, and torch's own layers one after the other."""

from __future__ import annotations

import pytest
import torch
from helpers_kernels import DEVICE, needs_kernels
from torch.nn import functional as F

import slimbayes as sb
from slimbayes.accelerate.gpu.norm import norm_rows

CASES = [
    (True, True, True),
    (True, False, True),
    (False, True, True),
    (True, False, False),
    (False, True, False),
]


def data(dtype: torch.dtype, rows: int = 6, channels: int = 5, size: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    y = (torch.randn(rows, channels, size, size) + 2).to(memory_format=torch.channels_last)
    made = {
        "y": y,
        "r": 1 + 0.5 * torch.randn(rows, channels),
        "weight": torch.rand(channels) + 0.5,
        "bias": torch.randn(channels) / 2,
        "s": 1 + 0.5 * torch.randn(rows, channels),
    }
    return {
        key: value.to(DEVICE, dtype if key in "yrs" else torch.promote_types(dtype, torch.float32))
        for key, value in made.items()
    }  # fmt: skip


def by_torch(d: dict[str, torch.Tensor], running: list[torch.Tensor], relu: bool) -> torch.Tensor:
    x = d["y"] * d["r"][:, :, None, None] if "r" in d else d["y"]
    z = F.batch_norm(x, *running, d["weight"], d["bias"], True, 0.1, 1e-5)
    z = z.relu() if relu else z
    return z * d["s"][:, :, None, None] if "s" in d else z


def by_us(d: dict[str, torch.Tensor], running: list[torch.Tensor], relu: bool) -> torch.Tensor:
    return norm_rows(d["y"], d.get("r"), *running, d["weight"], d["bias"], d.get("s"), 0.1, 1e-5, relu)


def run(function, d, relu, dtype):
    leaves = {key: value.detach().clone().requires_grad_() for key, value in d.items()}
    wide = torch.promote_types(dtype, torch.float32)
    channels = d["y"].shape[1]
    running = [
        torch.zeros(channels, dtype=wide, device=DEVICE),
        torch.ones(channels, dtype=wide, device=DEVICE),
    ]
    u = function(leaves, running, relu)
    g = torch.sin(torch.arange(u.numel(), dtype=torch.float64)).view_as(u).to(DEVICE, u.dtype)
    grads = torch.autograd.grad(u, list(leaves.values()), g)
    return u, dict(zip(leaves, grads, strict=True)), running


@pytest.mark.parametrize("use_r, use_s, relu", CASES)
def test_plain_twin_equals_torch_layers_in_double_precision(use_r: bool, use_s: bool, relu: bool) -> None:
    d = data(torch.float64)
    d = {k: v for k, v in d.items() if (k != "r" or use_r) and (k != "s" or use_s)}
    with sb.fast_paths(triton=False):
        u, grads, running = run(by_us, d, relu, torch.float64)
    expected, expected_grads, expected_running = run(by_torch, d, relu, torch.float64)
    torch.testing.assert_close(u, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(running, expected_running, rtol=1e-10, atol=1e-10)
    for key in d:
        torch.testing.assert_close(grads[key], expected_grads[key], rtol=1e-10, atol=1e-10)


@needs_kernels
@pytest.mark.parametrize("shape", [(6, 5, 3), (3, 40, 1), (5, 130, 9), (33, 16, 4), (2, 64, 16)])
@pytest.mark.parametrize("use_r, use_s, relu", CASES)
def test_kernels_equal_torch_layers(
    use_r: bool, use_s: bool, relu: bool, shape: tuple[int, int, int]
) -> None:
    d = data(torch.float32, *shape)
    d = {k: v for k, v in d.items() if (k != "r" or use_r) and (k != "s" or use_s)}
    u, grads, running = run(by_us, d, relu, torch.float32)
    wide = {k: v.double() for k, v in d.items()}
    expected, expected_grads, expected_running = run(by_torch, wide, relu, torch.float64)
    torch.testing.assert_close(u.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close([t.double() for t in running], expected_running, rtol=1e-4, atol=1e-4)
    for key in d:
        scale = float(expected_grads[key].abs().max())
        torch.testing.assert_close(
            grads[key].double() / scale, expected_grads[key] / scale, rtol=1e-4, atol=1e-4
        )


@needs_kernels
def test_bfloat16_activations_and_factors() -> None:
    d = data(torch.bfloat16, 16, 64, 8)
    u, grads, _ = run(by_us, d, True, torch.bfloat16)
    assert u.dtype == torch.bfloat16 and grads["s"].dtype == torch.bfloat16
    wide = {k: v.double() for k, v in d.items()}
    expected, expected_grads, _ = run(by_torch, wide, True, torch.float64)
    torch.testing.assert_close(u.double(), expected, rtol=2e-2, atol=2e-2)
    for key in d:
        error = (grads[key].double() - expected_grads[key]).norm() / expected_grads[key].norm()
        assert error < 2e-2, key


@needs_kernels
def test_result_keeps_channels_last_whatever_the_input() -> None:
    d = data(torch.float32)
    u, _, _ = run(by_us, d, True, torch.float32)
    d["y"] = d["y"].contiguous()
    other, _, _ = run(by_us, d, True, torch.float32)
    assert u.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(u, other)


@needs_kernels
def test_factors_may_lie_in_any_order_in_memory() -> None:
    d = data(torch.float32)
    turned = {key: value.t().contiguous().t() if key in "rs" else value for key, value in d.items()}
    found, expected = (run(by_us, each, True, torch.float32) for each in (turned, d))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
