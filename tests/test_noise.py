"""The CPU generator: exact laws, tails, bits, independence of everything that could be related, reproducibility."""

import math
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from helpers_statistics import assert_law
from scipy import stats
from torch.utils.checkpoint import checkpoint

import slimbayes as sb
from slimbayes.accelerate import bulk_noise
from slimbayes.accelerate.cpu import raw_noise
from slimbayes.core.noise import KINDS, fresh_noise, plain_noise

CPU = torch.device("cpu")
MANY = 4_000_003  # many pieces, and a last one that is neither whole nor even
LAWS = {"normal": stats.norm(), "uniform": stats.uniform(), "cauchy": stats.cauchy()}
Z = 5.5


def numbers(kind, seed=1, size=MANY, dtype=np.float32):
    out = np.empty(size, dtype)
    raw_noise.fill(out, kind, seed)
    return out


def assert_uncorrelated(x, y):
    """The correlation of two samples is within Z standard errors of zero."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    r = np.corrcoef(x, y)[0, 1]
    assert abs(r) < Z / math.sqrt(len(x)), r


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", LAWS)
def test_law(kind, dtype):
    sample = numbers(kind, 3, dtype=dtype)
    assert np.isfinite(sample).all()
    assert_law(torch.from_numpy(sample), LAWS[kind])
    # In the tails, where Kolmogorov and Smirnov's test sees nothing: counts beyond far quantiles, both sides.
    for tail in (1e-3, 1e-4, 1e-5, 1e-6):
        for count in ((sample < LAWS[kind].ppf(tail)).sum(), (sample > LAWS[kind].isf(tail)).sum()):
            assert stats.binomtest(int(count), MANY, tail).pvalue > 1e-7, (tail, count)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_moments_of_normals(dtype):
    sample = numbers("normal", 5, dtype=dtype).astype(np.float64)
    for power, expected in [(1, 0), (2, 1), (3, 0), (4, 3), (5, 0), (6, 15), (8, 105)]:
        values = sample**power
        assert abs(values.mean() - expected) < Z * values.std() / math.sqrt(MANY), power


def test_normals_reach_far(monkeypatch):
    """The ends of the 32 bits: radius 6.66 at f = 0, zero at f = −2³¹, never infinite."""
    words = np.array([0, 1, -(2**31), 2**31 - 1, 0, 2**29, 0, -(2**31)], np.int32)
    monkeypatch.setattr(raw_noise.Words, "integers", lambda self, count, like: torch.from_numpy(words))
    out = np.empty(8, np.float32)
    raw_noise.fill(out, "normal", 0)
    radius = np.hypot(out[:4], out[4:])
    ends = [math.sqrt(64 * math.log(2)), math.sqrt(-math.log(2.0**-62 + 2.0**-64))]  # 6.66, 6.54
    np.testing.assert_allclose(radius[:2], ends, rtol=1e-5)
    np.testing.assert_allclose(radius[2:], 0, atol=1e-3)
    assert np.isfinite(out).all()


def test_signs_are_balanced_bits():
    signs = numbers("sign", 7)
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert abs(signs.astype(np.float64).mean()) < Z / math.sqrt(MANY)
    bits = (signs[: MANY // 8 * 8] > 0).reshape(-1, 8)
    octets = np.packbits(bits, axis=1).ravel()
    assert stats.chisquare(np.bincount(octets, minlength=256)).pvalue > 1e-6
    runs = 1 + np.count_nonzero(np.diff(signs))
    assert abs(runs - MANY / 2) < Z * math.sqrt(MANY) / 2


def test_bits_of_the_words():
    """Every bit of a word is fair, unrelated to every other bit and to itself one word later."""
    words = raw_noise.Words(9, 0).take(200_000).view(np.uint64)
    bits = ((words[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).astype(np.float64) * 2 - 1
    n = len(bits)
    assert abs(bits.mean(0)).max() < Z / math.sqrt(n)
    for later in (0, 1, 2):
        related = bits[: n - later].T @ bits[later:] / n
        if later == 0:
            np.fill_diagonal(related, 0)
        assert abs(related).max() < 6 / math.sqrt(n)
    for column in (0, 1, 31, 32, 63):  # runs of equal bits
        runs = np.count_nonzero(np.diff(bits[:, column]))
        assert abs(runs - n / 2) < Z * math.sqrt(n) / 2


@pytest.mark.parametrize("kind", ["normal", "uniform", "sign"])
@pytest.mark.parametrize("lag", [1, 2, 7, 8, 64, raw_noise.PIECE // 2, raw_noise.PIECE])
def test_serial_correlation(kind, lag):
    """Half a piece is the distance of the two numbers that share a radius."""
    sample = numbers(kind, 11, 8 * raw_noise.PIECE)
    assert_uncorrelated(sample[:-lag], sample[lag:])
    if kind != "sign":  # neither are their sizes related
        middle = np.median(sample)
        assert_uncorrelated(abs(sample[:-lag] - middle), abs(sample[lag:] - middle))


def test_pairs_fill_the_plane():
    """Numbers that share a radius, and neighbours: 32 × 32 cells of equal probability, all equally full."""
    sample = numbers("normal", 13, 8 * raw_noise.PIECE)
    pieces = sample.reshape(-1, 2, raw_noise.PIECE // 2)
    cells = np.minimum((stats.norm.cdf(pieces) * 32).astype(np.int64), 31)
    for first, second in [
        (cells[:, 0], cells[:, 1]),
        (cells[..., :-1], cells[..., 1:]),
        (cells[:-1], cells[1:]),
    ]:
        counts = np.bincount((first * 32 + second).ravel(), minlength=1024)
        assert stats.chisquare(counts).pvalue > 1e-6


def test_radius_and_angle_of_pairs():
    sample = numbers("normal", 15, 5 * raw_noise.PIECE).reshape(-1, 2, raw_noise.PIECE // 2)
    x, y = sample[:, 0].ravel().astype(np.float64), sample[:, 1].ravel().astype(np.float64)
    assert stats.kstest((x**2 + y**2) / 2, "expon").pvalue > 1e-6
    assert stats.kstest(np.arctan2(x, y) / (2 * math.pi) + 0.5, "uniform").pvalue > 1e-6


@pytest.mark.parametrize(("first", "second"), [(1, 2), (0, 2**62), (5, 5 + 2**32), (2**63 - 1, 2**63 - 2)])
def test_neighbouring_seeds_are_unrelated(first, second):
    for kind in ("normal", "uniform", "sign"):
        assert_uncorrelated(numbers(kind, first, 1_000_000), numbers(kind, second, 1_000_000))


def test_kinds_of_one_seed_are_unrelated():
    made = [numbers(kind, 17, 1_000_000) for kind in ("normal", "uniform", "sign")]
    made.append(np.arctan(numbers("cauchy", 17, 1_000_000)))
    for i, x in enumerate(made):
        for y in made[:i]:
            assert_uncorrelated(x, y)
            assert_uncorrelated((x - 0.3) ** 2, (y - 0.3) ** 2)


def test_streams_and_their_starts_differ():
    """First words over many (seed, kind): no collision, every bit fair."""
    first = np.array([raw_noise.Words(s, k).take(1)[0] for s in range(1024) for k in range(4)], np.uint64)
    assert len(np.unique(first)) == len(first)
    bits = (first[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert abs(bits.mean(0) - 0.5).max() < Z / 2 / math.sqrt(len(first))


@pytest.mark.parametrize(
    "count", [0, 1, 2, 5, raw_noise.PIECE - 1, raw_noise.PIECE, raw_noise.PIECE + 1, MANY]
)
def test_pieces_cover_everything_once(count):
    found = raw_noise.pieces(count)
    assert sum(stop - start for start, stop in found) == count
    assert [start for start, _ in found] == [0, *(stop for _, stop in found)][: len(found)]
    assert all(0 < stop - start <= raw_noise.PIECE for start, stop in found)
    assert all((stop - start) % 2 == 0 for start, stop in found[:-1])


@pytest.mark.parametrize("kind", raw_noise.KINDS)
def test_empty_and_odd_sizes(kind):
    numbers(kind, 3, 0)
    for size in (1, 2, 3, 7, 9, 65):
        assert np.isfinite(numbers(kind, 3, size)).all()


def test_the_default_type_has_no_effect():
    expected = numbers("normal", 3, 1001)
    torch.set_default_dtype(torch.float64)
    try:
        found = numbers("normal", 3, 1001)
    finally:
        torch.set_default_dtype(torch.float32)
    np.testing.assert_array_equal(found, expected)


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


@pytest.mark.parametrize("native", [True, False])
def test_below_the_threshold_torchs_own(native):
    for kind in bulk_noise._FEWEST:
        with sb.fast_paths(native=native):
            fewest = bulk_noise._fewest(kind)
        for size in (1, 16, fewest - 1):
            torch.manual_seed(3)
            with sb.fast_paths(native=native):
                x = fresh_noise(kind, (size,), torch.float32, CPU)
            torch.manual_seed(3)
            assert torch.equal(x, plain_noise(kind, (size,), torch.float32, CPU))
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


@pytest.mark.parametrize("kind", KINDS)
def test_threads_have_no_effect(kind):
    before = torch.get_num_threads()
    try:
        made = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            made.append(numbers(kind, 19, 1_000_001))
    finally:
        torch.set_num_threads(before)
    for other in made[1:]:
        np.testing.assert_array_equal(other, made[0])


def test_calls_from_several_threads_at_once():
    expected = [numbers("normal", seed, 300_000) for seed in range(6)]
    found = [None] * 6
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        workers = [
            threading.Thread(target=lambda i=i: found.__setitem__(i, numbers("normal", i, 300_000)))
            for i in range(6)
        ]
        [worker.start() for worker in workers]
        [worker.join() for worker in workers]
    finally:
        torch.set_num_threads(before)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_after_a_fork():
    """In a process of its own: a child makes the same noise with one thread, for torch's do not survive a fork."""
    script = """
import os, warnings
warnings.simplefilter("ignore")
import numpy as np, torch
from slimbayes.accelerate import bulk_noise
from slimbayes.accelerate.cpu import raw_noise
torch.set_num_threads(1)
def make():
    out = np.empty(500_000, np.float32); raw_noise.fill(out, "normal", 4); return float(out.sum())
mine = make()
child = os.fork()
if child == 0:
    os._exit(0 if make() == mine else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert make() == mine
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env={**os.environ})


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
