"""Time the GPU kernels at the sizes of real networks, against the copy bandwidth measured in the same run.

python bench/kernels.py [--output kernels.json] [--only rows] [--rounds 30]

Each line: the kernel, its size, milliseconds (median by CUDA events, L2 flushed by a fill between runs), the
bytes that must move, the bandwidth these make, its share of a copy's bandwidth, the host's time to start it, and
the plain twin's times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from slimbayes import fast_paths
from slimbayes.accelerate.gpu import available
from slimbayes.accelerate.gpu.factors import sample_flat
from slimbayes.accelerate.gpu.factors_kl import flat_kl
from slimbayes.accelerate.gpu.joint_parameters import join
from slimbayes.accelerate.gpu.noise import philox_noise
from slimbayes.accelerate.gpu.rows import scale_rows
from slimbayes.accelerate.gpu.weights import ktied_weight, meanfield_weight

CUDA = torch.device("cuda")


def median_ms(run: Callable[[], object], rounds: int) -> float:
    """The median over rounds, each timed alone after the cache was overwritten.

    The device sleeps for longer than the host needs to start a round, so that the events time the device alone.
    """
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device=CUDA)  # 256 MB, over five times the L2 cache
    cycles = int((2.0 * host_us(run, 10) + 50.0) * 2000)  # at some 2 GHz
    marks = []
    for _ in range(rounds):
        torch.cuda._sleep(cycles)
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        marks.append((begin, end))
        torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)


def host_us(run: Callable[[], object], rounds: int = 50) -> float:
    """Microseconds of host time to start the work, what an eager step pays per call: the median of rounds.

    Each starts on an idle device, for a full queue would make the host wait.
    """
    for _ in range(5):
        run()
    taken = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(taken) * 1e6


def copy_bandwidth(rounds: int) -> float:
    """GB/s of torch's copy, read and write counted."""
    source = torch.empty(2**28, dtype=torch.float32, device=CUDA)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source), rounds) / 1e6


def backward(output: Tensor | tuple[Tensor, ...], inputs: list[Tensor]) -> Callable[[], object]:
    outputs = output if isinstance(output, tuple) else (output,)
    grads = [torch.randn_like(one) for one in outputs]
    return lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True)


Case = tuple[str, str, int, Callable[[], object], Callable[[], object] | None]


def row_cases() -> list[Case]:
    cases: list[Case] = []
    shapes = [(512, 160, 32, 32), (512, 320, 16, 16), (512, 640, 8, 8), (128, 256, 56, 56), (128, 2048, 7, 7)]
    for shape in shapes:
        for layout in (torch.channels_last, torch.contiguous_format):
            x = torch.randn(shape, device=CUDA, dtype=torch.bfloat16).to(memory_format=layout)
            x.requires_grad_()
            f = torch.randn(shape[:2], device=CUDA, dtype=torch.bfloat16, requires_grad=True)
            name = f"{list(shape)} {'last' if layout == torch.channels_last else 'first'}"
            plain = x * f[..., None, None]
            cases += [
                (
                    "rows forward", name, 2 * x.nbytes,
                    lambda x=x, f=f: scale_rows(x, f), lambda x=x, f=f: x * f[..., None, None],
                ),
                (
                    "rows backward", name, 3 * x.nbytes,
                    backward(scale_rows(x, f), [x, f]), backward(plain, [x, f]),
                ),
            ]  # fmt: skip
    return cases


def factor_cases() -> list[Case]:
    """The factors of WRN-28-10 (four components of 128 rows) and of a small MLP."""
    blocks = [16, *([160] * 8), *([320] * 8), *([640] * 8)]
    wide = [3, *blocks, *blocks[:-1], 640, 10]
    sets = {"WRN-28-10": (4, wide, 128), "MLP": (4, [784, 400, 400, 400, 400, 10], 256)}
    seed = torch.tensor([7], device=CUDA)
    cases: list[Case] = []
    for name, (components, widths, examples) in sets.items():
        locs = [torch.ones(components, width, device=CUDA, requires_grad=True) for width in widths]
        rhos = [torch.full((components, w), -3.0, device=CUDA, requires_grad=True) for w in widths]
        loc, rho = join(locs), join(rhos)
        moved = sum(widths) * components * examples * 2
        for family in ("normal", "cauchy"):

            def sample(loc=loc, rho=rho, widths=widths, examples=examples, family=family):
                return sample_flat(loc, rho, widths, seed, 1, examples, family, None, torch.bfloat16)

            def bulk(locs=locs, rhos=rhos, sample=sample):
                return sample(join(locs), join(rhos))

            def loop(locs=locs, rhos=rhos, k=components, n=examples):
                return [
                    (a[:, None] + torch.nn.functional.softplus(b)[:, None]
                     * torch.randn(k, n, a.shape[1], device=CUDA)).to(torch.bfloat16)
                    for a, b in zip(locs, rhos, strict=True)
                ]  # fmt: skip

            outs, plain = bulk(), loop()
            cases += [
                (f"factors {family} forward", name, moved, bulk, loop),
                (
                    f"factors {family} backward", name, moved,
                    backward(tuple(outs), locs + rhos), backward(tuple(plain), locs + rhos),
                ),
            ]  # fmt: skip
        cases.append(
            ("factors kl", name, 2 * loc.nbytes, lambda a=loc, b=rho: flat_kl(a, b, "normal", 1.0, 0.1), None)
        )
    return cases


def weight_cases() -> list[Case]:
    cases: list[Case] = []
    seed = torch.tensor([7], device=CUDA)
    for m, n in ((8192, 8192), (640, 5760), (400, 784)):
        mean = torch.randn(m, n, device=CUDA, requires_grad=True)
        rho = torch.full((m, n), -5.0, device=CUDA, requires_grad=True)
        u = torch.full((m, 2), -2.5, device=CUDA, requires_grad=True)
        v = torch.full((n, 2), -2.5, device=CUDA, requires_grad=True)
        size, name = m * n, f"[{m}, {n}]"

        def ktied(mean=mean, u=u, v=v):
            return ktied_weight(mean, u, v, seed, dtype=torch.bfloat16)

        def field(mean=mean, rho=rho):
            return meanfield_weight(mean, rho, seed, dtype=torch.bfloat16)

        def plain_ktied(mean=mean, u=u, v=v):
            sigma = u.exp() @ v.exp().t()
            sums = torch.stack([mean.square().sum(), sigma.square().sum(), sigma.log().sum()])
            return (mean + sigma * torch.randn_like(sigma)).to(torch.bfloat16), sums

        def plain_field(mean=mean, rho=rho):
            sigma = torch.nn.functional.softplus(rho) + 1e-7
            sums = torch.stack([mean.square().sum(), sigma.square().sum(), sigma.log().sum()])
            return (mean + sigma * torch.randn_like(sigma)).to(torch.bfloat16), sums

        tied, full = [mean, u, v], [mean, rho]
        cases += [
            ("ktied forward", name, 6 * size, ktied, plain_ktied),
            ("ktied backward", name, 10 * size, backward(ktied(), tied), backward(plain_ktied(), tied)),
            ("meanfield forward", name, 10 * size, field, plain_field),
            ("meanfield backward", name, 18 * size, backward(field(), full), backward(plain_field(), full)),
        ]
    return cases


def noise_cases() -> list[Case]:
    seed = torch.tensor([7], device=CUDA)
    size = (8192, 8192)
    return [
        (
            f"noise {kind}", f"{list(size)} {str(dtype).removeprefix('torch.')}", 8192 * 8192 * dtype.itemsize,
            lambda kind=kind, dtype=dtype: philox_noise(seed, kind, size, dtype),
            lambda dtype=dtype: torch.randn(size, dtype=dtype, device=CUDA),
        )
        for kind in ("normal", "uniform", "sign", "cauchy")
        for dtype in (torch.float32, torch.bfloat16)
    ]  # fmt: skip


GROUPS = {"rows": row_cases, "factors": factor_cases, "weights": weight_cases, "noise": noise_cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", choices=list(GROUPS), action="append")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    if not available(CUDA) or not torch.cuda.is_available():
        raise SystemExit("the kernels need a CUDA device and Triton")
    copy = copy_bandwidth(options.rounds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {copy:.0f} GB/s")
    rows = []
    for group in options.only or GROUPS:
        for kernel, size, moved, run, plain in GROUPS[group]():
            ms = median_ms(run, options.rounds)
            rate = moved / ms / 1e6
            row = {
                "kernel": kernel,
                "size": size,
                "ms": ms,
                "bytes": moved,
                "gbps": rate,
                "of_copy": rate / copy,
            }
            row["host_us"] = host_us(run)
            text = f"{kernel:24} {size:28} {ms:8.4f} ms {rate:7.0f} GB/s {rate / copy:5.0%} of copy"
            text += f"  host {row['host_us']:6.0f} us"
            if plain is not None:
                with fast_paths(False):
                    row["plain_ms"], row["plain_host_us"] = median_ms(plain, options.rounds), host_us(plain)
                text += f"  plain {row['plain_ms']:8.4f} ms, host {row['plain_host_us']:6.0f} us"
            print(text, flush=True)
            rows.append(row)
        torch.cuda.empty_cache()
    if options.output:
        device = torch.cuda.get_device_name()
        content = {"device": device, "torch": torch.__version__, "copy_gbps": copy, "kernels": rows}
        options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
