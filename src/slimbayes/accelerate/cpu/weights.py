"""Random weights and their gradients by the kernels of weights.c: one call for any number of tensors.

Tensor i of a call takes the streams from i·draws on, one for each draw, of the seed it is made with.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from slimbayes.accelerate import cpu, switches
from slimbayes.accelerate.cpu import addresses, new

_RANDOM = struct.Struct("=13q4d")  # what weights.c calls Random
_FEWEST = 1 << 15  # numbers below which a second thread costs more than it does

Parameters = Sequence[Tensor]  # (M, ρ), or (M, log U, log V)
Sums = tuple[float, float, float]  # Σ(M − centre)², Σσ² and Σ log σ
Pull = tuple[
    float, float, float, float
]  # (μ, a, b, c): a(M − μ) for the gradient of M, bσ − c/σ for that of σ
NO_PULL: Pull = (0.0, 0.0, 0.0, 0.0)


def usable(groups: Sequence[Parameters]) -> bool:
    """Whether the kernels take these: contiguous, float32, on the CPU, each spread of its mean's shape."""
    if not (groups and switches.paths.noise) or cpu.library() is None:
        return False
    if torch._C._get_tracing_state() is not None:
        return False  # a trace would keep the empty memory that they fill
    for group in groups:
        for tensor in group:
            if tensor.dtype != torch.float32 or not tensor.is_cpu or not tensor.is_contiguous():
                return False
        if not fits(group):
            return False
    return True


def fits(group: Parameters) -> bool:
    """Whether the shapes are those of a mean and its own ρ, or log U and log V.

    >>> fits((torch.zeros(2, 3), torch.zeros(2, 3))), fits((torch.zeros(2, 3), torch.zeros(1)))
    (True, False)
    """
    if len(group) == 2:
        return group[0].shape == group[1].shape
    mean, log_u, log_v = group
    if mean.dim() == 0 or log_u.dim() != 2 or log_v.dim() != 2 or log_u.shape[1] != log_v.shape[1]:
        return False
    rows, columns = log_u.shape[0], log_v.shape[0]
    return log_u.shape[1] > 0 and mean.shape[0] == rows and mean.numel() == rows * columns


def new_seed() -> int:
    """A seed that torch's generator gives."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


def sample(
    groups: Sequence[Parameters],
    centred: Sequence[bool],
    draws: int,
    seed: int,
    centres: Sequence[float] | None = None,
    first_stream: int = 0,
    axis: bool = True,
) -> tuple[list[Tensor], list[Sums]]:
    """M + σ∘ε [draws, *shape] of every tensor, or σ∘ε where ``centred``, and with ``centres`` the sums of its KL.

    One draw can do without its ``axis``: [*shape].

    >>> mean, rho = torch.ones(2, 3), torch.full((2, 3), -50.0)  # σ = 1e-7
    >>> (w,), ((distance, squares, logs),) = sample([(mean, rho)], [False], 1, 7, [0.0])
    >>> w.shape, round(distance), round(logs)
    (torch.Size([1, 2, 3]), 6, -97)
    """
    words, made = [], []
    shapes = _shapes(groups)
    for i, (group, alone) in enumerate(zip(groups, centred, strict=True)):
        mean = group[0]
        out = mean.new_empty((draws, *mean.shape)) if axis else torch.empty_like(mean)
        made.append(out)
        centre = 0.0 if centres is None else centres[i]
        shape = shapes[i]
        words.append(
            _RANDOM.pack(
                *shape[:3],
                new(out),
                0,
                0,
                0,
                0,
                *shape[3:],
                first_stream + i * draws,
                alone,
                centre,
                0.0,
                0.0,
                0.0,
            )
        )
    count = len(words)
    sums = None if centres is None else (ctypes.c_double * (3 * count))()
    threads = _threads(groups, draws)
    _call("slimbayes_sample_weights", b"".join(words), count, draws, seed, sums, threads)
    if sums is None:
        return made, []
    return made, [(sums[i], sums[i + 1], sums[i + 2]) for i in range(0, 3 * count, 3)]


def gradients(
    groups: Sequence[Parameters],
    centred: Sequence[bool],
    draws: int,
    seed: int,
    grads: Sequence[Tensor | None],
    needs: Sequence[Sequence[bool]],
    pulls: Sequence[Pull],
    first_stream: int = 0,
) -> list[Tensor | None]:
    """Gradients of all parameters, group by group, from those of the samples, with a KL's; None where not needed."""
    words: list[bytes] = []
    found: list[Tensor | None] = []
    shapes = _shapes(groups)
    kept = [None if grad is None else grad.contiguous() for grad in grads]  # what the kernel reads
    places = addresses(kept, [draws * group[0].numel() for group in groups])
    for i, group in enumerate(groups):
        need, shape = needs[i], shapes[i]
        mean = torch.empty_like(group[0]) if need[0] else None
        spread = [torch.empty_like(tensor) for tensor in group[1:]] if any(need[1:]) else []
        words.append(
            _RANDOM.pack(
                *shape[:3],
                0,
                places[i],
                new(mean),
                new(spread[0]) if spread else 0,
                new(spread[1]) if len(spread) > 1 else 0,
                *shape[3:],
                first_stream + i * draws,
                centred[i],
                *pulls[i],
            )
        )
        found.append(mean)
        found += spread or [None] * (len(group) - 1)
    _call("slimbayes_weight_gradients", b"".join(words), len(words), draws, seed, _threads(groups, draws))
    return found


def noise_of(like: Tensor, draws: int, seed: int, stream: int) -> Tensor:
    """ε [draws, *shape] of a tensor whose first stream is this.

    >>> zero, rho = torch.zeros(4), torch.full((4,), 30.0)
    >>> (w,), _ = sample([(zero, rho)], [True], 2, 5)
    >>> torch.allclose(w, 30 * noise_of(zero, 2, 5, 0))
    True
    """
    out = like.new_empty((draws, *like.shape))
    kernels, threads = _kernels(), torch.get_num_threads()
    for draw in range(draws):
        (place,) = addresses([out[draw]], [like.numel()])
        kernels.slimbayes_noise(place, like.numel(), 0, seed, stream + draw, threads)
    return out


def _shapes(groups: Sequence[Parameters]) -> list[tuple[int, ...]]:
    """Pointers, rows, columns and rank of every tensor."""
    tensors: list[Tensor] = []
    numbers: list[int] = []
    shapes: list[tuple[int, ...]] = []
    for group in groups:
        tensors += group
        if len(group) == 2:
            count = group[0].numel()
            numbers += (count, count)
            shapes.append((1, count, 0))
        else:
            (rows, rank), columns = group[1].shape, len(group[2])
            numbers += (rows * columns, rows * rank, columns * rank)
            shapes.append((rows, columns, rank))
    places = addresses(tensors, numbers)
    found: list[tuple[int, ...]] = []
    start = 0
    for group, shape in zip(groups, shapes, strict=True):
        end = start + len(group)
        found.append((*places[start:end], *shape) if end - start == 3 else (*places[start:end], 0, *shape))
        start = end
    return found


def _threads(groups: Sequence[Parameters], draws: int) -> int:
    return torch.get_num_threads() if draws * sum([group[0].numel() for group in groups]) >= _FEWEST else 1


def _kernels() -> ctypes.CDLL:
    found = cpu._load()  # though they may be turned off by now: what was sampled has gradients
    assert found is not None
    return found


def _call(name: str, *arguments: object) -> None:
    if getattr(_kernels(), name)(*arguments):
        raise MemoryError("no memory for the sums of the random weights")
