"""BatchNorm beside a residual sum: the kernels, their plain twins, and torch's own layers one after the other."""

from __future__ import annotations

import pytest
import torch
from helpers_kernels import DEVICE, needs_kernels
from torch.nn import functional as F

import slimbayes as sb
from slimbayes.accelerate.gpu.norm_launch import pieces
from slimbayes.accelerate.gpu.norm_sum import norm_sum_rows
from slimbayes.accelerate.gpu.sum_norm import sum_norm_rows

Tensors = dict[str, torch.Tensor]
SHAPES = [(6, 5, 3), (3, 40, 1), (5, 130, 9), (2, 64, 16)]  # rows, channels, height
# (the optional factors, ReLU, whether the sum or what is behind the ReLU is read itself)
SUM_FIRST = [("qs", True, True), ("s", True, True), ("", True, False), ("q", False, True)]
NORM_FIRST = [
    ("rst", True, True),
    ("rs", True, False),
    ("r", True, True),
    ("st", False, False),
    ("s", True, True),
]


def data(dtype: torch.dtype, names: str, rows: int = 6, channels: int = 5, size: int = 3) -> Tensors:
    torch.manual_seed(0)
    made = {name: torch.randn(rows, channels, size, size) + 1 for name in "yx"}
    made = {name: value.to(memory_format=torch.channels_last) for name, value in made.items()}
    made |= {name: 1 + 0.5 * torch.randn(rows, channels) for name in "rqst" if name in names}
    wide = torch.promote_types(dtype, torch.float32)
    affine = {"weight": torch.rand(channels) + 0.5, "bias": torch.randn(channels) / 2}
    return {
        **{name: value.to(DEVICE, dtype) for name, value in made.items()},
        **{name: value.to(DEVICE, wide) for name, value in affine.items()},
    }


def scaled(x: torch.Tensor, d: Tensors, name: str) -> torch.Tensor:
    return x * d[name][:, :, None, None] if name in d else x


def sum_first_by_torch(d: Tensors, running: list, relu: bool, keep: bool) -> list[torch.Tensor]:
    v = scaled(d["y"], d, "r") + scaled(d["x"], d, "q")
    u = F.batch_norm(v, *running, d["weight"], d["bias"], True, 0.1, 1e-5)
    u = scaled(u.relu() if relu else u, d, "s")
    return [v, u] if keep else [u]


def sum_first_by_us(d: Tensors, running: list, relu: bool, keep: bool) -> list[torch.Tensor]:
    v, u = sum_norm_rows(
        d["y"], d["r"], d["x"], d.get("q"), *running, d["weight"], d["bias"], d.get("s"), 0.1, 1e-5, relu, keep
    )  # fmt: skip
    return [v, u] if keep else [u]


def norm_first_by_torch(d: Tensors, running: list, relu: bool, keep: bool) -> list[torch.Tensor]:
    z = F.batch_norm(scaled(d["y"], d, "r"), *running, d["weight"], d["bias"], True, 0.1, 1e-5) + d["x"]
    z = z.relu() if relu else z
    return ([z] if keep else []) + [scaled(z, d, name) for name in "st" if name in d]


def norm_first_by_us(d: Tensors, running: list, relu: bool, keep: bool) -> list[torch.Tensor]:
    z, u, w = norm_sum_rows(
        d["y"], d.get("r"), d["x"], *running, d["weight"], d["bias"], d.get("s"), d.get("t"), 0.1, 1e-5, relu, keep
    )  # fmt: skip
    return [*([z] if keep else []), *([u] if "s" in d else []), *([w] if "t" in d else [])]


PAIRS = {
    "sum first": (sum_first_by_us, sum_first_by_torch),
    "norm first": (norm_first_by_us, norm_first_by_torch),
}
CASES = [
    *(("sum first", "r" + names, relu, keep) for names, relu, keep in SUM_FIRST),
    *(("norm first", names, relu, keep) for names, relu, keep in NORM_FIRST),
]


def run(function, d: Tensors, relu: bool, keep: bool):
    """Outputs, gradients and running statistics."""
    leaves = {key: value.detach().clone().requires_grad_() for key, value in d.items()}
    running = [torch.zeros_like(d["weight"]), torch.ones_like(d["weight"])]
    outputs = function(leaves, running, relu, keep)
    weights = [
        torch.sin(at + torch.arange(out.numel())).bfloat16().view_as(out).to(DEVICE, out.dtype)
        for at, out in enumerate(outputs)
    ]
    grads = torch.autograd.grad(outputs, list(leaves.values()), weights)
    return outputs, dict(zip(leaves, grads, strict=True)), running


@pytest.mark.parametrize("kind, names, relu, keep", CASES)
def test_plain_twin_equals_torch_layers_in_double_precision(kind, names, relu, keep) -> None:
    d = data(torch.float64, names)
    us, them = PAIRS[kind]
    with sb.fast_paths(triton=False):
        found = run(us, d, relu, keep)
    expected = run(them, d, relu, keep)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind, names, relu, keep", CASES)
def test_kernels_equal_torch_layers(kind, names, relu, keep, shape: tuple[int, int, int]) -> None:
    d = data(torch.float32, names, *shape)
    us, them = PAIRS[kind]
    outputs, grads, running = run(us, d, relu, keep)
    wide = {key: value.double() for key, value in d.items()}
    expected, expected_grads, expected_running = run(them, wide, relu, keep)
    for out, value in zip(outputs, expected, strict=True):
        torch.testing.assert_close(out.double(), value, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close([t.double() for t in running], expected_running, rtol=1e-4, atol=1e-4)
    for key in d:
        scale = float(expected_grads[key].abs().max())
        torch.testing.assert_close(
            grads[key].double() / scale, expected_grads[key] / scale, rtol=1e-4, atol=1e-4, msg=key
        )


def test_few_rows_are_cut_in_pieces() -> None:
    assert [pieces(torch.empty(rows, channels, size, size, device="meta")) for rows, channels, size in SHAPES] == [
        1, 1, 1, 4,
    ]  # fmt: skip
    assert pieces(torch.empty(16, 64, 56, 56, device="meta")) == 8
    assert pieces(torch.empty(512, 160, 32, 32, device="meta")) == 1


@needs_kernels
@pytest.mark.parametrize("kind, names", [("sum first", "rqs"), ("norm first", "rst")])
def test_bfloat16_activations_and_factors(kind: str, names: str) -> None:
    d = data(torch.bfloat16, names, 16, 64, 8)
    us, them = PAIRS[kind]
    outputs, grads, _ = run(us, d, True, True)
    wide = {key: value.double() for key, value in d.items()}
    expected, expected_grads, _ = run(them, wide, True, True)
    _, torch_grads, _ = run(them, d, True, True)  # sums that nearly cancel lose digits in torch's layers too
    for out, value in zip(outputs, expected, strict=True):
        assert out.dtype == torch.bfloat16 and out.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(out.double(), value, rtol=3e-2, atol=3e-2)
    for key in d:
        error, theirs = (
            float((each[key].double() - expected_grads[key]).norm() / expected_grads[key].norm())
            for each in (grads, torch_grads)
        )
        assert error < max(2e-2, 2 * theirs), key


@needs_kernels
@pytest.mark.parametrize("shape", [(6, 5, 3), (2, 64, 16)])
@pytest.mark.parametrize("kind, names", [("sum first", "rqs"), ("norm first", "rst")])
def test_factors_may_lie_in_any_order_in_memory(kind: str, names: str, shape: tuple[int, int, int]) -> None:
    d = data(torch.float32, names, *shape)
    turned = {key: d[key].t().contiguous().t() if key in names else d[key] for key in d}
    found, expected = (run(PAIRS[kind][0], each, True, True) for each in (turned, d))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
