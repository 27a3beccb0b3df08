"""Keyed noise: the generator is Philox4x32-10, its numbers are random, and nothing but their ids moves them.

Every seed is fixed, so a test gives the same verdict in every run. A p-value below `LEAST_P` and a deviation
above `SIGMAS` standard errors count as a failure.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

import slimbayes.core.keyed_noise as generator
from slimbayes.core.keyed_noise import keyed_noise, layer_key, philox

pytestmark = pytest.mark.oldest

CPU = torch.device("cpu")
KINDS = ("normal", "uniform", "sign", "cauchy", "exponential")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MASK = 2**32 - 1
LEAST_P = 1e-3
SIGMAS = 4.0
KEY = layer_key(0, "layer")


def noise(
    kind="normal",
    key=KEY,
    stream=0,
    components=None,
    samples=None,
    examples=None,
    shape=(),
    dtype=torch.float32,
    device=CPU,
):
    return keyed_noise(kind, key, stream, components, samples, examples, shape, dtype, device)


def scalar_philox(counter, key):
    """Philox4x32-10 on Python integers, from the paper's text."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high_0, low_0 = divmod(0xD2511F53 * c[0], 2**32)
        high_1, low_1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def scalar_noise(kind, word, pair, first):
    """One number from its word; a normal one from its pair of words, as the first or the second of two."""
    u, rest = (word + 0.5) / 2**32, (MASK - word + 0.5) / 2**32
    if kind == "normal":
        radius = math.sqrt(-2 * math.log((pair[0] + 0.5) / 2**32))
        angle = 2 * math.pi * (pair[1] + 0.5) / 2**32
        return -radius * (math.cos(angle) if first else math.sin(angle))
    return {
        "uniform": u,
        "sign": 1.0 if u > 0.5 else -1.0,
        "cauchy": -1 / math.tan(math.pi * u) if u < 0.5 else 1 / math.tan(math.pi * rest),
        "exponential": -math.log(u),
    }[kind]


@pytest.fixture
def with_words(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Noise of given words instead of random ones, to reach the ends of their range."""

    def make(words, kind, dtype):
        columns = torch.tensor(words).reshape(-1, 4).unbind(-1)
        monkeypatch.setattr(
            generator, "philox", lambda counter, key: tuple(c.view(1, 1, 1, -1) for c in columns)
        )
        return noise(kind, shape=(len(words),), dtype=dtype).flatten()

    return make


class TestGenerator:
    @pytest.mark.parametrize(
        ("counter", "key", "expected"),
        [
            (
                "00000000 00000000 00000000 00000000",
                "00000000 00000000",
                "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
            ),
            (
                "ffffffff ffffffff ffffffff ffffffff",
                "ffffffff ffffffff",
                "408f276d 41c83b0e a20bc7c6 6d5451fd",
            ),
            (
                "243f6a88 85a308d3 13198a2e 03707344",
                "a4093822 299f31d0",
                "d16cfe09 94fdcceb 5001e420 24126ea1",
            ),
        ],
    )
    def test_known_answers(self, counter, key, expected):
        """The known-answer vectors of Random123, the reference implementation."""
        counter, key, expected = (
            [int(word, 16) for word in text.split()] for text in (counter, key, expected)
        )
        assert scalar_philox(counter, key) == expected
        words = philox(tuple(map(torch.tensor, counter)), tuple(key))
        assert [int(word) for word in words] == expected

    def test_equals_the_scalar_twin(self):
        generator = np.random.default_rng(0)
        counters = generator.integers(0, 2**32, (256, 4))
        key = (0xFFFFFFFE, 0x80000001)  # both overflow 32 bits on the way
        words = philox(torch.from_numpy(counters).unbind(-1), key)
        assert torch.stack(words, -1).tolist() == [scalar_philox(map(int, c), key) for c in counters]

    def test_broadcasts_and_leaves_its_input_alone(self):
        counter = [
            torch.arange(2).view(2, 1, 1),
            torch.arange(3).view(3, 1),
            torch.arange(4),
            torch.tensor(MASK),
        ]
        copies = [c.clone() for c in counter]
        words = philox(tuple(counter), KEY)
        full = philox(tuple(c.contiguous() for c in torch.broadcast_tensors(*counter)), KEY)
        assert all(torch.equal(a, b) for a, b in zip(counter, copies, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(words, full, strict=True))
        assert all(w.shape == (2, 3, 4) and w.dtype == torch.int64 for w in words)

    @pytest.mark.parametrize("kind", KINDS)
    def test_noise_is_the_stated_function_of_its_ids(self, kind):
        """Every field of the counter, up to its largest value, and every formula, in float64."""
        components, samples, examples, stream = [0, 9, 2**16 - 1], [5, MASK], [MASK, 0, 2**31], 2**16 - 1
        ids = [torch.tensor(i) for i in (components, samples, examples)]
        got = noise(kind, KEY, stream, *ids, shape=(2, 5), dtype=torch.float64)
        assert got.shape == (3, 2, 3, 2, 5)
        for (c, component), (s, sample), (e, example) in itertools.product(
            enumerate(components), enumerate(samples), enumerate(examples)
        ):
            blocks = [scalar_philox((b, example, sample, (stream << 16) + component), KEY) for b in range(3)]
            words = list(itertools.chain.from_iterable(blocks))
            expected = [scalar_noise(kind, words[i], words[i - i % 2 :][:2], i % 2 == 0) for i in range(10)]
            torch.testing.assert_close(
                got[c, s, e].flatten(), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12
            )


class TestLayerKey:
    def test_is_frozen(self):
        """A seed written down today gives the same noise tomorrow, on any machine."""
        assert layer_key(0, "") == (0x5918C0FD, 0xCDFC0134)
        assert layer_key(-(2**70), "blocks.3.attn.äöü") == (0x12B89BCE, 0x01D067FC)

    def test_tells_seeds_and_names_apart(self):
        seeds = [0, 1, -1, 2**32, 2**32 + 1, 2**64, -(2**64), 10**5000]
        names = [f"layer.{i}" for i in range(500)] + ["", "0", ":", "0:"]
        keys = {layer_key(seed, name) for seed in seeds for name in names}
        assert len(keys) == len(seeds) * len(names)
        assert all(0 <= word <= MASK for key in keys for word in key)
        assert layer_key(1, "1:x") != layer_key(0x11, ":x") != layer_key(1, ":1:x")

    def test_takes_whatever_is_an_integer(self):
        assert layer_key(np.int64(7), "x") == layer_key(7, "x") == layer_key(torch.tensor(7), "x")
        with pytest.raises(TypeError):
            layer_key(0.5, "x")

    def test_its_bits_are_balanced(self):
        keys = np.array([layer_key(seed, "x") for seed in range(4096)])
        ones = (keys[:, :, None] >> np.arange(32) & 1).sum(0)
        assert np.abs(ones - 2048).max() < SIGMAS * math.sqrt(4096) / 2


class TestDistribution:
    """Of the generator under the counters that are really used: small, dense, differing in few bits."""

    LAWS = {
        "normal": stats.norm,
        "uniform": stats.uniform,
        "cauchy": stats.cauchy,
        "exponential": stats.expon,
    }

    @pytest.mark.parametrize("kind", LAWS)
    @pytest.mark.parametrize("layout", ["elements", "examples", "samples"])
    def test_kolmogorov_smirnov(self, kind, layout):
        count = 200_000
        # Except for "elements", one element each: every number comes from a counter of its own.
        options = {"shape": (count,)} if layout == "elements" else {layout: torch.arange(count)}
        values = noise(kind, **options)
        assert stats.kstest(values.flatten().double().numpy(), self.LAWS[kind].cdf).pvalue > LEAST_P

    def test_kolmogorov_smirnov_far_out(self):
        """The normal and Cauchy tails: the numbers beyond a threshold have the law's own tail."""
        count = 2_000_000
        for kind, law, threshold in (("normal", stats.norm, 3.0), ("cauchy", stats.cauchy, 100.0)):
            values = noise(kind, shape=(count,)).flatten().abs().double().numpy()
            beyond, expected = values[values > threshold], 2 * count * law.sf(threshold)
            assert abs(len(beyond) - expected) < SIGMAS * math.sqrt(expected)
            assert stats.kstest(law.sf(beyond) / law.sf(threshold), "uniform").pvalue > LEAST_P

    def test_normal_moments(self):
        x = noise(shape=(2_000_000,)).double()
        # The standard error of the k-th moment is sqrt(Var x^k / n), with E x^2 .. x^8 = 1, 3, 15, 105.
        for power, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
            assert abs(x.pow(power).mean().item() - mean) < SIGMAS * math.sqrt(variance / x.numel())

    def test_signs_are_balanced(self):
        x = noise("sign", shape=(1_000_000,))
        assert set(x.unique().tolist()) == {-1.0, 1.0}
        assert abs(x.sum().item()) < SIGMAS * 1000

    def test_box_muller_outputs_are_independent(self):
        first, second = noise(shape=(400_000,), dtype=torch.float64).view(-1, 2).numpy().T
        count = len(first)
        for power_1, power_2 in itertools.product((1, 2, 3), repeat=2):
            correlation = np.corrcoef(first**power_1, second**power_2)[0, 1]
            assert abs(correlation) < SIGMAS / math.sqrt(count)
        radius, angle = first**2 + second**2, np.arctan2(second, first)
        assert stats.kstest(radius, stats.expon(scale=2).cdf).pvalue > LEAST_P
        assert stats.kstest(angle, stats.uniform(-math.pi, 2 * math.pi).cdf).pvalue > LEAST_P
        edges = stats.norm.ppf(np.arange(1, 16) / 16)
        cells = np.digitize(first, edges) * 16 + np.digitize(second, edges)
        assert stats.chisquare(np.bincount(cells, minlength=256)).pvalue > LEAST_P


def words_of(**where):
    """The 32-bit words behind the noise: float64 uniforms hold them exactly."""
    return (noise("uniform", **where, dtype=torch.float64) * 2**32 - 0.5).long()


class TestBits:
    def test_every_bit_is_balanced(self):
        words = words_of(shape=(400_000,)).view(-1, 4)  # [blocks, 4]
        ones = torch.stack([(words >> bit & 1).sum(0) for bit in range(32)])  # [32, 4]
        assert (ones - len(words) / 2).abs().max() < SIGMAS * math.sqrt(len(words)) / 2

    @pytest.mark.parametrize("where", ["elements", "examples", "samples", "components"])
    def test_neighbouring_counters_differ_in_half_of_the_bits(self, where):
        """Avalanche: the exclusive or of neighbours is as random as they are."""
        if where == "elements":
            words = words_of(shape=(2**16,))
        else:
            words = words_of(**{where: torch.arange(2**14)}, shape=(4,))
        words = words.view(-1, 4)
        flips = words[1:] ^ words[:-1]
        ones = torch.stack([(flips >> bit & 1).sum(0) for bit in range(32)])  # [32, 4]
        assert (ones - len(flips) / 2).abs().max() < SIGMAS * math.sqrt(len(flips)) / 2

    @pytest.mark.parametrize("byte", range(4))
    def test_bytes_are_even(self, byte):
        words = words_of(shape=(512_000,)).view(-1, 4)
        for word in range(4):
            counts = torch.bincount((words[:, word] >> 8 * byte) & 255, minlength=256)
            assert stats.chisquare(counts.numpy()).pvalue > LEAST_P

    @pytest.mark.parametrize("shift", [0, 13, 26])
    @pytest.mark.parametrize("lag", [1, 4])
    def test_serial_pairs_are_even(self, shift, lag):
        """Pairs of six bits, neighbouring words or neighbouring blocks, fill their 4096 cells evenly."""
        six = (words_of(shape=(400_000,)) >> shift & 63).view(-1, 2, lag)
        pairs = six[:, 0] * 64 + six[:, 1]  # disjoint, as the chi-square test wants them
        assert stats.chisquare(torch.bincount(pairs.flatten(), minlength=4096).numpy()).pvalue > LEAST_P

    @pytest.mark.parametrize("across", ["elements", "examples"])
    def test_birthday_spacings(self, across):
        """Marsaglia's test: of m birthdays in 2^32 days, about Poisson(m^3 / 2^34) spacings repeat."""
        trials, birthdays = 128, 4096
        if across == "elements":
            words = words_of(shape=(trials, birthdays)).view(trials, birthdays)
        else:
            words = words_of(examples=torch.arange(birthdays), shape=(trials,)).view(birthdays, trials).T
        spacings = words.sort(-1).values.diff(dim=-1).sort(-1).values
        repeats = int((spacings.diff(dim=-1) == 0).sum())
        expected = trials * birthdays**3 / 2**34
        assert abs(repeats - expected) < SIGMAS * math.sqrt(expected)


class TestCorrelation:
    """Neighbours on every axis are uncorrelated, in value and in size."""

    @staticmethod
    def check(first, second):
        for a, b in ((first, second), (first.square(), second.square()), (first.sign(), second.abs())):
            a, b = a.flatten().double(), b.flatten().double()
            correlation = torch.corrcoef(torch.stack((a, b)))[0, 1].item()
            assert abs(correlation) < SIGMAS / math.sqrt(len(a))

    @pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 8, 64])
    def test_elements(self, lag):
        x = noise(shape=(400_000,)).flatten()
        self.check(x[:-lag], x[lag:])

    @pytest.mark.parametrize("axis", [0, 1, 2])
    @pytest.mark.parametrize("lag", [1, 2, 16])
    def test_ids(self, axis, lag):
        name = ("components", "samples", "examples")[axis]
        x = noise(**{name: torch.arange(400)}, shape=(1000,))
        self.check(x.narrow(axis, 0, 400 - lag), x.narrow(axis, lag, 400 - lag))

    def test_across_fields(self):
        """The same id in another field: a sum or an exclusive or of the fields would make them equal."""
        ids = torch.arange(1, 401)
        fields = [noise(**{name: ids}, shape=(1000,)) for name in ("components", "samples", "examples")]
        fields.append(torch.stack([noise(stream=i, shape=(1000,)) for i in range(1, 401)]))
        for first, second in itertools.combinations(fields, 2):
            self.check(first, second)

    def test_streams(self):
        x = torch.stack([noise(stream=i, shape=(4000,)) for i in range(64)])
        self.check(x[:-1], x[1:])

    def test_layers(self):
        x = torch.stack([noise(key=layer_key(0, f"layer.{i}"), shape=(4000,)) for i in range(64)])
        self.check(x[:-1], x[1:])

    def test_seeds(self):
        x = torch.stack([noise(key=layer_key(i, "layer"), shape=(4000,)) for i in range(64)])
        self.check(x[:-1], x[1:])


class TestInvariance:
    """Bit for bit: a number does not know which others are made with it."""

    IDS = {"components": torch.arange(3), "samples": torch.arange(5) + 7, "examples": torch.arange(11) + 100}

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_chunks_make_the_whole(self, kind, dtype):
        whole = noise(kind, **self.IDS, shape=(3, 7), dtype=dtype)
        assert whole.shape == (3, 5, 11, 3, 7)
        assert whole.dtype == dtype
        for axis, (name, ids) in enumerate(self.IDS.items()):
            for size in (1, 2, 4):
                parts = [
                    noise(kind, **{**self.IDS, name: c}, shape=(3, 7), dtype=dtype) for c in ids.split(size)
                ]
                assert torch.equal(torch.cat(parts, axis), whole)

    @pytest.mark.parametrize("name", ["samples", "examples"])
    def test_more_ids_extend(self, name):
        ids = torch.arange(1000)
        few, many = (noise(**{name: i}, shape=(9,)) for i in (ids[:77], ids))
        assert torch.equal(few, many.narrow(1 if name == "samples" else 2, 0, 77))

    def test_ids_in_any_order(self):
        ids = torch.tensor([8, 3, 3, 2**32 - 1, 0])
        together = noise(examples=ids, shape=(6,))
        alone = [noise(examples=i.view(1), shape=(6,)) for i in ids]
        assert torch.equal(torch.cat(alone, 2), together)

    def test_no_ids_is_the_id_zero(self):
        zero = torch.zeros(1, dtype=torch.int64)
        assert torch.equal(noise(shape=(6,)), noise(components=zero, samples=zero, examples=zero, shape=(6,)))

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_order_of_elements_is_all_of_the_shape(self, kind):
        whole = noise(kind, shape=(2, 3, 5)).flatten()
        assert noise(kind).shape == (1, 1, 1)
        for numel in range(31):
            assert torch.equal(noise(kind, shape=(numel,)).flatten(), whole[:numel])

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("piece", [1, 13, 64])
    def test_the_size_of_the_pieces_has_no_effect(self, kind, piece, monkeypatch):
        arguments = {"components": torch.arange(2), "examples": torch.arange(7), "shape": (23,)}
        whole = noise(kind, **arguments)
        monkeypatch.setattr(generator, "_CPU_PIECE", piece)
        assert torch.equal(noise(kind, **arguments), whole)

    @pytest.mark.parametrize(("numel", "blocks"), [(96, 24), (97, 25)])
    def test_work_is_bounded_and_not_wasted(self, numel, blocks, monkeypatch):
        """Four elements to a counter block, and no more blocks in memory than a piece holds."""
        sizes = []

        def counted(counter, key):
            sizes.append(torch.broadcast_shapes(*(c.shape for c in counter)).numel())
            return philox(counter, key)

        monkeypatch.setattr(generator, "philox", counted)
        monkeypatch.setattr(generator, "_CPU_PIECE", 100)
        noise(examples=torch.arange(31), shape=(numel,))
        assert sum(sizes) == 31 * blocks
        assert max(sizes) <= 100

    @pytest.mark.parametrize("size", [{"shape": (0, 3)}, {"examples": torch.arange(0), "shape": (3,)}])
    def test_nothing_is_asked_for(self, size):
        assert noise(**size).numel() == 0

    def test_torchs_generator_is_left_alone(self):
        state = torch.get_rng_state()
        first = noise(shape=(8,))
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(1)
        assert torch.equal(noise(shape=(8,)), first)

    def test_autocast_has_no_effect(self):
        with torch.autocast("cpu", torch.bfloat16):
            inside = [noise(kind, shape=(64,)) for kind in KINDS]
        assert all(torch.equal(x, noise(kind, shape=(64,))) for kind, x in zip(KINDS, inside, strict=True))

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("kind", KINDS)
    def test_devices_agree(self, kind, dtype):
        on_cpu = noise(kind, **self.IDS, shape=(1001,), dtype=dtype)
        on_gpu = noise(kind, **self.IDS, shape=(1001,), dtype=dtype, device=torch.device("cuda"))
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=2e-6, atol=2e-6)


class TestDtypes:
    ENDS = [0, 1, 2, 3, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 3 * 2**30 - 1, 3 * 2**30, MASK - 1, MASK]
    # Near both ends, near the middle and at every scale between.
    EDGES = ENDS + [w ^ flip for bit in range(32) for w in (1 << bit, 3 << bit & MASK) for flip in (0, MASK)]

    @pytest.mark.parametrize("kind", ["uniform", "sign", "cauchy", "exponential"])
    def test_float32_agrees_with_float64_relative_to_the_value(self, kind, with_words):
        single, double = (with_words(self.EDGES, kind, d).double() for d in (torch.float32, torch.float64))
        torch.testing.assert_close(single, double, rtol=1e-6, atol=0)
        expected = [scalar_noise(kind, word, None, True) for word in self.EDGES]
        torch.testing.assert_close(double, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-15)

    def test_float32_agrees_with_float64_for_normal(self, with_words):
        words = [word for pair in itertools.product(self.EDGES, repeat=2) for word in pair]
        single, double = (with_words(words, "normal", d).double() for d in (torch.float32, torch.float64))
        radius = double.view(-1, 2).norm(dim=-1, keepdim=True)
        assert ((single - double).view(-1, 2).abs() / radius).max() < 1e-6
        assert (radius.max().item(), radius.min().item()) == pytest.approx(
            (math.sqrt(66 * math.log(2)), 2**-16), rel=1e-9
        )

    @pytest.mark.parametrize("kind", KINDS)
    def test_random_words_agree(self, kind):
        single, double = (
            noise(kind, shape=(200_000,), dtype=d).double() for d in (torch.float32, torch.float64)
        )
        scale = double.abs()
        if kind == "normal":  # of the pair: a rounded angle moves the smaller of the two by the larger
            scale = scale.view(-1, 2).norm(dim=-1, keepdim=True).expand(-1, 2).reshape(double.shape)
        assert ((single - double).abs() / scale).max() < 1e-6

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_interval_is_open(self, dtype, with_words):
        x = with_words(self.EDGES, "uniform", dtype)
        assert ((x > 0) & (x < 1)).all()
        assert (with_words(self.EDGES, "exponential", dtype) > 0).all()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kind", KINDS)
    def test_every_word_gives_a_finite_number(self, kind, dtype, with_words):
        assert with_words(self.EDGES, kind, dtype).isfinite().all()

    def test_cauchy_is_odd(self, with_words):
        x = with_words(self.EDGES, "cauchy", torch.float32)
        assert torch.equal(with_words([MASK - w for w in self.EDGES], "cauchy", torch.float32), -x)
        assert x.max().item() == pytest.approx(2**33 / math.pi, rel=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("kind", ["normal", "sign"])
    def test_low_precision_is_float32_rounded(self, kind, dtype):
        assert torch.equal(noise(kind, shape=(999,), dtype=dtype), noise(kind, shape=(999,)).to(dtype))


class TestCompile:
    @pytest.fixture(autouse=True)
    def fresh(self):
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    @pytest.mark.parametrize("kind", KINDS)
    def test_whole_graph(self, kind):
        ids = {"components": torch.arange(2), "samples": torch.arange(3), "examples": torch.arange(5) + 9}
        compiled = torch.compile(noise, fullgraph=True, backend="eager")
        assert torch.equal(compiled(kind, **ids, shape=(2, 3)), noise(kind, **ids, shape=(2, 3)))

    def test_one_graph_for_other_keys_and_batches(self):
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(noise, fullgraph=True, backend=backend, dynamic=True)
        for seed, batch in ((0, 6), (1, 6), (2, 9), (-5, 30)):
            arguments = {"key": layer_key(seed, "x"), "examples": torch.arange(batch), "shape": (10,)}
            assert torch.equal(compiled(**arguments), noise(**arguments))
        assert len(graphs) <= 2

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_fused_on_a_gpu(self):
        """Ids made inside the graph: the compiler must not take their products for indices of 32 bits."""

        def inside(count, device):
            return noise(samples=torch.arange(count, device=device), shape=(1000,), device=device)

        fused = torch.compile(inside, fullgraph=True)(5, torch.device("cuda"))
        torch.testing.assert_close(fused.cpu(), inside(5, CPU), rtol=2e-6, atol=2e-6)


class TestErrors:
    def test_unknown_kind(self):
        with pytest.raises(ValueError, match="kind='gauss' is not a kind of noise; choose one of 'normal'"):
            noise("gauss")

    @pytest.mark.parametrize("stream", [-1, 2**16])
    def test_stream_out_of_range(self, stream):
        with pytest.raises(
            ValueError, match=f"stream={stream} is out of range; use a stream from 0 to 65535"
        ):
            noise(stream=stream)

    def test_too_many_elements(self):
        with pytest.raises(ValueError, match="shape has 17179869184 elements"):
            noise(shape=(2**17, 2**17))

    @pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
    def test_dtype_that_is_not_real(self, dtype):
        with pytest.raises(
            ValueError, match=f"dtype={dtype} has no keyed noise; choose one of torch.float16"
        ):
            noise(dtype=dtype)

    @pytest.mark.parametrize("name", ["components", "samples", "examples"])
    @pytest.mark.parametrize("ids", [torch.tensor(3), torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2)])
    def test_ids_that_are_not_ids(self, name, ids):
        with pytest.raises(ValueError, match=f"{name} has dtype .* give ids as a 1-D torch.int64 tensor"):
            noise(**{name: ids})
