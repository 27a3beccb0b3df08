"""Time k-tied weight samples under several tiles, forward and backward, and check each against its formula.

python bench/sweep_ktied.py [--output sweep.json] [--sizes 4096 8192] [--rank 2] [--seconds 55]

The fastest tiles belong in FORWARD and BACKWARD of slimbayes/accelerate/gpu/weight_launch.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimbayes.accelerate.gpu import available, weight_launch
from slimbayes.accelerate.gpu.weight_launch import Tile

CUDA = torch.device("cuda")
TILES = [
    Tile(128, 32), Tile(128, 64), Tile(128, 16), Tile(128, 128), Tile(64, 32), Tile(64, 64), Tile(64, 128),
    Tile(128, 32, 1, 128), Tile(128, 64, 1, 128), Tile(128, 64, 1, 96), Tile(64, 64, 1, 64), Tile(128, 64, 2),
    Tile(64, 64, 2), Tile(32, 64), Tile(64, 32, 2), Tile(128, 64, 1, 128, 1024),
]  # fmt: skip


def median_ms(run: Callable[[], object], rounds: int = 15) -> float:
    """The median by CUDA events, the cache overwritten before each; all are queued before the first ends."""
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device=CUDA)
    run()
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # some 10 ms: the host queues everything meanwhile
    marks = []
    for _ in range(rounds):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)


class Problem:
    """One size: parameters, gradients, and what the kernels must give, by the noise read back from them."""

    def __init__(self, size: int, rank: int) -> None:
        torch.manual_seed(0)
        self.mean = torch.randn(size, size, device=CUDA)
        self.u = torch.randn(size, rank, device=CUDA).mul(0.3).sub(2.5)
        self.v = torch.randn(size, rank, device=CUDA).mul(0.3).sub(2.5)
        self.seed = torch.tensor([7], device=CUDA)
        self.grad = torch.randn(size, size, device=CUDA, dtype=torch.bfloat16)
        self.d_sums = torch.tensor([0.01, 0.02, -0.5], device=CUDA)
        zero = torch.zeros(size, 1, device=CUDA)
        noise = weight_launch.ktied(self.mean, zero, zero, self.seed, 0, 0.0, torch.float32, True)[0]
        sigma = self.u.exp().double() @ self.v.exp().double().t()
        self.w = (self.mean + sigma * noise).to(torch.bfloat16)
        self.sums = torch.stack([self.mean.double().square().sum(), sigma.square().sum(), sigma.log().sum()])
        slope = self.grad.double() * noise + 2.0 * self.d_sums[1] * sigma + self.d_sums[2] / sigma
        self.d_mean = self.grad.float() + 2.0 * self.d_sums[0] * self.mean
        self.d_u = self.u.exp() * (slope @ self.v.exp().double())
        self.d_v = self.v.exp() * (slope.t() @ self.u.exp().double())

    def forward(self) -> tuple[Tensor, ...]:
        return weight_launch.ktied(self.mean, self.u, self.v, self.seed, 0, 0.0, torch.bfloat16, False)

    def backward(self) -> tuple[Tensor, ...]:
        return weight_launch.ktied_backward(
            self.grad, self.d_sums, self.mean, self.u, self.v, self.seed, 0, 0.0, False
        )  # fmt: skip

    def check(self, which: str) -> None:
        found = self.forward() if which == "forward" else self.backward()
        exact = (self.w, self.sums) if which == "forward" else (self.d_mean, self.d_u, self.d_v)
        for value, target in zip(found, exact, strict=True):
            scale = float(target.float().abs().max())
            torch.testing.assert_close(value.float(), target.float(), rtol=2e-2 if target is self.w else 1e-4,
                                       atol=1e-4 * scale)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8192, 4096])
    parser.add_argument("--rank", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=55.0)
    options = parser.parse_args()
    if not available(CUDA) or not torch.cuda.is_available():
        raise SystemExit("the kernels need a CUDA device and Triton")
    begin, rows = time.perf_counter(), []
    for size in options.sizes:
        problem = Problem(size, options.rank)
        for which, table in (("forward", weight_launch.FORWARD), ("backward", weight_launch.BACKWARD)):
            chosen = table[options.rank]
            for tile in dict.fromkeys([chosen, *TILES]):
                if time.perf_counter() - begin > options.seconds:
                    print(f"out of time: {which} [{size}, {size}] is not complete")
                    break
                table[options.rank] = tile
                row: dict[str, Any] = {"pass": which, "size": size, "rank": options.rank, **tile._asdict()}
                try:
                    problem.check(which)
                    row["ms"] = median_ms(getattr(problem, which))
                except Exception as error:  # a tile may ask for more than the device has
                    row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                row["chosen"] = tile == chosen
                rows.append(row)
            table[options.rank] = chosen
            found = [row for row in rows if row["pass"] == which and row["size"] == size]
            for row in sorted(found, key=lambda one: one.get("ms", float("inf"))):
                tile_text = f"columns {row['columns']:4} steps {row['steps']:4} unroll {row['unroll']}"
                tile_text += f" registers {row['registers'] or 'free':>4} programs {row['programs']}"
                text = f"{which:9} [{size}, {size}] {tile_text}"
                text += f"  {row['ms']:.4f} ms" if "ms" in row else f"  {row['error']}"
                print(text + ("  (in use)" if row["chosen"] else ""), flush=True)
        del problem
        torch.cuda.empty_cache()
    if options.output:
        content = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "tiles": rows}
        options.output.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
