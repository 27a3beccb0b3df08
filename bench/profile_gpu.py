"""Where the GPU time of a training step goes: the bench's own steps under torch's profiler, kernels by kind.

    python bench/profile_gpu.py --networks mlp-4096 --methods ktied-local,meanfield-flipout --mode graphs

Every step is the one that ``slimbayes bench`` times. The file also has the rates that this GPU reached in the same run
(a large copy, a large product), so that a floor in bytes and operations can be turned into time.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from slimbayes.files import write_whole
from slimbayes.lab.bench.cases import Case, build
from slimbayes.lab.bench.settings import NETWORKS, REFERENCE
from slimbayes.verbs.provenance import commit, versions

KINDS = {  # the first that has a word of the kernel's name
    "convolutions and matrix products": (
        "gemm",
        "conv",
        "cutlass",
        "xmma",
        "cudnn",
        "nvjet",
        "cublas",
        "wgrad",
        "dgrad",
    ),
    "optimizer": ("multi_tensor_apply", "FusedAdam", "FusedSgd", "fused_adam", "fused_sgd"),
    "compiler-made element-wise and reductions": ("triton_",),
    "copies and fills": ("Memcpy", "Memset", "memcpy", "memset"),
    "torch's other kernels": ("at::", "native", "void "),
}


def kind(name: str) -> str:
    """Which kind of kernel a name belongs to: a kernel of ours keeps its own name.

    >>> kind("triton_red_fused_add_3"), kind("ktied_sample")
    ('compiler-made element-wise and reductions', 'ours: ktied_sample')
    """
    for title, words in KINDS.items():
        if any(word in name for word in words):
            return title
    return f"ours: {name.split('_0d')[0][:60]}"


def rates() -> dict[str, float]:
    """What this GPU reaches: bytes per second of a copy, operations per second of a bfloat16 product."""
    source = torch.empty(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    copied = timed(lambda: target.copy_(source))
    multiplied = timed(lambda: a @ a)
    return {"bytes_per_second": 2 * source.nbytes / copied, "operations_per_second": 2 * 8192**3 / multiplied}


def timed(run: Any, rounds: int = 20) -> float:
    """The median seconds of a call, by the GPU's own clock."""
    run()
    spent = []
    for _ in range(rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        spent.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(spent)


def profiled(case: Case, steps: int) -> tuple[dict[str, float], int]:
    """Milliseconds of a step by kind of kernel, the largest first, and how many kernels it starts."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            case.step()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    launches = 0
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            found[kind(event.key)] = (
                found.get(kind(event.key), 0.0) + event.self_device_time_total / 1e3 / steps
            )
            launches += event.count
    return {
        name: round(found[name], 4) for name in sorted(found, key=lambda name: -found[name])
    }, launches // steps


def measured(name: str, network: str, mode: str, steps: int) -> dict[str, Any]:
    """One contender: its first step, the wall time of later ones, peak memory, and its kernels."""
    torch.compiler.reset()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    case = build(name, NETWORKS[network], "train", mode, torch.device("cuda"))
    case.step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    for _ in range(4):
        case.step()
    wall = 1e3 * timed(case.step)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    parts, launches = profiled(case, steps)
    return {
        "wall_ms": round(wall, 3),
        "gpu_ms": round(sum(parts.values()), 3),
        "launches": launches,
        "first_step_s": round(first, 1),
        "peak_gib": round(peak, 2) if mode != "graphs" else None,  # graphs allocate from a pool of their own
        "parts": parts,
    }


def main() -> None:
    """Profile what was asked for, and add it to the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", default="mlp-4096", help="names of `slimbayes bench`, with commas")
    parser.add_argument(
        "--methods", default="ktied-local", help="contenders of `slimbayes bench`, with commas"
    )
    parser.add_argument("--mode", default="graphs", choices=("eager", "compiled", "graphs"))
    parser.add_argument("--steps", type=int, default=3, help="steps under the profiler")
    parser.add_argument("--output", type=Path, default=Path("bench/results/profile-gpu.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("profile_gpu.py needs a GPU; bench/profile_cpu.py is for the CPU")
    content: dict[str, Any] = {"format": "slimbayes profile", "runs": {}}
    if options.output.is_file():
        content = json.loads(options.output.read_text(encoding="utf-8"))
    content.update(
        device=torch.cuda.get_device_name(), torch=versions()["torch"], commit=commit(), rates=rates()
    )
    for network in options.networks.split(","):
        for name in (REFERENCE, *options.methods.split(",")):
            try:
                found = measured(name, network, options.mode, options.steps)
            except Exception as error:  # the others are still wanted
                found = {"error": f"{type(error).__name__}: {error}"[:300]}
            content["runs"][f"{network} / {name} / {options.mode}"] = found
            print(network, name, options.mode, {k: v for k, v in found.items() if k != "parts"}, flush=True)
            write_whole(options.output, json.dumps(content, indent=1) + "\n")
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
