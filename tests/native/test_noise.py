"""Noise of the kernels in C: the distributions it names, and a function of seed and stream alone."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import slimbayes as sb
from slimbayes.accelerate import cpu
from slimbayes.core import noise

SOURCES = Path(cpu.__file__).parent
CHUNK, BLOCK, LANES = 16384, 1024, 64
needs_kernels = pytest.mark.skipif(
    cpu._load() is None, reason="no compiled kernels: no C compiler was at hand"
)
CUMULATIVE = {"normal": stats.norm.cdf, "uniform": stats.uniform.cdf, "cauchy": stats.cauchy.cdf}


def made(kind, count, seed=11, stream=0):
    out = torch.full((count,), float("nan"))
    assert cpu.noise(out, kind, seed, stream)
    return out


@needs_kernels
class TestNumbers:
    @pytest.mark.parametrize("kind", CUMULATIVE)
    @pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
    def test_distribution(self, kind, seed):
        numbers = made(kind, 400_000, seed).double().numpy()
        assert np.isfinite(numbers).all()
        assert stats.kstest(numbers, CUMULATIVE[kind]).pvalue > 1e-4

    @pytest.mark.parametrize("seed", [0, 5, 2**63 - 1])
    def test_moments_of_normals(self, seed):
        numbers, n = made("normal", 1 << 21, seed).double(), 1 << 21
        for order, expected, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            found = numbers.pow(order).mean().item()
            assert abs(found - expected) < 5 * (variance / n) ** 0.5, order

    def test_tails_of_normals(self):
        numbers = made("normal", 1 << 22).double()
        for edge in (2.0, 3.0, 4.0, 5.0):
            expected = 2 * stats.norm.sf(edge) * len(numbers)
            assert abs((numbers.abs() > edge).sum().item() - expected) < 5 * expected**0.5 + 1

    def test_signs(self):
        numbers = made("sign", 1 << 20)
        assert set(numbers.tolist()) == {-1.0, 1.0}
        assert abs(numbers.mean().item()) < 5 / 2**10

    def test_uniform_stays_below_one(self):
        numbers = made("uniform", 1 << 20)
        assert numbers.min() >= 0 and numbers.max() < 1

    @pytest.mark.parametrize("kind", ["normal", "uniform", "sign"])
    def test_no_lag_is_correlated(self, kind):
        """Lanes, halves of a block (cosine and sine), blocks and chunks are all at some lag."""
        numbers = made(kind, 1 << 20).double()
        numbers = (numbers - numbers.mean()) / numbers.std()
        for power in (1, 2) if kind != "sign" else (1,):
            x = numbers.pow(power) - numbers.pow(power).mean()
            x = x / x.std()
            for lag in (1, 2, LANES - 1, LANES, LANES + 1, BLOCK // 2, BLOCK, CHUNK - 1, CHUNK, 2 * CHUNK):
                assert abs((x[lag:] * x[:-lag]).mean().item()) < 5 / (len(x) - lag) ** 0.5, (power, lag)

    def test_streams_and_seeds_are_independent(self):
        keys = [(0, 0), (0, 1), (1, 0), (1 << 32, 0), (2**63 - 1, 0), (2**63 - 1, 2**32 - 1)]
        x = torch.stack([made("normal", 1 << 18, *key) for key in keys]).double()
        for power in (1, 2):
            correlation = torch.corrcoef(x.pow(power)) - torch.eye(len(keys), dtype=torch.float64)
            assert correlation.abs().max() < 5 / 2**9

    def test_lanes_are_uncorrelated(self):
        x = made("normal", 1 << 21).double().view(-1, LANES)
        correlation = torch.corrcoef(x.T) - torch.eye(LANES, dtype=torch.float64)
        assert correlation.abs().max() < 6 / len(x) ** 0.5


@needs_kernels
class TestFunctionOfItsKey:
    @pytest.mark.parametrize("kind", cpu.KINDS)
    @pytest.mark.parametrize("count", [1, 63, 1023, 1025, CHUNK - 1, CHUNK + 1, 5 * CHUNK + 7])
    def test_threads(self, kind, count):
        before = torch.get_num_threads()
        try:
            found = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(made(kind, count))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])

    @pytest.mark.parametrize("kind", cpu.KINDS)
    def test_a_shorter_piece_is_its_beginning(self, kind):
        whole = made(kind, 3 * CHUNK)
        for count in (1, 100, BLOCK, CHUNK, CHUNK + 3):
            assert torch.equal(made(kind, count), whole[:count])

    def test_nothing_is_written_past_the_end(self):
        out = torch.full((2000,), 9.0)
        cpu.noise(out[:1500], "normal", 3)
        assert (out[1500:] == 9.0).all() and not (out[:1500] == 9.0).any()

    def test_no_numbers(self):
        assert cpu.noise(torch.empty(0), "normal", 3)

    def test_torchs_generator_governs_fresh_noise(self):
        like = ((5000,), torch.float32, torch.device("cpu"))
        torch.manual_seed(4)
        first, second = noise.fresh_noise("normal", *like), noise.fresh_noise("normal", *like)
        torch.manual_seed(4)
        assert torch.equal(noise.fresh_noise("normal", *like), first) and not torch.equal(first, second)


class TestWithoutKernels:
    def test_turned_off(self):
        out = torch.zeros(3)
        with sb.fast_paths(native=False):
            assert cpu.library() is None and not cpu.noise(out, "normal", 1)
        assert (out == 0).all()

    def test_no_library(self, monkeypatch):
        monkeypatch.setattr(cpu, "_load", lambda: None)
        assert not cpu.noise(torch.zeros(3), "normal", 1)
        torch.manual_seed(0)
        x = noise.fresh_noise("normal", (1 << 17,), torch.float32, torch.device("cpu"))
        assert abs(x.std().item() - 1) < 0.02

    def test_a_library_of_other_sources(self, monkeypatch):
        monkeypatch.setitem(cpu._ARGUMENTS, "slimbayes_no_such_function", [])
        assert cpu._load.__wrapped__() is None


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_the_sources_compile_without_warnings(tmp_path):
    flags = [
        "-O2",
        "-std=gnu11",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fPIC",
    ]
    for source in sorted(SOURCES.glob("*.c")):
        done = subprocess.run(
            ["cc", *flags, "-c", str(source), "-o", str(tmp_path / "out.o")], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
