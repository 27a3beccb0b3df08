"""Keyed noise: random numbers that are a pure function of what they are for.

With a user seed, the noise of a layer depends on (seed, layer, stream, component, sample, example, element)
and on nothing else: no hidden state advances, so the chunk size, the split into batches and the device leave
it alone.

The generator is Philox4x32-10, a bijection of a 128-bit counter under a 64-bit key (Salmon, Moraes, Dror and
Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011). The key names the seed and the layer; the
counter names the rest, each field in bits of its own, so that two places in a layer never share a counter:

    word 0: block b, elements 4b to 4b + 3      word 2: sample
    word 1: example                             word 3: stream · 2¹⁶ + component
"""

import functools
import hashlib
import math
import operator
from collections.abc import Callable

import torch
from torch import Tensor

from slimbayes.core.compiler import constant
from slimbayes.core.custom_operation import operation

Words = tuple[Tensor, Tensor, Tensor, Tensor]
Key = tuple[int, int] | tuple[Tensor, Tensor]

_MASK = 0xFFFFFFFF
_HALF = 1 << 31
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85  # the golden ratio and √3 − 1, in units of 2⁻³²
_ROUNDS = 10

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Counter blocks worked on at a time outside torch.compile: few enough for the words to stay in the cache,
# enough to hide the calls. They bound the memory beside the output.
_CPU_PIECE, _DEVICE_PIECE = 1 << 17, 1 << 22


def philox(counter: Words, key: Key) -> Words:
    """Philox4x32-10: four random 32-bit words for each counter.

    Each of the ten rounds, with fixed multipliers M₀, M₁ and keys k₀, k₁ that advance by a Weyl constant:

        (c₀, c₁, c₂, c₃) ← (hi(M₁c₂) ^ c₁ ^ k₀, lo(M₁c₂), hi(M₀c₀) ^ c₃ ^ k₁, lo(M₀c₀))

    Citation: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Args:
        counter: four int64 tensors that broadcast together, with values in [0, 2³²).
        key: two integers in [0, 2³²), or two int64 tensors of such that broadcast to the counters' shape, which
            all four counters then have.

    Returns:
        Four int64 tensors of the broadcast shape, with values in [0, 2³²).

    >>> zero = torch.tensor(0)
    >>> [f"{int(word):08x}" for word in philox((zero, zero, zero, zero), (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    # Without a bitwise operation first, torch.compile takes the product of an arange for an index of 32 bits.
    c0, c2 = c0 & _MASK, c2 & _MASK
    for _ in range(_ROUNDS):
        # The products wrap modulo 2⁶⁴, which keeps all their bits. The low words are passed on with the high
        # bits still there, and the keys grow past 32 bits: the mask in _mix drops both.
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1 = _mix(product_1, c1, k0), product_1
        c2, c3 = _mix(product_0, c3, k1), product_0
        k0, k1 = k0 + _WEYL_0, k1 + _WEYL_1
    return c0, c1 & _MASK, c2, c3 & _MASK


def _mix(product: Tensor, word: Tensor, key: int | Tensor) -> Tensor:
    """32 bits of hi(product) ^ word ^ key: the mask drops the sign bits that the shift brings in."""
    return ((product >> 32) ^ word).bitwise_xor_(key).bitwise_and_(_MASK)


def layer_key(seed: int, name: str) -> tuple[int, int]:
    """Philox key of a layer: 64 bits of BLAKE2b (RFC 7693) of the seed and the layer's name, as two words.

    Any Python integer is a seed, negative and large ones too. Some two of n layers share a key with
    probability about n²/2⁶⁵. torch.compile does not trace hashlib: there ``noise_key`` is the way.

    >>> layer_key(0, "encoder.0") == layer_key(0, "encoder.0")
    True
    >>> layer_key(0, "encoder.0") == layer_key(0, "encoder.1")
    False
    """
    # Hexadecimal, unlike decimal, has no limit on digits; it has no colon, so no two pairs give one text.
    text = f"{operator.index(seed):x}:{name}"
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"slimbayes").digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


# In compiled code: a number that does not fit a graph's integers is a constant of it.
_constant_key = constant(layer_key)


@operation("layer_key", "(SymInt seed, str name) -> Tensor")
def _key_words(seed: int, name: str) -> Tensor:
    """``layer_key`` as a node of a graph, [2]: the seed is an input, so that another one compiles nothing anew."""
    return torch.tensor(layer_key(seed, name), device="cpu")


@_key_words.register_fake
def _(seed: int, name: str) -> Tensor:
    return torch.empty(2, dtype=torch.int64, device="cpu")


def noise_key(seed: int, name: str) -> Key:
    """The layer's key for ``keyed_noise``: two integers, or in compiled code two tensors without axes.

    >>> noise_key(0, "encoder.0") == layer_key(0, "encoder.0")
    True
    """
    if not torch.compiler.is_dynamo_compiling():
        return layer_key(seed, name)
    if not -(1 << 63) <= seed < 1 << 63:
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        return _constant_key(int(guard_scalar(seed)), name)
    first, second = _key_words(seed, name).unbind()
    return first, second


def keyed_noise(
    kind: str,
    key: Key,
    stream: int,
    components: Tensor | None,
    samples: Tensor | None,
    examples: Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Noise [C, S, E, *shape], each number a function of the key, the stream, its own ids and its own index.

    With w a 32-bit word of ``philox``, u = (w + ½)/2³², and u′ the same of the next word:

        "uniform"      u, in the open interval (0, 1)
        "normal"       √(−2 ln u) cos(2πu′ − π) and √(−2 ln u) sin(2πu′ − π), up to 6.76 either side
                       (Box and Muller, "A note on the generation of random normal deviates", 1958)
        "sign"         +1 or −1, by the highest bit of w
        "cauchy"       tan(π(u − ½)), up to 2³³/π = 2.7e9 either side
        "exponential"  −ln u, up to 22.9

    Works in float32 and rounds to ``dtype``, or in float64 if that is ``dtype``. Both ends of (0, 1) keep
    their precision, so float32 and float64 agree to 1e-6 of √(−2 ln u) for "normal" and to 1e-6 of the value
    itself for the rest, in the tails of "cauchy" too. The tails end where 32 bits do: a true Cauchy variable
    is past 2.7e9 with probability 2⁻³². In float16, Cauchy values stop at ±65504.

    In eager mode, pieces put together equal the whole bit for bit. Another device or compiled code agrees
    with it up to the rounding of logarithms, sines and tangents.

    Args:
        kind: one of the names above.
        key: the layer's, from ``noise_key`` or ``layer_key``.
        stream: in [0, 2¹⁶), to tell apart several noises of one layer.
        components: absolute ids of the components, 1-D int64, in [0, 2¹⁶); None is the one id 0.
        samples: absolute ids of the samples, likewise, in [0, 2³²).
        examples: absolute ids of the examples, likewise, in [0, 2³²).
        shape: of the noise of one example, with fewer than 2³⁴ elements; how they are folded has no effect.
        dtype: float16, bfloat16, float32 or float64.
        device: where the result is made.

    >>> ids, cpu = torch.arange(6), torch.device("cpu")
    >>> whole = keyed_noise("normal", layer_key(0, "fc"), 0, None, None, ids, (3,), torch.float32, cpu)
    >>> whole.shape
    torch.Size([1, 1, 6, 3])
    >>> half = keyed_noise("normal", layer_key(0, "fc"), 0, None, None, ids[3:], (3,), torch.float32, cpu)
    >>> torch.equal(half, whole[:, :, 3:])
    True
    """
    numel = math.prod(shape)
    _check(kind, stream, numel, dtype)
    ids = (
        _ids("components", components, device) + (stream << 16),
        _ids("samples", samples, device),
        _ids("examples", examples, device),
        torch.arange((numel + 3) // 4, device=device),
    )
    rows = [i.shape[0] for i in ids[:3]]
    if torch.compiler.is_compiling():  # fused kernels keep no words in memory: nothing to cut
        values = _values(kind, ids, key, dtype)[..., :numel]  # [C, S, E, numel]
    else:
        values = torch.empty(*rows, numel, dtype=dtype, device=device)  # [C, S, E, numel]
        _fill(values, kind, ids, key, _CPU_PIECE if values.device.type == "cpu" else _DEVICE_PIECE)
    return values.reshape(*rows, *shape)  # [C, S, E, *shape]


def from_words(kind: str, words: Words, dtype: torch.dtype) -> Tensor:
    """Noise [..., 4B] of one kind from the four words [..., B] of ``philox``, as ``keyed_noise`` makes it.

    >>> zero = torch.zeros(2, dtype=torch.int64)
    >>> from_words("sign", philox((zero, zero, zero, zero), (0, 0)), torch.float32)
    tensor([-1.,  1.,  1.,  1., -1.,  1.,  1.,  1.])
    """
    _check(kind, 0, 1, dtype)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    return _KINDS[kind](words, real, torch.finfo(dtype)).flatten(-2).to(dtype)


def keyed_uniforms(
    seed: int,
    sources: tuple[tuple[str, int], ...],
    components: int,
    samples: Tensor,
    dtype: torch.dtype,
) -> Tensor | None:
    """The "uniform" noise of many layers by one evaluation: [C · S, Σ counts], for sources (name, count).

    The columns of a source are its ``keyed_noise`` for ``layer_key(seed, name)``, stream 0, all components and no
    examples, bit for bit. None where there are so many that they should not be held at a time.

    >>> ids = torch.arange(3)
    >>> both = keyed_uniforms(0, (("a", 5), ("b", 1)), 1, ids, torch.float32)
    >>> cpu = torch.device("cpu")
    >>> b = keyed_noise("uniform", layer_key(0, "b"), 0, None, ids, None, (1,), torch.float32, cpu)
    >>> both.shape, torch.equal(both[:, 5:], b[0, :, 0])
    (torch.Size([3, 6]), True)
    """
    k0, k1, block, columns = _joint(seed, sources, samples.device)
    size = (components, len(samples), len(block))
    if math.prod(size) > _DEVICE_PIECE:
        return None
    ids = torch.arange(components, device=samples.device)
    counter = (block, torch.zeros_like(block), samples[:, None], ids[:, None, None])
    c0, c1, c2, c3 = (word.expand(size) for word in counter)
    words = philox((c0, c1, c2, c3), (k0, k1))
    real = torch.float64 if dtype == torch.float64 else torch.float32
    made = _uniform(words, real, torch.finfo(dtype)).to(dtype).flatten(2).flatten(0, 1)
    return made if columns is None else made.index_select(1, columns)


def _joint(
    seed: int, sources: tuple[tuple[str, int], ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Keys and number of every block [B], and the place of every source's elements among the blocks' words."""
    owner, block, columns = _blocks(tuple(count for _, count in sources), device)
    k0, k1 = _keys(seed, tuple(name for name, _ in sources), device).index_select(0, owner).unbind(1)
    return k0, k1, block, columns


@functools.lru_cache(maxsize=32)
def _keys(seed: int, names: tuple[str, ...], device: torch.device) -> Tensor:
    """The keys of some layers, [layers, 2]."""
    with torch.inference_mode(False):
        return torch.tensor([layer_key(seed, name) for name in names]).to(device)


@functools.lru_cache(maxsize=32)
def _blocks(counts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """Whose every block [B] is, its number there, and the places of elements among the words; None: all, in order."""
    owners, blocks, columns, start = [], [], [], 0
    for source, count in enumerate(counts):
        number = (count + 3) // 4
        owners.append(torch.full((number,), source))
        blocks.append(torch.arange(number))
        columns.append(torch.arange(4 * start, 4 * start + count))
        start += number
    with torch.inference_mode(False):
        owner, block, places = (torch.cat(parts).to(device) for parts in (owners, blocks, columns))
        return owner, block, places if sum(counts) < 4 * start else None


def _check(kind: str, stream: int, numel: int, dtype: torch.dtype) -> None:
    if kind not in _KINDS:
        raise ValueError(
            f"kind={kind!r} is not a kind of noise; choose one of {', '.join(map(repr, _KINDS))}"
        )
    if not 0 <= stream < 1 << 16:
        raise ValueError(f"stream={stream} is out of range; use a stream from 0 to {(1 << 16) - 1}")
    if numel >= 1 << 34:
        raise ValueError(f"shape has {numel} elements, 2^34 or more; spread them over several streams")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype} has no keyed noise; choose one of {', '.join(map(str, _DTYPES))}")


def _ids(name: str, ids: Tensor | None, device: torch.device) -> Tensor:
    if ids is None:
        return torch.zeros(1, dtype=torch.int64, device=device)
    if ids.ndim != 1 or ids.dtype != torch.int64:
        raise ValueError(
            f"{name} has dtype {ids.dtype} and shape {tuple(ids.shape)}; give ids as a 1-D torch.int64 tensor"
        )
    return ids.to(device)


def _fill(out: Tensor, kind: str, ids: Words, key: Key, piece: int) -> None:
    """Write the noise into ``out`` [C, S, E, numel], halving the longest axis down to small pieces."""
    lengths = [i.shape[0] for i in ids]
    if math.prod(lengths) <= piece:
        out.copy_(_values(kind, ids, key, out.dtype)[..., : out.shape[-1]])
        return
    axis = lengths.index(max(lengths))
    middle = lengths[axis] // 2
    edge = 4 * middle if axis == 3 else middle  # the axis of blocks has four elements to the block
    first, second = out.narrow(axis, 0, edge), out.narrow(axis, edge, out.shape[axis] - edge)
    for part, part_ids in ((first, ids[axis][:middle]), (second, ids[axis][middle:])):
        c, s, e, b = (part_ids if a == axis else i for a, i in enumerate(ids))
        _fill(part, kind, (c, s, e, b), key, piece)


def _values(kind: str, ids: Words, key: Key, dtype: torch.dtype) -> Tensor:
    """Noise of whole blocks, [C, S, E, 4B]."""
    components, samples, examples, blocks = ids
    # Broadcasting keeps the first two rounds small: no word spans both examples and blocks before their end.
    counter = (blocks, examples[:, None], samples[:, None, None], components[:, None, None, None])
    real = torch.float64 if dtype == torch.float64 else torch.float32
    return _KINDS[kind](philox(counter, key), real, torch.finfo(dtype)).flatten(-2).to(dtype)


def _uniform(words: Words, real: torch.dtype, info: torch.finfo) -> Tensor:
    # Rounding would close the interval: at 1 for all but float64, at 0 for float16.
    return _unit(torch.stack(words, -1), real).clamp_(_smallest(info), 1 - info.eps / 2)  # [..., B, 4]


def _normal(words: Words, real: torch.dtype, info: torch.finfo) -> Tensor:
    w0, w1, w2, w3 = words
    radius = _minus_log(torch.stack((w0, w2), -1), real).mul_(2).sqrt_()  # [..., B, 2]
    # A range with 0 in its middle halves the rounding of the angle.
    angle = (torch.stack((w1, w3), -1) - _HALF).to(real).add_(0.5).mul_(math.pi / _HALF)  # [..., B, 2]
    return torch.stack((radius * angle.cos(), radius * angle.sin()), -1).flatten(-2)  # [..., B, 4]


def _sign(words: Words, real: torch.dtype, info: torch.finfo) -> Tensor:
    return (torch.stack(words, -1) >> 31).to(real).mul_(2).sub_(1)  # [..., B, 4]


def _cauchy(words: Words, real: torch.dtype, info: torch.finfo) -> Tensor:
    w = torch.stack(words, -1)  # [..., B, 4]
    end = torch.minimum(w, _MASK - w)  # steps to the nearer end of (0, 1)
    # |tan(π(u − ½))| = 1/tan(π · distance to the end) = tan(π · distance to ½). With the smaller of the two
    # distances the argument stays below π/4, where the relative error is that of the rounding.
    tangent = _unit(torch.minimum(end, _HALF - 1 - end), real).mul_(math.pi).tan_()
    magnitude = torch.where(end < _HALF // 2, tangent.reciprocal(), tangent)
    return torch.where(w < _HALF, -magnitude, magnitude).clamp_(-info.max, info.max)


def _exponential(words: Words, real: torch.dtype, info: torch.finfo) -> Tensor:
    return _minus_log(torch.stack(words, -1), real).clamp_(min=_smallest(info))  # [..., B, 4]


def _unit(steps: Tensor, real: torch.dtype) -> Tensor:
    """(steps + ½)/2³²."""
    return steps.to(real).add_(0.5).mul_(2.0**-32)


def _minus_log(words: Tensor, real: torch.dtype) -> Tensor:
    """−ln u, with 1 − u in place of u above ½: float32 has no u that close to 1."""
    end = _unit(torch.minimum(words, _MASK - words), real)
    return torch.where(words < _HALF, -end.log(), -torch.log1p(-end))


def _smallest(info: torch.finfo) -> float:
    return info.tiny * info.eps  # the smallest subnormal number


_KINDS: dict[str, Callable[[Words, torch.dtype, torch.finfo], Tensor]] = {
    "normal": _normal,
    "uniform": _uniform,
    "sign": _sign,
    "cauchy": _cauchy,
    "exponential": _exponential,
}
