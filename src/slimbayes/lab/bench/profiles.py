"""What bench/profile_cpu.py and bench/profile_gpu.py found, as tables of the page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slimbayes.lab.bench.settings import NETWORKS
from slimbayes.lab.bench.table import title

ALIASES = {"meanfield": "meanfield-shared", "ktied": "ktied-shared"}


def gpu_profile(content: dict[str, Any]) -> Iterator[str]:
    """One table for each network and mode: milliseconds of a step by kind of kernel."""
    panels: dict[tuple[str, str], dict[str, Any]] = {}
    for name, run in content["runs"].items():
        network, method, mode = name.split(" / ")
        if "error" not in run:
            panels.setdefault((network, mode), {})[method] = run
    yield (
        f"Milliseconds of one training step by kind of kernel, on {content['device']}; torch {content['torch']}, "
        f"commit {content['commit']}. The last line is the step's wall time without the profiler."
    )
    if "rates" in content:
        rates = content["rates"]
        yield (
            f"A large copy moves {rates['bytes_per_second'] / 1e12:.2f} TB/s there, a large bfloat16 product makes "
            f"{rates['operations_per_second'] / 1e12:.0f} TFLOP/s."
        )
    for (network, mode), runs in panels.items():
        largest: dict[str, float] = {}
        for run in runs.values():
            for part, spent in run["parts"].items():
                largest[part] = max(largest.get(part, 0.0), float(spent))
        yield f"\n### {NETWORKS[network].title}, {mode}\n"
        yield "| part | " + " | ".join(title(method) for method in runs) + " |"
        yield "|---|" + "---:|" * len(runs)
        for part in sorted(largest, key=lambda part: -largest[part]):
            cells = [f"{run['parts'][part]:.2f}" if part in run["parts"] else "–" for run in runs.values()]
            yield f"| {part} | " + " | ".join(cells) + " |"
        yield "| step | " + " | ".join(f"{run['wall_ms']:.2f}" for run in runs.values()) + " |"


def cpu_profile(content: dict[str, Any]) -> Iterator[str]:
    """One table for each network: the parts of every contender's step and its floor, the deterministic step being 1."""
    yield (
        f"Parts of one eager training step, the deterministic step being 1; {content['threads']} threads, torch "
        f"{content['torch']}, commit {content['commit']}, {content['time']}. The floor is the deterministic step and "
        "what the method cannot do without, each measured in the same run as one call of torch at the network's "
        "sizes, all passes over the same data as one, the host's work left out."
    )
    for network, found in content["networks"].items():
        parts = list(found["methods"]["deterministic"]["parts"])
        yield f"\n### {NETWORKS[network].title}: {found['deterministic_ms']:.1f} ms\n"
        yield "| method | " + " | ".join(parts) + " | step | floor |"
        yield "|---|" + "---:|" * (len(parts) + 2)
        for method, run in found["methods"].items():
            cells = [f"{run['parts'].get(part, 0.0):.2f}" for part in parts]
            floor = f"{run['floor']['ratio']:.2f}" if "floor" in run else "–"
            name = title(ALIASES.get(method, method))
            yield f"| {name} | " + " | ".join(cells) + f" | {run['ratio']:.2f} | {floor} |"
