"""Fresh noise: its laws, and what governs it; tests/native has the kernels' own."""

import math
import sys

import numpy as np
import pytest
import torch
from helpers_statistics import assert_law
from scipy import stats
from torch.utils.checkpoint import checkpoint

import slimbayes as sb
from slimbayes.accelerate import bulk_noise
from slimbayes.core import noise
from slimbayes.core.noise import KINDS, fresh_noise

CPU = torch.device("cpu")
MANY = 4_000_003  # many pieces, and a last one that is neither whole nor even
LAWS = {"normal": stats.norm(), "uniform": stats.uniform(), "cauchy": stats.cauchy()}
Z = 5.5


def assert_uncorrelated(x, y):
    """The correlation of two samples is within Z standard errors of zero."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    r = np.corrcoef(x, y)[0, 1]
    assert abs(r) < Z / math.sqrt(len(x)), r


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_fresh_noise(kind, dtype):
    torch.manual_seed(0)
    x = fresh_noise(kind, (3, 50_001), dtype, CPU)
    assert x.shape == (3, 50_001) and x.dtype == dtype and torch.isfinite(x).all()
    if kind == "uniform":
        assert x.min() >= 0 and x.max() < 1
        for p in (2**-6, 0.25, 0.5, 0.75):
            assert stats.binomtest(int((x < p).sum()), x.numel(), p).pvalue > 1e-7
    elif kind == "normal":
        assert abs(x.double().mean()) < Z / math.sqrt(x.numel())
        assert abs(x.double().var() - 1) < Z * math.sqrt(2 / x.numel()) + 1e-4
    elif kind == "sign":
        assert (x.abs() == 1).all()
    elif kind == "cauchy":
        assert stats.binomtest(int((x.abs() > 1).sum()), x.numel(), 0.5).pvalue > 1e-7


@pytest.mark.parametrize("kind", KINDS)
def test_few_numbers_and_no_kernels_are_torchs_own(kind):
    for size, native in (
        (1, True),
        (16, True),
        (bulk_noise._FEWEST - 1, True),
        (5 * bulk_noise._FEWEST, False),
    ):
        torch.manual_seed(3)
        with sb.fast_paths(native=native):
            x = fresh_noise(kind, (size,), torch.float32, CPU)
        torch.manual_seed(3)
        assert torch.equal(x, noise.plain_noise(kind, (size,), torch.float32, CPU))


def test_no_numbers_and_unknown_kinds():
    assert fresh_noise("normal", (0, 5), torch.float32, CPU).shape == (0, 5)
    with pytest.raises(ValueError, match="unknown kind"):
        fresh_noise("gamma", (3,), torch.float32, CPU)


def test_switched_off_it_is_torchs_own():
    with sb.fast_paths(noise=False):
        torch.manual_seed(3)
        x = fresh_noise("normal", (100_000,), torch.float32, CPU)
    torch.manual_seed(3)
    assert torch.equal(x, torch.randn(100_000))


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_generator_governs(kind):
    def make():
        return fresh_noise(kind, (300_000,), torch.float32, CPU)

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first, second = make(), make()
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(make(), first)
    torch.set_rng_state(state)
    assert torch.equal(make(), first) and torch.equal(make(), second)
    with torch.random.fork_rng():
        make()
    third = make()
    torch.set_rng_state(state)
    make(), make()
    assert torch.equal(make(), third)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled(backend):
    """One operation of its own in the graph; reproducible; of the right law; another at every call."""
    if backend == "inductor" and sys.platform != "linux":
        pytest.skip("needs a C++ compiler")
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=backend)
    def make(x):
        return x + fresh_noise("normal", tuple(x.shape), x.dtype, x.device)

    zero = torch.zeros(200, 1000)
    torch.manual_seed(0)
    first, second = make(zero), make(zero)
    torch.manual_seed(0)
    assert torch.equal(make(zero), first)
    assert_law(first, stats.norm())
    assert_uncorrelated(first.flatten().numpy(), second.flatten().numpy())
    torch._dynamo.reset()


def test_compiled_with_dynamic_shapes():
    torch._dynamo.reset()
    make = torch.compile(
        lambda x: x + fresh_noise("uniform", tuple(x.shape), x.dtype, x.device),
        fullgraph=True,
        backend="aot_eager",
        dynamic=True,
    )
    for rows in (100, 130, 170):
        assert make(torch.zeros(rows, 1000)).std().item() == pytest.approx(math.sqrt(1 / 12), rel=0.02)
    torch._dynamo.reset()


def test_the_operation():
    """Its schema, its fake twin, and that it is a function of the seed alone."""
    seed = torch.tensor([123])
    arguments = (seed, "normal", (20, 1000), torch.float32)
    assert torch.equal(bulk_noise.noise(*arguments), bulk_noise.noise(*arguments))
    torch.library.opcheck(bulk_noise.noise.overload, arguments)


def test_checkpointing_draws_the_same_again():
    torch.manual_seed(0)
    weight = torch.ones(300, 300, requires_grad=True)
    seen = []

    def run(w):
        y = w * fresh_noise("normal", (300, 300), torch.float32, CPU)
        seen.append(y.detach())
        return y.square()

    checkpoint(run, weight, use_reentrant=False).sum().backward()
    assert len(seen) == 2 and torch.equal(*seen)
    torch.testing.assert_close(weight.grad, 2 * seen[0].square())


def test_transforms_and_modes_keep_torchs_own():
    def make(x):
        return x + fresh_noise("normal", (70_000,), torch.float32, CPU)

    out = torch.func.vmap(make, randomness="different")(torch.zeros(3, 1))
    assert out.shape == (3, 70_000) and not torch.equal(out[0], out[1])
    with torch.inference_mode():
        assert make(torch.zeros(1)).std().item() == pytest.approx(1, abs=0.05)
