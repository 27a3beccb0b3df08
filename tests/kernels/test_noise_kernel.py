"""Noise of the kernels: moments, goodness of fit, types, independence of seeds and streams."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_kernels import DEVICE, needs_kernels

from slimbayes import fast_paths
from slimbayes.accelerate.gpu.noise import packed_signs, philox_noise

KERNEL = [pytest.param(True, marks=needs_kernels, id="kernel"), pytest.param(False, id="plain")]
SEED = torch.tensor([2**61 + 12345], device=DEVICE)
COUNT = 100_003


def uniforms(noise, kind):
    noise = noise.double()
    if kind == "normal":
        return torch.special.ndtr(noise)
    return 0.5 + torch.atan(noise) / math.pi if kind == "cauchy" else noise


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("kind", ["normal", "uniform", "cauchy"])
def test_goodness_of_fit(kernel, kind):
    with fast_paths(triton=kernel):
        u = uniforms(philox_noise(SEED, kind, (COUNT,), torch.float32), kind).cpu()
    counts = torch.histc(u, 64, 0.0, 1.0)
    chi2 = float(((counts - COUNT / 64) ** 2 / (COUNT / 64)).sum())
    assert 20.0 < chi2 < 125.0  # 63 degrees of freedom: p = 1e-8 and 1e-5
    ordered = u.sort().values
    ideal = (torch.arange(COUNT, dtype=torch.float64) + 0.5) / COUNT
    assert float((ordered - ideal).abs().max()) * math.sqrt(COUNT) < 2.2  # Kolmogorov: p = 1e-4
    for shift in (1, 2, 512, 25_088, 50_176):
        assert abs(float(((u[:-shift] - 0.5) * (u[shift:] - 0.5)).mean() * 12)) < 5 / math.sqrt(COUNT - shift)


@pytest.mark.parametrize("kernel", KERNEL)
def test_signs(kernel):
    with fast_paths(triton=kernel):
        noise = philox_noise(SEED, "sign", (COUNT,), torch.bfloat16)
    assert (noise.abs() == 1).all()
    assert abs(float(noise.double().mean())) < 5 / math.sqrt(COUNT)


@pytest.mark.parametrize("kernel", KERNEL)
def test_tails(kernel):
    with fast_paths(triton=kernel):
        normal = philox_noise(SEED, "normal", (COUNT,), torch.float32)
        cauchy = philox_noise(SEED, "cauchy", (COUNT,), torch.float32).abs()
    assert 3.5 < float(normal.abs().max()) < 6.8
    for level in (100.0, 1000.0):  # P(|x| > t) = 2/(πt)
        expected = COUNT * 2 / (math.pi * level)
        assert abs(int((cauchy > level).sum()) - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize("kernel", KERNEL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(0,), (1,), (3, 7), (5, 1, 1000)], ids=str)
def test_types_and_sizes(kernel, dtype, size):
    with fast_paths(triton=kernel):
        for kind in ("normal", "uniform", "sign", "cauchy"):
            noise = philox_noise(SEED, kind, size, dtype)
            assert noise.shape == size and noise.dtype == dtype
            if kernel or dtype == torch.float32:
                assert noise.isfinite().all()
                assert kind != "uniform" or bool((noise < 1).all())


@pytest.mark.parametrize("kernel", KERNEL)
def test_seeds_and_streams(kernel):
    with fast_paths(triton=kernel):
        noise = [
            philox_noise(SEED, "normal", (5000,), torch.float32),
            philox_noise(SEED + 1, "normal", (5000,), torch.float32),
            philox_noise(SEED + 2**32, "normal", (5000,), torch.float32),
            philox_noise(SEED, "normal", (5000,), torch.float32, stream=1),
        ]
        assert torch.equal(noise[0], philox_noise(SEED, "normal", (5000,), torch.float32))
    assert (torch.corrcoef(torch.stack(noise)).fill_diagonal_(0.0).abs() < 5 / math.sqrt(5000)).all()


def test_an_unknown_kind():
    with pytest.raises(ValueError, match="laplace"):
        philox_noise(SEED, "laplace", (3,), torch.float32)


@pytest.mark.parametrize("kernel", KERNEL)
def test_packed_signs(kernel):
    """One bit each: fair, and none like its neighbour in the row, in the word or in the row below."""
    torch.manual_seed(3)
    with fast_paths(triton=kernel):
        signs = packed_signs((2, 1, 60, 70), torch.float32, DEVICE)
        again = packed_signs((2, 1, 60, 70), torch.bfloat16, DEVICE)
    assert signs.shape == (2, 1, 60, 70) and again.dtype == torch.bfloat16
    assert bool((signs.abs() == 1).all()) and not torch.equal(signs, again.float())
    table = signs.double()
    bound = 5 / math.sqrt(table.numel())
    assert abs(float(table.mean())) < bound
    for other in (table.roll(1, -1), table.roll(32, -1), table.roll(1, 2), table.roll(1, 0), again.double()):
        assert abs(float((table * other).mean())) < 1.5 * bound
