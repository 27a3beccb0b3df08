"""``slimbayes bench``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from slimbayes.lab.cli import options as o
from slimbayes.lab.cli.errors import friendly, screen


@friendly
def bench(
    networks: Annotated[
        str | None,
        typer.Option(
            "--networks", metavar="A,B,...", help="mlp, lenet, wrn-16-2, ...; default: all for the device."
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option("--methods", metavar="A,B,...", help="rank1, ktied-local, ...; default: all."),
    ] = None,
    phases: Annotated[
        str | None,
        typer.Option("--phases", metavar="A,B,...", help="train, predict, small, head, many; default: all."),
    ] = None,
    modes: Annotated[
        str, typer.Option("--modes", metavar="A,B,...", help="eager, compiled, graphs (CUDA graphs).")
    ] = "eager,compiled",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Undisturbed rounds per contender.")] = 15,
    device: o.OnDevice = None,
    threads: o.Threads = None,
    peers: Annotated[
        str | None,
        typer.Option(
            "--peers",
            metavar="PYTHON",
            help="Measure peers too, with the Python that make bench-peers sets up.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="JSON to write, and to go on from; default: bench-cpu.json or bench-gpu.json.",
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what the file already has.")] = False,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="SECONDS", help="Stop cleanly by then; the next call goes on."),
    ] = None,
    beside: Annotated[
        bool,
        typer.Option(
            "--beside",
            help="Compile the contenders side by side, each in a process of its own; first steps are not timed then.",
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="The MLP, eager, five rounds: a minute on a laptop.")
    ] = False,
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Write the plot beside the JSON.")] = True,
    page: Annotated[
        Path | None,
        typer.Option(
            "--page", metavar="FILE", help="Write the page of the figures in the JSON's folder, and stop."
        ),
    ] = None,
    quiet: o.Quiet = False,
) -> None:
    """Measure what every method costs in time and memory, against the deterministic network on the same rows.

    Contenders take turns in one process with pinned cores; what is in the output file already is kept.
    """
    from slimbayes.lab.bench import BenchConfig, run_bench
    from slimbayes.lab.bench.page import FILES, write_page
    from slimbayes.lab.bench.plot import write_plot
    from slimbayes.lab.bench.table import print_table

    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    path = output or Path(FILES[torch.device(where).type])
    if page is not None:
        o.note(f"Page: {write_page(path.parent, page)}")
        return
    config = BenchConfig(
        networks=o.words(networks) or (("mlp",) if quick else ()),
        methods=o.words(methods) or (),
        phases=o.words(phases) or (),
        modes=("eager",) if quick else o.words(modes) or (),
        rounds=5 if quick else rounds,
        device=where,
        threads=threads or min(2, _cores()),
        peers=peers,
        budget=budget,
        beside=beside,
    )
    results = run_bench(config, path, fresh, _progress(quiet))
    print_table(results, screen)
    figures = [*write_plot(results, path.with_suffix("")), *_peers_plot(results, path)] if plot else []
    o.note(f"Figures: {path}   plot: {', '.join(str(figure) for figure in figures) or 'none'}")


def _peers_plot(results: Any, path: Path) -> list[Path]:
    from slimbayes.lab.bench.plot import write_plot

    return write_plot(results, path.with_name(f"{path.stem}-peers"), "peers")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _progress(quiet: bool) -> Any:
    """A line per interleaved run, with what is built and timed at the moment."""
    if quiet:
        return lambda job, event: None
    status = screen.status("")
    seen: set[tuple[str, ...]] = set()

    def say(job: Any, event: dict[str, Any]) -> None:
        where = (job.group, job.network, job.phase, job.mode)
        text = f"{job.network}: {job.phase}, {job.mode}" + (", with peers" if job.group == "peers" else "")
        if where not in seen:
            seen.add(where)
            o.note(f"{text}: {len(job.contenders)} contenders")
        if event["event"] == "build":
            status.update(f"{text}: {event['method']}")
        elif event["event"] == "round":
            status.update(f"{text}: round {event['done']} of {event['of']}")
        status.start()
        if event["event"] == "round" and event["done"] >= event["of"]:
            status.stop()

    return say


COMMANDS = (
    (
        bench,
        o.examples(
            "slimbayes bench --quick",
            "slimbayes bench --networks mlp,lenet --methods rank1,ktied-shared --phases train",
            "slimbayes bench --peers .venv-peers/bin/python --output bench/results/bench-cpu.json",
            "slimbayes bench --device cuda --networks wrn-28-10 --modes compiled --budget 540",
            "slimbayes bench --output bench/results/bench-cpu.json --page docs/speed.md",
        ),
    ),
)
