"""The page of the documentation: what the JSON files say, and nothing that they do not."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimbayes.files import write_whole
from slimbayes.lab.bench.measuring import FOREIGN_SHARE
from slimbayes.lab.bench.profiles import cpu_profile, gpu_profile
from slimbayes.lab.bench.results import Cell, Results, read_results
from slimbayes.lab.bench.settings import CONTENDERS, MODES, NETWORKS, PEERS, PHASES, REFERENCE, TARGETS
from slimbayes.lab.bench.table import blocks, milliseconds, ratio, short, title, value, verdict

FILES = {"cpu": "bench-cpu.json", "cuda": "bench-gpu.json"}
NAMES = {"cpu": "CPU", "cuda": "GPU"}
EPOCHS, NOTES = "epoch-gpu.json", "notes.md"
PROFILES = {"cpu": "profile-cpu.json", "cuda": "profile-gpu.json"}
RENDERERS = {"cpu": cpu_profile, "cuda": gpu_profile}
QUANTITIES = {"time": "time", "memory": "peak memory", "first": "first step"}
TEXT = """\
# Speed

<!-- Written by docs/generate.py from the JSON files in bench/results: do not edit. -->

What a Bayesian network costs, against the deterministic one on the same number of rows. A method with K components
sees rows/K distinct examples in a step, the deterministic network as many as there are rows: both multiply as much.
1.00 is the price of the plain torch network, which goes through none of slimbayes' code.

## How it is measured

- {phases}
- {modes}
- All contenders of one network, phase and mode run in one process, in turn, in a new order each round. Times are
  medians over rounds with quartiles; a ratio is the median of the ratios within rounds, ± its standard error from the
  median absolute deviation. Compiled networks are compared with the compiled deterministic one.
- CPU: float32, torch's Adam as it is, a fixed number of threads on cores of their own, an allocator that keeps its
  pages, and rounds in which other processes took more than {share:g} % of the cores are dropped and counted. When
  compiling, random numbers come from torch's generator, which is faster there than the compiler's. GPU: bfloat16
  autocast, a fused optimizer. Both: convolutions in channels_last. Networks of words train as if every word had been
  seen: roots of exact zeros, which Adam would take of all others, have another price. The same for all contenders.
- Peak memory is the most bytes that tensors take during one step, weights, gradients, optimizer state and inputs
  included: on the GPU `max_memory_allocated`, on the CPU the allocator's events as torch's profiler records them.
- The first compiled step starts with an empty compiler cache.
- Peers are converted as their documentation says, their KL is part of the loss, and they predict by as many passes as
  there are samples; they may break the compiled graph, slimbayes may not.

## Run it again

```bash
slimbayes bench --quick                                  # the MLP, eager
make bench                                               # everything, beside the peers that make bench-peers installed
slimbayes bench --device cuda --networks wrn-28-10 --modes compiled --output bench/results/bench-gpu.json --budget 540
python bench/epoch.py --output bench/results/epoch-gpu.json
python docs/generate.py                                  # this page, from bench/results
```

What a file already has is kept, so a run that was stopped goes on where it was."""


def write_page(folder: Path, path: Path) -> Path:
    """Write the page of the JSON files in a folder."""
    return write_whole(path, page_text(folder, path.parent))


def page_text(folder: Path, beside: Path) -> str:
    """The page as markdown, with links as they are from the folder it stands in."""
    found = {
        device: read_results(folder / name) for device, name in FILES.items() if (folder / name).is_file()
    }
    parts = [
        TEXT.format(
            share=100 * FOREIGN_SHARE,
            phases="\n- ".join(f"**{name}**: {words}." for name, words in PHASES.items()),
            modes="\n- ".join(f"**{name}**: {words}." for name, words in MODES.items()),
        )
    ]
    for device, results in found.items():
        parts.append(f"## What must hold: {NAMES[device]}\n\n" + "\n".join(_targets(results)))
        beaten = list(_peers(results))
        if beaten:
            parts.append(f"## Peers: {NAMES[device]}\n\n" + "\n".join(beaten))
    if (folder / EPOCHS).is_file():
        parts.append("\n".join(_epochs(json.loads((folder / EPOCHS).read_text(encoding="utf-8")))))
    if (folder / NOTES).is_file():
        parts.append((folder / NOTES).read_text(encoding="utf-8").strip())
    for device, name in PROFILES.items():
        if (folder / name).is_file():
            content = json.loads((folder / name).read_text(encoding="utf-8"))
            parts.append("\n".join([f"## Profiles: {NAMES[device]}\n", *RENDERERS[device](content)]))
    for device, results in found.items():
        parts.append(f"## All figures: {NAMES[device]}\n\n" + "\n".join(_origin(results)))
        for suffix in ("", "-peers"):
            figure = folder / f"{Path(FILES[device]).stem}{suffix}.svg"
            if figure.is_file():
                words = "peers" if suffix else "every method"
                parts.append(
                    f"![Ratios of {words} on the {NAMES[device]}]({os.path.relpath(figure, beside)})"
                )
        parts += list(_tables(results))
    if not found:
        parts.append("No figures yet: bench/results holds no JSON file.")
    return "\n\n".join(parts) + "\n"


def _targets(results: Results) -> Iterator[str]:
    """Every target that has a measured cell; those that were not measured are counted."""
    yield "| network | phase | mode | method | what | target | measured | holds |"
    yield "|---|---|---|---|---|---:|---:|---|"
    absent = 0
    for target in TARGETS:
        if target.device != results.device:
            continue
        for network in target.networks:
            if (
                results.device not in NETWORKS[network].devices
                or target.phase not in NETWORKS[network].phases
            ):
                continue
            for method in target.methods:
                cell = results.find("own", network, target.phase, target.mode, method)
                if cell is None:
                    absent += 1
                    continue
                measured = None if "error" in cell else value(cell, target.quantity)
                text, holds = "failed", "**no**"
                if measured is not None:
                    text = ratio(cell) if target.quantity == "time" else f"{measured:.2f}"
                    holds = "yes" if measured <= target.limit else "**no**"
                yield (
                    f"| {network} | {target.phase} | {target.mode} | {title(method)} | {QUANTITIES[target.quantity]} "
                    f"| ≤ {target.limit:g} | {text} | {holds} |"
                )
    if absent:
        yield f"\n{absent} more bounds have no figure in this file yet."


def _peers(results: Results) -> Iterator[str]:
    """Each peer beside our counterpart, from the same run."""
    lines = []
    for block in (block for block in blocks(results) if block[0] == "peers"):
        for name, peer in PEERS.items():
            theirs = results.find(*block, name)
            ours = results.find(*block, peer.counterpart)
            if theirs is None or ours is None or "error" in ours:
                continue
            _, network, phase, mode = block
            text = f"failed: {short(theirs['error'], 60)}" if "error" in theirs else ratio(theirs)
            faster = "–" if "error" in theirs else "yes" if ours["ratio"] < theirs["ratio"] else "**no**"
            lines.append(
                f"| {network} | {phase} | {mode} | {peer.title} | {text} | {title(peer.counterpart)} | {ratio(ours)} "
                f"| {faster} |"
            )
    if lines:
        yield "Both in one run; deterministic = 1."
        yield ""
        yield "| network | phase | mode | peer | time | counterpart | time | faster |"
        yield "|---|---|---|---|---:|---|---:|---|"
        yield from lines


def _epochs(content: dict[str, Any]) -> Iterator[str]:
    """What bench/epoch.py measured."""
    yield "## An epoch of WRN-16-4\n"
    yield (
        f"{content['images']:,} images of {content['size']}×{content['size']}, K = {content['components']}, batch "
        f"{content['batch']} per component, on {content['device']}; torch {content['torch']}, commit "
        f"{content['commit']}, {content['created']}. The bound for Rank1 is {content['target_seconds']:g} s.\n"
    )
    yield "| network | how | seconds per epoch | first step s |"
    yield "|---|---|---:|---:|"
    for run in content["runs"]:
        if "error" in run:
            yield f"| {run['name']} | {run['mode']} | failed: {short(run['error'])} | |"
            continue
        yield f"| {run['name']} | {run['mode']} | {run['epoch_seconds']:.2f} | {run['first_seconds']:.1f} |"


def _origin(results: Results) -> Iterator[str]:
    """Where the figures come from."""
    yield f"{results.hardware}."
    yield ""
    for run in results.runs:
        versions = run.get("versions", {})
        yield (
            f"- {run['created']}, commit {run['commit']}, torch {versions.get('torch', 'unknown')}, "
            f"{run['threads']} threads: `{run['command']}`"
        )


def _tables(results: Results) -> Iterator[str]:
    """A table per network and phase, with a pair of columns for each mode."""
    panels: dict[tuple[str, str, str], list[str]] = {}
    for group, network, phase, mode in blocks(results):
        panels.setdefault((group, network, phase), []).append(mode)
    for (group, network, phase), modes in panels.items():
        beside = ", beside peers" if group == "peers" else ""
        lines = [f"### {NETWORKS[network].title}: {phase}{beside}", ""]
        heads = [f"{mode} {what}" for mode in modes for what in ("ms", "time", "memory")]
        first = [f"{mode} first step" for mode in modes if mode != "eager"]
        lines.append("| " + " | ".join(["method", *heads, *first, "parameters"]) + " |")
        lines.append("|---|" + "---:|" * (len(heads) + len(first) + 1))
        failures = []
        for name in (REFERENCE, *PEERS, *CONTENDERS):
            cells = {mode: results.find(group, network, phase, mode, name) for mode in modes}
            if not any(cells.values()):
                continue
            failures += [
                f"{title(name)}, {mode}: {short(cell['error'], 300)}"
                for mode, cell in cells.items()
                if cell is not None and "error" in cell
            ]
            lines.append("| " + " | ".join(_row(results.device, name, cells)) + " |")
        lines += ["", *(f"- failed: {failure}" for failure in failures)] if failures else []
        dropped = max(
            (c.get("discarded", 0) for c in results.cells if _of(c, group, network, phase)), default=0
        )
        forced = any(c.get("disturbed") for c in results.cells if _of(c, group, network, phase))
        if dropped:
            kept = " so many that all were kept" if forced else " at most, in one mode"
            lines += ["", f"Rounds with foreign load: {dropped},{kept}."]
        yield "\n".join(lines)


def _of(cell: Cell, group: str, network: str, phase: str) -> bool:
    return (cell["group"], cell["network"], cell["phase"]) == (group, network, phase)


def _row(device: str, name: str, cells: dict[str, Cell | None]) -> list[str]:
    row, first, parameters = [title(name)], [], "–"
    for mode, cell in cells.items():
        if cell is None or "error" in cell:
            words = "–" if cell is None else "failed"
            row += [words, words, words]
            first += [words] if mode != "eager" else []
            continue
        row += [
            milliseconds(cell["milliseconds"]),
            ratio(cell) + verdict(device, cell, name, "time"),
            "–"
            if cell.get("memory_ratio") is None
            else f"{cell['memory_ratio']:.2f}" + verdict(device, cell, name, "memory"),
        ]
        if mode != "eager":
            known = cell.get("first_seconds") is not None  # not of contenders that compiled side by side
            words = f"{cell['first_seconds']:.1f} s" + verdict(device, cell, name, "first") if known else "–"
            first.append(words)
        parameters = f"{cell['parameters']:,}"
    return [*row, *first, parameters]
